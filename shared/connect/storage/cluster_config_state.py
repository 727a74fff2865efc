"""The configs in force, read from the config topic record by record.

A connector's task configs are several records, and after a compaction or a crash some of them may be missing. They take
effect only with the commit record that follows them and has their count. If all of them are there, they take effect
together. If not, the connector is `inconsistent` and has no tasks. The worker that runs it then writes the task configs
again.

`apply` returns the change that a record makes (`ConfigChange`). While a reader reads the topic from its start, it
ignores the changes. Afterwards it acts on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.storage.config_records import (
    Config,
    ConfigRecord,
    ConnectorRecord,
    LoggerLevel,
    RestartRequest,
    SessionKey,
    TargetStateRecord,
    TaskCommitRecord,
    TaskCountRecord,
    TaskRecord,
)

NO_OFFSET = -1
"""The offset of a snapshot, as in Kafka Connect, if the config topic has no record."""


@dataclass(frozen=True, slots=True)
class ConnectorChanged:
    """A connector's config was written, even if it equals the one before. `is_new` is True for its first config."""

    connector: str
    is_new: bool


@dataclass(frozen=True, slots=True)
class ConnectorRemoved:
    """A connector is removed."""

    connector: str


@dataclass(frozen=True, slots=True)
class TasksChanged:
    """A complete set of task configs was committed, even if it equals the one before. `tasks` are the set's tasks."""

    connector: str
    tasks: tuple[ConnectorTaskId, ...]


@dataclass(frozen=True, slots=True)
class TargetStateChanged:
    """A connector's target state has changed."""

    connector: str


ConfigChange = (
    ConnectorChanged | ConnectorRemoved | TasksChanged | TargetStateChanged | SessionKey | RestartRequest | LoggerLevel
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSnapshot:
    """The cluster's configs up to `offset`, which is the offset of the next record, as in Kafka Connect."""

    offset: int = NO_OFFSET
    session_key: SessionKey | None = None
    configs: Mapping[str, Config] = field(default_factory=dict)
    target_states: Mapping[str, TargetState] = field(default_factory=dict)
    task_counts: Mapping[str, int] = field(default_factory=dict)
    task_configs: Mapping[ConnectorTaskId, Config] = field(default_factory=dict)
    task_count_records: Mapping[str, int] = field(default_factory=dict)
    applied_configs: Mapping[str, Config] = field(default_factory=dict)
    """The connector's config that its tasks were made from."""
    pending_fencing: frozenset[str] = frozenset()
    inconsistent: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        tasks = sum(len(self.tasks(connector)) for connector in self.configs)
        return f"<ConfigSnapshot at {self.offset}: {len(self.configs)} connectors, {tasks} tasks>"

    def connectors(self) -> list[str]:
        """Return all connectors' names, sorted."""
        return sorted(self.configs)

    def target_state(self, connector: str) -> TargetState:
        """Return the connector's target state; the default is STARTED."""
        return self.target_states.get(connector, TargetState.STARTED)

    def tasks(self, connector: str) -> tuple[ConnectorTaskId, ...]:
        """Return the connector's tasks, or none if their configs are incomplete."""
        if connector in self.inconsistent or connector not in self.configs:
            return ()
        return tuple(ConnectorTaskId(connector, n) for n in range(self.task_counts.get(connector, 0)))

    def is_committed(self, connector: str) -> bool:
        """Return whether the connector's task configs are complete, and were committed after its newest config, even if
        that equals an older one."""
        # Compared by identity, since each record has a config object of its own. A newer record counts even if it is
        # equal: after a compaction it alone is left, and a reader ignores a commit before it (KAFKA-17719).
        applied = self.applied_configs.get(connector)
        return applied is not None and applied is self.configs.get(connector) and connector not in self.inconsistent

    def all_task_configs(self, connector: str) -> list[Config]:
        """Return the configs of the connector's tasks, by number."""
        return [self.task_configs[task] for task in self.tasks(connector)]


class ConfigState:
    """Applies the records of the config topic in order, and returns snapshots."""

    def __init__(self) -> None:
        self._offset = NO_OFFSET
        self._session_key: SessionKey | None = None
        self._configs: dict[str, Config] = {}
        self._targets: dict[str, TargetState] = {}
        self._counts: dict[str, int] = {}
        self._tasks: dict[ConnectorTaskId, Config] = {}
        self._deferred: dict[str, dict[int, Config]] = {}
        self._count_records: dict[str, int] = {}
        self._applied: dict[str, Config] = {}
        self._pending_fencing: set[str] = set()
        self._inconsistent: set[str] = set()
        self._snapshot: ConfigSnapshot | None = None

    def __repr__(self) -> str:
        return repr(self.snapshot())

    def snapshot(self) -> ConfigSnapshot:
        """Return the configs in force. The same object is returned until another record is read."""
        if self._snapshot is None:
            self._snapshot = ConfigSnapshot(
                offset=self._offset,
                session_key=self._session_key,
                configs=dict(self._configs),
                target_states=dict(self._targets),
                task_counts=dict(self._counts),
                task_configs=dict(self._tasks),
                task_count_records=dict(self._count_records),
                applied_configs=dict(self._applied),
                pending_fencing=frozenset(self._pending_fencing),
                inconsistent=frozenset(self._inconsistent),
            )
        return self._snapshot

    def passed(self, offset: int) -> None:
        """Record that the record at `offset` has no effect."""
        self._offset = offset + 1
        if self._snapshot is not None:
            self._snapshot = replace(self._snapshot, offset=self._offset)

    def apply(self, record: ConfigRecord, offset: int) -> ConfigChange | None:
        """Apply the record at `offset`. Returns the ConfigChange to act on, or None if the record needs no action."""
        self._offset = offset + 1
        self._snapshot = None
        match record:
            case ConnectorRecord(connector, None):
                return self._remove_connector_config(connector)
            case ConnectorRecord(connector, config):
                assert config is not None
                is_new = connector not in self._configs
                self._configs[connector] = config
                self._targets.setdefault(connector, TargetState.STARTED)
                return ConnectorChanged(connector, is_new)
            case TaskRecord(task, config):
                self._deferred.setdefault(task.connector, {})[task.task] = config
            case TaskCommitRecord(connector, tasks):
                return self._commit_task_configs(connector, tasks)
            case TargetStateRecord(connector, state):
                return self._apply_target_state(connector, state)
            case TaskCountRecord(connector, None):
                self._count_records.pop(connector, None)
            case TaskCountRecord(connector, count):
                assert count is not None
                self._count_records[connector] = count
                self._pending_fencing.discard(connector)
            case SessionKey():
                self._session_key = record
                return record
            case RestartRequest() | LoggerLevel():
                return record
        return None

    def _remove_connector_config(self, connector: str) -> ConfigChange:
        # The task count record stays: producers of the removed tasks may still be active, and a new connector of this
        # name must fence them.
        self._configs.pop(connector, None)
        self._counts.pop(connector, None)
        self._deferred.pop(connector, None)
        self._applied.pop(connector, None)
        self._tasks = {task: config for task, config in self._tasks.items() if task.connector != connector}
        self._inconsistent.discard(connector)
        self._pending_fencing.discard(connector)
        return ConnectorRemoved(connector)

    def _apply_target_state(self, connector: str, state: TargetState | None) -> ConfigChange | None:
        before = self._targets.get(connector)
        if state is None:
            self._targets.pop(connector, None)
            return None
        self._targets[connector] = state
        # A connector that is created as stopped has no config yet: its config comes next.
        return TargetStateChanged(connector) if before is not state and connector in self._configs else None

    def _commit_task_configs(self, connector: str, count: int) -> ConfigChange | None:
        deferred = self._deferred.pop(connector, {})
        if connector not in self._configs:
            # The connector was removed, so its task configs are not used.
            return None
        self._counts[connector] = count
        # As in KafkaConfigBackingStore: compaction or a crash of the writer has removed task configs of this set.
        if not all(number in deferred for number in range(count)):
            self._inconsistent.add(connector)
            return None
        self._inconsistent.discard(connector)
        for task in [task for task in self._tasks if task.connector == connector]:
            del self._tasks[task]
        # Task configs of an older set may remain beyond the committed number. Compaction decides which, so they do not
        # count.
        self._tasks |= {ConnectorTaskId(connector, number): deferred[number] for number in range(count)}
        self._applied[connector] = self._configs[connector]
        # The set is new: the producers of older sets must be fenced before its tasks start (KIP-618).
        self._pending_fencing.add(connector)
        return TasksChanged(connector, tuple(ConnectorTaskId(connector, number) for number in range(count)))
