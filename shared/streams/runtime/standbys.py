"""The standbys of one instance: copies of state that other instances own, which follow the changelogs.

A standby is a task that is not started: only its stores are kept up to date from the changelog. When its partition
moves to this instance, the new owner continues from the standby, and has to restore only later changes. If a standby
fails with a RetriableError after its snapshot was loaded, it continues. After any other failure it begins again. If
its partition moves to the instance meanwhile, the restore takes longer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable
from functools import partial
from typing import Literal, TypedDict

from prometheus_client import CollectorRegistry

from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import RetriableError, StateStoreFailed
from penstock.shared.common.log import get_logger
from penstock.shared.common.metrics import gauge
from penstock.shared.common.repeated_failure import RepeatedFailure
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.partition_restore import PartitionRestore
from penstock.shared.streams.runtime.restore_progress import RestoreProgress
from penstock.shared.streams.runtime.stream_task_factory import StreamTaskFactory
from penstock.shared.streams.settings import StreamsSettings

log = get_logger(__name__)

RETRY_MS = 2_000
RESTART_BACKOFF = ExponentialBackoff(2_000, 60_000)
"""The waits before a standby that failed begins again."""
WRITE_MS = 1_000
"""The interval at which read changes are written to disk, for state on disk."""


class StandbyDescription(TypedDict):
    """A standby as plain values."""

    partition: int
    state: Literal["catching up", "current", "failed"]
    state_rows: int
    lag: int | None


class Standby:
    """The standby of one partition."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.restoring: PartitionRestore | None = None
        self.following: asyncio.Task[None] | None = None
        self.is_current = False
        """Whether it has reached the changelog's end since it last began to read."""
        self.current_lag: int | None = None
        """The lag as of the last poll, once it is current."""
        self.failed = ""
        self.failing = RepeatedFailure()
        """Errors after which it continues with its state."""
        self.restarts = RepeatedFailure()
        """Errors after which it begins again without its state."""

    @property
    def lag(self) -> int | None:
        """The changelog offsets that it had not read yet at its last poll; None while they are unknown."""
        if self.restoring is None:
            return None
        return self.current_lag if self.is_current else self.restoring.progress.remaining_records

    def describe(self) -> StandbyDescription:
        """Return it as plain values."""
        task = None if self.restoring is None else self.restoring.task
        return {
            "partition": self.partition,
            "state": "failed" if self.failed else "current" if self.is_current else "catching up",
            "state_rows": 0 if task is None else sum(map(len, task.stores.values())),
            "lag": self.lag,
        }


class Standbys:
    """Maintains the standbys of the assigned partitions."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: StreamsSettings,
        task_factory: StreamTaskFactory,
        clock: Clock,
        registry: CollectorRegistry,
    ) -> None:
        self._kafka = kafka
        self._settings = settings
        self._task_factory = task_factory
        self._clock = clock
        self._own: dict[int, Standby] = {}
        self._lag = gauge(
            registry,
            "streams_standby_lag",
            "Changelog offsets that a standby has not read yet; NaN while they are unknown.",
            "partition",
        )

    def __repr__(self) -> str:
        return f"Standbys({sorted(self._own)})"

    def warm(self) -> set[int]:
        """Return the partitions that have a standby here, or state on disk."""
        on_disk = [] if self._task_factory.directory is None else self._task_factory.directory.partitions()
        return {*on_disk, *self._own}

    def describe(self) -> list[StandbyDescription]:
        """Return each standby as plain values."""
        return [standby.describe() for _, standby in sorted(self._own.items())]

    async def stand_by(self, partitions: Iterable[int], owned: Collection[int] = ()) -> None:
        """Maintain standbys for exactly these partitions; those of `owned` partitions stay until `hand_over`."""
        wanted = set(partitions)
        unwanted = self._own.keys() - wanted - set(owned)
        # They stop concurrently, because each has a connection to close.
        for partition in unwanted:
            if (following := self._own[partition].following) is not None:
                following.cancel()
        for partition in unwanted:
            await self.stop(partition)
        for partition in sorted(wanted - self._own.keys() - set(owned)):
            standby = Standby(partition)
            self._own[partition] = standby
            self._lag.labels(partition).set_function(partial(_lag_or_nan, standby))
            standby.following = asyncio.create_task(self._follow_changelog(standby), name=f"standby-{partition}")

    async def hand_over(self, partition: int) -> PartitionRestore | None:
        """End a standby and return its state; None if it has none yet."""
        if (standby := self._own.pop(partition, None)) is None:
            return None
        self._lag.remove(partition)
        assert standby.following is not None
        standby.following.cancel()
        try:
            await asyncio.wait({standby.following})
        except asyncio.CancelledError:
            # The follower still uses the database. It is closed when the follower has ended, so that the folder can be
            # opened again.
            standby.following.add_done_callback(lambda _: _close_standby_state(standby.restoring))
            raise
        restoring = standby.restoring
        # The reader has no position yet: perhaps a snapshot is loaded in part.
        if restoring is not None and restoring.reader.next_offset is None:
            _close_standby_state(restoring)
            return None
        return restoring

    async def stop(self, partition: int) -> None:
        """End a standby. Its state on disk stays; if it cannot be written now, without the newest changes."""
        if (restoring := await self.hand_over(partition)) is None:
            return
        try:
            try:
                restoring.write()
            finally:
                _close_standby_state(restoring)
        except StateStoreFailed as e:
            # As in `_follow_changelog`. The next restore reads the missing changes from the changelog.
            log.error("a standby's state was not written", partition=partition, reason=str(e))

    async def close(self) -> None:
        """End all standbys."""
        await self.stand_by(())

    # --- inside ---

    async def _follow_changelog(self, standby: Standby) -> None:
        while True:
            try:
                await self._read_changelog(standby)
            except RetriableError as e:
                if (times := standby.failing.failed(self._clock.monotonic_ms())) is not None:
                    log.warning("a standby is behind", partition=standby.partition, **times, reason=str(e))
                if standby.restoring is not None and standby.restoring.reader.next_offset is None:
                    # Rows of a partial load may be deleted in what is loaded next.
                    self._drop_restored_state(standby)
                await asyncio.sleep(RETRY_MS / 1000)
            except Exception as e:
                # No error of a standby may affect the tasks that run here.
                if (times := standby.restarts.failed(self._clock.monotonic_ms())) is not None:
                    reason = f"{type(e).__name__}: {e}"
                    log.error("a standby starts again", partition=standby.partition, **times, reason=reason)
                standby.failed = str(e)
                self._drop_restored_state(standby)
                # The error may last, and each start may read a whole snapshot.
                await asyncio.sleep(RESTART_BACKOFF.wait_ms(standby.restarts.failures) / 1000)

    def _drop_restored_state(self, standby: Standby) -> None:
        _close_standby_state(standby.restoring)
        standby.restoring = None

    async def _read_changelog(self, standby: Standby) -> None:
        if standby.restoring is None:
            task = self._task_factory.standby_task(standby.partition)
            standby.restoring = PartitionRestore(self._kafka, self._settings, task, self._clock)
        restoring = standby.restoring
        standby.is_current = False
        # After a failure, the remaining records are unknown until it reads again.
        restoring.progress = RestoreProgress(standby.partition)
        async with restoring.consumer() as consumer:
            await restoring.read_until(await restoring.begin(consumer), consumer)
            restoring.write()
            standby.current_lag = 0
            standby.is_current = True
            standby.failed = ""
            # The next line logs that it is current.
            standby.failing.succeeded(self._clock.monotonic_ms())
            standby.restarts.succeeded(self._clock.monotonic_ms())
            log.info("a standby is current", partition=standby.partition, **_standby_restore_counts(restoring))
            unwritten = 0
            written_ms = self._clock.monotonic_ms()
            while True:
                unwritten += await restoring.poll(consumer)
                standby.current_lag = consumer.known_lag(restoring.at)
                if unwritten and self._clock.monotonic_ms() - written_ms >= WRITE_MS:
                    restoring.write()
                    unwritten = 0
                    written_ms = self._clock.monotonic_ms()


def _lag_or_nan(standby: Standby) -> float:
    return math.nan if standby.lag is None else standby.lag


def _standby_restore_counts(restoring: PartitionRestore) -> dict[str, int]:
    """Return what a standby has restored so far, for the log."""
    report = restoring.report
    return {
        "snapshot_windows": report.snapshot_windows,
        "local_windows": report.local_windows,
        "changelog_records": report.changelog_records,
    }


def _close_standby_state(restoring: PartitionRestore | None) -> None:
    """Close a standby's state on disk, if there is any."""
    if restoring is not None and restoring.task.local is not None:
        restoring.task.local.close()
