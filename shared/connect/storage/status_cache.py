"""The statuses in the status topic, and the check whether a worker may still write one.

A worker that has lost a connector or task may report on it after the new owner did. So a `safe` status is written only
if there is no current status, or if the current one is from the same worker, or its generation is not later than that
of the `safe` status. The current status is the newest one that this worker has read or written.
"""

from __future__ import annotations

from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.status_listener import Id, connector_of
from penstock.shared.connect.storage.status_records import Forgotten, Status, StatusRecord, TopicStatus


class StatusCache:
    """The newest status of each connector, task and topic. All records of the status topic must be applied in order."""

    def __init__(self) -> None:
        self._statuses: dict[str, dict[Id, Status]] = {}
        """By connector: its status, and those of its tasks."""
        self._topics: dict[str, dict[str, TopicStatus]] = {}

    def __repr__(self) -> str:
        return f"<StatusCache of {len(self._statuses)} connectors>"

    def apply(self, record: StatusRecord) -> None:
        """Apply one record."""
        match record:
            case Status(id):
                self._statuses.setdefault(connector_of(id), {})[id] = record
            case Forgotten(str() | ConnectorTaskId() as id):
                statuses = self._statuses.get(connector_of(id), {})
                statuses.pop(id, None)
                if not statuses:
                    self._statuses.pop(connector_of(id), None)
            case TopicStatus(topic, connector):
                self._topics.setdefault(connector, {})[topic] = record
            case Forgotten((topic, connector)):
                topics = self._topics.get(connector, {})
                topics.pop(topic, None)
                if not topics:
                    self._topics.pop(connector, None)

    def get(self, id: Id) -> Status | None:
        """Return the newest status of a connector or task."""
        return self._statuses.get(connector_of(id), {}).get(id)

    def tasks(self, connector: str) -> dict[ConnectorTaskId, Status]:
        """Return the newest status of each of the connector's tasks, in order."""
        found = self._statuses.get(connector, {})
        return {task: found[task] for task in sorted(id for id in found if isinstance(id, ConnectorTaskId))}

    def topic(self, connector: str, topic: str) -> TopicStatus | None:
        """Return the status of a topic that the connector uses."""
        return self._topics.get(connector, {}).get(topic)

    def topics(self, connector: str) -> list[TopicStatus]:
        """Return the topics that the connector has used, by name."""
        found = self._topics.get(connector, {})
        return [found[topic] for topic in sorted(found)]

    def connectors(self) -> list[str]:
        """Return every connector that has a status, or whose tasks have one."""
        return sorted(self._statuses)

    def may_write(self, status: Status) -> bool:
        """Return whether a safe status may replace the current one."""
        # As in KafkaStatusBackingStore.putSafe: the same worker may always overwrite its own status.
        current = self.get(status.id)
        return current is None or current.worker_id == status.worker_id or current.generation <= status.generation
