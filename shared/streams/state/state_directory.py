"""The directory of an instance's state, with one database for each partition.

Two instances must not share the directory. The new owner of a partition could not open its database while the former
owner has it open, and an owner that hangs never closes it. So an instance locks the application's whole directory for
as long as it runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.extras import needs
from penstock.shared.common.file_lock import FileLock
from penstock.shared.streams.state.persistent_stores import CacheBudget

if TYPE_CHECKING:
    from penstock.shared.streams.state.local_state import LocalState

LOCK_FILE = ".lock"


class StateDirectory:
    """The directory `<state_dir>/<application_id>`.

    `memory_bytes_max` limits the memory of RocksDB, `cache_bytes_max` that of the stores' rows in memory. Raises
    ConfigError, which names the setting, if RocksDB is not installed. `acquire` raises it if the directory cannot be
    written, or if another instance has locked it.
    """

    def __init__(self, state_dir: str, application_id: str, *, memory_bytes_max: int, cache_bytes_max: int) -> None:
        self.folder = Path(state_dir) / application_id
        self.budget = CacheBudget(cache_bytes_max)
        self._rocksdb, self._local_state = _import_rocksdb_modules()
        self._memory = self._rocksdb.RocksMemory(memory_bytes_max)
        self._lock = FileLock(self.folder / LOCK_FILE)
        self._open: set[int] = set()

    def __repr__(self) -> str:
        return f"<StateDirectory {self.folder} {'locked' if self._lock.is_held else 'free'}>"

    def acquire(self) -> None:
        """Create the directory and lock it."""
        try:
            is_ours = self._lock.try_acquire()
        except OSError as e:
            raise ConfigError(f"streams.state_dir: {self.folder} cannot be written: {e.strerror}") from None
        if not is_ours:
            raise ConfigError(
                f"streams.state_dir: {self.folder} is locked by another instance: give each its own state_dir"
            )
        # The time before the start does not count as unused, since the group has not assigned the partitions yet.
        for partition in self.partitions():
            self._mark_used(partition)

    def release(self) -> None:
        """Unlock the directory; a second call does nothing."""
        self._lock.release()

    def state_of(self, partition: int) -> LocalState:
        """Open one partition's state, which must not be open already."""
        db = self._rocksdb.RocksDb(self._partition_folder(partition), self._memory)
        state: LocalState = self._local_state.LocalState(db, self.budget, on_close=lambda: self._mark_closed(partition))
        self._open.add(partition)
        return state

    def clean(self, delay_ms: int, now_ms: int) -> list[int]:
        """Delete the state of partitions that were not used for `delay_ms`, and return these partitions.

        The time before `acquire` does not count.
        """
        # As StateDirectory.cleanRemovedTasks and `state.cleanup.delay.ms`: a partition that returns soon should find
        # its state.
        found = [p for p in self.partitions() if p not in self._open]
        old = [p for p in found if now_ms - self._partition_folder(p).stat().st_mtime * 1000 > delay_ms]
        for partition in old:
            shutil.rmtree(self._partition_folder(partition), ignore_errors=True)
        return old

    def partitions(self) -> list[int]:
        """Return the partitions that have state here, up to date or not."""
        return sorted(int(found.name) for found in self.folder.iterdir() if found.name.isdecimal())

    def _partition_folder(self, partition: int) -> Path:
        return self.folder / str(partition)

    def _mark_closed(self, partition: int) -> None:
        self._open.discard(partition)
        self._mark_used(partition)

    def _mark_used(self, partition: int) -> None:
        with contextlib.suppress(OSError):
            # `clean` takes the folder's modification time as the time of last use.
            os.utime(self._partition_folder(partition))


def _import_rocksdb_modules() -> tuple[ModuleType, ModuleType]:
    with needs("streams.default_dsl_store: rocksDB"):
        from penstock.shared.streams.state import local_state, rocksdb
    return rocksdb, local_state
