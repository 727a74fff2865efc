"""When a failed task is started again: after a wait that doubles with each failure.

>>> restarts = Restarts({"task.restart.enable": True, "task.restart.backoff.ms": 10, "task.restart.backoff.max.ms": 35})
>>> task = ConnectorTaskId("src", 0)
>>> waits = []
>>> for now_ms in (0, 1, 2, 3):
...     restarts.started(task, now_ms)
...     waits.append(restarts.failed(task, now_ms))
>>> waits
[10, 20, 35, 35]
>>> restarts.failed(task, 100)  # it ran for longer than the longest wait
10
"""

from __future__ import annotations

from typing import Any, Protocol

from penstock.shared.connect.states import ConnectorTaskId


class Settings(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...


class Restarts:
    """The failures of each task."""

    def __init__(self, settings: Settings) -> None:
        self._enabled = bool(settings["task.restart.enable"])
        self._first_ms = int(settings["task.restart.backoff.ms"])
        self._max_ms = max(int(settings["task.restart.backoff.max.ms"]), self._first_ms)
        self._failures: dict[ConnectorTaskId, int] = {}
        self._started_ms: dict[ConnectorTaskId, int] = {}

    def started(self, id: ConnectorTaskId, now_ms: int) -> None:
        """The task was started."""
        self._started_ms[id] = now_ms

    def failed(self, id: ConnectorTaskId, now_ms: int) -> int | None:
        """How long to wait before it is started again, in ms; None: not at all."""
        if not self._enabled:
            return None
        ran_ms = now_ms - self._started_ms.get(id, now_ms)
        failures = 0 if ran_ms > self._max_ms else self._failures.get(id, 0)
        self._failures[id] = failures + 1
        return min(self._first_ms << min(failures, 32), self._max_ms)

    def forget(self, id: ConnectorTaskId) -> None:
        """The task is not here any more."""
        self._failures.pop(id, None)
        self._started_ms.pop(id, None)
