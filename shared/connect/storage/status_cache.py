"""What the status topic says now, and which status a worker may still write.

A worker that has lost a connector or task may report about it after the new owner has: a status that is `safe` is
written only where the one that stands is the same worker's, or of no later generation.
"""

from __future__ import annotations

from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage.status_records import (
    ConnectorStatus,
    Forgotten,
    StatusRecord,
    TaskStatus,
    TopicStatus,
)


class StatusCache:
    """The newest status of each connector, task and topic; feed it every record in order."""

    def __init__(self) -> None:
        self._connectors: dict[str, ConnectorStatus] = {}
        self._tasks: dict[str, dict[int, TaskStatus]] = {}
        self._topics: dict[str, dict[str, TopicStatus]] = {}

    def __repr__(self) -> str:
        tasks = sum(map(len, self._tasks.values()))
        return f"<StatusCache of {len(self._connectors)} connectors, {tasks} tasks>"

    def apply(self, record: StatusRecord) -> None:
        """Take one record."""
        match record:
            case ConnectorStatus(connector, State.DESTROYED) | Forgotten(str() as connector):
                self._connectors.pop(connector, None)
            case ConnectorStatus(connector):
                self._connectors[connector] = record
            case TaskStatus(task, State.DESTROYED) | Forgotten(ConnectorTaskId() as task):
                tasks = self._tasks.get(task.connector, {})
                tasks.pop(task.task, None)
                if not tasks:
                    self._tasks.pop(task.connector, None)
            case TaskStatus(task):
                self._tasks.setdefault(task.connector, {})[task.task] = record
            case TopicStatus(topic, connector):
                self._topics.setdefault(connector, {})[topic] = record
            case Forgotten((topic, connector)):
                topics = self._topics.get(connector, {})
                topics.pop(topic, None)
                if not topics:
                    self._topics.pop(connector, None)

    def connector(self, connector: str) -> ConnectorStatus | None:
        """The connector's newest status."""
        return self._connectors.get(connector)

    def task(self, task: ConnectorTaskId) -> TaskStatus | None:
        """The task's newest status."""
        return self._tasks.get(task.connector, {}).get(task.task)

    def tasks(self, connector: str) -> list[TaskStatus]:
        """The newest status of each of the connector's tasks, by number."""
        found = self._tasks.get(connector, {})
        return [found[number] for number in sorted(found)]

    def topic(self, connector: str, topic: str) -> TopicStatus | None:
        """What is known of a topic that the connector uses."""
        return self._topics.get(connector, {}).get(topic)

    def topics(self, connector: str) -> list[TopicStatus]:
        """The topics that the connector has used, by name."""
        found = self._topics.get(connector, {})
        return [found[topic] for topic in sorted(found)]

    def connectors(self) -> list[str]:
        """Every connector of which there is a status."""
        return sorted(self._connectors)

    def connectors_with_tasks(self) -> list[str]:
        """Every connector of a task of which there is a status."""
        return sorted(self._tasks)

    def may_write(self, status: ConnectorStatus | TaskStatus) -> bool:
        """Whether a safe status may follow what stands."""
        stands = self.connector(status.connector) if isinstance(status, ConnectorStatus) else self.task(status.task)
        return stands is None or stands.worker_id == status.worker_id or stands.generation <= status.generation
