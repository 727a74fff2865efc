"""The interface through which a worker reports on its connectors and tasks, to a herder or a parent worker.

Every method is called on the worker's event loop and must not wait. An implementation must put slow work in a queue.
"""

from __future__ import annotations

from typing import Protocol

from penstock.shared.connect.runtime.states import ConnectorTaskId, Event

Id = str | ConnectorTaskId
"""A connector's name, or a task."""


class StatusListener(Protocol):
    """Is called at each event of a connector or task."""

    def on_event(self, id: Id, event: Event, trace: str | None = None) -> None:
        """Called after the event. `trace` is the error of a failure with its traceback."""
        ...

    def on_topic_used(self, id: ConnectorTaskId, topic: str) -> None:
        """Called when the task has polled records of the topic, or has passed one to the producer.

        A task calls it for every batch, so it must be fast."""
        ...
