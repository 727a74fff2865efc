"""The tasks of one worker by partition: those it owns, and those suspended until a rebalance assigns them.

A pause belongs to the partition, not the task. It holds until it is revoked, whichever task runs the partition here,
across restores and rebalances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.common.errors import IllegalState
from penstock.shared.common.log import get_logger
from penstock.shared.streams.runtime.owned_task import OwnedTask

log = get_logger(__name__)

Ready = Mapping[int, OwnedTask]
"""Restored tasks by partition."""


class WorkerTasks:
    """`owned` are the tasks that run or are restored, `suspended` those that are set aside."""

    def __init__(self) -> None:
        self.owned: dict[int, OwnedTask] = {}
        self.suspended: dict[int, OwnedTask] = {}
        self._paused: set[int] = set()

    def __repr__(self) -> str:
        return f"WorkerTasks(owned {sorted(self.owned)}, suspended {sorted(self.suspended)}, paused {self._paused})"

    def running(self) -> list[OwnedTask]:
        """Return the restored tasks."""
        return [owned for owned in self.owned.values() if owned.task is not None]

    def holds(self, partition: int) -> bool:
        """Return whether no other instance can have the partition: its task is here, owned or suspended."""
        return partition in self.owned or partition in self.suspended

    def ready(self) -> dict[int, OwnedTask]:
        """Return the tasks that may take records now, by partition."""
        return {p: owned for p, owned in self.owned.items() if owned.task is not None and owned.restoring is None}

    def pause(self, partition: int, *, paused: bool) -> None:
        """Pause or resume a partition's task. Raises IllegalState if it neither runs here nor was paused."""
        owned = self.owned.get(partition)
        if owned is None and (paused or partition not in self._paused):
            raise IllegalState(f"the task of partition {partition} does not run here")
        (self._paused.add if paused else self._paused.discard)(partition)
        if owned is not None and owned.inputs is not None:
            owned.inputs.is_paused = paused

    def begun(self, owned: OwnedTask) -> None:
        """Apply the partition's pause to a restored task."""
        assert owned.inputs is not None
        owned.inputs.is_paused = owned.partition in self._paused

    def all(self) -> list[OwnedTask]:
        """Return all tasks."""
        return [*self.owned.values(), *self.suspended.values()]

    def clear(self) -> None:
        """Drop all tasks, which must be closed separately."""
        self.owned.clear()
        self.suspended.clear()

    def closed(self, outcomes: Sequence[BaseException | None]) -> None:
        """Drop the tasks, which were closed in the order of `all()`; log those that failed."""
        for owned, error in zip(self.all(), outcomes, strict=True):
            if error is not None:
                log.error("a task cannot be closed", partition=owned.partition, reason=str(error), exc_info=error)
        self.clear()

    def describe(self) -> list[dict[str, Any]]:
        """Return each owned task as plain values."""
        return [owned.describe(partition) for partition, owned in sorted(self.owned.items())]
