"""A consumer's group membership against a fake broker that loses, rejects and delays requests."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiokafka.client import ConnectionGroup
from structlog.testing import capture_logs

from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.clients.producer import Producer
from penstock.shared.common import log
from penstock.shared.common.errors import (
    AuthorizationFailed,
    CommitFailed,
    FencedInstanceId,
    IllegalState,
    InconsistentGroupProtocol,
)
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings, LogSettings
from penstock.shared.testing.fake_broker import Action, Api, Close, Delay, Drop, ErrorCode, Fail, FakeCluster, Request

GROUP_APIS = (Api.JOIN_GROUP, Api.SYNC_GROUP, Api.HEARTBEAT, Api.OFFSET_COMMIT)
T = [TopicPartition("t", p) for p in range(4)]
ALL = frozenset(T)


class Heard(RebalanceListener):
    """A listener that records its calls as (event, partition numbers)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(("assigned", sorted(tp.partition for tp in partitions)))

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(("revoked", sorted(tp.partition for tp in partitions)))

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(("lost", sorted(tp.partition for tp in partitions)))


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("t", partitions=4)
        yield cluster


@asynccontextmanager
async def member(
    cluster: FakeCluster, topics: list[str] | re.Pattern[str], listener: RebalanceListener | None = None, **more: object
) -> AsyncIterator[Consumer]:
    settings = {"group_id": "g", "auto_offset_reset": "earliest", "heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20}
    kafka = KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers,
        request_timeout_ms=5_000,
        retry_backoff_ms=10,
        metadata_max_age_ms=200,
    )
    async with Consumer(kafka, ConsumerSettings.model_validate({**settings, **more})) as consumer:
        consumer.subscribe(topics, listener)
        yield consumer


async def poll_until(until: Callable[[], object], *consumers: Consumer) -> list[tuple[int, int]]:
    """Polls until a condition holds, and returns partitions and offsets of the records."""
    found: list[tuple[int, int]] = []
    async with asyncio.timeout(20):
        while not until():
            for consumer in consumers:
                for tp, columns in (await consumer.poll(20)).items():
                    found += [(tp.partition, offset) for offset in columns.offsets.tolist()]
    return found


async def fill(cluster: FakeCluster, each: int) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
        await (
            await producer.send_many([ProducerRecord("t", b"v", partition=p) for p in range(4)] * each)
        ).first_error()


def spy(cluster: FakeCluster) -> list[Request]:
    """Collects every incoming request."""
    seen: list[Request] = []
    cluster.control(None, seen.append)
    return seen


def count(seen: list[Request], api: Api) -> int:
    return sum(request.api is api for request in seen)


def has_more(seen: list[Request], api: Api, than: int) -> bool:
    return count(seen, api) > than


def names(heard: Heard) -> list[str]:
    return [name for name, _ in heard.calls]


def test_a_listener_needs_a_group() -> None:
    """Without a group there are no rebalances, so `subscribe` rejects a listener that would never be called."""
    with pytest.raises(IllegalState, match="a rebalance listener needs a group_id"):
        Consumer("127.0.0.1:1").subscribe(["t"], Heard())


@pytest.mark.parametrize("group_id", ["g", None])
async def test_missing_topics_are_logged(cluster: FakeCluster, group_id: str | None) -> None:
    """The log has the subscribed topics that do not exist, not once for each look, and when all of them exist."""
    with capture_logs() as logged:
        async with member(cluster, ["t", "ordes"], group_id=group_id) as consumer:
            looks = consumer._coordinator.look_for_topics

            async def look(*times_ms: int) -> list[tuple[str, list[str] | None]]:
                for now_ms in times_ms:
                    looks(now_ms)
                    await consumer._connection.refresh_metadata()
                return [(line["log_level"], line.get("topics")) for line in logged if "subscribed" in line["event"]]

            warning = ("warning", ["ordes"])
            # The first look may be earlier than the first metadata of the topic.
            assert await look(1_000) == []
            assert await look(2_000, 3_000) == [warning]
            cluster.create_topic("ordes")
            assert await look(4_000, 5_000) == [warning, ("info", None)]


@pytest.mark.parametrize("busy", [True, False])
async def test_polls_that_never_wait_look_for_missing_topics(cluster: FakeCluster, *, busy: bool) -> None:
    """Polls that always find records, and polls without a timeout, request metadata for a missing topic."""
    if busy:
        await fill(cluster, 2)
    async with member(cluster, ["t"], group_id=None) as consumer:
        await consumer.poll(5_000 if busy else 0, max_records=1)
        consumer.subscribe(["t", "ordes"])
        polled = await consumer.poll(0, max_records=1)
        assert (bool(polled), consumer._coordinator._look is not None) == (busy, True)


async def test_a_dynamic_member_leaves(cluster: FakeCluster) -> None:
    """A dynamic member joins with the member id that it got, and sends LeaveGroup when it closes."""
    seen = spy(cluster)
    async with member(cluster, ["t"]) as consumer:
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        member_id = consumer.group_metadata().member_id
    joins = [r.body.member_id for r in seen if r.api is Api.JOIN_GROUP]
    assert joins == ["", member_id]
    (left,) = [r.body.members for r in seen if r.api is Api.LEAVE_GROUP]
    assert [row.member_id for row in left] == [member_id]


async def test_a_member_that_closes_while_joining_leaves_the_group(cluster: FakeCluster) -> None:
    """A member that closes while it joins waits for its member id and leaves with it. The next member need not wait."""
    seen = spy(cluster)
    with cluster.control(Api.JOIN_GROUP, Delay(100), times=1):
        async with member(cluster, ["t"]) as consumer:
            await poll_until(lambda: count(seen, Api.JOIN_GROUP), consumer)
    assert count(seen, Api.JOIN_GROUP) == 1
    (left,) = [r.body.members for r in seen if r.api is Api.LEAVE_GROUP]
    assert left[0].member_id
    async with member(cluster, ["t"]) as second:
        async with asyncio.timeout(5):
            await poll_until(lambda: second.assignment() == ALL, second)


async def test_a_static_member_stays(cluster: FakeCluster) -> None:
    """A static member sends its instance id in every group request. It does not leave, and a restart causes no new
    generation."""
    seen, generations = spy(cluster), []
    for _ in range(2):
        async with member(cluster, ["t"], group_instance_id="i") as consumer:
            await poll_until(lambda: consumer.assignment() == ALL, consumer)
            generations.append(consumer.group_metadata().generation_id)
            await consumer.commit({T[0]: 1})
            before = count(seen, Api.HEARTBEAT)
            await poll_until(functools.partial(has_more, seen, Api.HEARTBEAT, before), consumer)
    assert generations == [1, 1]
    assert not [r for r in seen if r.api is Api.LEAVE_GROUP]
    assert {r.body.group_instance_id for r in seen if r.api in GROUP_APIS} == {"i"}


@pytest.mark.parametrize("api", [Api.JOIN_GROUP, Api.SYNC_GROUP], ids=lambda api: api.name)
@pytest.mark.parametrize(
    "fault",
    [
        Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        Fail(ErrorCode.COORDINATOR_NOT_AVAILABLE),
        Fail(ErrorCode.NOT_COORDINATOR),
        Fail(ErrorCode.REBALANCE_IN_PROGRESS),
        Fail(ErrorCode.UNKNOWN_MEMBER_ID),
        Close(),
        Close(handled=True),
    ],
    ids=repr,
)
async def test_faults_while_joining(cluster: FakeCluster, api: Api, fault: Action) -> None:
    """After transient failures of JoinGroup or SyncGroup the member gets its partitions, exactly once."""
    control = cluster.control(api, fault, times=2)
    heard = Heard()
    # A join whose response was lost leaves a member without a client: the group waits until its session expires.
    async with member(cluster, ["t"], heard, session_timeout_ms=300, max_poll_interval_ms=300) as consumer:
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        assert control.acted == 2
        await consumer.commit({T[0]: 1})
    assert heard.calls[-1] == ("revoked", [0, 1, 2, 3])


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
@pytest.mark.parametrize(
    "code", [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION], ids=lambda code: code.name
)
async def test_a_member_unknown_to_the_group_joins_again(cluster: FakeCluster, code: ErrorCode, assignor: str) -> None:
    """If a heartbeat returns that the member is unknown, its partitions are lost and it joins again."""
    heard = Heard()
    # Where it is to be a new member, the group waits for the one that it was until that one's session is over.
    quick = {"session_timeout_ms": 300, "max_poll_interval_ms": 300}
    async with member(cluster, ["t"], heard, partition_assignment_strategy=assignor, **quick) as consumer:
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        cluster.control(Api.HEARTBEAT, Fail(code), times=1)
        await poll_until(lambda: len(heard.calls) == 3, consumer)
    assert heard.calls == [
        ("assigned", [0, 1, 2, 3]), ("lost", [0, 1, 2, 3]), ("assigned", [0, 1, 2, 3]), ("revoked", [0, 1, 2, 3])
    ]  # fmt: skip


async def test_silent_connections_to_the_coordinator_are_closed(cluster: FakeCluster) -> None:
    """After a session timeout without a response, heartbeats and joins use new connections. The silent ones would be
    closed only after the request timeout and the rebalance timeout, which are longer."""
    kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=60_000)
    quick = {"session_timeout_ms": 300, "heartbeat_interval_ms": 50, "max_poll_interval_ms": 300}
    async with Consumer(kafka, ConsumerSettings.model_validate({"group_id": "g", **quick})) as consumer:
        consumer.subscribe(["t"])
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        sockets = list(consumer._connection._client._conns.items())
        silent = cluster.control(Api.HEARTBEAT, Drop(), times=1)
        await poll_until(lambda: silent.acted, consumer)
        answered = cluster.control(Api.HEARTBEAT, Delay(0))
        await poll_until(lambda: answered.acted, consumer)
        open_groups = [group for (_, group), socket in sockets if socket.connected()]
        assert open_groups == [ConnectionGroup.DEFAULT]


async def test_a_commit_of_the_old_generation_is_rejected(cluster: FakeCluster) -> None:
    """While its partitions are lost the member commits with its old identity, and the group rejects it."""
    heard = Heard()
    async with member(cluster, ["t"], heard) as consumer:
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        before = consumer.group_metadata()
        cluster.control(Api.JOIN_GROUP, Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        cluster.control(Api.HEARTBEAT, Fail(ErrorCode.UNKNOWN_MEMBER_ID), times=1)
        cluster.control(Api.OFFSET_COMMIT, Fail(ErrorCode.UNKNOWN_MEMBER_ID))
        await poll_until(lambda: len(heard.calls) == 2, consumer)
        assert consumer.group_metadata() == before
        with pytest.raises(CommitFailed, match=f"group g, generation 1, member {before.member_id}"):
            await consumer.commit({T[0]: 1})


@pytest.mark.parametrize(
    "fault",
    [
        Fail(ErrorCode.NOT_COORDINATOR),
        Fail(ErrorCode.COORDINATOR_NOT_AVAILABLE),
        Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        Close(),
    ],
    ids=repr,
)
async def test_heartbeats_without_a_response(cluster: FakeCluster, fault: Action) -> None:
    """If the coordinator moves, loads or closes the connection, heartbeats are retried and no partition is revoked."""
    heard = Heard()
    async with member(cluster, ["t"], heard) as consumer:
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        control, seen = cluster.control(Api.HEARTBEAT, fault, times=3), spy(cluster)
        await poll_until(lambda: control.acted == 3 and len([r for r in seen if r.api is Api.HEARTBEAT]), consumer)
        assert heard.calls == [("assigned", [0, 1, 2, 3])]
        assert consumer.group_metadata().generation_id == 1


@pytest.mark.parametrize(
    ("api", "lost", "again"),
    [
        (Api.HEARTBEAT, "heartbeat without response", "heartbeats are answered again"),
        (Api.JOIN_GROUP, "group request failed", "group requests are answered again"),
    ],
)
async def test_a_broker_that_is_away_is_logged_once_and_when_it_is_back(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], api: Api, lost: str, again: str
) -> None:
    """An unavailable broker is logged once, and once more when it is back, however often the member retries."""
    log.configure(LogSettings(format="json"), "test")
    times = 15
    gone = cluster.control(api, Close(), times=times)
    async with member(cluster, ["t"]) as consumer:
        await poll_until(lambda: gone.acted == times and consumer.assignment() == ALL, consumer)
        seen = spy(cluster)
        await poll_until(lambda: count(seen, Api.HEARTBEAT) > 1, consumer)
    err = capsys.readouterr().err
    lines = [msgspec.json.decode(line) for line in err.splitlines()]
    (first,) = [line for line in lines if line["event"] == lost]
    (last,) = [line for line in lines if line["event"] == again]
    assert (first["level"], first["group_id"]) == ("warning", "g")
    assert first["reason"]
    assert (last["level"], last["failures"]) == ("info", times)
    assert sum(line["event"] == "joining the group" for line in lines) <= 3


async def test_the_coordinator_moves_to_another_node() -> None:
    """When the coordinator's node stops, the new coordinator is found and gets the commits."""
    async with FakeCluster(3) as cluster:
        cluster.create_topic("t", partitions=4)
        async with member(cluster, ["t"]) as consumer:
            await poll_until(lambda: consumer.assignment() == ALL, consumer)
            await cluster.stop_node(cluster.coordinator("g"))
            seen = spy(cluster)
            await poll_until(lambda: [r for r in seen if r.api is Api.HEARTBEAT], consumer)
            await consumer.commit({T[0]: 1})


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.GROUP_AUTHORIZATION_FAILED, AuthorizationFailed),
        (ErrorCode.INCONSISTENT_GROUP_PROTOCOL, InconsistentGroupProtocol),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else "",
)
async def test_group_errors_are_raised_by_poll(cluster: FakeCluster, code: ErrorCode, kind: type[Exception]) -> None:
    """If the group rejects the member, `poll` raises an error with client, group and member."""
    cluster.control(Api.JOIN_GROUP, Fail(code), times=1)
    async with member(cluster, ["t"]) as consumer:
        with pytest.raises(kind, match="JoinGroup.*group g.*member.*" + code.name):
            await poll_until(lambda: False, consumer)
        if kind is InconsistentGroupProtocol:  # the others may have been changed: the next poll tries again
            await poll_until(lambda: consumer.assignment() == ALL, consumer)


async def test_a_fenced_member(cluster: FakeCluster) -> None:
    """If two members have one instance id, the older one loses its partitions. Each of its polls raises the error."""
    heard = Heard()
    async with member(cluster, ["t"], heard, group_instance_id="i") as first:
        await poll_until(lambda: first.assignment() == ALL, first)
        async with member(cluster, ["t"], group_instance_id="i") as second:
            await poll_until(lambda: second.assignment() == ALL, second)
            for _ in range(2):
                with pytest.raises(FencedInstanceId, match=r"group g.*instance i.*FENCED_INSTANCE_ID"):
                    await poll_until(lambda: False, first)
            await poll_until(lambda: "lost" in names(heard), second)
            assert first.assignment() == frozenset()
    assert names(heard) == ["assigned", "lost"]


async def test_cooperative_rebalance_revokes_only_moved_partitions(cluster: FakeCluster) -> None:
    """Only partitions that move are revoked. No record of the other partitions is read twice."""
    await fill(cluster, 50)
    one, two = Heard(), Heard()
    settings = {"partition_assignment_strategy": "cooperative-sticky"}
    async with member(cluster, ["t"], one, **settings) as first:
        found = await poll_until(lambda: first.assignment() == ALL, first)
        async with member(cluster, ["t"], two, **settings) as second:
            found += await poll_until(
                lambda: len(second.assignment()) == 2 and len(first.assignment()) == 2, first, second
            )
            kept, moved = first.assignment(), second.assignment()
            assert kept | moved == ALL
            for tp in sorted(ALL):  # every owner has read all of its partition
                owner = first if tp in kept else second
                while await owner.position(tp) < 50:
                    found += await poll_until(lambda: True, first, second)
                    found += [(tp.partition, o) for tp, c in (await owner.poll(20)).items() for o in c.offsets.tolist()]
        found += await poll_until(lambda: first.assignment() == ALL, first)
    what_moved = sorted(tp.partition for tp in moved)
    calls = [call for call in one.calls if call[1]]  # a rebalance without a change is reported too, and left out here
    assert calls[:3] == [("assigned", [0, 1, 2, 3]), ("revoked", what_moved), ("assigned", what_moved)]
    assert [call for call in two.calls if call[1]] == [("assigned", what_moved), ("revoked", what_moved)]
    read = [at for at in found if TopicPartition("t", at[0]) in kept]
    assert sorted(read) == [(tp.partition, offset) for tp in sorted(kept) for offset in range(50)]


async def test_a_revoked_partition_is_not_committed_again(cluster: FakeCluster) -> None:
    """The position of a partition is committed when it is revoked, and by no later poll."""
    await fill(cluster, 5)
    settings = {"partition_assignment_strategy": "cooperative-sticky", "commit_strategy": "async"}
    async with member(cluster, ["t"], **settings) as first:
        found: list[tuple[int, int]] = []
        while len(found) < 20:
            found += [(tp.partition, o) for tp, c in (await first.poll(500)).items() for o in c.offsets.tolist()]
        async with member(cluster, ["t"], partition_assignment_strategy="cooperative-sticky") as second:
            await poll_until(lambda: len(second.assignment()) == 2, first, second)
            assert cluster.committed("g").keys() == ALL
            seen = spy(cluster)
            await fill(cluster, 1)
            await poll_until(lambda: count(seen, Api.OFFSET_COMMIT), first, second)
            committed = {tp for r in seen if r.api is Api.OFFSET_COMMIT for tp in r.partitions()}
            assert committed <= first.assignment()


async def test_a_commit_does_not_wait_for_a_rebalance(cluster: FakeCluster) -> None:
    """While a cooperative member waits for the others to join, its kept partitions are read and committed."""
    gate = asyncio.Event()

    async def hold(_: Request) -> Action | None:
        await gate.wait()
        return None

    async with member(cluster, ["t"], partition_assignment_strategy="cooperative-sticky") as consumer:
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        seen = spy(cluster)
        cluster.control(Api.JOIN_GROUP, hold)
        consumer.enforce_rebalance()
        await poll_until(lambda: [r for r in seen if r.api is Api.JOIN_GROUP], consumer)
        await fill(cluster, 1)
        found: list[tuple[int, int]] = []
        while len(found) < 4:
            for tp, columns in (await consumer.poll(100)).items():
                found += [(tp.partition, offset) for offset in columns.offsets.tolist()]
        await consumer.commit(timeout_ms=2_000)
        gate.set()
        await poll_until(lambda: consumer.group_metadata().generation_id == 2, consumer)
    assert {tp: committed.offset for tp, committed in cluster.committed("g").items()} == dict.fromkeys(T, 1)


async def test_an_eager_rebalance_revokes_everything(cluster: FakeCluster) -> None:
    """An enforced rebalance revokes and assigns all partitions, in the next generation."""
    heard = Heard()
    async with member(cluster, ["t"], heard) as consumer:
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        consumer.enforce_rebalance()
        await poll_until(lambda: consumer.group_metadata().generation_id == 2, consumer)
    assert names(heard) == ["assigned", "revoked", "assigned", "revoked"]


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "sticky", "cooperative-sticky"])
async def test_a_new_topic_triggers_a_rebalance(cluster: FakeCluster, assignor: str) -> None:
    """The leader triggers a rebalance when a topic appears that its pattern matches."""
    async with (
        member(cluster, re.compile("t.*"), partition_assignment_strategy=assignor) as first,
        member(cluster, re.compile("t.*"), partition_assignment_strategy=assignor) as second,
    ):
        await poll_until(lambda: first.assignment() | second.assignment() == ALL, first, second)
        cluster.create_topic("t2", partitions=2)
        more = ALL | {TopicPartition("t2", 0), TopicPartition("t2", 1)}
        await poll_until(
            lambda: (
                (first.assignment() | second.assignment()) == more
                and len(first.assignment()) == len(second.assignment()) == 3
            ),
            first,
            second,
        )
        assert not first.assignment() & second.assignment()


async def test_a_restarted_static_leader_triggers_rebalances(cluster: FakeCluster) -> None:
    """A restarted static leader does not learn that it leads, but still triggers a rebalance when a topic appears."""
    for _ in range(2):
        async with member(cluster, ["t", "later"], group_instance_id="i") as consumer:
            await poll_until(lambda: consumer.assignment() == ALL, consumer)
    async with member(cluster, ["t", "later"], group_instance_id="i") as consumer:
        await poll_until(lambda: consumer.assignment() == ALL, consumer)
        assert consumer.group_metadata().generation_id == 1
        cluster.create_topic("later", partitions=1)
        await poll_until(lambda: TopicPartition("later", 0) in consumer.assignment(), consumer)


async def test_close_while_the_group_does_not_answer(cluster: FakeCluster) -> None:
    """A `close` with a timeout ends in time, whatever request the member waits for."""
    cluster.control(Api.SYNC_GROUP, Drop())
    kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    consumer = Consumer(kafka, ConsumerSettings(group_id="g"))
    await consumer.start()
    consumer.subscribe(["t"])
    seen = spy(cluster)
    await poll_until(lambda: [r for r in seen if r.api is Api.JOIN_GROUP and r.body.member_id], consumer)
    async with asyncio.timeout(5):
        await consumer.close(timeout_ms=1_000)
