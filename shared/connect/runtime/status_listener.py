"""The interface for a worker's reports on its connectors and tasks. A herder records them.

Every method is called on the worker's event loop and must not wait. Work that takes time is put in a queue.
"""

from __future__ import annotations

from typing import Protocol

from penstock.shared.connect.runtime.states import ConnectorTaskId

Id = str | ConnectorTaskId
"""A connector's name, or a task."""


class StatusListener(Protocol):
    """Is called at each change. `id` is a connector's name or a task's id."""

    def on_startup(self, id: Id) -> None:
        """It runs, for the first time or after a restart."""
        ...

    def on_running(self, id: Id) -> None:
        """It continues after a pause or a stop."""
        ...

    def on_paused(self, id: Id) -> None:
        """It is paused."""
        ...

    def on_stopped(self, id: Id) -> None:
        """The connector is stopped."""
        ...

    def on_failure(self, id: Id, trace: str) -> None:
        """It has failed. `trace` is the error with its traceback."""
        ...

    def on_shutdown(self, id: Id) -> None:
        """It ended here in order and may be started elsewhere."""
        ...

    def on_restart(self, id: Id) -> None:
        """The worker restarts it after a failure."""
        ...

    def on_deletion(self, id: Id) -> None:
        """It is deleted."""
        ...

    def on_topic_used(self, id: ConnectorTaskId, topic: str) -> None:
        """The task read from or wrote to the topic. Called with every batch, so it must be cheap."""
        ...
