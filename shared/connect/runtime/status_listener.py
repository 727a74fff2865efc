"""What a worker reports of the connectors and tasks it runs; a herder writes it down.

Every method is called on the worker's event loop and must not wait: what takes time is put in a queue there.
"""

from __future__ import annotations

from typing import Protocol

from penstock.shared.connect.runtime.states import ConnectorTaskId

Id = str | ConnectorTaskId
"""A connector's name, or a task."""


class StatusListener(Protocol):
    """Hears of each change; `id` is a connector's name or a task's id."""

    def on_startup(self, id: Id) -> None:
        """It runs now, for the first time or after a restart."""
        ...

    def on_running(self, id: Id) -> None:
        """It goes on after a pause or a stop."""
        ...

    def on_paused(self, id: Id) -> None:
        """It is paused now."""
        ...

    def on_stopped(self, id: Id) -> None:
        """The connector is stopped now."""
        ...

    def on_failure(self, id: Id, trace: str) -> None:
        """It has failed; `trace` is the error with where it came from."""
        ...

    def on_shutdown(self, id: Id) -> None:
        """It was ended here in order and may be started elsewhere."""
        ...

    def on_restart(self, id: Id) -> None:
        """It is being restarted by the worker itself, after a failure."""
        ...

    def on_deletion(self, id: Id) -> None:
        """It is gone for good."""
        ...

    def on_topic_used(self, id: ConnectorTaskId, topic: str) -> None:
        """The task read from or wrote to the topic; said with every batch, so make little of it."""
        ...
