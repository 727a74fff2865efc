"""Creates an instance's tasks, with their state in memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from penstock.shared.common.clock import Clock
from penstock.shared.common.log import get_logger
from penstock.shared.streams.lake_names import require_lake_names
from penstock.shared.streams.operators.tables import TableLookup
from penstock.shared.streams.punctuation import NOT_INITIALIZED
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.metrics import StreamTaskMetrics
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.size_limits import default_state_bytes_max, require_missed_windows_fit

if TYPE_CHECKING:
    from penstock.shared.streams.state.local_state import LocalState

log = get_logger(__name__)

CLEAN_INTERVAL_MS = 60_000


class StreamTaskFactory:
    """Creates the tasks of one topology.

    The constructor raises ConfigError if rocksDB is configured and not installed. With a lake, it also raises
    ConfigError if a store or an aggregation has a name that the lake's tables cannot have as a column, or if a record
    is in so many windows that their list takes more than half of the largest changelog entry. `startup` raises
    ConfigError if the state directory cannot be written, or another instance has locked it.
    """

    def __init__(
        self,
        settings: StreamsSettings,
        topology: Topology,
        clock: Clock,
        registry: CollectorRegistry,
    ) -> None:
        self._settings = settings
        self._topology = topology
        self._registry = registry
        self._clock = clock
        self._clean_due_ms = clock.monotonic_ms() + CLEAN_INTERVAL_MS
        if settings.lake is not None:
            require_lake_names(topology.schemas())
            require_missed_windows_fit(topology.schemas(), default_state_bytes_max(settings.max_request_size))
        self.directory: StateDirectory | None = None
        if settings.default_dsl_store == "rocksDB":
            self.directory = StateDirectory(
                settings.state_dir,
                settings.application_id,
                memory_bytes_max=settings.rocksdb_memory_max_bytes,
                cache_bytes_max=settings.statestore_cache_max_bytes,
            )

    def startup(self) -> None:
        """Lock the state directory, if there is one."""
        if self.directory is not None:
            self.directory.acquire()

    def shutdown(self) -> None:
        """Release the state directory."""
        if self.directory is not None:
            self.directory.release()

    def clean(self) -> None:
        """Every CLEAN_INTERVAL_MS, delete state on disk that was not used for `state_cleanup_delay_ms`."""
        if self.directory is None or self._clock.monotonic_ms() < self._clean_due_ms:
            return
        self._clean_due_ms = self._clock.monotonic_ms() + CLEAN_INTERVAL_MS
        if deleted := self.directory.clean(self._settings.state_cleanup_delay_ms, self._clock.now_ms()):
            log.info("unused state on disk is deleted", partitions=deleted, folder=str(self.directory.folder))

    def open_state(self, partition: int) -> LocalState | None:
        """Open a partition's state on disk; None if it is kept in memory."""
        return None if self.directory is None else self.directory.state_of(partition)

    def standby_task(self, partition: int) -> StreamTask:
        """Create the task of a standby. It is started only when this instance takes the partition over."""
        task = self.task(partition, self.open_state(partition), is_standby=True)
        task.not_running_reason = (
            f"this instance stands by for partition {partition}: schedule() is for the instance where its task runs"
        )
        return task

    def start(self, task: StreamTask, global_tables: Mapping[str, TableLookup]) -> None:
        """Start a restored task. The metrics of a former standby are in the instance's registry from now on."""
        task.global_tables = global_tables
        # A standby counts in a registry of its own, because what it reads is the owner's work.
        if task.not_running_reason != NOT_INITIALIZED:
            task.metrics = StreamTaskMetrics(self._registry, task.partition)
        task.initialize(self._clock.now_ms())

    def task(self, partition: int, local: LocalState | None, *, is_standby: bool = False) -> StreamTask:
        """Create a partition's task. Its state is not restored yet."""
        return StreamTask(
            self._topology,
            partition,
            application=self._settings.application_id,
            guarantee=self._settings.processing_guarantee,
            handlers=self._settings.error_handlers,
            record_bytes_max=self._settings.max_request_size,
            key_bytes_max=self._settings.key_bytes_max,
            keeps_late=self._settings.lake is not None,
            max_future_ms=self._settings.max_future_ms,
            registry=None if is_standby else self._registry,
            local=local,
        )
