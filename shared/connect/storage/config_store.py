"""The store of a Connect cluster's configs.

`ConfigStore` decides which records a change consists of, and their order, and applies them in memory. Its subclass
writes them to the config topic. There the call for a change returns when its records have been read back.

With `transactional_id`, a transactional producer writes the leader's changes, so that a former leader is fenced.
`claim` takes over the id. Then a write of the former leader raises ProducerFenced. An error of a leader's write ends
its claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import IllegalState, PenstockError, SerializationError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord, RecordMetadata
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.storage.cluster_config_state import ConfigChange, ConfigSnapshot, ConfigState
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
    decode,
    encode,
)
from penstock.shared.connect.storage.kafka_based_log import READ_TO_END_MS, KafkaBasedLog, LogTopic

log = get_logger(__name__)

OnChange = Callable[[ConfigChange], None]


class ConfigStore:
    """Stores the configs in the memory of one process. It is the base class of the store in Kafka.

    After the start, `on_change` is called with each ConfigChange that a record makes.
    """

    def __init__(self, on_change: OnChange) -> None:
        self._on_change = on_change
        self._state = ConfigState()
        self._started = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state!r}>"

    def snapshot(self) -> ConfigSnapshot:
        """Return the configs as far as they were read."""
        return self._state.snapshot()

    async def start(self) -> None:
        """Read the existing records, without calls of `on_change`."""
        self._started = True

    async def stop(self) -> None:
        """Stop reading."""
        self._started = False

    async def refresh(self, timeout_ms: int = READ_TO_END_MS) -> None:
        """Read all records that other workers have written up to now. A store in memory has none. Raises KafkaTimeout
        after `timeout_ms`."""

    @property
    def is_claimed(self) -> bool:
        """Return whether this process may make a leader's changes."""
        return True

    async def claim(self) -> None:
        """Claim the right to make a leader's changes, until `release` or a failed change. Fences earlier claims.

        Does nothing without a transactional id.
        """

    async def release(self) -> None:
        """Give up the right to make a leader's changes."""

    async def put_connector(self, name: str, config: Config, target: TargetState | None = None) -> None:
        """Store a connector's config. Before it, `target` is written as the target state. None keeps the target state,
        which is STARTED for a new connector."""
        # As in KIP-980: a worker that reads the connector before its target state would start it.
        records: list[ConfigRecord] = [] if target is None else [TargetStateRecord(name, target)]
        await self._write_config_records([*records, ConnectorRecord(name, config)], privileged=True)

    async def remove_connector(self, name: str) -> None:
        """Remove a connector, its tasks and its target state."""
        await self._write_config_records([ConnectorRecord(name, None), TargetStateRecord(name, None)], privileged=True)

    async def put_tasks(self, name: str, configs: Sequence[Config]) -> None:
        """Store all of a connector's task configs."""
        tasks = [TaskRecord(ConnectorTaskId(name, n), config) for n, config in enumerate(configs)]
        # The commit record last: readers apply the set only when all of its configs precede it.
        await self._write_config_records([*tasks, TaskCommitRecord(name, len(configs))], privileged=True)

    async def put_target_state(self, name: str, state: TargetState) -> None:
        """Store a connector's target state."""
        await self._write_config_records([TargetStateRecord(name, state)])

    async def put_task_count(self, name: str, count: int) -> None:
        """Record that the producers of older tasks were fenced, and the number of tasks that may start."""
        await self._write_config_records([TaskCountRecord(name, count)], privileged=True)

    async def put_session_key(self, key: SessionKey) -> None:
        """Store the key with which workers sign from now on."""
        await self._write_config_records([key], privileged=True)

    async def put_restart(self, request: RestartRequest) -> None:
        """Request that every worker restarts, of what it runs of a connector, what `request` selects."""
        await self._write_config_records([request], privileged=True)

    async def put_logger_level(self, level: LoggerLevel) -> None:
        """Request that every worker sets a logger's level."""
        await self._write_config_records([level])

    async def _write_config_records(self, records: Sequence[ConfigRecord], privileged: bool = False) -> None:
        """Write the records in order, and read them back. Only the leader may make `privileged` writes."""
        for record in records:
            self._apply_config_record(record, max(self._state.snapshot().offset, 0))

    def _apply_config_record(self, record: ConfigRecord, offset: int) -> None:
        change = self._state.apply(record, offset)
        # While the topic is read from its start, only the final state counts.
        if change is not None and self._started:
            self._on_change(change)


class KafkaConfigStore(ConfigStore):
    """Stores the configs in the config topic. Applies every record that it reads, also those of other workers."""

    def __init__(
        self,
        kafka: KafkaSettings,
        admin: Admin,
        producer: Producer,
        topic: LogTopic,
        on_change: OnChange,
        *,
        transactional_id: str | None = None,
    ) -> None:
        super().__init__(on_change)
        self._kafka = kafka
        self._transactional_id = transactional_id
        self._log = KafkaBasedLog(kafka, admin, producer, topic, self._on_record)
        self._leader: Producer | None = None
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        await self._log.start()
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        await self._close_leader_producer()
        await self._log.stop()

    async def refresh(self, timeout_ms: int = READ_TO_END_MS) -> None:
        await self._log.read_to_end(timeout_ms)

    @property
    def is_claimed(self) -> bool:
        return self._transactional_id is None or self._leader is not None

    async def claim(self) -> None:
        if self._transactional_id is None:
            return
        await self._close_leader_producer()
        leader = Producer(self._kafka, ProducerSettings(transactional_id=self._transactional_id, linger_ms=0))
        await leader.__aenter__()
        try:
            await leader.init_transactions()
        except BaseException:
            await leader.close(0)
            raise
        self._leader = leader

    async def release(self) -> None:
        await self._close_leader_producer()

    async def _close_leader_producer(self) -> None:
        leader = self._leader
        self._leader = None
        if leader is not None:
            await leader.close(0)

    async def _write_config_records(self, records: Sequence[ConfigRecord], privileged: bool = False) -> None:
        async with self._writing:
            if privileged and self._transactional_id is not None:
                written = await self._write_as_leader(records)
            else:
                written = [await self._log.send(*encode(record)) for record in records]
        await self._log.read_past(written)

    async def _write_as_leader(self, records: Sequence[ConfigRecord]) -> list[RecordMetadata]:
        leader = self._leader
        if leader is None:
            raise IllegalState("this worker has not claimed the config topic: it is not the leader")
        try:
            async with leader.transaction():
                return [await self._log.send(*encode(record), leader) for record in records]
        # As in Kafka Connect, any error ends the claim. Another worker may have claimed the topic, or the outcome of
        # the commit is unknown: then the producer cannot begin another transaction.
        except PenstockError:
            await self._close_leader_producer()
            raise

    def _on_record(self, record: ConsumerRecord) -> None:
        try:
            decoded = decode(record.key, record.value)
        # As in Kafka Connect, an invalid record is skipped: it must not stop the whole cluster.
        except SerializationError as e:
            log.error("a record of the config topic cannot be read", offset=record.offset, reason=str(e))
            decoded = None
        if decoded is None:
            self._state.passed(record.offset)
        else:
            self._apply_config_record(decoded, record.offset)
