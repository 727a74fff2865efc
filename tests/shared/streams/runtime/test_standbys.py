"""Standbys: their assignment, and how they follow the owner, take over and fail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.clients.consumer.assignors import ASSIGNORS, GroupMember
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.protocol.consumer_protocol import Subscription, decode_generation
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import InconsistentGroupProtocol, SchemaMismatch, StateStoreFailed
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.standby_assignor import (
    MARK,
    STRATEGIES,
    StreamsAssignor,
    append_standing_partitions,
    assign_standbys,
    standing_partitions_of,
)
from penstock.shared.streams.runtime.standbys import Standby, Standbys
from penstock.shared.streams.runtime.stream_task_factory import StreamTaskFactory
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.fake_broker import Api, FakeCluster, Request
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests import virtual_time

CHANGELOG = "app-changelog"
PARTITIONS = 3
WAIT_SECONDS = 30.0


def topology() -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(100).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


class Instance:
    """The standbys of an instance, and the owner that writes to their partitions."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        cluster.create_topic(CHANGELOG, PARTITIONS)
        self._kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        self._driver, self._written = TopologyTestDriver(topology()), 0
        settings, self.registry = StreamsSettings(application_id="app"), CollectorRegistry()
        task_factory = StreamTaskFactory(settings, topology(), SYSTEM_CLOCK, self.registry)
        self.standbys = Standbys(self._kafka, settings, task_factory, SYSTEM_CLOCK, self.registry)

    async def own(self, partition: int, *keys: str) -> None:
        """Lets the owner process a record of each key and commit."""
        for key in keys:
            self._driver.pipe("in", key=key.encode(), value=b"{}", timestamp=0)
        entries, self._written = self._driver.changelog[self._written :], len(self._driver.changelog)
        await self.write(partition, *entries)

    async def write(self, partition: int, *entries: tuple[bytes | None, bytes]) -> None:
        async with Producer(self._kafka, ProducerSettings(linger_ms=0)) as producer:
            records = [ProducerRecord(CHANGELOG, value, key, (), partition, None) for key, value in entries]
            await (await producer.send_many(records))

    def shown(self) -> list[tuple[int, str, int]]:
        return [(one["partition"], one["state"], one["state_rows"]) for one in self.standbys.describe()]

    def lags(self) -> list[int | None]:
        return [one["lag"] for one in self.standbys.describe()]

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                if done():
                    return
                await asyncio.sleep(0)

    def sample(self, partition: int) -> float | None:
        return self.registry.get_sample_value("penstock_streams_standby_lag", {"partition": str(partition)})


@asynccontextmanager
async def instance() -> AsyncIterator[Instance]:
    async with FakeCluster() as cluster:
        made = Instance(cluster)
        try:
            yield made
        finally:
            await made.standbys.close()


async def test_it_follows_the_owner_and_hands_over_what_it_has() -> None:
    """A standby has the owner's records from before and after its start. After the hand-over it is neither followed nor
    measured."""
    async with instance() as one:
        await one.own(1, "ann", "bob")
        await one.standbys.stand_by([1])
        await one.until(lambda: one.shown() == [(1, "current", 2)])
        await one.own(1, "cat")
        await one.until(lambda: one.shown() == [(1, "current", 3)] and one.sample(1) == 0)
        assert one.standbys.warm() == {1}
        restoring = await one.standbys.hand_over(1)
        assert restoring is not None
        assert sorted(row.key for row in restoring.task.stores["s"].rows()) == ["ann", "bob", "cat"]
        assert restoring.reader.progress is not None
        assert restoring.reader.progress.sources == {"in": 3}
        assert (one.shown(), one.standbys.warm(), one.sample(1)) == ([], set(), None)
        assert await one.standbys.hand_over(1) is None


async def test_the_lag_of_a_standby_that_is_catching_up() -> None:
    """While a standby catches up, its lag is the rest of the changelog. It is unknown until its reading has begun."""
    fetched = asyncio.Event()

    async def hold(_: Request) -> None:
        await fetched.wait()

    async with instance() as one:
        await one.own(1, "ann", "bob")
        one.cluster.control(Api.FETCH, hold)
        await one.standbys.stand_by([1])
        assert (one.lags(), math.isnan(one.sample(1) or 0)) == ([None], True)
        await one.until(lambda: one.lags() == [one.cluster.end_offset(CHANGELOG, 1)])
        assert (one.shown(), one.sample(1)) == ([(1, "catching up", 0)], one.lags()[0])
        fetched.set()
        await one.until(lambda: one.shown() == [(1, "current", 2)])
        assert (one.lags(), one.sample(1)) == ([0], 0)


async def test_unassigned_standbys_are_ended() -> None:
    """Other standbys are ended, except those of partitions owned here, which the hand-over ends. No owned partition
    gets a standby."""
    async with instance() as one:
        await one.standbys.stand_by([0, 1])
        await one.until(lambda: [state for _, state, _ in one.shown()] == ["current", "current"])
        await one.standbys.stand_by([1, 2], owned=[0, 2])
        assert repr(one.standbys) == "Standbys([0, 1])"
        await one.standbys.stand_by([2])
        assert repr(one.standbys) == "Standbys([2])"
        await one.standbys.close()
        assert repr(one.standbys) == "Standbys([])"


async def test_a_failed_standby_stops_no_other() -> None:
    """An unreadable changelog is logged, other standbys continue, and nothing is handed over for it."""
    async with instance() as one:
        await one.write(0, (b"k", b"\x01L and no more of an entry"))
        await one.own(1, "ann")
        await one.standbys.stand_by([0, 1])
        await one.until(lambda: one.shown() == [(0, "failed", 0), (1, "current", 1)])
        assert await one.standbys.hand_over(0) is None
        assert one.shown() == [(1, "current", 1)]


class FullDisk:
    """State on disk that cannot be written."""

    closed = False

    def write(self, _: object) -> None:
        raise StateStoreFailed("no space left on device")

    def close(self) -> None:
        self.closed = True


async def test_a_standby_ends_though_its_state_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rebalance that ends it would end the instance, whose own tasks may need no more space."""
    async with instance() as one:
        await one.own(0, "ann")
        await one.standbys.stand_by([0])
        await one.until(lambda: one.shown() == [(0, "current", 1)])
        restoring = one.standbys._own[0].restoring
        assert restoring is not None
        monkeypatch.setattr(restoring.task, "local", disk := FullDisk())
        await one.standbys.stand_by([])
        assert (one.shown(), disk.closed) == ([], True)


async def test_a_standby_that_read_nothing_hands_over_nothing() -> None:
    """A standby that has not read anything hands over nothing."""
    async with instance() as one:
        await one.standbys.stand_by([2])
        assert one.shown() == [(2, "catching up", 0)]
        handed: Any = await one.standbys.hand_over(2)
        assert handed is None


class Unreadable(Standbys):
    """Standbys that cannot read any changelog; `tries` has the times in s."""

    def __init__(self) -> None:
        settings, registry, clock = StreamsSettings(application_id="app"), CollectorRegistry(), virtual_time.LoopClock()
        task_factory = StreamTaskFactory(settings, topology(), clock, registry)
        super().__init__(KafkaSettings(), settings, task_factory, clock, registry)
        self.tries: list[float] = []

    async def _read_changelog(self, standby: Standby) -> None:
        self.tries.append(asyncio.get_running_loop().time())
        raise SchemaMismatch("the changelog has an aggregation that this topology lacks")


def test_a_standby_that_always_fails_starts_again_less_and_less_often() -> None:
    """The wait before each new start doubles up to a minute, and not every failure is logged."""

    async def failures() -> list[float]:
        standbys = Unreadable()
        await standbys.stand_by([0])
        await virtual_time.let_pass(200)
        assert standbys.describe()[0]["state"] == "failed"
        await standbys.close()
        return standbys.tries

    with capture_logs() as logged:
        assert virtual_time.run(failures()) == [0, 2, 6, 14, 30, 62, 122, 182]
    assert [line.get("failures") for line in logged] == [None, 4, 6, 7]


def assignor(strategy: str = "cooperative-sticky", replicas: int = 1, *warm: int) -> StreamsAssignor:
    return STRATEGIES[strategy](replicas, lambda: warm)


def member(own: StreamsAssignor, owned: tuple[int, ...] = (), generation: int = 3) -> GroupMember:
    at = tuple(TopicPartition("t", p) for p in owned)
    return GroupMember(Subscription(("t",), own.user_data(at, generation), at, generation))


def test_standbys_follow_the_assignors_user_data() -> None:
    """The standbys follow the assignor's own user data: a member without standbys reads its generation as before, and
    sends none."""
    data = assignor("cooperative-sticky", 1, 4, 2).user_data((), 7)
    assert decode_generation(data) == 7
    assert standing_partitions_of(data) == {2, 4}
    assert standing_partitions_of(assignor("range", 1).user_data((), 7)) == frozenset()
    plain = ASSIGNORS["cooperative-sticky"].user_data((), 7)
    deep = b'{"x":' + b"[" * 0x10000
    invalid = (plain, None, b"", b"x{}\x00\x00\x00\x03" + MARK, deep + b"\x00\x01\x00\x05" + MARK)
    assert [standing_partitions_of(each) for each in invalid] == [None] * 5


def test_each_strategy_has_a_name_of_its_own() -> None:
    """A broker rejects a member that shares no strategy with its group, so no other consumer has these names."""
    for strategy in ("range", "cooperative-sticky"):
        made = assignor(strategy, 0)
        assert made.name == f"penstock-streams-{strategy}"
        assert made.name not in ASSIGNORS
        assert made.is_cooperative == ASSIGNORS[strategy].is_cooperative


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_without_replicas_assignments_have_empty_user_data(strategy: str) -> None:
    """Members send no standbys and are assigned none, but each assignment has user data: a broker then rejects
    consumers of KIP-848."""
    own = assignor(strategy, 0)
    members = {"a": member(own), "b": member(own)}
    standing = [standing_partitions_of(one.subscription.user_data) for one in members.values()]
    assigned = own.assign({"t": 1}, members)
    data_by_member = own.assignment_data({"t": 1}, members, assigned)
    assert standing == [None, None]
    assert {name: standing_partitions_of(data) for name, data in data_by_member.items()} == {
        "a": frozenset(),
        "b": frozenset(),
    }


def test_the_leader_assigns_standbys_to_members() -> None:
    """Each partition is assigned to one member besides its owner. Members that report no standbys are assigned none."""
    own, others = assignor("range", 1), assignor("range", 1, 0)
    members = {"a": member(own), "b": member(others), "c": member(assignor("range", 0))}
    assigned = own.assign({"t": 3}, members)
    data_by_member = own.assignment_data({"t": 3}, members, assigned)
    assert {name: standing_partitions_of(data) for name, data in data_by_member.items()} == {
        "a": {1, 2},
        "b": {0},
        "c": frozenset(),
    }
    others.on_assignment(data_by_member["b"])
    assert others.standbys == {0}


def test_an_assignment_that_no_instance_made_is_rejected() -> None:
    """An assignment without user data, as a KIP-848 group makes it, is rejected."""
    for data in (None, b""):
        with pytest.raises(InconsistentGroupProtocol, match="penstock-streams-range"):
            assignor("range", 1).on_assignment(data)


def test_a_member_with_a_standby_becomes_the_owner() -> None:
    """Among the members with the fewest partitions, one with a standby of an unowned partition becomes its owner."""
    order = {"a": (assignor(), (0,)), "b": (assignor("cooperative-sticky", 1, 3), (1,)), "c": (assignor(), (2,))}
    members = {name: member(own, owned) for name, (own, owned) in order.items()}
    assigned = order["a"][0].assign({"t": 4}, members)
    assert {name: [p for _, p in given] for name, given in assigned.items()} == {"a": [0], "b": [1, 3], "c": [2]}


def test_a_partition_between_owners_keeps_its_standbys() -> None:
    """Under the cooperative assignor a partition has no owner for one round. Its standbys stay, and no new one is
    assigned."""
    assert assign_standbys({0: None, 1: "a"}, ["a", "b", "c"], {"c": {0}}, 1) == {"a": [], "b": [1], "c": [0]}


partitions = st.integers(1, 12)
assignments = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.just([f"m{i}" for i in range(n)]),
        st.lists(st.integers(0, n - 1), min_size=1, max_size=12),
        st.dictionaries(st.sampled_from([f"m{i}" for i in range(n)]), st.sets(st.integers(0, 12))),
        st.integers(1, 3),
    )
)


@given(assignments)
def test_as_many_as_there_can_be_and_never_the_owner(
    plan: tuple[list[str], list[int], dict[str, set[int]], int],
) -> None:
    """Each partition has the configured number of standbys on other members, or as many as there are members."""
    order, own, warm, replicas = plan
    owners: dict[int, str | None] = {p: order[i] for p, i in enumerate(own)}
    standbys = assign_standbys(owners, order, warm, replicas)
    for partition, owner in owners.items():
        standing = [name for name, given in standbys.items() if partition in given]
        assert owner not in standing
        assert len(standing) == min(replicas, len(order) - 1)
    assert all(len(given) == len(set(given)) for given in standbys.values())


@given(partitions, st.integers(2, 4))
def test_standbys_are_even_and_stay(count: int, members: int) -> None:
    """With evenly assigned owners, no member has many more standbys than another, and assigned standbys stay."""
    order = [f"m{i}" for i in range(members)]
    owners: dict[int, str | None] = {p: order[p % members] for p in range(count)}
    standbys = assign_standbys(owners, order, {}, 1)
    sizes = [len(given) for given in standbys.values()]
    assert max(sizes) - min(sizes) <= 2
    assert assign_standbys(owners, order, {name: set(given) for name, given in standbys.items()}, 1) == standbys


def test_encoded_standbys_round_trip() -> None:
    """Encoded standbys are decoded unchanged, also without user data before them."""
    assert standing_partitions_of(append_standing_partitions(None, [3])) == {3}
