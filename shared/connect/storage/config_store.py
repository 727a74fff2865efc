"""The configs of a Connect cluster, to be read and changed (an edge).

`ConfigStore` says what is written for each change and in which order; where it goes is the subclass's: the config
topic, or this process's memory. Every change has been read back when its call returns.

With `transactional_id` the leader's changes are written by a transactional producer, so that a former leader is
fenced: `claim` takes the id over, and what a fenced leader writes ends in ProducerFenced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import IllegalState, ProducerFenced, SerializationError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord, RecordMetadata
from penstock.shared.common.settings import KafkaSettings
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
    decode,
    encode,
)
from penstock.shared.connect.storage.config_state import ConfigChange, ConfigSnapshot, ConfigState
from penstock.shared.connect.storage.kafka_based_log import READ_TO_END_MS, KafkaBasedLog, LogTopic

log = get_logger(__name__)

OnChange = Callable[[ConfigChange], None]


class ConfigStore:
    """What is written for each change; `on_change` hears of each one once the store is started."""

    def __init__(self, on_change: OnChange) -> None:
        self._on_change = on_change
        self._state = ConfigState()
        self._started = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._state!r}>"

    def snapshot(self) -> ConfigSnapshot:
        """The configs as far as they were read."""
        return self._state.snapshot()

    async def start(self) -> None:
        """Read what there is; nothing of it is told to `on_change`."""
        self._started = True

    async def stop(self) -> None:
        """Read no longer."""
        self._started = False

    async def refresh(self, timeout_ms: int = READ_TO_END_MS) -> None:
        """Read all that others have written up to now; KafkaTimeout."""

    @property
    def is_claimed(self) -> bool:
        """Whether a leader's changes may be made from here."""
        return True

    async def claim(self) -> None:
        """Become the one that may make a leader's changes; others that did so before are fenced."""

    async def release(self) -> None:
        """Lead no longer."""

    async def put_connector(self, name: str, config: Config, target: TargetState | None = None) -> None:
        """A connector's config; `target` where it is not to start as usual, before anyone starts it."""
        records: list[ConfigRecord] = [] if target is None else [TargetStateRecord(name, target)]
        await self._write([*records, ConnectorRecord(name, config)], privileged=True)

    async def remove_connector(self, name: str) -> None:
        """Forget a connector, its tasks and what it was to do."""
        await self._write([ConnectorRecord(name, None), TargetStateRecord(name, None)], privileged=True)

    async def put_tasks(self, name: str, configs: Sequence[Config]) -> None:
        """A connector's tasks, all of them."""
        tasks = [TaskRecord(ConnectorTaskId(name, n), config) for n, config in enumerate(configs)]
        await self._write([*tasks, TaskCommitRecord(name, len(configs))], privileged=True)

    async def put_target_state(self, name: str, state: TargetState) -> None:
        """What a connector is to do."""
        await self._write([TargetStateRecord(name, state)])

    async def put_task_count(self, name: str, count: int) -> None:
        """The producers of all tasks were fenced, and so many may start."""
        await self._write([TaskCountRecord(name, count)], privileged=True)

    async def put_session_key(self, key: SessionKey) -> None:
        """What workers sign with from now on."""
        await self._write([key], privileged=True)

    async def put_restart(self, request: RestartRequest) -> None:
        """Have every worker restart what it has of a connector."""
        await self._write([request], privileged=True)

    async def put_logger_level(self, level: LoggerLevel) -> None:
        """Have every worker set a logger's level."""
        await self._write([level])

    async def _write(self, records: Sequence[ConfigRecord], privileged: bool = False) -> None:
        """Write them in order, and read to the end; `privileged`: only the leader may."""
        raise AssertionError("a subclass writes")

    def _apply(self, record: ConfigRecord, offset: int) -> None:
        change = self._state.apply(record, offset)
        if change is not None and self._started:
            self._on_change(change)


class MemoryConfigStore(ConfigStore):
    """The configs of one process, gone with it."""

    async def _write(self, records: Sequence[ConfigRecord], privileged: bool = False) -> None:
        for record in records:
            self._apply(record, self._state.snapshot().offset + 1)


class KafkaConfigStore(ConfigStore):
    """The configs in the config topic."""

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
        self._kafka, self._transactional_id = kafka, transactional_id
        self._log = KafkaBasedLog(kafka, admin, producer, topic, self._on_record)
        self._leader: Producer | None = None
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        await self._log.start()
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        await self._let_go()
        await self._log.stop()

    async def refresh(self, timeout_ms: int = READ_TO_END_MS) -> None:
        await self._log.read_to_end(timeout_ms)

    @property
    def is_claimed(self) -> bool:
        return self._transactional_id is None or self._leader is not None

    async def claim(self) -> None:
        if self._transactional_id is None:
            return
        await self._let_go()
        leader = Producer(self._kafka, ProducerSettings(transactional_id=self._transactional_id, linger_ms=0))
        await leader.__aenter__()
        try:
            await leader.init_transactions()
        except BaseException:
            await leader.close(0)
            raise
        self._leader = leader

    async def release(self) -> None:
        await self._let_go()

    async def _let_go(self) -> None:
        leader, self._leader = self._leader, None
        if leader is not None:
            await leader.close(0)

    async def _write(self, records: Sequence[ConfigRecord], privileged: bool = False) -> None:
        async with self._writing:
            if privileged and self._transactional_id is not None:
                written = await self._write_as_leader(records)
            else:
                written = [await self._log.send(*encode(record)) for record in records]
        await self._log.read_past(written)

    async def _write_as_leader(self, records: Sequence[ConfigRecord]) -> list[RecordMetadata]:
        leader = self._leader
        if leader is None:
            raise IllegalState("this worker has not claimed the config topic: it does not lead")
        try:
            async with leader.transaction():
                return [await self._log.send(*encode(record), leader) for record in records]
        except ProducerFenced:
            await self._let_go()
            raise

    def _on_record(self, record: ConsumerRecord) -> None:
        try:
            decoded = decode(record.key, record.value)
        except SerializationError as e:
            log.error("a record of the config topic cannot be read", offset=record.offset, reason=str(e))
            decoded = None
        if decoded is None:
            self._state.passed(record.offset)
        else:
            self._apply(decoded, record.offset)
