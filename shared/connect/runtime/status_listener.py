"""The interface for a worker's reports on its connectors and tasks. A herder records them.

Every method is called on the worker's event loop and must not wait. Work that takes time is put in a queue.
"""

from __future__ import annotations

from typing import Protocol

from penstock.shared.connect.runtime.states import ConnectorTaskId, Event

Id = str | ConnectorTaskId
"""A connector's name, or a task."""


class StatusListener(Protocol):
    """Is called at each event of a connector or task."""

    def on_event(self, id: Id, event: Event, trace: str | None = None) -> None:
        """The event happened. The `trace` of a failure is the error with its traceback."""
        ...

    def on_topic_used(self, id: ConnectorTaskId, topic: str) -> None:
        """The task read from or wrote to the topic. Called with every batch, so it must be cheap."""
        ...
