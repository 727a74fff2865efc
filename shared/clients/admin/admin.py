"""Administers topics, configs, records, groups and offsets, over a connection of its own (Java: `Admin`).

A call may send several requests, and retries retriable errors. One deadline covers all of this: `timeout_ms`, by
default the admin's. A call that fails raises KafkaTimeout or a Kafka error. The error for a broker's response names the
topic, partition, group or node. A topic name that Kafka does not allow is InvalidTopic without a request: a broker
closes the connection after a request with a name that is too long for Kafka's protocol.

A group's offsets can be changed only while the group has no members. A member would overwrite the change by a commit,
or would continue from its own position. So each change first describes the group, and raises GroupNotEmpty with its
members if it has any. If a member joins in between, the broker rejects a change that affects it.
"""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, Self, TypeVar

from penstock.shared.clients.admin.types import (
    CONFIG_SOURCES,
    DEAD,
    UNLIMITED_TIMESTAMPS,
    BrokerDescription,
    ClusterDescription,
    ConfigEntry,
    ConfigSynonym,
    GroupDescription,
    GroupListing,
    MemberDescription,
    NewTopic,
    OffsetChange,
    PartitionDescription,
    PartitionLag,
    TopicDescription,
    topic_before_3_6,
    topic_id_text,
)
from penstock.shared.clients.connection import Connection, by_leader, list_offsets
from penstock.shared.clients.connection.offsets import checked_offset, checked_offsets, checked_partitions, checked_spec
from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.consumer_protocol import PROTOCOL_TYPE, decode_assignment
from penstock.shared.clients.protocol.errors import error_for_code
from penstock.shared.clients.protocol.requests import NO_GENERATION, NO_UUID, ApiVersion
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerNotAvailable,
    CoordinatorNotAvailable,
    GroupNotEmpty,
    GroupNotFound,
    IllegalState,
    InvalidRequest,
    KafkaTimeout,
    NotLeaderOrFollower,
    PenstockError,
    TopicAlreadyExists,
    UnknownMember,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import check_topic_name, checked_topic_names

log = get_logger(__name__)

DEFAULT_TIMEOUT_MS = 60_000
"""Kafka's `default.api.timeout.ms`: how long one call may take, retries included."""

T = TypeVar("T")
P = ParamSpec("P")
DEADLINE_MS: ContextVar[float | None] = ContextVar("admin_deadline_ms", default=None)
"""The deadline of the current call, for all its remaining requests."""

IsolationLevel = Literal["read_uncommitted", "read_committed"]
OffsetSpec = Literal["earliest", "latest"] | int
TOPIC_RESOURCE = 2
CONFIGS_OF_TOPICS_MAX = 100
"""The maximum number of topics in one request for configs: each takes about 6 KB of the response."""
SET_CONFIG = 0
DELETE_CONFIG = 1
ALL_RECORDS = -1
"""DeleteRecords: the offset that stands for the high watermark."""


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """A reset that moves the committed offset by `records`, kept within the partition's first and end offset.

    Without a committed offset it moves from the first offset.
    """

    records: int


Reset = Literal["earliest", "latest"] | int | ShiftBy | Mapping[TopicPartition, int | OffsetAndMetadata]
"""The target of a reset: the earliest or latest offset, a time in ms since the epoch, a shift, or an offset for each
partition. Metadata of such an offset is not committed."""


def one_deadline(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a method that sends several requests in turn, so that they share its `timeout_ms`."""

    @functools.wraps(method)
    async def call_with_deadline(*args: P.args, **kwargs: P.kwargs) -> T:
        admin: Any = args[0]
        # A context variable: the calls within the method find the deadline, and concurrent tasks have their own.
        before = DEADLINE_MS.set(SYSTEM_CLOCK.monotonic_ms() + admin._limit_ms(kwargs.get("timeout_ms")))
        try:
            return await method(*args, **kwargs)
        finally:
            DEADLINE_MS.reset(before)

    return call_with_deadline


class Admin:
    """Administers a cluster; use it as `async with Admin(kafka) as admin`, in one process and event loop."""

    def __init__(self, kafka: KafkaSettings | str, *, timeout_ms: int = DEFAULT_TIMEOUT_MS) -> None:
        """`kafka` has the brokers' addresses: settings, or bootstrap servers as text."""
        self._connection = Connection(KafkaSettings.of(kafka))
        self._timeout_ms = timeout_ms
        self._open = False

    def __repr__(self) -> str:
        return f"<Admin {self._connection!r}>"

    async def __aenter__(self) -> Self:
        await self._connection.open()
        self._open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Later calls raise IllegalState."""
        if self._open:
            self._connection.check_loop()
        self._open = False
        await self._connection.close()

    def silent_ms(self) -> float | None:
        """Return the ms since a broker last answered this client. Returns None while the admin is not open."""
        return self._connection.silent_ms()

    @one_deadline
    async def create_topics(
        self, topics: Iterable[NewTopic], exist_ok: bool = False, *, timeout_ms: int | None = None
    ) -> None:
        """Create topics, and wait until every broker that can be reached knows the leader of each partition.

        Raises TopicAlreadyExists (unless `exist_ok`: an existing topic is left as it is, and no right to create it is
        needed), InvalidTopic, InvalidRequest (partitions, replication factor, configs: with the broker's message).
        """
        wanted = list(topics)
        if not wanted:
            return
        names = [t.name for t in wanted]
        rows = {t.name: _new_topic_row(t) for t in wanted}
        broker_limit_ms = self._connection.settings.request_timeout_ms

        def use_older_configs(error: InvalidRequest) -> bool:
            if not any(name in str(error) for name in UNLIMITED_TIMESTAMPS):
                return False
            rows.update((t.name, _new_topic_row(topic_before_3_6(t))) for t in wanted)
            return True

        async def request_topics(requested: list[str]) -> list[PenstockError]:
            return await self._change_topics(
                requested,
                lambda pending: requests.CREATE_TOPICS([rows[name] for name in pending], broker_limit_ms, False),
                TopicAlreadyExists,
                "create topics",
                timeout_ms,
                use_older_configs,
            )

        try:
            existing = await request_topics(names)
        except AuthorizationFailed:
            if not exist_ok:
                raise
            # A broker checks the right to create a topic before it looks for it. Topics are looked up only now, because
            # a broker may list a deleted topic for a while.
            found = {t.name for t in (await self._fetch_metadata(names, timeout_ms)).topics if not t.error_code}
            existing = await request_topics([name for name in names if name not in found])
        if existing and not exist_ok:
            raise existing[0]
        # CreateTopics returns before all brokers know the topic. A producer or consumer would find it missing.
        await self._wait_for_leaders(names, timeout_ms)

    async def _change_topics(
        self,
        names: list[str],
        request_for: Callable[[list[str]], Any],
        no_change: type[PenstockError],
        where: str,
        timeout_ms: int | None,
        correct: Callable[[InvalidRequest], bool] = lambda _: False,
    ) -> list[PenstockError]:
        """Change the topics `names` at the controller, with retries after retriable errors.

        After an InvalidRequest, `correct` may change the request, and returns whether to send it once more.
        An error of the class `no_change` says that a topic already is as requested. Such errors are returned, not
        raised. They are ignored for topics that an earlier attempt may have changed.
        """
        if not names:
            return []
        pending = checked_topic_names(names)
        maybe_changed: set[str] = set()
        unchanged: list[PenstockError] = []

        async def change() -> None:
            nonlocal pending
            # Looked up for each attempt, since only the controller changes topics and it may move.
            node = int((await self._request_cluster()).controller_id)
            # An attempt that fails here has changed nothing. `send` may connect too, and its error does not say whether
            # the request was written.
            if not await self._connection.connect(node):
                raise self._connection.connection_error(node, where)
            try:
                response = await self._connection.send(node, request_for(pending), where)
            except (BrokerNotAvailable, KafkaTimeout):
                # The controller may have carried out the request.
                maybe_changed.update(pending)
                raise
            failed: dict[str, PenstockError] = {}
            for topic in response.topics:
                if not topic.error_code:
                    continue
                error = error_for_code(topic.error_code, f"topic {topic.name}", getattr(topic, "error_message", None))
                if not isinstance(error, no_change):
                    failed[topic.name] = error
                elif topic.name not in maybe_changed:
                    unchanged.append(error)
            # REQUEST_TIMED_OUT: the controller may still make the change.
            maybe_changed.update(name for name, error in failed.items() if isinstance(error, KafkaTimeout))
            pending = [name for name in pending if name in failed]
            for error in failed.values():
                raise error

        try:
            await self._retry_request(change, where, timeout_ms)
        except InvalidRequest as e:
            if not correct(e):
                raise
            await self._retry_request(change, where, timeout_ms)
        return unchanged

    async def _wait_for_leaders(
        self, names: Iterable[str], timeout_ms: int | None, counts: Mapping[str, int] | None = None
    ) -> None:
        """Wait until all brokers know each topic, its first `counts` partitions, and a leader of each partition."""
        request = requests.METADATA([(NO_UUID, name, {}) for name in names], False, False, False)
        where = "wait for leaders"

        async def check_leaders_on_broker(node: int) -> bool:
            if not await self._connection.connect(node):
                return False
            for topic in (await self._connection.send(node, request, where)).topics:
                if topic.error_code:
                    error = error_for_code(topic.error_code, f"topic {topic.name}")
                    # The topic exists: a broker that has not heard of it yet is no reason to report it as missing.
                    if isinstance(error, UnknownTopicOrPartition):
                        raise NotLeaderOrFollower(f"{error}: not known to node {node} yet")
                    raise error
                if counts is not None and len(topic.partitions) < counts[topic.name]:
                    raise NotLeaderOrFollower(f"topic {topic.name}: not all partitions known to node {node} yet")
                for partition in topic.partitions:
                    if partition.leader < 0:
                        raise NotLeaderOrFollower(f"{topic.name}-{partition.partition}: no leader yet")
            return True

        async def check_leaders() -> None:
            # Brokers learn of a new topic at different times, and the next request may go to any of them. The checks
            # run concurrently, since a broker that cannot be reached may take all of its time limit to connect.
            checks = map(check_leaders_on_broker, self._connection.nodes())
            results = await asyncio.gather(*checks, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            if True not in results:
                raise BrokerNotAvailable(f"{where}: no broker reached")

        await self._retry_request(check_leaders, where, timeout_ms)

    async def delete_topics(self, names: Iterable[str], *, timeout_ms: int | None = None) -> None:
        """Delete topics. If some do not exist, the others are deleted, and UnknownTopicOrPartition names one that
        does not exist.
        """
        broker_limit_ms = self._connection.settings.request_timeout_ms
        missing = await self._change_topics(
            list(names),
            lambda pending: requests.DELETE_TOPICS(pending, broker_limit_ms),
            UnknownTopicOrPartition,
            "delete topics",
            timeout_ms,
        )
        if missing:
            raise missing[0]

    @one_deadline
    async def create_partitions(self, counts: Mapping[str, int], *, timeout_ms: int | None = None) -> None:
        """Add partitions to topics, up to a total number for each. Waits as `create_topics` does.

        Records of a key that are sent later may go to another partition than before. Raises UnknownTopicOrPartition,
        or InvalidRequest if a topic already has so many partitions. The other topics are changed. If the response was
        lost, a topic that has more partitions is no error, since another program may have added them meanwhile.
        """
        broker_limit_ms = self._connection.settings.request_timeout_ms
        rejected = await self._change_topics(
            list(counts),
            lambda pending: requests.CREATE_PARTITIONS(
                [(name, counts[name], None) for name in pending], broker_limit_ms, False
            ),
            InvalidRequest,
            "create partitions",
            timeout_ms,
        )
        if rejected:
            raise rejected[0]
        if counts:
            await self._wait_for_leaders(counts, timeout_ms, counts)

    async def list_topics(self, *, internal: bool = False, timeout_ms: int | None = None) -> list[str]:
        """Return the names of all topics, sorted; Kafka's internal topics only with `internal`."""
        response = await self._fetch_metadata(None, timeout_ms)
        return sorted(topic.name for topic in response.topics if internal or not topic.is_internal)

    async def describe_topics(
        self, names: Iterable[str], *, timeout_ms: int | None = None
    ) -> dict[str, TopicDescription]:
        """Return each topic's id and partitions.

        Raises UnknownTopicOrPartition, which names a topic that does not exist.
        """
        wanted = list(names)
        if not wanted:
            return {}
        found = {}
        for topic in (await self._fetch_metadata(wanted, timeout_ms)).topics:
            if topic.error_code:
                raise error_for_code(topic.error_code, f"topic {topic.name}")
            partitions = tuple(
                PartitionDescription(p.partition, None if p.leader < 0 else p.leader, tuple(p.replicas), tuple(p.isr))
                for p in sorted(topic.partitions, key=lambda row: row.partition)
            )
            found[topic.name] = TopicDescription(
                topic.name, topic_id_text(topic.topic_id), topic.is_internal, partitions
            )
        return found

    async def describe_configs(self, topic: str, *, timeout_ms: int | None = None) -> dict[str, str | None]:
        """Return the value in force of each config of a topic, defaults included; sensitive values are None."""
        return {entry.name: entry.value for entry in (await self.topic_configs([topic], timeout_ms=timeout_ms))[topic]}

    @one_deadline
    async def topic_configs(
        self, topics: Iterable[str], *, timeout_ms: int | None = None
    ) -> dict[str, list[ConfigEntry]]:
        """Return all configs of each topic, sorted by name. Each entry has the value in force and its source.

        Raises UnknownTopicOrPartition, which names the topic.
        """
        wanted = checked_topic_names(topics)
        found = dict[str, list[ConfigEntry]]()
        for at in range(0, len(wanted), CONFIGS_OF_TOPICS_MAX):
            named = wanted[at : at + CONFIGS_OF_TOPICS_MAX]
            request = requests.DESCRIBE_CONFIGS([(TOPIC_RESOURCE, topic, None) for topic in named], True)
            where = f"configs of topic {named[0]}" + (f" and {len(named) - 1} more" if len(named) > 1 else "")
            for result in (await self._request_any_broker(request, where, timeout_ms)).results:
                if result.error_code:
                    raise error_for_code(result.error_code, f"configs of topic {result.name}", result.error_message)
                found[result.name] = sorted(map(_config_entry, result.configs), key=lambda entry: entry.name)
        return found

    async def _request_any_broker(self, request: Any, where: str, timeout_ms: int | None) -> Any:
        async def send_to_any_broker() -> Any:
            return await self._connection.send(self._connection.any_node(), request, where)

        return await self._retry_request(send_to_any_broker, where, timeout_ms)

    async def alter_configs(
        self, topic: str, configs: Mapping[str, str | None], *, timeout_ms: int | None = None
    ) -> None:
        """Set configs of a topic; None resets a config to the broker's default. All other configs of the topic stay as
        they are.

        Raises UnknownTopicOrPartition, or InvalidRequest with the broker's message.
        """
        check_topic_name(topic)
        rows = [(name, DELETE_CONFIG if value is None else SET_CONFIG, value) for name, value in configs.items()]
        request = requests.INCREMENTAL_ALTER_CONFIGS([(TOPIC_RESOURCE, topic, rows)], False)
        where = f"configs of topic {topic}"

        async def alter_topic_configs() -> None:
            response = await self._connection.send(self._connection.any_node(), request, where)
            for resource in response.resources:
                if resource.error_code:
                    raise error_for_code(resource.error_code, where, resource.error_message)

        await self._retry_request(alter_topic_configs, where, timeout_ms)

    @one_deadline
    async def list_offsets(
        self,
        specs: Mapping[TopicPartition, OffsetSpec],
        isolation_level: IsolationLevel = "read_uncommitted",
        *,
        timeout_ms: int | None = None,
    ) -> dict[TopicPartition, int]:
        """Return each partition's offset: `earliest`, `latest`, or that of the first record at or after a time (ms
        since the epoch).

        `latest` is the high watermark, or the last stable offset under `read_committed`. It is also returned if all
        records are earlier than the time. Raises ValueError or TypeError for an invalid spec.
        """
        self._check_open()
        checked = {tp: checked_spec(tp, spec) for tp, spec in specs.items()}
        found = await list_offsets(self._connection, checked, isolation_level, self._limit_ms(timeout_ms))
        # No record is as late as the time: Kafka answers with -1.
        without = {tp: "latest" for tp, offset in found.items() if offset < 0}
        if without:
            found.update(await list_offsets(self._connection, without, isolation_level, self._limit_ms(timeout_ms)))
        return found

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """Delete the records below an offset; -1 deletes all. Returns the new earliest offset of each partition.

        Raises OffsetOutOfRange, which names the partition, if the offset is above the high watermark. Raises ValueError
        or TypeError for an invalid offset.
        """
        before = {tp: ALL_RECORDS if at == ALL_RECORDS else checked_offset(tp, at) for tp, at in before.items()}
        low: dict[TopicPartition, int] = {}

        async def delete() -> None:
            # A retry requests only what an earlier attempt did not delete.
            missing = [tp for tp in before if tp not in low]
            for node, topics in (await by_leader(self._connection, missing)).items():
                rows = [(t, [(p, before[TopicPartition(t, p)]) for p in ps]) for t, ps in topics.items()]
                request = requests.DELETE_RECORDS(rows, self._connection.settings.request_timeout_ms)
                response = await self._connection.send(node, request, "delete records")
                for topic in response.topics:
                    for row in topic.partitions:
                        tp = TopicPartition(topic.name, row.partition)
                        if row.error_code:
                            raise error_for_code(row.error_code, f"{tp} at offset {before[tp]}")
                        low[tp] = row.low_watermark

        await self._retry_request(delete, "delete records", timeout_ms)
        return low

    async def partition_bytes(
        self, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> dict[TopicPartition, int]:
        """Return the size in bytes of each partition's log on the disk of its leader.

        A partition that its leader does not report is left out. The size is that of whole segments. So it includes
        records that `delete_records` has deleted, until the broker removes their segment. Raises AuthorizationFailed if
        the client may not describe the cluster.
        """
        wanted = list(partitions)
        sizes: dict[TopicPartition, int] = {}

        async def describe_log_dirs() -> None:
            error: PenstockError | None = None
            for node, topics in (await by_leader(self._connection, wanted)).items():
                request = requests.DESCRIBE_LOG_DIRS([(name, list(of)) for name, of in topics.items()])
                response = await self._connection.send(node, request, "log dirs")
                for log_dir in response.log_dirs:
                    if log_dir.error_code:
                        error = error_for_code(log_dir.error_code, f"log dirs of node {node}")
                    for topic in log_dir.topics:
                        for row in topic.partitions:
                            if not row.is_future:
                                sizes[TopicPartition(topic.name, row.partition)] = row.size
            # The wanted partitions may all be in other log dirs than the one with the error.
            if error is not None and not sizes.keys() >= set(wanted):
                raise error
            # This version of the response has no error code of its own (later ones add it). Without the permission,
            # Describe on the cluster, the broker returns no log dirs.
            if wanted and not sizes:
                raise AuthorizationFailed("log dirs: the brokers return none (Describe on the cluster is needed)")

        await self._retry_request(describe_log_dirs, "log dirs", timeout_ms)
        return sizes

    async def unsupported_requests(self) -> list[str]:
        """Return, as texts, the required requests of the module `requests` that some broker does not support.

        Returns [] if there are none. Produce and Fetch are not checked. Raises BrokerNotAvailable at once if a broker
        cannot be reached, and AuthenticationFailed if a broker rejects the client.
        """
        self._check_open()
        used = [api for api in vars(requests).values() if isinstance(api, ApiVersion) and not api.optional]
        lacking = []
        for node in self._connection.nodes():
            spoken = await self._connection.api_versions(node)
            for api in used:
                low, high = spoken.get(api.key, (0, -1))
                if not low <= api.version <= high:
                    lacking.append(f"{api.name} version {api.version} (node {node}: {low} to {high})")
        return lacking

    async def cluster(self, *, timeout_ms: int | None = None) -> ClusterDescription:
        """Return the cluster's id, controller and brokers."""
        response = await self._fetch_metadata([], timeout_ms)
        brokers = tuple(BrokerDescription(*row[:4]) for row in sorted(response.brokers))
        return ClusterDescription(response.cluster_id, response.controller_id, brokers)

    async def list_groups(self, *, timeout_ms: int | None = None) -> list[GroupListing]:
        """Return every group of the cluster that this principal may describe, sorted by id."""

        async def list_groups_of_brokers() -> list[GroupListing]:
            found: dict[str, GroupListing] = {}
            # Each broker lists only the groups that it coordinates. Brokers may be missing in the known metadata.
            for node in [broker.node_id for broker in (await self._request_cluster()).brokers]:
                response = await self._connection.send(node, requests.LIST_GROUPS([]), f"groups of node {node}")
                if response.error_code:
                    raise error_for_code(response.error_code, f"groups of node {node}")
                for group in response.groups:
                    found[group.group_id] = GroupListing(group.group_id, group.state, group.protocol_type)
            return [found[group_id] for group_id in sorted(found)]

        return await self._retry_request(list_groups_of_brokers, "list groups", timeout_ms)

    async def describe_group(self, group_id: str, *, timeout_ms: int | None = None) -> GroupDescription:
        """Return a group's state and members with their assignments, under either group protocol (classic, KIP-848).

        A group that does not exist has the state Dead.
        """
        where = f"group {group_id}"

        async def fetch_group_description() -> GroupDescription:
            response = await self._request_coordinator(group_id, requests.DESCRIBE_GROUPS([group_id], False), where)
            group = response.groups[0]
            if group.error_code:
                self._raise_group_error(group.error_code, group_id, where)
            # The members of another type, as Connect's workers, write other assignments.
            is_consumer = group.protocol_type == PROTOCOL_TYPE
            members = tuple(
                MemberDescription(
                    member.member_id,
                    member.client_id,
                    member.client_host,
                    member.group_instance_id,
                    frozenset(decode_assignment(member.assignment).partitions if is_consumer else ()),
                )
                for member in group.members
            )
            node = await self._connection.coordinator("group", group_id)
            # DescribeGroups reports a group of the new protocol (KIP-848) as dead: look there too.
            if group.state == DEAD and (found := await self._describe_consumer_group(group_id, node)) is not None:
                return found
            return GroupDescription(group_id, group.state, group.protocol_type, group.protocol, node, members)

        return await self._retry_request(fetch_group_description, where, timeout_ms)

    async def _describe_consumer_group(self, group_id: str, node: int) -> GroupDescription | None:
        """Return a group of the new protocol (KIP-848), in which the coordinator assigns the partitions.

        Returns None if there is no such group, or if the cluster does not support the protocol.
        """
        api = requests.CONSUMER_GROUP_DESCRIBE
        where = f"group {group_id}"
        low, high = (await self._connection.api_versions(node)).get(api.key, (0, -1))
        if not low <= api.version <= high:
            return None
        response = await self._request_coordinator(group_id, api([group_id], False), where)
        group = response.groups[0]
        if group.error_code:
            error = error_for_code(group.error_code, where)
            # Brokers of Kafka 4 know the request, but reject it while the cluster's feature `group.version` is 0.
            if isinstance(error, GroupNotFound | UnsupportedVersion):
                return None
            self._raise_group_error(group.error_code, group_id, where)
        members = tuple(
            MemberDescription(
                member.member_id,
                member.client_id,
                member.client_host,
                member.instance_id,
                frozenset(
                    TopicPartition(topic.topic_name, p) for topic in member.assignment_topics for p in topic.partitions
                ),
            )
            for member in group.members
        )
        return GroupDescription(group_id, group.group_state, PROTOCOL_TYPE, group.assignor_name, node, members)

    async def group_offsets(
        self, group_id: str, *, require_stable: bool = False, timeout_ms: int | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the committed offsets of a group.

        With `require_stable` the call waits until open transactions with offsets of the group have ended (KIP-447).
        Raises KafkaTimeout if they are still open after `timeout_ms`.
        """
        where = f"offsets of group {group_id}"

        async def fetch_group_offsets() -> dict[TopicPartition, OffsetAndMetadata]:
            response = await self._request_coordinator(
                group_id, requests.OFFSET_FETCH(group_id, None, require_stable), where
            )
            if response.error_code:
                self._raise_group_error(response.error_code, group_id, where)
            found = {}
            for topic in response.topics:
                for row in topic.partitions:
                    tp = TopicPartition(topic.name, row.partition)
                    if row.error_code:
                        self._raise_group_error(row.error_code, group_id, f"{where}, {tp}")
                    # -1: nothing is committed, although the partition is listed.
                    if row.offset >= 0:
                        found[tp] = OffsetAndMetadata(row.offset, row.metadata or "", row.leader_epoch)
            return found

        return await self._retry_request(fetch_group_offsets, where, timeout_ms)

    @one_deadline
    async def group_lag(
        self, group_id: str, isolation_level: IsolationLevel = "read_uncommitted", *, timeout_ms: int | None = None
    ) -> list[PartitionLag]:
        """Return committed offset, end and lag of each partition the group has committed or is assigned, sorted.

        The end and the lag of a partition without a leader are None, and those of a partition that does not exist any
        more: members may still have it.
        """
        committed = await self.group_offsets(group_id, timeout_ms=timeout_ms)
        members = (await self.describe_group(group_id, timeout_ms=timeout_ms)).members
        partitions = sorted(set(committed).union(*(m.assignment for m in members)))
        if not partitions:
            return []
        online = await self._partitions_with_leaders(partitions, timeout_ms)
        ends = await self.list_offsets(dict.fromkeys(online, "latest"), isolation_level, timeout_ms=timeout_ms)
        starts = await self.list_offsets(dict.fromkeys(online, "earliest"), timeout_ms=timeout_ms)
        rows = []
        for tp in partitions:
            own = committed[tp].offset if tp in committed else None
            if tp in online:
                # Without a commit the lag is counted from the first offset: everything is still to be read.
                rows.append(PartitionLag(tp, own, ends[tp], max(0, ends[tp] - (starts[tp] if own is None else own))))
            else:
                rows.append(PartitionLag(tp, own, None, None))
        return rows

    async def _partitions_with_leaders(
        self, partitions: Collection[TopicPartition], timeout_ms: int | None
    ) -> set[TopicPartition]:
        """Return those of the partitions that have a leader. A lookup of others would be repeated until the timeout."""
        found = set[TopicPartition]()
        for topic in (await self._fetch_metadata({tp.topic for tp in partitions}, timeout_ms)).topics:
            error = error_for_code(topic.error_code, f"topic {topic.name}") if topic.error_code else None
            if error is not None and not isinstance(error, UnknownTopicOrPartition):
                raise error
            found |= {TopicPartition(topic.name, row.partition) for row in topic.partitions if row.leader >= 0}
        return found & set(partitions)

    @one_deadline
    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], *, timeout_ms: int | None = None
    ) -> None:
        """Commit offsets for a group without members.

        Raises GroupNotEmpty, which names the members. Raises ValueError or TypeError for an invalid offset or
        partition.
        """
        checked_partitions(offsets)
        checked = checked_offsets(offsets)
        await self._check_no_members(group_id, timeout_ms)
        topics: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        for tp, at in checked.items():
            topics[tp.topic].append((tp.partition, at.offset, at.leader_epoch, at.metadata))
        where = f"offsets of group {group_id}"
        request = requests.OFFSET_COMMIT(group_id, NO_GENERATION, "", None, list(topics.items()))

        async def commit_group_offsets() -> None:
            response = await self._request_coordinator(group_id, request, where)
            for topic, partitions in response.topics:
                for partition, code in partitions:
                    if code:
                        self._raise_group_error(code, group_id, f"{where}, {TopicPartition(topic, partition)}")

        try:
            await self._retry_request(commit_group_offsets, where, timeout_ms)
        # A member has joined since the check. UNKNOWN_MEMBER_ID is the coordinator's response to a commit from outside
        # of a group that has members. The second check names them.
        except UnknownMember:
            await self._check_no_members(group_id, timeout_ms)
            raise

    @one_deadline
    async def reset_group_offsets(
        self,
        group_id: str,
        to: Reset,
        partitions: Iterable[TopicPartition] | None = None,
        dry_run: bool = False,
        *,
        timeout_ms: int | None = None,
    ) -> dict[TopicPartition, OffsetChange]:
        """Move a group's committed offsets. Returns each partition's offset before and after.

        If `partitions` is None, the partitions of a mapping `to` are moved, or else all partitions with a committed
        offset. An offset outside the log becomes the log's first or end offset. If `dry_run` is True, nothing is
        changed.

        Raises GroupNotEmpty with the members, but not in a dry run. Raises GroupNotFound if there is no partition to
        move. Raises ValueError or TypeError if `to` is invalid, or is a mapping without one of `partitions`.
        """
        partitions = None if partitions is None else list(partitions)
        offsets = _check_reset(to, partitions)
        if not dry_run:
            await self._check_no_members(group_id, timeout_ms)
        committed = await self.group_offsets(group_id, timeout_ms=timeout_ms)
        wanted = sorted(partitions if partitions is not None else offsets if isinstance(to, Mapping) else committed)
        if not wanted:
            raise GroupNotFound(f"group {group_id}: nothing committed, and no partitions given")
        first = await self.list_offsets(dict.fromkeys(wanted, "earliest"), timeout_ms=timeout_ms)
        end = await self.list_offsets(dict.fromkeys(wanted, "latest"), timeout_ms=timeout_ms)
        if isinstance(to, ShiftBy):
            target = {tp: (committed[tp].offset if tp in committed else first[tp]) + to.records for tp in wanted}
        elif isinstance(to, Mapping):
            target = {tp: offsets[tp].offset for tp in wanted}
        else:
            target = await self.list_offsets(dict.fromkeys(wanted, to), timeout_ms=timeout_ms)
        # Kept within the log: a consumer would find any other offset out of range, and reset to `auto_offset_reset`.
        changes = {
            tp: OffsetChange(
                committed[tp].offset if tp in committed else None, min(max(target[tp], first[tp]), end[tp])
            )
            for tp in wanted
        }
        if not dry_run:
            await self.alter_group_offsets(group_id, {tp: c.after for tp, c in changes.items()}, timeout_ms=timeout_ms)
        return changes

    @one_deadline
    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> None:
        """Delete the offsets that a group has committed for some partitions.

        Raises GroupNotEmpty, which names the members, or GroupNotFound if there is no such group. Raises ValueError or
        TypeError for an invalid partition.
        """
        checked = checked_partitions(partitions)
        await self._check_no_members(group_id, timeout_ms)
        topics: dict[str, list[int]] = defaultdict(list)
        for tp in checked:
            topics[tp.topic].append(tp.partition)
        where = f"offsets of group {group_id}"
        request = requests.OFFSET_DELETE(group_id, list(topics.items()))

        async def delete() -> None:
            response = await self._request_coordinator(group_id, request, where)
            if response.error_code:
                self._raise_group_error(response.error_code, group_id, where)
            for topic, rows in response.topics:
                for partition, code in rows:
                    if code:
                        self._raise_group_error(code, group_id, f"{where}, {TopicPartition(topic, partition)}")

        try:
            await self._retry_request(delete, where, timeout_ms)
        except GroupNotEmpty:
            await self._check_no_members(group_id, timeout_ms)
            raise

    @one_deadline
    async def delete_group(self, group_id: str, *, timeout_ms: int | None = None) -> None:
        """Delete a group and its offsets.

        Raises GroupNotEmpty, which names the members, or GroupNotFound if there is no such group.
        """
        where = f"group {group_id}"
        maybe_deleted = False

        async def delete() -> None:
            nonlocal maybe_deleted
            # An attempt that fails here has deleted nothing.
            node = await self._connection.coordinator("group", group_id)
            if not await self._connection.connect(node):
                self._connection.forget_coordinator("group", group_id)
                raise self._connection.connection_error(node, where)
            try:
                response = await self._request_coordinator(group_id, requests.DELETE_GROUPS([group_id]), where)
                for _, code in response.results:
                    if code:
                        self._raise_group_error(code, group_id, where)
            except (BrokerNotAvailable, KafkaTimeout, CoordinatorNotAvailable):
                # The coordinator may have carried out the request.
                maybe_deleted = True
                raise
            except GroupNotFound:
                if not maybe_deleted:
                    raise

        try:
            await self._retry_request(delete, where, timeout_ms)
        except GroupNotEmpty:
            await self._check_no_members(group_id, timeout_ms)
            raise

    def _check_open(self) -> None:
        if not self._open:
            raise IllegalState("not connected to Kafka: the admin is not open (`async with` opens it)")
        self._connection.check_loop()

    async def _retry_request(self, call: Callable[[], Awaitable[T]], where: str, timeout_ms: int | None) -> T:
        self._check_open()
        return await self._connection.retrying(call, where, self._limit_ms(timeout_ms))

    def _limit_ms(self, timeout_ms: float | None) -> float:
        """Return the ms left for one request."""
        limit_ms = self._timeout_ms if timeout_ms is None else timeout_ms
        deadline_ms = DEADLINE_MS.get()
        return limit_ms if deadline_ms is None else max(0.0, min(limit_ms, deadline_ms - SYSTEM_CLOCK.monotonic_ms()))

    async def _fetch_metadata(self, names: Iterable[str] | None, timeout_ms: int | None = None) -> Any:
        checked = None if names is None else checked_topic_names(names)
        topics: list[Any] | None = None if checked is None else [(NO_UUID, name, {}) for name in checked]
        return await self._request_any_broker(requests.METADATA(topics, False, False, False), "metadata", timeout_ms)

    async def _request_cluster(self) -> Any:
        # No topics are requested (null would be all of them).
        topics: list[Any] = []
        request = requests.METADATA(topics, False, False, False)
        return await self._connection.send(self._connection.any_node(), request, "metadata")

    async def _request_coordinator(self, group_id: str, request: Any, where: str) -> Any:
        return await self._connection.request_coordinator("group", group_id, request, where)

    def _raise_group_error(self, code: int, group_id: str, where: str) -> None:
        error = error_for_code(code, where)
        # The retry must not go to the broker that no longer coordinates the group.
        if isinstance(error, CoordinatorNotAvailable):
            self._connection.forget_coordinator("group", group_id)
        raise error

    async def _check_no_members(self, group_id: str, timeout_ms: int | None) -> None:
        """Raise GroupNotEmpty with the members if the group has any."""
        members = (await self.describe_group(group_id, timeout_ms=timeout_ms)).members
        if members:
            raise GroupNotEmpty(f"group {group_id} has {len(members)} members: {'; '.join(map(str, members))}")


async def describe_configs_if_authorized(admin: Admin, topic: str) -> dict[str, str | None]:
    """Return every config of a topic, or {} if this principal lacks the right DESCRIBE_CONFIGS."""
    try:
        return await admin.describe_configs(topic)
    except AuthorizationFailed as e:
        log.warning("the configs of a topic cannot be read: grant DESCRIBE_CONFIGS", topic=topic, reason=str(e))
        return {}


def _new_topic_row(topic: NewTopic) -> Any:
    return topic.name, topic.partitions, topic.replication_factor, [], list(topic.configs.items())


def _config_entry(row: Any) -> ConfigEntry:
    synonyms = tuple(ConfigSynonym(one.name, one.value, _config_source(one.source)) for one in row.synonyms)
    return ConfigEntry(row.name, row.value, _config_source(row.source), row.read_only, row.sensitive, synonyms)


def _config_source(number: int) -> str:
    return CONFIG_SOURCES.get(number, "UNKNOWN")


def _check_reset(to: object, partitions: Iterable[TopicPartition] | None) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the checked offsets of a reset to given offsets, {} for any other reset."""
    if isinstance(to, Mapping):
        if lacking := set(partitions or ()) - to.keys():
            raise ValueError(f"no offset to reset to: {', '.join(map(str, sorted(lacking)))}")
        return checked_offsets(to)
    if isinstance(to, ShiftBy):
        if not isinstance(to.records, int) or isinstance(to.records, bool):
            raise TypeError(f"shift by {to.records!r}: not a number of records")
    else:
        checked_spec("reset", to)
    return {}
