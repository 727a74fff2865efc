"""Commits against a coordinator that fails, delays, forgets and applies late what it is asked.

Time stands still here: a coordinator that does not answer says so at once (KafkaTimeout), and what it applies late it
applies whenever the test has it do so.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.shared.clients.consumer.commit_requests import REJECTED_RETRY_MS, OffsetCommits
from penstock.shared.clients.consumer.commit_sequence import LATE_MS
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    CommitFailed,
    FencedInstanceId,
    IllegalGeneration,
    InvalidRequest,
    KafkaTimeout,
    PenstockError,
    RebalanceInProgress,
    RetriableError,
    UnknownMember,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, TopicPartition
from penstock.shared.testing.manual_clock import ManualClock
from tests import virtual_time

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
LOADING, UNAVAILABLE, MOVED, GENERATION, UNKNOWN, REBALANCE, FENCED = 14, 15, 16, 22, 25, 27, 82
GONE, TOO_LONG = 3, 12


def at(offset: int) -> OffsetAndMetadata:
    return OffsetAndMetadata(offset)


class Coordinator:
    """A group's coordinator in place of the connection to it; `fates` says what becomes of the next commits."""

    def __init__(self, generation: int = 1) -> None:
        self.settings = SimpleNamespace(retry_backoff_ms=0, request_timeout_ms=1_000)
        self.client_id = "c"
        self.generation = generation
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self.sent: list[dict[TopicPartition, OffsetAndMetadata]] = []
        self.late: list[tuple[int, dict[TopicPartition, OffsetAndMetadata]]] = []
        self.overlaid: set[TopicPartition] = set()  # where a late commit has landed on top of a newer one
        self.fates: Callable[[], str] = lambda: "ok"
        self.forgotten = 0
        self.gate: asyncio.Event | None = None

    def forget_coordinator(self, kind: str, key: str) -> None:
        self.forgotten += 1

    async def ask_coordinator(self, kind: str, key: str, request: Any, where: str) -> Any:
        await asyncio.sleep(0)
        if request._api.name == "OffsetFetch":
            rows = [(tp, self.committed[tp]) for tp in (A, B) if tp in self.committed]
            topics = [(tp.topic, [(tp.partition, o.offset, -1, o.metadata, 0, {})], {}) for tp, o in rows]
            return SimpleNamespace(error_code=0, topics=topics)
        _, generation, _, _, topics = request._fields
        offsets = {TopicPartition(t, p): OffsetAndMetadata(o, m) for t, rows in topics for p, o, _, m in rows}
        self.sent.append(offsets)
        if self.gate is not None:
            await self.gate.wait()
        codes = await self._decide(generation, offsets, where)
        rows_by_topic: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for tp, code in codes.items():
            rows_by_topic[tp.topic].append((tp.partition, code))
        return SimpleNamespace(topics=list(rows_by_topic.items()))

    async def _decide(
        self, generation: int, offsets: dict[TopicPartition, OffsetAndMetadata], where: str
    ) -> dict[TopicPartition, int]:
        fate = self.fates()
        if fate.startswith("delay"):
            for _ in range(int(fate[5:])):
                await asyncio.sleep(0)
            fate = "ok"
        if fate == "timeout, late":
            self.late.append((generation, offsets))
        if fate in ("timeout, applied", "closed, applied"):
            self.apply(generation, offsets)
        if fate.startswith("timeout"):
            raise KafkaTimeout(f"{where}: no answer")
        if fate.startswith("closed"):
            raise BrokerNotAvailable(f"{where}: closed")
        if fate.startswith("without t-1: "):
            rest = {tp: offset for tp, offset in offsets.items() if tp != B}
            self.apply(generation, rest)
            return {tp: int(fate.split()[-1]) if tp == B else 0 for tp in offsets}
        if fate == "half":
            first = min(offsets)
            self.apply(generation, {first: offsets[first]})
            return {tp: 0 if tp == first else LOADING for tp in offsets}
        if fate != "ok":
            return dict.fromkeys(offsets, int(fate))
        return dict.fromkeys(offsets, 0 if self.apply(generation, offsets) else GENERATION)

    def apply(self, generation: int, offsets: dict[TopicPartition, OffsetAndMetadata]) -> bool:
        if generation != self.generation:
            return False
        for tp, offset in offsets.items():
            if tp in self.committed and tp not in self.overlaid:
                assert self.committed[tp].offset <= offset.offset, "backwards"
            self.committed[tp] = offset
        self.overlaid -= offsets.keys()
        return True

    def apply_late(self) -> None:
        generation, offsets = self.late.pop()
        if generation == self.generation:
            below = {tp for tp, offset in offsets.items() if tp in self.committed and offset < self.committed[tp]}
            self.committed.update(offsets)
            self.overlaid |= below

    def land(self, rng: random.Random) -> None:
        """Some of what is late, in any order."""
        rng.shuffle(self.late)
        for _ in range(rng.randint(0, len(self.late))):
            self.apply_late()

    async def retrying(self, call: Callable[[], Awaitable[Any]], where: str, timeout_ms: float) -> Any:
        while True:
            try:
                return await call()
            except RetriableError:
                await asyncio.sleep(0)


class Member:
    """A committer as a consumer has it, in a generation of its own."""

    def __init__(self, coordinator: Coordinator, **settings: Any) -> None:
        self.coordinator, self.generation, self.clock = coordinator, coordinator.generation, ManualClock()
        self.registry = CollectorRegistry()
        self.commits = OffsetCommits(
            coordinator,  # type: ignore[arg-type]
            lambda: GroupMetadata("g", self.generation, "m", "i"),
            ConsumerMetrics(self.registry, "g"),
            **{"clock": self.clock, "is_managed": lambda: True, "require_stable": False, **settings},
        )
        self.told: list[tuple[int, str]] = []

    def later(self, offset: int, tp: TopicPartition = A) -> None:
        self.commits.commit_async({tp: at(offset)}, lambda o, e: self.told.append((o[tp].offset, type(e).__name__)))


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def scripted(*fates: str) -> Callable[[], str]:
    left = list(fates)
    return lambda: left.pop(0) if left else "ok"


async def test_one_at_a_time_and_the_newest_wins() -> None:
    """While one is out the next wait; of several for a partition only the newest is sent, all callbacks are told."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    member.later(1)
    await turns()
    for offset in (2, 3, 4):
        member.later(offset)
    await turns()
    assert [sent[A].offset for sent in coordinator.sent] == [1]
    coordinator.gate.set()
    await turns()
    assert [sent[A].offset for sent in coordinator.sent] == [1, 4]
    assert member.told == [(1, "NoneType"), (2, "NoneType"), (3, "NoneType"), (4, "NoneType")]


@pytest.mark.parametrize("fate", [str(LOADING), str(UNAVAILABLE), str(MOVED), "closed", "timeout", "half"])
async def test_passing_failures_are_retried(fate: str) -> None:
    """A coordinator that loads, moved, hangs up or does not answer is asked again; a sync commit waits for it."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(fate, fate)
    await member.commits.commit({A: at(5), B: at(6)}, 5_000)
    assert coordinator.committed == {A: at(5), B: at(6)}
    # What half an answer has stored is not sent again, so that the next answer is a whole one.
    failed = 1 if fate == "half" else 2
    assert len(coordinator.sent) == failed + 1
    assert (coordinator.forgotten > 0) == (fate not in ("closed", "timeout"))
    failures = member.registry.get_sample_value("penstock_consumer_commits_total", {"group": "g", "result": "failed"})
    assert failures == failed


async def test_a_partition_that_is_no_more_holds_no_other_up() -> None:
    """Those stored are done and told; the one that is unknown is tried for a while, then named, and later once."""
    member = Member(coordinator := Coordinator())
    member.clock.advance(1_000_000)
    coordinator.fates = lambda: f"without t-1: {GONE}"
    await member.commits.commit({A: at(1)}, 5_000)
    both = asyncio.ensure_future(member.commits.commit({A: at(2), B: at(2)}, 60_000))
    await turns(5)
    member.later(3, A)
    member.later(3, B)
    await turns()
    assert coordinator.committed == {A: at(3)}
    assert (both.done(), member.told) == (False, [(3, "NoneType")])
    await asyncio.wait_for(member.commits.commit({A: at(4)}, 60_000), 5)
    member.clock.advance(REJECTED_RETRY_MS - 1)
    await turns()
    assert not both.done()
    member.clock.advance(1)
    with pytest.raises(UnknownTopicOrPartition, match=r"OffsetCommit of client c, group g, generation 1.*t-1"):
        await asyncio.wait_for(both, 5)
    assert member.told == [(3, "NoneType"), (3, "UnknownTopicOrPartition")]
    sent = len(coordinator.sent)
    with pytest.raises(UnknownTopicOrPartition, match="t-1"):
        await asyncio.wait_for(member.commits.commit({A: at(5), B: at(5)}, 60_000), 5)
    assert coordinator.committed == {A: at(5)}
    assert len(coordinator.sent) == sent + 1
    coordinator.fates = lambda: "ok"
    await member.commits.commit({A: at(6), B: at(6)}, 5_000)
    assert coordinator.committed == {A: at(6), B: at(6)}


async def test_a_partition_that_was_known_again_is_retried_anew() -> None:
    """The time for which it is retried begins when it is unknown first, since it was committed last."""
    member = Member(coordinator := Coordinator())
    unknown = f"without t-1: {GONE}"
    coordinator.fates = scripted(unknown)
    await member.commits.commit({B: at(1)}, 5_000)
    member.clock.advance(REJECTED_RETRY_MS)
    coordinator.fates = scripted(unknown)
    await member.commits.commit({B: at(2)}, 5_000)
    assert coordinator.committed == {B: at(2)}


async def test_a_partition_is_not_retried_beyond_its_time() -> None:
    """Also if nobody looked at the very moment."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: f"without t-1: {GONE}"
    member.later(1, B)
    await turns(5)
    assert member.told == []
    member.clock.advance(REJECTED_RETRY_MS + 1)
    await turns()
    assert member.told == [(1, "UnknownTopicOrPartition")]


async def test_all_that_wait_for_a_refused_partition_are_told() -> None:
    """Also those whose offsets were covered by newer ones; the others wait for their own partitions."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: f"without t-1: {TOO_LONG}"
    member.later(1, B)
    member.later(2, B)
    member.later(3, A)
    await turns()
    assert sorted(member.told) == [(1, "InvalidRequest"), (2, "InvalidRequest"), (3, "NoneType")]


async def test_a_member_without_an_assignment_commits_nothing() -> None:
    """The broker would take it as a commit from outside the group. Outside a group that is right."""
    for managed, generation, expected in ((True, -1, {}), (False, -1, {A: at(5)}), (True, 0, {A: at(5)})):
        member = Member(coordinator := Coordinator(generation), is_managed=lambda managed=managed: managed)
        member.later(5)
        await turns()
        assert coordinator.committed == expected
        assert member.told == [(5, "NoneType" if expected else "UnknownMember")]


async def test_the_latency_of_a_commit_is_measured() -> None:
    """From the request to its answer."""
    member = Member(coordinator := Coordinator())
    member.clock.advance(1_000)
    coordinator.gate = asyncio.Event()
    member.later(1)
    await turns()
    member.clock.advance(40)
    coordinator.gate.set()
    await turns()
    sums = [
        sample.value
        for metric in member.registry.collect()
        for sample in metric.samples
        if sample.name.endswith("commit_latency_seconds_sum")
    ]
    assert sums == [0.04]


def test_the_backoff_grows_until_a_commit_succeeds() -> None:
    """Each wait is twice the one before, up to a second; after a success it begins again."""

    async def waits() -> list[int]:
        member = Member(coordinator := Coordinator(), clock=virtual_time.LoopClock())
        coordinator.settings.retry_backoff_ms = 100
        times: list[float] = []
        fates = [*[LOADING] * 6, "ok", LOADING, "end"]

        def fate() -> str:
            times.append(asyncio.get_running_loop().time())
            if fates[0] == "ok":
                member.later(2)
            return str(fates.pop(0)) if fates[1:] else "ok"

        coordinator.fates = fate
        member.later(1)
        await virtual_time.let_pass(60)
        await member.commits.close()
        return [round(1_000 * (b - a)) for a, b in itertools.pairwise(times)]

    assert virtual_time.run(waits()) == [100, 200, 400, 800, 1_000, 1_000, 0, 100]


def test_a_drain_and_a_commit_end_in_time() -> None:
    """Each at its own deadline, and at once if it has passed; what is answered before is waited for."""

    async def measured() -> list[int]:
        member = Member(coordinator := Coordinator(), clock=virtual_time.LoopClock())
        loop, found = asyncio.get_running_loop(), list[int]()
        coordinator.gate = asyncio.Event()
        member.later(1)
        await turns()
        for timeout_ms in (500, 0, -5):
            started = loop.time()
            await member.commits.drain(timeout_ms)
            found.append(round(1_000 * (loop.time() - started)))
        started = loop.time()
        with pytest.raises(KafkaTimeout, match="not committed within 500 ms"):
            await member.commits.commit({A: at(2)}, 500)
        found.append(round(1_000 * (loop.time() - started)))
        loop.call_later(0.3, coordinator.gate.set)
        started = loop.time()
        await member.commits.drain(500)
        found.append(round(1_000 * (loop.time() - started)))
        assert coordinator.committed == {A: at(2)}
        await member.commits.close()
        return found

    assert virtual_time.run(measured()) == [500, 0, 0, 500, 300]


def test_a_late_commit_is_covered_by_a_timer() -> None:
    """The offsets are read back LATE_MS after the commit without an answer, and committed again."""

    async def committed() -> list[tuple[int, dict[TopicPartition, OffsetAndMetadata]]]:
        member = Member(coordinator := Coordinator(), clock=virtual_time.LoopClock())
        await virtual_time.let_pass(7)
        coordinator.fates = scripted("timeout, late")
        await member.commits.commit({A: at(9)}, 5_000)
        await turns()
        coordinator.late = [(1, {A: at(5)})]
        coordinator.apply_late()
        found = []
        for seconds in (LATE_MS / 1000 - 1, 2):
            await virtual_time.let_pass(seconds)
            found.append((len(coordinator.sent), dict(coordinator.committed)))
        await member.commits.close()
        return found

    assert virtual_time.run(committed()) == [(2, {A: at(5)}), (3, {A: at(9)})]


async def test_a_text_that_is_too_long_is_said_of_its_partition_at_once() -> None:
    """The other partitions of the commit are stored, and the sequence goes on."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: f"without t-1: {TOO_LONG}"
    with pytest.raises(InvalidRequest, match="t-1"):
        await member.commits.commit({A: at(1), B: at(1)}, 5_000)
    assert coordinator.committed == {A: at(1)}
    await member.commits.commit({A: at(2)}, 5_000)
    await member.commits.drain(5_000)
    assert member.commits.sequence.is_drained


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (GENERATION, IllegalGeneration),
        (UNKNOWN, UnknownMember),
        (REBALANCE, RebalanceInProgress),
        (FENCED, FencedInstanceId),
    ],
)
async def test_what_only_a_rebalance_can_mend_is_raised_at_once(code: int, error: type[PenstockError]) -> None:
    """Sync raises it, async tells its callback; the message names client, group, generation, member and request."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: str(code)
    with pytest.raises(error) as raised:
        await member.commits.commit({A: at(5)}, 5_000)
    assert "OffsetCommit of client c, group g, generation 1, member m, instance i, t-0" in str(raised.value)
    member.later(6)
    await turns()
    assert member.told == [(6, error.__name__)]
    await member.commits.close()


async def test_callbacks_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the coordinator is away the oldest are told by an error that passes; the newest offsets are committed."""
    monkeypatch.setattr("penstock.shared.clients.consumer.commit_requests.WAITING_MAX", 3)
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    for offset in range(1, 8):
        member.later(offset)
    await asyncio.sleep(0)
    assert member.told == [(offset, "CoordinatorNotAvailable") for offset in range(1, 5)]
    coordinator.gate.set()
    await member.commits.commit({}, 5_000)
    assert member.told[4:] == [(5, "NoneType"), (6, "NoneType"), (7, "NoneType")]
    assert coordinator.committed == {A: at(7)}


async def test_callbacks_are_called_before_a_sync_commit_returns() -> None:
    """A sync commit completes what was pending before it, and its callbacks know."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(str(LOADING), "delay5")
    member.later(3)
    member.later(7, B)
    await member.commits.commit({A: at(5)}, 5_000)
    assert member.told == [(3, "NoneType"), (7, "NoneType")]
    assert coordinator.committed == {A: at(5), B: at(7)}


async def test_a_commit_of_nothing_waits_for_what_is_pending() -> None:
    """It has nothing of its own to wait for, and what was committed before it is done all the same."""
    member = Member(coordinator := Coordinator())
    await member.commits.commit({}, 5_000)
    coordinator.gate = asyncio.Event()
    member.later(1)
    waiting = asyncio.create_task(member.commits.commit({}, 5_000))
    await turns()
    assert not waiting.done()
    coordinator.gate.set()
    await waiting
    assert member.told == [(1, "NoneType")]
    coordinator.gate = asyncio.Event()
    member.later(2)
    with pytest.raises(KafkaTimeout, match="not committed within 5 ms"):
        await member.commits.commit({}, 5)
    await member.commits.close()


@pytest.mark.parametrize("code", [UNKNOWN, GENERATION, REBALANCE])
async def test_a_revocation_goes_on_without_what_cannot_be_committed(code: int) -> None:
    """Its drain ends at once where no answer can mend it, and in time where there is none."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: str(code)
    member.later(1)
    async with asyncio.timeout(5):
        await member.commits.drain(60_000)
    coordinator.gate = asyncio.Event()
    member.later(2)
    async with asyncio.timeout(5):
        await member.commits.drain(5)
    await member.commits.close()


async def test_a_callback_that_raises_harms_nobody() -> None:
    """What a callback raises is logged; the others are told, and commits go on."""
    member = Member(coordinator := Coordinator())

    def broken(*_: object) -> None:
        raise RuntimeError("in the callback")

    member.commits.commit_async({A: at(1)}, broken)
    member.later(2)
    await turns()
    assert member.told == [(2, "NoneType")]
    assert coordinator.committed == {A: at(2)}


async def test_failed_offsets_go_on_in_the_new_generation() -> None:
    """Refused for a rebalance, a kept partition's offset is committed once the member has the new generation; that of
    one that went elsewhere is dropped, and its callback is told."""
    member = Member(coordinator := Coordinator())
    coordinator.generation = 2
    member.later(5)
    member.commits.commit_async({B: at(6)}, lambda o, e: member.told.append((o[B].offset, type(e).__name__)))
    await turns()
    assert (coordinator.committed, member.told) == ({}, [(5, "IllegalGeneration"), (6, "IllegalGeneration")])
    member.generation = 2
    member.commits.keep([A])
    await turns()
    assert coordinator.committed == {A: at(5)}


async def test_a_commit_whose_partitions_go_is_not_waited_for() -> None:
    """A sync commit that has not been answered when its partitions are lost ends at once."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    waiting = asyncio.ensure_future(member.commits.commit({A: at(5)}, 60_000))
    await turns()
    member.commits.keep([B])
    with pytest.raises(CommitFailed, match="the partitions were taken away"):
        await asyncio.wait_for(waiting, 5)
    await member.commits.close()


async def test_an_error_of_the_generation_before_is_not_the_new_ones() -> None:
    """A commit under way in a rebalance is refused; a sync commit made since goes on under the new generation."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    member.later(5)
    await turns()
    coordinator.generation = member.generation = 2
    member.commits.keep([A])
    waiting = asyncio.ensure_future(member.commits.commit({A: at(6)}, 5_000))
    await turns()
    coordinator.gate.set()
    await waiting
    assert coordinator.committed == {A: at(6)}
    assert member.told == [(5, "NoneType")]


async def test_a_commit_of_the_generation_before_is_sent_again_by_itself() -> None:
    """It was under way in the rebalance, and nothing else is committed since."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    member.later(5)
    await turns()
    coordinator.generation = member.generation = 2
    member.commits.keep([A])
    coordinator.gate.set()
    await turns()
    assert (coordinator.committed, member.told) == ({A: at(5)}, [(5, "NoneType")])


async def test_a_sync_commit_has_a_deadline() -> None:
    """After it KafkaTimeout names the last failure."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: str(LOADING)
    with pytest.raises(KafkaTimeout, match=r"not committed within 20 ms: .*COORDINATOR_LOAD_IN_PROGRESS"):
        await member.commits.commit({A: at(5)}, 20)
    await member.commits.close()


async def test_a_late_commit_is_covered_when_it_cannot_land_any_more() -> None:
    """One without an answer lands after a newer one was read back: after LATE_MS the newest is committed again."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted("timeout, late")
    member.later(5)
    await turns(5)
    await member.commits.commit({A: at(9)}, 5_000)
    await turns()
    assert coordinator.committed == {A: at(9)}
    coordinator.apply_late()
    assert coordinator.committed == {A: at(5)}
    member.clock.advance(LATE_MS)
    member.commits._look()
    await turns()
    assert coordinator.committed == {A: at(9)}
    await member.commits.close()


FATES = ["ok", "ok", "ok", "delay1", "delay7", "half", *(f"{fate}{end}" for fate in ("timeout", "closed")
         for end in ("", ", applied")), "timeout, late", str(LOADING), str(MOVED), str(REBALANCE)]  # fmt: skip
STEPS = ["process"] * 5 + ["async"] * 4 + ["sync", "turns", "turns", "land", "rebalance", "drain and revoke"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=50), st.integers(0, 2**32))
async def test_committed_offsets_never_go_backwards_or_ahead(steps: list[str], seed: int) -> None:
    """Whatever fails, is late or lands late, through rebalances: nothing beyond what was processed is sent; no commit
    that is acknowledged, and no offset that the next owner finds, is below one before; in the end it is the newest."""
    rng = random.Random(seed)
    member = Member(coordinator := Coordinator())
    processed = {A: 0, B: 0}
    acknowledged, found = {A: 0, B: 0}, {A: 0, B: 0}
    coordinator.fates = lambda: rng.choice(FATES)

    def told(offsets: Any, error: Exception | None) -> None:
        if error is None:
            for tp, offset in offsets.items():
                acknowledged[tp] = max(acknowledged[tp], offset.offset)

    def current() -> dict[TopicPartition, OffsetAndMetadata]:
        return {tp: at(offset) for tp, offset in processed.items() if offset}

    for step in steps:
        if step == "process":
            processed[rng.choice([A, B])] += rng.randint(1, 9)
        elif step == "async" and current():
            member.commits.commit_async(current(), told)
        elif step == "sync" and (offsets := current()):
            try:
                await member.commits.commit(offsets, 5_000)
                told(offsets, None)
            except (RetriableError, CommitFailed):
                pass
        elif step == "turns":
            await turns(rng.randint(1, 6))
        elif step == "land":
            coordinator.land(rng)
        elif step in ("rebalance", "drain and revoke"):
            if step == "drain and revoke":
                await member.commits.drain(5_000)
            coordinator.generation += 1  # from here on nothing of before is taken
            for tp, offset in coordinator.committed.items():
                assert offset.offset <= processed[tp]
                assert found[tp] <= offset.offset or tp in coordinator.overlaid
                found[tp] = max(found[tp], offset.offset)
            coordinator.overlaid = set(coordinator.committed)  # the next owner may go on from lower
            if step == "drain and revoke":  # another had them and gave them back as they were
                member.commits.keep(())
            member.generation = coordinator.generation
            member.commits.keep((A, B))
        assert all(sent[tp].offset <= processed[tp] for sent in coordinator.sent for tp in sent)
    coordinator.fates = lambda: "ok"
    if current():
        await member.commits.commit(current(), 5_000)
    coordinator.land(rng)
    member.clock.advance(LATE_MS)
    member.commits._look()
    await turns()
    assert coordinator.committed == current()
    assert all(acknowledged[tp] <= offset.offset for tp, offset in coordinator.committed.items())
    by_partition = {tp: [sent[tp].offset for sent in coordinator.sent if tp in sent] for tp in (A, B)}
    assert all(offsets == sorted(offsets) for offsets in by_partition.values())
    await member.commits.close()
