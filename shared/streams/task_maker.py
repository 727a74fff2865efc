"""Makes an instance's tasks, with their state in memory or on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from shared.streams.settings import StreamsSettings
from shared.streams.state.state_directory import StateDirectory
from shared.streams.stream_task import StreamTask
from shared.streams.task_commits import TaskCommits
from shared.streams.topology import Topology

if TYPE_CHECKING:
    from shared.streams.state.local_state import LocalState


class TaskMaker:
    """Tasks of one topology; ConfigError from `startup` where the folder of their state cannot be had."""

    def __init__(
        self, settings: StreamsSettings, topology: Topology, commits: TaskCommits, registry: CollectorRegistry
    ) -> None:
        self._settings, self._topology, self._commits, self._registry = settings, topology, commits, registry
        self.directory: StateDirectory | None = None
        if settings.default_dsl_store == "rocksDB":
            self.directory = StateDirectory(
                settings.state_dir,
                settings.application_id,
                memory_bytes_max=settings.rocksdb_memory_max_bytes,
                cache_bytes_max=settings.statestore_cache_max_bytes,
            )

    def startup(self) -> None:
        """Take the folder, where there is to be one."""
        if self.directory is not None:
            self.directory.acquire()

    def shutdown(self) -> None:
        """Let go of it."""
        if self.directory is not None:
            self.directory.release()

    def open_state(self, partition: int) -> LocalState | None:
        """A partition's state on disk; None where it is to be in memory."""
        return None if self.directory is None else self.directory.state_of(partition)

    def task(self, partition: int, local: LocalState | None) -> StreamTask:
        """A partition's task, still empty."""
        return StreamTask(
            self._topology,
            partition,
            application=self._settings.application_id,
            guarantee=self._settings.processing_guarantee,
            handlers=self._settings.error_handlers,
            record_bytes_max=self._settings.max_request_size,
            key_bytes_max=self._settings.key_bytes_max,
            refused=self._commits.refused(partition),
            check_states=self._commits.checks_states(partition),
            registry=self._registry,
            local=local,
        )
