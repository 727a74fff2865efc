"""Topics, their configs and offsets, and the cluster.

Each call has one deadline (`timeout_ms`, else the admin's) for all that it asks, retries what is passing within it, and
ends in KafkaTimeout, or in the Kafka error named with the topic or partition.
"""

from __future__ import annotations

import base64
import functools
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Literal, ParamSpec, TypeVar

from penstock.shared.clients.admin.types import (
    CONFIG_SOURCES,
    BrokerDescription,
    ClusterDescription,
    ConfigEntry,
    ConfigSynonym,
    NewTopic,
    PartitionDescription,
    TopicDescription,
)
from penstock.shared.clients.connection import NO_UUID, Connection, by_leader, error_for_code, list_offsets, wire
from penstock.shared.clients.connection.log_dirs import DESCRIBE_LOG_DIRS
from penstock.shared.clients.connection.wire_types import Api
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import AuthorizationFailed, IllegalState, NotLeaderOrFollower, TopicAlreadyExists
from penstock.shared.common.offset_checks import checked_offset, checked_spec
from penstock.shared.common.records import TopicPartition

T = TypeVar("T")
P = ParamSpec("P")
DEADLINE_MS: ContextVar[float | None] = ContextVar("admin_deadline_ms", default=None)
"""When the call under way must be over, whatever it asks yet."""

IsolationLevel = Literal["read_uncommitted", "read_committed"]
OffsetSpec = Literal["earliest", "latest"] | int
TOPIC_RESOURCE = 2
CONFIGS_OF_TOPICS_MAX = 100
"""Topics of one request for configs: each takes some 6 KB of the answer."""
SET_CONFIG, DELETE_CONFIG = 0, 1
ALL_RECORDS = -1


def kafka_uuid(value: uuid.UUID) -> str:
    """A UUID as Kafka and its tools write it: base64, 22 characters.

    >>> kafka_uuid(uuid.UUID("da26b76d-ab0e-47e2-9b95-658fb13b8b6f"))
    '2ia3basOR-KblWWPsTuLbw'
    """
    return base64.urlsafe_b64encode(value.bytes).rstrip(b"=").decode()


def one_deadline(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Of a method that asks several things in turn: they share its `timeout_ms`."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        admin: Any = args[0]
        before = DEADLINE_MS.set(SYSTEM_CLOCK.monotonic_ms() + admin._limit_ms(kwargs.get("timeout_ms")))
        try:
            return await method(*args, **kwargs)
        finally:
            DEADLINE_MS.reset(before)

    return call


class TopicsAdmin:
    """The part of `Admin` that deals with topics."""

    _connection: Connection
    _timeout_ms: int
    _open: bool

    def _check_open(self) -> None:
        if not self._open:
            raise IllegalState("the admin is not open; use it in `async with`")

    async def _run(self, call: Callable[[], Awaitable[T]], where: str, timeout_ms: int | None) -> T:
        self._check_open()
        return await self._connection.retrying(call, where, self._limit_ms(timeout_ms))

    def _limit_ms(self, timeout_ms: float | None) -> float:
        """The time there is for one request."""
        limit_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        deadline_ms = DEADLINE_MS.get()
        return limit_ms if deadline_ms is None else max(0.0, min(limit_ms, deadline_ms - SYSTEM_CLOCK.monotonic_ms()))

    async def _metadata(self, names: Iterable[str] | None, timeout_ms: int | None = None) -> Any:
        topics: list[Any] | None = None if names is None else [(NO_UUID, name, {}) for name in names]
        where = "metadata"
        request = wire.METADATA(topics, False, False, False)
        return await self._run(
            lambda: self._connection.send(self._connection.any_node(), request, where), where, timeout_ms
        )

    @one_deadline
    async def create_topics(
        self, topics: Iterable[NewTopic], exist_ok: bool = False, *, timeout_ms: int | None = None
    ) -> None:
        """Create topics and wait until every partition has a leader.

        Raises TopicAlreadyExists (unless `exist_ok`, which leaves an existing topic as it is), InvalidTopic,
        InvalidRequest (partitions, replication factor, configs: the broker's words).
        """
        wanted = list(topics)
        if not wanted:
            return
        rows: list[Any] = [(t.name, t.partitions, t.replication_factor, [], list(t.configs.items())) for t in wanted]
        request = wire.CREATE_TOPICS(rows, self._connection.settings.request_timeout_ms, False)
        sent: list[bool] = []

        async def create() -> None:
            retried = bool(sent)
            sent.append(True)
            response = await self._connection.send(await self._controller(), request, "create topics")
            for name, code, message in response.topics:
                if code:
                    error = error_for_code(code, f"topic {name}", message)
                    # After a try whose answer was lost, "exists" says that the first one succeeded.
                    if not (isinstance(error, TopicAlreadyExists) and (exist_ok or retried)):
                        raise error

        await self._run(create, "create topics", timeout_ms)
        await self._wait_for_leaders([t.name for t in wanted], timeout_ms)

    async def _wait_for_leaders(self, names: list[str], timeout_ms: int | None) -> None:
        async def check() -> None:
            for description in (await self.describe_topics(names, timeout_ms=timeout_ms)).values():
                for partition in description.partitions:
                    if partition.leader is None:
                        raise NotLeaderOrFollower(f"{description.name}-{partition.partition}: no leader yet")

        await self._run(check, "wait for leaders", timeout_ms)

    async def delete_topics(self, names: Iterable[str], *, timeout_ms: int | None = None) -> None:
        """Delete topics; UnknownTopicOrPartition names one that does not exist."""
        request = wire.DELETE_TOPICS(list(names), self._connection.settings.request_timeout_ms)

        async def delete() -> list[tuple[str, int]]:
            response = await self._connection.send(await self._controller(), request, "delete topics")
            return [(name, code) for name, code in response.topics if code]

        for name, code in await self._run(delete, "delete topics", timeout_ms):
            raise error_for_code(code, f"topic {name}")

    async def list_topics(self, *, internal: bool = False, timeout_ms: int | None = None) -> list[str]:
        """The names of all topics, sorted; Kafka's own only with `internal`."""
        response = await self._metadata(None, timeout_ms)
        return sorted(name for _, name, _, is_internal, *_ in response.topics if internal or not is_internal)

    async def describe_topics(
        self, names: Iterable[str], *, timeout_ms: int | None = None
    ) -> dict[str, TopicDescription]:
        """Each topic's id and partitions; UnknownTopicOrPartition names one that does not exist."""
        wanted = list(names)
        if not wanted:
            return {}
        found = {}
        for code, name, topic_id, is_internal, partitions, *_ in (await self._metadata(wanted, timeout_ms)).topics:
            if code:
                raise error_for_code(code, f"topic {name}")
            rows = tuple(
                PartitionDescription(index, None if leader < 0 else leader, tuple(replicas), tuple(isr))
                for _, index, leader, _, replicas, isr, *_ in sorted(partitions, key=lambda p: p[1])
            )
            found[name] = TopicDescription(name, kafka_uuid(topic_id), is_internal, rows)
        return found

    async def describe_configs(self, topic: str, *, timeout_ms: int | None = None) -> dict[str, str | None]:
        """Every config of a topic in force, defaults included; sensitive values are None."""
        return {entry.name: entry.value for entry in (await self.topic_configs([topic], timeout_ms=timeout_ms))[topic]}

    @one_deadline
    async def topic_configs(
        self, topics: Iterable[str], *, timeout_ms: int | None = None
    ) -> dict[str, list[ConfigEntry]]:
        """Every config in force of each topic, by name, with where its value comes from.

        Raises UnknownTopicOrPartition, which names the topic.
        """
        wanted, found = list(topics), dict[str, list[ConfigEntry]]()
        for at in range(0, len(wanted), CONFIGS_OF_TOPICS_MAX):
            asked = wanted[at : at + CONFIGS_OF_TOPICS_MAX]
            request = wire.DESCRIBE_CONFIGS([(TOPIC_RESOURCE, topic, None) for topic in asked], True)
            where = f"configs of topic {asked[0]}" + (f" and {len(asked) - 1} more" if len(asked) > 1 else "")
            for code, message, _, topic, rows in (await self._ask_any(request, where, timeout_ms)).results:
                if code:
                    raise error_for_code(code, f"configs of topic {topic}", message)
                found[topic] = sorted((_config_entry(row) for row in rows), key=lambda entry: entry.name)
        return found

    async def _ask_any(self, request: Any, where: str, timeout_ms: int | None) -> Any:
        async def ask() -> Any:
            return await self._connection.send(self._connection.any_node(), request, where)

        return await self._run(ask, where, timeout_ms)

    async def alter_configs(
        self, topic: str, configs: Mapping[str, str | None], *, timeout_ms: int | None = None
    ) -> None:
        """Set configs of a topic, None puts one back to the broker's default; the others stay as they are.

        Raises InvalidRequest with the broker's words, UnknownTopicOrPartition.
        """
        rows = [(name, DELETE_CONFIG if value is None else SET_CONFIG, value) for name, value in configs.items()]
        request = wire.INCREMENTAL_ALTER_CONFIGS([(TOPIC_RESOURCE, topic, rows)], False)
        where = f"configs of topic {topic}"

        async def alter() -> None:
            response = await self._connection.send(self._connection.any_node(), request, where)
            for code, message, _, _ in response.resources:
                if code:
                    raise error_for_code(code, where, message)

        await self._run(alter, where, timeout_ms)

    @one_deadline
    async def list_offsets(
        self,
        specs: Mapping[TopicPartition, OffsetSpec],
        isolation_level: IsolationLevel = "read_uncommitted",
        *,
        timeout_ms: int | None = None,
    ) -> dict[TopicPartition, int]:
        """One offset a partition: the earliest, the latest, or the first record at or after a time (ms since the
        epoch).

        The latest is the high watermark, under `read_committed` the last stable offset (before the first open
        transaction). Where no record is as late as the time, the latest offset is given. ValueError and TypeError for
        any other spec.
        """
        self._check_open()
        for tp, spec in specs.items():
            checked_spec(tp, spec)
        found = await list_offsets(self._connection, specs, isolation_level, self._limit_ms(timeout_ms))
        without = {tp: "latest" for tp, offset in found.items() if offset < 0}
        if without:
            found.update(await list_offsets(self._connection, without, isolation_level, self._limit_ms(timeout_ms)))
        return found

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """Delete the records below an offset (-1: all there are); gives each partition's new first offset.

        Raises OffsetOutOfRange naming the partition where the offset is above the high watermark, ValueError and
        TypeError for what is no offset.
        """
        for tp, offset in before.items():
            if offset != ALL_RECORDS:
                checked_offset(tp, offset)
        low: dict[TopicPartition, int] = {}

        async def delete() -> None:
            missing = [tp for tp in before if tp not in low]
            for node, topics in (await by_leader(self._connection, missing)).items():
                rows = [(t, [(p, before[TopicPartition(t, p)]) for p in ps]) for t, ps in topics.items()]
                request = wire.DELETE_RECORDS(rows, self._connection.settings.request_timeout_ms)
                response = await self._connection.send(node, request, "delete records")
                for topic, partitions in response.topics:
                    for partition, watermark, code in partitions:
                        tp = TopicPartition(topic, partition)
                        if code:
                            raise error_for_code(code, f"{tp} at offset {before[tp]}")
                        low[tp] = watermark

        await self._run(delete, "delete records", timeout_ms)
        return low

    async def partition_bytes(
        self, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """What each partition takes on its leader's disk, whole segments with what they hold of deleted records.

        Needs the right to describe the cluster; raises AuthorizationFailed without it.
        """
        wanted = list(partitions)
        sizes: dict[TopicPartition, int] = {}

        async def ask() -> None:
            for node, topics in (await by_leader(self._connection, wanted)).items():
                request = DESCRIBE_LOG_DIRS([(topic, list(of)) for topic, of in topics.items()])
                response = await self._connection.send(node, request, "log dirs")
                for code, _, found in response.log_dirs:
                    if code:
                        raise error_for_code(code, f"log dirs of node {node}")
                    for topic, of in found:
                        sizes.update({TopicPartition(topic, p): size for p, size, _, future in of if not future})
            if sizes.keys() < set(wanted) and not sizes:
                raise AuthorizationFailed("log dirs: the brokers tell nothing of them (Describe on the cluster)")

        await self._run(ask, "log dirs", timeout_ms)
        return sizes

    async def unsupported_requests(self) -> list[str]:
        """What Penstock asks of a broker and some broker does not speak, as texts; none where all is well."""
        self._check_open()
        asked = [api for api in vars(wire).values() if isinstance(api, Api)]
        lacking = []
        for node in self._connection.nodes():
            spoken = await self._connection.api_versions(node)
            for api in asked:
                low, high = spoken.get(api.key, (0, -1))
                if not low <= api.version <= high:
                    lacking.append(f"{api.name} version {api.version} (node {node}: {low} to {high})")
        return lacking

    async def cluster(self, *, timeout_ms: int | None = None) -> ClusterDescription:
        """The cluster's id, controller and brokers."""
        response = await self._metadata([], timeout_ms)
        brokers = tuple(BrokerDescription(*row[:4]) for row in sorted(response.brokers))
        return ClusterDescription(response.cluster_id, response.controller_id, brokers)

    async def _controller(self) -> int:
        topics: list[Any] = []
        request = wire.METADATA(topics, False, False, False)
        response = await self._connection.send(self._connection.any_node(), request, "metadata")
        return int(response.controller_id)


def _config_entry(row: Any) -> ConfigEntry:
    name, value, is_read_only, source, is_sensitive, rows = row
    synonyms = tuple(ConfigSynonym(name, value, _config_source(source)) for name, value, source in rows)
    return ConfigEntry(name, value, _config_source(source), is_read_only, is_sensitive, synonyms)


def _config_source(number: int) -> str:
    return CONFIG_SOURCES.get(number, "UNKNOWN")
