"""The admin client: calls with one deadline each, offset resets, deletions, and topics for event-time data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from penstock.shared.clients.admin import Admin, NewTopic, ShiftBy
from penstock.shared.clients.admin.types import MemberDescription, OffsetChange, PartitionLag, event_time_topic
from penstock.shared.clients.connection.connection import KEY_BYTES_MAX, UNKNOWN_TOPIC_GRACE_MS, Connection
from penstock.shared.clients.connection.sockets import Socket
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.protocol import requests
from penstock.shared.common.errors import (
    AuthorizationFailed,
    GroupNotFound,
    InvalidRequest,
    InvalidTopic,
    KafkaTimeout,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import (
    Action,
    Api,
    Close,
    Delay,
    Drop,
    ErrorCode,
    Fail,
    FakeCluster,
    Message,
    Request,
    Respond,
)


async def test_waiting_for_leaders_counts_against_the_timeout() -> None:
    """If the broker creates the topic and then stops answering, the call ends after its `timeout_ms`."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=5_000)
        async with Admin(kafka) as admin:
            await admin.list_topics()
            cluster.control(Api.METADATA, Drop())
            started = time.monotonic()
            with pytest.raises(KafkaTimeout):
                await admin.create_topics([NewTopic("new", 1)], timeout_ms=300)
            assert time.monotonic() - started < 2


async def test_a_created_topic_is_awaited_until_the_broker_knows_it() -> None:
    """A broker can hear of a new topic late. The call waits for longer than for a topic that may not exist."""
    late_ms = 2 * UNKNOWN_TOPIC_GRACE_MS
    created: list[float] = []
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        host, port = cluster.bootstrap_servers.split(":")
        unknown = Message(
            brokers=[Message(node_id=cluster.nodes[0], host=host, port=int(port))],
            controller_id=cluster.nodes[0],
            topics=[Message(name="new", error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)],
        )

        def note_creation(_: Request) -> None:
            created.append(time.monotonic())

        def hide_topic(_: Request) -> Respond | None:
            return Respond(unknown) if created and (time.monotonic() - created[0]) * 1000 < late_ms else None

        cluster.control(Api.CREATE_TOPICS, note_creation)
        cluster.control(Api.METADATA, hide_topic)
        await admin.create_topics([NewTopic("new", 1)])
        assert (time.monotonic() - created[0]) * 1000 >= late_ms
        assert await admin.list_topics() == ["new"]


async def test_a_created_topic_is_awaited_until_every_broker_knows_it() -> None:
    """The next request may go to any broker. It must not find the topic missing."""
    hidden: set[int] = set()
    async with FakeCluster(nodes=5) as cluster:

        def hide_topic_once(request: Request) -> Respond | None:
            named = [topic.name for topic in request.body.topics or ()]
            if request.node == 1 or request.node in hidden or "new" not in named or "new" not in cluster._state.topics:
                return None
            hidden.add(request.node)
            return Respond(
                Message(topics=[Message(name="new", error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)], brokers=[])
            )

        cluster.control(Api.METADATA, hide_topic_once)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=1)
        async with Admin(kafka) as admin:
            await admin.create_topics([NewTopic("new", 1)])
    assert hidden == {2, 3, 4, 5}


async def test_a_broker_that_is_not_reached_does_not_delay_the_creation_of_a_topic() -> None:
    """The call does not wait until an unreachable broker knows the topic."""
    async with FakeCluster(nodes=2) as cluster:
        host, _, port = cluster.bootstrap_servers.split(",")[0].rpartition(":")
        kafka = KafkaSettings(
            bootstrap_servers=f"{host}:{port}", retry_backoff_ms=1, socket_connection_setup_timeout_ms=50
        )
        async with Admin(kafka) as admin:
            cluster.pause_node(2)
            await admin.create_topics([NewTopic("new", 1)], timeout_ms=10_000)


async def test_brokers_are_checked_concurrently_for_a_created_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits for several unreachable brokers do not add up: no connection waits for another one."""
    async with FakeCluster(nodes=3) as cluster:
        cluster.create_topic("new")
        async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
            known = admin._connection.connect
            begun: set[int] = set()
            all_begun = asyncio.Event()

            async def connect(node: int) -> bool:
                begun.add(node)
                if begun == {1, 2, 3}:
                    all_begun.set()
                await all_begun.wait()
                return await known(node)

            monkeypatch.setattr(admin._connection, "connect", connect)
            await admin._wait_for_leaders(["new"], 1_000)


async def test_created_partitions_are_awaited_until_every_broker_knows_them() -> None:
    """The next request may go to any broker. It must not find a partition missing."""
    hidden: set[int] = set()
    async with FakeCluster(nodes=3) as cluster:
        cluster.create_topic("t")

        def hide_partitions_once(request: Request) -> Respond | None:
            if request.node in hidden or len(cluster._state.topics["t"].partitions) == 1:
                return None
            hidden.add(request.node)
            return Respond(Message(topics=[Message(name="t", partitions=[Message(partition=0)])], brokers=[]))

        async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=1)) as admin:
            await admin.create_partitions({})
            cluster.control(Api.METADATA, hide_partitions_once)
            await admin.create_partitions({"t": 3})
            assert hidden == {1, 2, 3}
            cluster.create_topic("u")
            with pytest.raises(InvalidRequest, match=r"topic t: .*3 partitions"):
                await admin.create_partitions({"t": 3, "u": 2})
            assert len((await admin.describe_topics(["u"]))["u"].partitions) == 2


A = TopicPartition("t", 0)


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", partitions=1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Consumer(kafka, ConsumerSettings(group_id="g")) as consumer:
            consumer.assign([A])
            await consumer.commit({A: 3})
        yield cluster


@pytest.mark.parametrize("call", ["group_lag", "reset_group_offsets"])
async def test_requests_of_one_call_share_its_timeout(cluster: FakeCluster, call: str) -> None:
    """A call ends at its own timeout, even if each of its responses arrives within the limit."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=5_000)) as admin:
        await admin.group_lag("g")
        for api in (Api.OFFSET_FETCH, Api.DESCRIBE_GROUPS, Api.LIST_OFFSETS, Api.OFFSET_COMMIT):
            cluster.control(api, lambda _: Delay(300))
        started = time.monotonic()
        with pytest.raises(KafkaTimeout):
            await getattr(admin, call)("g", *(["earliest"] if call == "reset_group_offsets" else []), timeout_ms=500)
        assert 0.4 < time.monotonic() - started < 0.85
        assert cluster.committed("g") == {A: OffsetAndMetadata(3)}
        assert (await admin.group_offsets("g", timeout_ms=3_000))[A].offset == 3  # the next has its own time


async def test_a_partition_without_a_leader_has_no_lag() -> None:
    """A group's lag is returned at once if a partition has no leader: that partition has neither end nor lag."""
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t", partitions=2)
        b = TopicPartition("t", 1)
        kept = cluster.coordinator("g")
        stopped = next(node for node in cluster.nodes if node != kept)
        async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
            await admin.alter_group_offsets("g", {A: 0, b: 3})
            await cluster.stop_node(stopped)
            cluster.move_leader(A, kept)
            cluster.move_leader(b, stopped)
            lag = await admin.group_lag("g", timeout_ms=2_000)
            assert lag == [PartitionLag(A, 0, 0, 0), PartitionLag(b, 3, None, None)]


async def test_a_deleted_topic_has_no_lag() -> None:
    """A member may still have its partitions. The others have their lag."""
    async with FakeCluster() as cluster:
        for topic in ("t", "gone"):
            cluster.create_topic(topic)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin, Consumer(kafka, ConsumerSettings(group_id="g")) as consumer:
            consumer.subscribe(["t", "gone"])
            while not consumer.assignment():
                await consumer.poll(10)
            await consumer.commit({A: 0})
            await admin.delete_topics(["gone"])
            lag = await admin.group_lag("g", timeout_ms=2_000)
        assert lag == [PartitionLag(TopicPartition("gone", 0), None, None, None), PartitionLag(A, 0, 0, 0)]


@pytest.mark.parametrize("to", [-1, -2, -7, True, 1.5, "earlist", "", None, {A: -5}, {A: "x"}, ShiftBy(True)], ids=repr)
async def test_reset_to_a_negative_time_is_rejected(cluster: FakeCluster, to: Any) -> None:
    """A negative time is rejected before it is sent, because brokers give negative times special meanings."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        for dry_run in (False, True):
            with pytest.raises((ValueError, TypeError)):
                await admin.reset_group_offsets("g", to, dry_run=dry_run)
    assert cluster.committed("g") == {A: OffsetAndMetadata(3)}


async def test_a_reset_to_the_offsets_of_another_group(cluster: FakeCluster) -> None:
    """The result of `group_offsets` can be passed as it is."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        await admin.alter_group_offsets("other", {A: OffsetAndMetadata(0, "by hand")})
        changes = await admin.reset_group_offsets("g", await admin.group_offsets("other"))
    assert changes == {A: OffsetChange(3, 0)}
    assert cluster.committed("g") == {A: OffsetAndMetadata(0)}


async def test_a_reset_needs_an_offset_of_each_partition(cluster: FakeCluster) -> None:
    """A partition that the offsets lack is named, and nothing is changed."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        with pytest.raises(ValueError, match=str(TopicPartition(A.topic, 7))):
            await admin.reset_group_offsets("g", {A: 1}, [A, TopicPartition(A.topic, 7)])
    assert cluster.committed("g") == {A: OffsetAndMetadata(3)}


@pytest.mark.parametrize("offset", [-5, True, "x", None, OffsetAndMetadata(2, "x" * 5_000)], ids=repr)
async def test_an_invalid_offset_is_not_committed(cluster: FakeCluster, offset: Any) -> None:
    """An invalid offset is rejected with an error that names the partition. A broker would accept -5 silently as "no
    offset"."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        with pytest.raises((ValueError, TypeError), match="t-0"):
            await admin.alter_group_offsets("g", {A: offset})
    assert cluster.committed("g") == {A: OffsetAndMetadata(3)}


@pytest.mark.parametrize("name", ["t" * 40_000, "\ud800", "a/b"], ids=["long", "surrogate", "slash"])
async def test_an_invalid_name_is_not_sent(cluster: FakeCluster, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic or group that no request can name is rejected at once. A broker would close the connection."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), timeout_ms=1_000) as admin:
        monkeypatch.setattr(Socket, "send", None)
        for call in (
            admin.describe_topics(["t", name]),
            admin.describe_configs(name),
            admin.alter_configs(name, {}),
            admin.list_offsets({TopicPartition(name, 0): "latest"}),
            admin.create_topics([NewTopic(name, 1)]),
            admin.delete_topics([name]),
            admin.alter_group_offsets("g", {TopicPartition(name, 0): 1}),
            admin.delete_group_offsets("g", [TopicPartition(name, 0)]),
        ):
            with pytest.raises(InvalidTopic):
                await call
        if name != "a/b":
            for group_call in (admin.group_lag(name), admin.describe_group(name), admin.delete_group(name)):
                with pytest.raises(InvalidRequest, match=f"at most {KEY_BYTES_MAX} bytes"):
                    await group_call


async def test_a_deletion_is_retried_at_the_new_controller() -> None:
    """While the controller moves, a broker answers NOT_CONTROLLER. The topic is deleted nevertheless."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic("a", 1)])
        moved = Message(topics=[Message(name="a", error_code=ErrorCode.NOT_CONTROLLER)])
        cluster.control(Api.DELETE_TOPICS, Respond(moved), times=1)
        await admin.delete_topics(["a"])
        assert await admin.list_topics() == []
        with pytest.raises(UnknownTopicOrPartition, match="topic a"):
            await admin.delete_topics(["a"])


def topic_codes(**codes: int) -> Respond:
    """A response to a change of topics with an error code for each topic."""
    return Respond(Message(topics=[Message(name=name, error_code=code) for name, code in codes.items()]))


NOT_CREATED = {
    "moved": topic_codes(a=ErrorCode.NOT_CONTROLLER),
    "throttled": topic_codes(a=ErrorCode.THROTTLING_QUOTA_EXCEEDED),
}


@pytest.mark.parametrize("failure", NOT_CREATED)
async def test_a_retry_reports_a_topic_that_existed_before(failure: str) -> None:
    """A rejected first attempt has created nothing. So the topic that the second one finds existed before."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        cluster.create_topic("a", partitions=1)
        cluster.control(Api.CREATE_TOPICS, NOT_CREATED[failure], times=1)
        with pytest.raises(TopicAlreadyExists, match="topic a"):
            await admin.create_topics([NewTopic("a", 1)])


async def test_an_existing_topic_needs_no_right_to_create_it() -> None:
    """With `exist_ok`, the right is needed for missing topics only, although a broker rejects the others too."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        cluster.create_topic("a", partitions=1)
        cluster.control(Api.CREATE_TOPICS, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
        await admin.create_topics([NewTopic("a", 1)], exist_ok=True)
        with pytest.raises(AuthorizationFailed, match="topic b"):
            await admin.create_topics([NewTopic("a", 1), NewTopic("b", 1)], exist_ok=True)


async def test_a_topic_that_a_broker_still_lists_after_its_deletion_is_created() -> None:
    """Brokers learn of a deletion later than the controller. With `exist_ok`, the controller decides what exists."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        listed = Message(name="a", partitions=[Message(partition=0, leader_id=cluster.nodes[0])])

        def list_a(request: Request) -> Respond | None:
            return Respond(Message(brokers=[], topics=[listed])) if request.body.topics else None

        cluster.control(Api.METADATA, list_a)
        await admin.create_topics([NewTopic("a", 1)], exist_ok=True, timeout_ms=5_000)
        assert await admin.list_topics() == ["a"]


async def test_a_failed_look_up_of_the_controller_creates_nothing() -> None:
    """An attempt that has not found the controller has sent no request to create topics."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        cluster.create_topic("a", partitions=1)
        cluster.control(Api.METADATA, Close(), times=1)
        with pytest.raises(TopicAlreadyExists, match="topic a"):
            await admin.create_topics([NewTopic("a", 1)])


async def test_an_attempt_without_a_connection_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt fails without a request, also if the reconnect backoff has passed in the meantime."""
    reached = [False]
    connect = Connection.connect

    async def connect_later(connection: Connection, node: int) -> bool:
        return reached.pop() if reached else await connect(connection, node)

    monkeypatch.setattr(Connection, "connect", connect_later)
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        cluster.control(Api.CREATE_TOPICS, Close(handled=True), times=1)
        await admin.create_topics([NewTopic("a", 1)])
        assert await admin.list_topics() == ["a"]


async def test_a_lost_response_is_no_error() -> None:
    """The retry finds the topic created, changed or deleted: the attempt without a response has done it."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        for api in (Api.CREATE_TOPICS, Api.CREATE_PARTITIONS, Api.DELETE_TOPICS):
            cluster.control(api, Close(handled=True), times=1)
        await admin.create_topics([NewTopic("a", 1), NewTopic("b", 1)])
        assert await admin.list_topics() == ["a", "b"]
        await admin.create_partitions({"a": 3})
        assert len((await admin.describe_topics(["a"]))["a"].partitions) == 3
        await admin.delete_topics(["a", "b"])
        assert await admin.list_topics() == []


@pytest.mark.parametrize(
    "action",
    [Close(handled=True), Fail(ErrorCode.COORDINATOR_NOT_AVAILABLE, handled=True)],
    ids=["closed", "no replica"],
)
async def test_a_lost_response_to_the_deletion_of_a_group_is_no_error(cluster: FakeCluster, action: Action) -> None:
    """The retry finds no group: the attempt without a clear response has deleted it. A group that never existed is
    named.
    """
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        cluster.control(Api.DELETE_GROUPS, action, times=1)
        await admin.delete_group("g")
        assert await admin.list_groups() == []
        with pytest.raises(GroupNotFound, match="group g"):
            await admin.delete_group("g")


async def test_the_groups_of_a_broker_that_has_restarted_are_listed() -> None:
    """The brokers of the cluster are looked up in each call: one may have been missing in the last metadata."""
    async with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("t", partitions=1)
        group_ids = {cluster.coordinator(f"g{i}"): f"g{i}" for i in range(20)}
        assert len(group_ids) == 2
        async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
            for group_id in group_ids.values():
                await admin.alter_group_offsets(group_id, {A: 0})
            await cluster.stop_node(2)
            assert await admin._connection.refresh_metadata()
            await cluster.start_node(2)
            assert [group.group_id for group in await admin.list_groups()] == sorted(group_ids.values())


async def test_a_missing_group_is_dead_in_a_cluster_without_the_new_group_protocol(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers of Kafka 4 list ConsumerGroupDescribe, but answer UNSUPPORTED_VERSION while `group.version` is 0."""
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        request_coordinator = admin._connection.request_coordinator
        described: list[Any] = []

        async def api_versions(_: int) -> dict[int, tuple[int, int]]:
            return {requests.CONSUMER_GROUP_DESCRIBE.key: (0, 1)}

        async def answer(kind: Literal["group"], key: str, request: Any, where: str) -> Any:
            if request.name != "ConsumerGroupDescribe":
                return await request_coordinator(kind, key, request, where)
            described.append(request)
            return Message(groups=[Message(group_id=key, error_code=ErrorCode.UNSUPPORTED_VERSION)])

        monkeypatch.setattr(admin._connection, "api_versions", api_versions)
        monkeypatch.setattr(admin._connection, "request_coordinator", answer)
        assert (await admin.describe_group("missing")).state == "Dead"
        assert len(described) == 1


async def test_a_change_that_timed_out_at_the_broker_may_have_been_done() -> None:
    """The retry of such a topic finds it created. That is no error, but a topic that existed before still is."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:

        def create_late(_: Request) -> Respond:
            cluster.create_topic("a", partitions=1)
            return topic_codes(a=ErrorCode.REQUEST_TIMED_OUT)

        cluster.control(Api.CREATE_TOPICS, create_late, times=1)
        await admin.create_topics([NewTopic("a", 1)])
        with pytest.raises(TopicAlreadyExists, match="topic a"):
            await admin.create_topics([NewTopic("a", 1)])


async def test_a_retry_leaves_out_the_topics_that_are_done() -> None:
    """A retry because of one throttled topic does not report the topics that the first attempt created or deleted."""
    requested: list[list[str]] = []
    codes = {"a": 0, "b": int(ErrorCode.THROTTLING_QUOTA_EXCEEDED), "c": 0}

    def throttle_b(request: Request) -> Respond | None:
        body = request.body
        requested.append([t.name for t in body.topics] if request.api is Api.CREATE_TOPICS else body.topic_names)
        return topic_codes(**codes) if requested[-1] == ["a", "b", "c"] else None

    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        cluster.control(Api.CREATE_TOPICS, throttle_b)
        cluster.control(Api.DELETE_TOPICS, throttle_b)
        for name in ("a", "c"):
            cluster.create_topic(name, partitions=1)
        await admin.create_topics([NewTopic(name, 1) for name in "abc"])
        codes["c"] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(UnknownTopicOrPartition, match="topic c"):
            await admin.delete_topics(["a", "b", "c"])
    assert requested == [["a", "b", "c"], ["b"]] * 2


async def test_a_failed_disk_hides_only_its_own_partitions(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker with an offline log dir still reports the sizes of partitions in its other log dirs."""
    row = Message(partition=0, size=70, is_future=False)
    healthy = Message(error_code=ErrorCode.NONE, topics=[Message(name="t", partitions=[row])])
    failed = Message(error_code=ErrorCode.KAFKA_STORAGE_ERROR, topics=[])
    log_dirs = [failed, healthy]
    send_request = Connection.send

    async def send(connection: Connection, node: int, request: Any, where: str, **options: Any) -> Any:
        if where != "log dirs":
            return await send_request(connection, node, request, where, **options)
        return Message(log_dirs=log_dirs)

    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        monkeypatch.setattr(Connection, "send", send)  # the fake broker has no DescribeLogDirs
        assert await admin.partition_bytes([A]) == {A: 70}
        log_dirs.remove(healthy)
        with pytest.raises(KafkaTimeout, match="KAFKA_STORAGE_ERROR"):
            await admin.partition_bytes([A], timeout_ms=50)


def test_event_time_topic() -> None:
    """Event-time topics never expire and accept any timestamp. The caller's own configs take precedence."""
    topic = event_time_topic("t", 4, cleanup_policy="compact", segment_ms="5")
    assert topic.configs == {
        "retention.ms": "-1",
        "segment.ms": "5",
        "message.timestamp.type": "CreateTime",
        "message.timestamp.before.max.ms": str(2**63 - 1),
        "message.timestamp.after.max.ms": str(2**63 - 1),
        "cleanup.policy": "compact",
    }
    assert (topic.partitions, topic.replication_factor) == (4, -1)


class KafkaBefore36:
    """Handles CreateTopics as a broker that lacks the two limits of timestamps (KIP-937)."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.created: dict[str, dict[str, str]] = {}
        cluster.control(Api.CREATE_TOPICS, self.create)

    def create(self, request: Request) -> Respond:
        return Respond(Message(topics=[self._create(topic) for topic in request.body.topics]))

    def _create(self, topic: Any) -> Message:
        configs = {config.name: config.value for config in topic.configs}
        if topic.name in self.created:
            return Message(name=topic.name, error_code=ErrorCode.TOPIC_ALREADY_EXISTS)
        for name in configs:
            if name in ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms"):
                why = f"Unknown topic config name: {name}"
                return Message(name=topic.name, error_code=ErrorCode.INVALID_CONFIG, error_message=why)
        self.created[topic.name] = configs
        self._cluster.create_topic(topic.name, partitions=1)
        return Message(name=topic.name, error_code=ErrorCode.NONE)


async def test_an_event_time_topic_on_kafka_before_3_6() -> None:
    """The older limit of timestamps takes the place of both newer ones. Other topics of the call are not affected."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        broker = KafkaBefore36(cluster)
        await admin.create_topics([NewTopic("plain", 1), event_time_topic("t", 1)])
        assert broker.created == {
            "plain": {},
            "t": {
                "retention.ms": "-1",
                "segment.ms": str(2**63 - 1),
                "message.timestamp.type": "CreateTime",
                "message.timestamp.difference.max.ms": str(2**63 - 1),
            },
        }
        with pytest.raises(TopicAlreadyExists, match="topic plain"):
            await admin.create_topics([NewTopic("plain", 1), event_time_topic("u", 1)])
        assert list(broker.created) == ["plain", "t", "u"]


async def test_an_own_limit_of_timestamps_needs_kafka_3_6() -> None:
    """An older broker cannot apply a limit in one direction. The error names the config."""
    async with FakeCluster() as cluster, Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        broker = KafkaBefore36(cluster)
        with pytest.raises(InvalidRequest, match=r"message\.timestamp\.after\.max\.ms"):
            await admin.create_topics(
                [NewTopic("t", 1, configs={"message.timestamp.after.max.ms": "3600000"}), event_time_topic("u", 1)]
            )
        assert list(broker.created) in ([], ["u"])


def test_text_of_a_member_has_id_client_id_and_host() -> None:
    """A member's text has its id, client id and host."""
    assert str(MemberDescription("m", "c", "/10.0.0.1", None, frozenset())) == "m (client c, host /10.0.0.1)"
