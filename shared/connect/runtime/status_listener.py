"""The interface through which a worker reports on its connectors and tasks, to a herder or a parent worker.

Every method is called on the worker's event loop and must not wait. An implementation must put slow work in a queue.
"""

from __future__ import annotations

from typing import Protocol

from penstock.shared.connect.runtime.states import ConnectorTaskId, Event

Id = str | ConnectorTaskId
"""A connector's name, or a task."""


def connector_of(id: Id) -> str:
    """Return the name of the connector, also of a task's."""
    return id if isinstance(id, str) else id.connector


class StatusListener(Protocol):
    """Is called at each event of a connector or task."""

    def on_event(self, id: Id, event: Event, trace: str | None = None) -> None:
        """Called when the worker reports an event. `trace` is the error of a failure with its traceback."""
        ...

    def on_topic_used(self, id: ConnectorTaskId, topic: str) -> None:
        """Called after a sink task has read records of the topic, or a source task has passed one to the producer.

        Calls are as frequent as batches, so the method must be fast."""
        ...
