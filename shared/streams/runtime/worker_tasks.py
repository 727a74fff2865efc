"""The tasks of one worker, by partition: those it owns, and those set aside until a rebalance says whose they are.

Whether a partition is paused is the user's word and not the task's: it holds until it is taken back, whichever task
runs the partition here, after a restore or a rebalance as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.common.errors import IllegalState
from penstock.shared.common.log import get_logger
from penstock.shared.streams.runtime.owned_task import OwnedTask

log = get_logger(__name__)

Ready = Mapping[int, OwnedTask]
"""Tasks that are restored, by partition."""


class WorkerTasks:
    """`owned` are the tasks that run or are restored, `suspended` those that are set aside."""

    def __init__(self) -> None:
        self.owned: dict[int, OwnedTask] = {}
        self.suspended: dict[int, OwnedTask] = {}
        self._paused: set[int] = set()

    def __repr__(self) -> str:
        return f"WorkerTasks(owned {sorted(self.owned)}, suspended {sorted(self.suspended)}, paused {self._paused})"

    def running(self) -> list[OwnedTask]:
        """Those that are restored."""
        return [owned for owned in self.owned.values() if owned.task is not None]

    def holds(self, partition: int) -> bool:
        """Whether no other instance can have the partition: its task is here, or set aside while the group meets."""
        return partition in self.owned or partition in self.suspended

    def ready(self) -> dict[int, OwnedTask]:
        """Those that may take records now, by partition."""
        return {p: owned for p, owned in self.owned.items() if owned.task is not None and owned.restoring is None}

    def pause(self, partition: int, *, paused: bool) -> None:
        """Have a partition's task do nothing, or go on; IllegalState where it neither runs here nor was paused."""
        owned = self.owned.get(partition)
        if owned is None and (paused or partition not in self._paused):
            raise IllegalState(f"the task of partition {partition} does not run here")
        (self._paused.add if paused else self._paused.discard)(partition)
        if owned is not None and owned.inputs is not None:
            owned.inputs.is_paused = paused

    def begun(self, owned: OwnedTask) -> None:
        """A task is restored: it is paused if its partition is."""
        assert owned.inputs is not None
        owned.inputs.is_paused = owned.partition in self._paused

    def all(self) -> list[OwnedTask]:
        """Every one there is."""
        return [*self.owned.values(), *self.suspended.values()]

    def clear(self) -> None:
        """Forget them; they have to be closed."""
        self.owned.clear()
        self.suspended.clear()

    def closed(self, outcomes: Sequence[BaseException | None]) -> None:
        """Forget them, which were closed in the order of `all()`; of whom that failed is logged."""
        for owned, error in zip(self.all(), outcomes, strict=True):
            if error is not None:
                log.error("a task cannot be closed", partition=owned.partition, reason=str(error), exc_info=error)
        self.clear()

    def describe(self) -> list[dict[str, Any]]:
        """Each owned task as plain values."""
        return [owned.describe(partition) for partition, owned in sorted(self.owned.items())]
