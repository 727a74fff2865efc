"""Writes a worker's reports on its connectors and tasks as statuses. It is the StatusListener of a herder.

The end or failure of a connector or task is not written if another worker has reported on it in a later generation.
That worker may be its new owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.shared.common.clock import Clock
from penstock.shared.connect.runtime.states import TRANSITIONS, ConnectorTaskId, Event, State
from penstock.shared.connect.runtime.status_listener import Id, connector_of
from penstock.shared.connect.storage.status_records import Forgotten, Status, TopicStatus
from penstock.shared.connect.storage.status_store import StatusStore

TRACE_LENGTH_MAX = 32_768
"""The middle of a longer trace is left out: a traceback ends with the raised error. A status must fit into a record of
`max.request.size` (1 MiB by default), and JSON has up to six bytes for a character."""
TRACE_GAP = "\n[…]\n\n"
"""The text in place of the middle of a long trace."""


class StatusReporter:
    """Reports for one worker. `generation` returns the group's current one. `version` returns the version of a
    connector's plugin."""

    def __init__(
        self,
        statuses: StatusStore,
        worker_id: str,
        clock: Clock,
        *,
        generation: Callable[[], int],
        version: Callable[[str], str | None],
        tracks_topics: bool = True,
    ) -> None:
        self._statuses = statuses
        self._worker_id = worker_id
        self._clock = clock
        self._generation = generation
        self._version = version
        self._tracks_topics = tracks_topics

    def __repr__(self) -> str:
        return f"<StatusReporter {self._worker_id}>"

    def on_event(self, id: Id, event: Event, trace: str | None = None) -> None:
        """Report the status that the event leads to, without waiting for the write.

        A FAILURE or SHUTDOWN is dropped if another worker has reported in a later generation. The middle of a very long
        trace is left out.
        """
        if trace is not None and len(trace) > TRACE_LENGTH_MAX:
            half = (TRACE_LENGTH_MAX - len(TRACE_GAP)) // 2
            trace = f"{trace[:half]}{TRACE_GAP}{trace[-half:]}"
        state = TRANSITIONS[event][1]
        status = Status(id, state, self._worker_id, self._generation(), self._version(connector_of(id)), trace)
        # As in AbstractHerder: a report at the end of work must not overwrite that of the next owner.
        self._statuses.put(status, safe=event in (Event.FAILURE, Event.SHUTDOWN))

    def on_topic_used(self, id: ConnectorTaskId, topic: str) -> None:
        """Add a topic to the connector's list of topics, unless it is there already or topics are not tracked."""
        if self._tracks_topics and self._statuses.cache.topic(id.connector, topic) is None:
            self._statuses.put(TopicStatus(topic, id.connector, id.task, self._clock.now_ms()))

    def announce_restart(self, tasks: Iterable[ConnectorTaskId], connector: str | None) -> None:
        """Announce the restart of tasks and, unless `connector` is None, of the connector, wherever they run.

        Their statuses, if they have one, become RESTARTING and keep their worker.
        """
        ids: list[Id] = [*tasks, *([] if connector is None else [connector])]
        for id in ids:
            if (status := self._statuses.cache.get(id)) is not None:
                self._statuses.put(replace(status, state=State.RESTARTING, trace=None))

    def forget_connector(self, name: str) -> None:
        """Remove all statuses of a connector, its tasks and its topics."""
        for task in self._statuses.cache.tasks(name):
            self.forget(task)
        self.forget_topics(name)
        self.forget(name)

    def forget(self, id: Id) -> None:
        """Remove the status of a connector or task."""
        self._statuses.put(Forgotten(id))

    def forget_topics(self, name: str) -> None:
        """Empty the list of a connector's topics."""
        for topic in self._statuses.cache.topics(name):
            self._statuses.put(Forgotten((topic.topic, name)))
