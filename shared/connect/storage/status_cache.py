"""The statuses in the status topic, and the check whether a worker may still write one.

A worker that has lost a connector or task may report on it after the new owner did. So a `safe` status is written only
if there is no current status, or if the current one is from the same worker, or its generation is not later than that
of the `safe` status. The current status is the newest one that this worker has read or written.
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
    """The newest status of each connector, task and topic. All records of the status topic must be applied in order."""

    def __init__(self) -> None:
        self._connectors: dict[str, ConnectorStatus] = {}
        self._tasks: dict[str, dict[int, TaskStatus]] = {}
        self._topics: dict[str, dict[str, TopicStatus]] = {}

    def __repr__(self) -> str:
        tasks = sum(map(len, self._tasks.values()))
        return f"<StatusCache of {len(self._connectors)} connectors, {tasks} tasks>"

    def apply(self, record: StatusRecord) -> None:
        """Apply one record."""
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
        """Return the connector's newest status."""
        return self._connectors.get(connector)

    def task(self, task: ConnectorTaskId) -> TaskStatus | None:
        """Return the task's newest status."""
        return self._tasks.get(task.connector, {}).get(task.task)

    def tasks(self, connector: str) -> list[TaskStatus]:
        """Return the newest status of each of the connector's tasks, by number."""
        found = self._tasks.get(connector, {})
        return [found[number] for number in sorted(found)]

    def topic(self, connector: str, topic: str) -> TopicStatus | None:
        """Return the status of a topic that the connector uses."""
        return self._topics.get(connector, {}).get(topic)

    def topics(self, connector: str) -> list[TopicStatus]:
        """Return the topics that the connector has used, by name."""
        found = self._topics.get(connector, {})
        return [found[topic] for topic in sorted(found)]

    def connectors(self) -> list[str]:
        """Return every connector that has a status."""
        return sorted(self._connectors)

    def connectors_with_tasks(self) -> list[str]:
        """Return every connector with a task that has a status."""
        return sorted(self._tasks)

    def may_write(self, status: ConnectorStatus | TaskStatus) -> bool:
        """Return whether a safe status may replace the current one."""
        # As in KafkaStatusBackingStore.putSafe: the same worker may always overwrite its own status.
        current = self.connector(status.connector) if isinstance(status, ConnectorStatus) else self.task(status.task)
        return current is None or current.worker_id == status.worker_id or current.generation <= status.generation
