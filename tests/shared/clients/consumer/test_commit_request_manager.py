"""Commits against a coordinator that fails, delays, loses commits and applies them late.

The clock stands still: a missing response is a KafkaTimeout at once, and the test decides when a late commit is
applied.
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
from structlog.testing import capture_logs

from penstock.shared.clients.consumer.commit_request_manager import REJECTED_RETRY_MS, CommitRequestManager
from penstock.shared.clients.consumer.commit_sequence import LATE_MS
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.common.errors import (
    AuthorizationFailed,
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
from tests.property_tests import examples

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
LOADING, UNAVAILABLE, MOVED, GENERATION, UNKNOWN, REBALANCE, FENCED = 14, 15, 16, 22, 25, 27, 82
GONE, TOO_LONG, TOPIC_DENIED, NOT_AUTHORIZED, UNSTABLE = 3, 12, 29, 30, 88


def at(offset: int) -> OffsetAndMetadata:
    return OffsetAndMetadata(offset)


class Coordinator:
    """A fake group coordinator. `fates` scripts the outcomes of the next commits."""

    def __init__(self, generation: int = 1) -> None:
        self.settings = SimpleNamespace(retry_backoff_ms=0, request_timeout_ms=1_000)
        self.client_id = "c"
        self.generation = generation
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self.sent: list[dict[TopicPartition, OffsetAndMetadata]] = []
        self.identities: list[tuple[int, str, str | None]] = []  # generation, member id and instance id of each commit
        self.fetched: list[tuple[Any, ...]] = []  # the fields of each request for committed offsets
        self.late: list[tuple[int, dict[TopicPartition, OffsetAndMetadata]]] = []
        self.overlaid: set[TopicPartition] = set()  # where a late commit has landed on top of a newer one
        self.fates: Callable[[], str] = lambda: "ok"
        self.fetch_codes: Callable[[], int] = lambda: 0
        self.partition_codes: Callable[[TopicPartition], int] = lambda tp: 0
        self.forgotten = 0
        self.gate: asyncio.Event | None = None
        self.fetch_gate: asyncio.Event | None = None

    def forget_coordinator(self, kind: str, key: str) -> None:
        self.forgotten += 1

    async def request_coordinator(self, kind: str, key: str, request: Any, where: str) -> Any:
        await asyncio.sleep(0)
        if request._api.name == "OffsetFetch":
            self.fetched.append(request._fields)
            if self.fetch_gate is not None:
                await self.fetch_gate.wait()
            code = self.fetch_codes()
            rows = [(tp, self.committed[tp]) for tp in (A, B) if tp in self.committed]
            topics = [
                SimpleNamespace(
                    name=tp.topic,
                    partitions=[
                        SimpleNamespace(
                            partition=tp.partition,
                            offset=o.offset,
                            leader_epoch=o.leader_epoch,
                            metadata=o.metadata or None,
                            error_code=self.partition_codes(tp),
                        )
                    ],
                )
                for tp, o in rows
            ]
            return SimpleNamespace(error_code=code, topics=topics)
        _, generation, member_id, instance_id, topics = request._fields
        self.identities.append((generation, member_id, instance_id))
        offsets = {TopicPartition(t, p): OffsetAndMetadata(o, m, e) for t, rows in topics for p, o, e, m in rows}
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
        if fate.endswith(", late"):
            self.late.append((generation, offsets))
        if fate in ("timeout, applied", "closed, applied"):
            self.apply(generation, offsets)
        if fate.startswith("timeout"):
            raise KafkaTimeout(f"{where}: no response")
        if fate.startswith("closed"):
            raise BrokerNotAvailable(f"{where}: closed")
        if fate.startswith("without t-1: "):
            rest = {tp: offset for tp, offset in offsets.items() if tp != B}
            self.apply(generation, rest)
            return {tp: int(fate.split()[-1]) if tp == B else 0 for tp in offsets}
        if fate.startswith("codes "):
            return dict(zip(sorted(offsets), map(int, fate.split()[1:]), strict=True))
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
        """Applies some of the late commits, in any order."""
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
    """A committer as the consumer creates it, with its own generation."""

    gone_because = ""
    is_owner = False
    member_id = "m"

    def __init__(self, coordinator: Coordinator, *, is_managed: bool = True, **settings: Any) -> None:
        self.coordinator, self.generation, self.clock = coordinator, coordinator.generation, ManualClock()
        self.is_managed = is_managed
        self.registry = CollectorRegistry()
        self.commits = CommitRequestManager(
            coordinator,  # type: ignore[arg-type]
            self,
            ConsumerMetrics(self.registry, "g"),
            **{"clock": self.clock, **settings},
        )
        self.outcomes: list[tuple[int, str]] = []
        self.rejections: list[tuple[tuple[int, str], int]] = []

    def group_metadata(self) -> GroupMetadata:
        return GroupMetadata("g", self.generation, self.member_id, "i")

    def on_commit_rejected(self, sent_as: tuple[int, str], code: int) -> None:
        """Only note it: the tests end the membership themselves."""
        self.rejections.append((sent_as, code))

    def later(self, offset: int, tp: TopicPartition = A) -> None:
        self.commits.commit_async({tp: at(offset)}, lambda o, e: self.outcomes.append((o[tp].offset, type(e).__name__)))


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def scripted(*fates: str) -> Callable[[], str]:
    left = list(fates)
    return lambda: left.pop(0) if left else "ok"


async def test_one_at_a_time_and_the_newest_wins() -> None:
    """While a commit is in flight the next ones wait. Only the newest for a partition is sent, and all callbacks are
    called."""
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
    assert member.outcomes == [(1, "NoneType"), (2, "NoneType"), (3, "NoneType"), (4, "NoneType")]


@pytest.mark.parametrize("fate", [str(LOADING), str(UNAVAILABLE), str(MOVED), "closed", "timeout", "half"])
async def test_retriable_failures_are_retried(fate: str) -> None:
    """If the coordinator loads, moves, disconnects or does not respond, the commit is retried. A sync commit waits for
    it."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(fate, fate)
    await member.commits.commit({A: at(5), B: at(6)}, 5_000)
    assert coordinator.committed == {A: at(5), B: at(6)}
    # Offsets that a partial response has confirmed are not sent again, so the next response is complete.
    failed = 1 if fate == "half" else 2
    assert len(coordinator.sent) == failed + 1
    assert (coordinator.forgotten > 0) == (fate not in ("closed", "timeout"))
    failures = member.registry.get_sample_value("penstock_consumer_commits_total", {"group": "g", "result": "failed"})
    assert failures == failed


async def test_an_unknown_partition_does_not_block_others() -> None:
    """Stored partitions are done. An unknown one is retried for a while, then named in the error, and afterwards tried
    once."""
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
    assert (both.done(), member.outcomes) == (False, [(3, "NoneType")])
    await asyncio.wait_for(member.commits.commit({A: at(4)}, 60_000), 5)
    member.clock.advance(REJECTED_RETRY_MS - 1)
    await turns()
    assert not both.done()
    member.clock.advance(1)
    with pytest.raises(UnknownTopicOrPartition, match=r"OffsetCommit.*group g.*t-1"):
        await asyncio.wait_for(both, 5)
    assert member.outcomes == [(3, "NoneType"), (3, "UnknownTopicOrPartition")]
    sent = len(coordinator.sent)
    with pytest.raises(UnknownTopicOrPartition, match="t-1"):
        await asyncio.wait_for(member.commits.commit({A: at(5), B: at(5)}, 60_000), 5)
    assert coordinator.committed == {A: at(5)}
    assert len(coordinator.sent) == sent + 1
    coordinator.fates = lambda: "ok"
    await member.commits.commit({A: at(6), B: at(6)}, 5_000)
    assert coordinator.committed == {A: at(6), B: at(6)}


async def test_the_retry_time_of_a_partition_restarts() -> None:
    """The retry time of an unknown partition starts at its first failure since its last successful commit."""
    member = Member(coordinator := Coordinator())
    unknown = f"without t-1: {GONE}"
    coordinator.fates = scripted(unknown)
    await member.commits.commit({B: at(1)}, 5_000)
    member.clock.advance(REJECTED_RETRY_MS)
    coordinator.fates = scripted(unknown)
    await member.commits.commit({B: at(2)}, 5_000)
    assert coordinator.committed == {B: at(2)}


async def test_a_long_outage_makes_few_log_lines() -> None:
    """The first failed commit and its end are logged, not each retry."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: "timeout"
    with capture_logs() as logged:
        member.later(1, A)
        await turns()
        assert len(coordinator.sent) > 5
        coordinator.fates = lambda: "ok"
        await turns()
    assert member.outcomes == [(1, "NoneType")]
    (first, last) = logged
    assert (first["event"], first["error"]) == ("commit failed", "KafkaTimeout")
    assert (last["event"], last["failures"]) == ("commits are answered again", len(coordinator.sent) - 1)


async def test_a_partition_is_not_retried_beyond_its_time() -> None:
    """A partition is not retried after its retry time, even if no check ran at that moment. Only the first rejection of
    each kind is logged."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: f"without t-1: {GONE}"
    with capture_logs() as logged:
        member.later(1, B)
        await turns(5)
        assert member.outcomes == []
        member.clock.advance(REJECTED_RETRY_MS + 1)
        await turns()
        assert member.outcomes == [(1, "UnknownTopicOrPartition")]
        coordinator.fates = lambda: f"without t-1: {TOO_LONG}"
        member.later(2, B)
        await turns()
    assert [one["event"] for one in logged] == ["commit rejected"] * 2
    assert len({one["error"] for one in logged}) == 2


async def test_all_callbacks_of_a_rejected_partition_are_called() -> None:
    """Callbacks whose offsets were superseded are called too. Callbacks of other partitions wait for their own."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: f"without t-1: {TOO_LONG}"
    member.later(1, B)
    member.later(2, B)
    member.later(3, A)
    await turns()
    assert sorted(member.outcomes) == [(1, "InvalidRequest"), (2, "InvalidRequest"), (3, "NoneType")]


@pytest.mark.parametrize("first", [GONE, LOADING])
async def test_a_retry_of_some_partitions_fails(first: int) -> None:
    """The callback of a commit is called with the error of its last partition, although others were stored before."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(f"without t-1: {first}", str(NOT_AUTHORIZED))
    member.commits.commit_async(
        {A: at(1), B: at(1)}, lambda o, e: member.outcomes.append((o[B].offset, type(e).__name__))
    )
    member.later(7, A)
    await turns()
    assert member.outcomes == [(7, "NoneType"), (1, "AuthorizationFailed")]
    assert coordinator.committed == {A: at(7)}


async def test_a_failed_commit_does_not_hold_up_later_ones() -> None:
    """Offsets that were registered while a commit was in flight are sent after it has failed for good."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    coordinator.fates = scripted(str(NOT_AUTHORIZED))
    member.later(1, A)
    await turns()
    member.later(2, B)
    coordinator.gate.set()
    await turns()
    assert member.outcomes == [(1, "AuthorizationFailed"), (2, "NoneType")]
    assert coordinator.committed == {B: at(2)}


async def test_a_failed_commit_fails_no_newer_offset() -> None:
    """The callback of a newer offset of the same partition waits for its own commit."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    coordinator.fates = scripted(str(NOT_AUTHORIZED))
    member.later(1)
    await turns()
    member.later(2)
    coordinator.gate.set()
    await turns()
    assert member.outcomes == [(1, "AuthorizationFailed"), (2, "NoneType")]
    assert coordinator.committed == {A: at(2)}


async def test_a_stored_offset_does_not_fail_with_a_newer_one() -> None:
    """A commit with one stored partition fails because of its other partition, not because of a newer offset."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted("half", str(TOO_LONG))
    errors: list[str] = []
    member.commits.commit_async({A: at(1), B: at(1)}, lambda _, e: errors.append(str(e)))
    while not coordinator.committed:
        await turns(1)
    member.later(2, A)
    await turns()
    assert coordinator.sent[1] == {A: at(2), B: at(1)}
    assert member.outcomes == [(2, "InvalidRequest")]
    assert ["t-1" in error for error in errors] == [True]


@pytest.mark.parametrize("tp", [A, B])
async def test_a_sync_commit_does_not_raise_the_error_of_an_earlier_one(tp: TopicPartition) -> None:
    """The earlier commit fails for good while the sync commit waits. Its offsets are then stored, and no error is
    raised."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    coordinator.fates = scripted(str(NOT_AUTHORIZED))
    member.later(1, A)
    await turns()
    waiting = asyncio.ensure_future(member.commits.commit({tp: at(2)}, 5_000))
    await turns()
    coordinator.gate.set()
    await waiting
    assert member.outcomes == [(1, "AuthorizationFailed")]
    assert coordinator.committed == {tp: at(2)}


async def test_an_empty_commit_waits_for_the_others_after_a_failed_one() -> None:
    """The error of a pending commit that fails for good is passed to its callback, as in Java."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    coordinator.fates = scripted(str(NOT_AUTHORIZED))
    member.later(1, A)
    await turns()
    waiting = asyncio.ensure_future(member.commits.commit({}, 5_000))
    await turns()
    member.later(2, B)
    coordinator.gate.set()
    await waiting
    assert member.outcomes == [(1, "AuthorizationFailed"), (2, "NoneType")]
    assert coordinator.committed == {B: at(2)}


async def test_a_commit_of_the_old_generation_that_fails_for_good() -> None:
    """It is not repeated in the new generation, so its callback is called and a sync commit raises its error."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    coordinator.fates = scripted(str(NOT_AUTHORIZED))
    waiting = asyncio.ensure_future(member.commits.commit({A: at(1)}, 60_000))
    member.later(1, A)
    await turns()
    coordinator.generation = member.generation = 2
    member.commits.retain([A])
    coordinator.gate.set()
    with pytest.raises(AuthorizationFailed):
        await asyncio.wait_for(waiting, 5)
    assert member.outcomes == [(1, "AuthorizationFailed")]


async def test_a_member_without_an_assignment_commits_nothing() -> None:
    """A member without an assignment commits nothing, because a broker would accept it as a commit from outside the
    group."""
    for managed, generation, expected in ((True, -1, {}), (False, -1, {A: at(5)}), (True, 0, {A: at(5)})):
        member = Member(coordinator := Coordinator(generation), is_managed=managed)
        member.later(5)
        await turns()
        assert coordinator.committed == expected
        assert member.outcomes == [(5, "NoneType" if expected else "UnknownMember")]


async def test_the_identity_of_a_commit() -> None:
    """It is the member's generation, member id and instance id. From outside the group it has no instance id."""
    member = Member(coordinator := Coordinator())
    await member.commits.commit({A: at(5)}, 5_000)
    assert coordinator.identities == [(1, "m", "i")]
    member = Member(coordinator := Coordinator(-1), is_managed=False)
    member.member_id = ""
    await member.commits.commit({A: at(5)}, 5_000)
    assert coordinator.identities == [(-1, "", None)]


async def test_stored_offsets_are_reported() -> None:
    """`on_committed` is called with the offsets that the coordinator has stored, and only if there are any."""
    stored: list[Any] = []
    member = Member(coordinator := Coordinator(), on_committed=stored.append)
    coordinator.fates = scripted(str(LOADING), f"without t-1: {TOO_LONG}")
    with pytest.raises(InvalidRequest):
        await member.commits.commit({A: at(1), B: at(1)}, 5_000)
    assert stored == [{A: at(1)}]


async def test_a_stored_offset_does_not_fail_with_the_rest_of_its_request() -> None:
    """If an error of the group comes with some offsets only, the commits of the stored ones succeed."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(f"without t-1: {NOT_AUTHORIZED}")
    stored = asyncio.ensure_future(member.commits.commit({A: at(1)}, 5_000))
    failed = asyncio.ensure_future(member.commits.commit({B: at(1)}, 5_000))
    await stored
    with pytest.raises(AuthorizationFailed):
        await failed
    assert coordinator.sent == [{A: at(1), B: at(1)}]


async def test_an_error_of_the_group_comes_before_that_of_a_partition() -> None:
    """If a response has both, the whole request is retried without a limit. No offset is given up."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: f"codes {LOADING} {TOO_LONG}"
    member.later(1, A)
    member.later(2, B)
    await turns(5)
    member.clock.advance(REJECTED_RETRY_MS)
    await turns()
    assert member.outcomes == []
    coordinator.fates = lambda: "ok"
    await turns()
    assert member.outcomes == [(1, "NoneType"), (2, "NoneType")]


async def test_the_latency_of_a_commit_is_measured() -> None:
    """Latency is measured from the request to its response."""
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
    """Each wait is twice the previous one, up to one second. A success resets it."""

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


def test_a_commit_that_failed_for_good_delays_no_other() -> None:
    """After an error that is not retried, the next commit is sent without a backoff."""

    async def wait_ms() -> int:
        member = Member(coordinator := Coordinator(), clock=virtual_time.LoopClock())
        coordinator.settings.retry_backoff_ms = 100
        times: list[float] = []

        def fate() -> str:
            times.append(asyncio.get_running_loop().time())
            if times[1:]:
                return "ok"
            member.later(2, B)
            return str(NOT_AUTHORIZED)

        coordinator.fates = fate
        member.later(1, A)
        await virtual_time.let_pass(60)
        await member.commits.close()
        assert coordinator.committed == {B: at(2)}
        return round(1_000 * (times[1] - times[0]))

    assert virtual_time.run(wait_ms()) == 0


def test_a_drain_and_a_commit_end_in_time() -> None:
    """A drain and a commit end at their own deadlines, at once if it has passed. Earlier responses are waited for."""

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
        with pytest.raises(KafkaTimeout, match="within 500 ms"):
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
    """LATE_MS after an unanswered commit the offsets are read back and committed again."""

    async def committed() -> list[tuple[int, dict[TopicPartition, OffsetAndMetadata]]]:
        member = Member(coordinator := Coordinator(), clock=virtual_time.LoopClock())
        await virtual_time.let_pass(7)
        coordinator.fates = scripted("timeout, late")
        await member.commits.commit({A: at(9)}, 5_000)
        await turns()
        coordinator.late = [(1, {A: at(5)})]
        coordinator.apply_late()
        found = []
        for seconds in (LATE_MS / 1000 - 1 / 1000, 2 / 1000):
            await virtual_time.let_pass(seconds)
            found.append((len(coordinator.sent), dict(coordinator.committed)))
        await member.commits.close()
        return found

    assert virtual_time.run(committed()) == [(2, {A: at(5)}), (3, {A: at(9)})]


def test_a_read_back_that_fails_is_repeated_with_a_backoff() -> None:
    """Offsets are read back after the next successful commit, and after LATE_MS until that succeeds."""

    async def times_ms() -> list[int]:
        member = Member(coordinator := Coordinator(), clock=virtual_time.LoopClock())
        coordinator.settings.retry_backoff_ms = 100
        times: list[int] = []

        def code() -> int:
            times.append(round(1_000 * asyncio.get_running_loop().time()))
            return NOT_AUTHORIZED if times[3:] == [] else 0

        coordinator.fates = scripted("timeout, late")
        coordinator.fetch_codes = code
        await member.commits.commit({A: at(9)}, 5_000)
        await virtual_time.let_pass(2 * LATE_MS / 1000)
        await member.commits.close()
        return times

    assert virtual_time.run(times_ms()) == [100, LATE_MS, LATE_MS + 100, LATE_MS + 200]


async def test_oversized_metadata_fails_its_partition_at_once() -> None:
    """The other partitions of the commit are stored, and later commits continue."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: f"without t-1: {TOO_LONG}"
    with pytest.raises(InvalidRequest, match="t-1"):
        await member.commits.commit({A: at(1), B: at(1)}, 5_000)
    assert coordinator.committed == {A: at(1)}
    failures = member.registry.get_sample_value("penstock_consumer_commits_total", {"group": "g", "result": "failed"})
    assert failures == 1
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
async def test_errors_that_need_a_rebalance_are_raised_at_once(code: int, error: type[PenstockError]) -> None:
    """Sync commits raise the error and async commits pass it on. It names client, group, generation, member and
    request. The member is called if it was removed."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: str(code)
    with pytest.raises(error) as raised:
        await member.commits.commit({A: at(5)}, 5_000)
    assert "OffsetCommit of client c, group g, generation 1, member m, instance i, t-0" in str(raised.value)
    assert member.rejections == ([((1, "m"), code)] if issubclass(error, CommitFailed) else [])
    assert coordinator.forgotten == 0
    member.later(6)
    await turns()
    assert member.outcomes == [(6, error.__name__)]
    await member.commits.close()


@pytest.mark.parametrize(
    ("code", "error", "named"),
    [
        (GENERATION, IllegalGeneration, True),
        (UNKNOWN, UnknownMember, True),
        (NOT_AUTHORIZED, AuthorizationFailed, False),
    ],
)
async def test_the_reason_of_a_lost_membership(code: int, error: type[PenstockError], named: bool) -> None:
    """The error of a commit has the reason if the group has removed the member."""
    member = Member(coordinator := Coordinator())
    member.gone_because = "no poll in time"
    coordinator.fates = lambda: str(code)
    with pytest.raises(error) as raised:
        await member.commits.commit({A: at(5)}, 5_000)
    assert ("no poll in time" in str(raised.value)) == named
    await member.commits.close()


@pytest.mark.parametrize("code", [GENERATION, REBALANCE])
async def test_a_commit_of_an_owner_waits_for_the_end_of_a_rebalance(code: int) -> None:
    """A member that owns partitions commits them in its next generation. No error is raised or passed on."""
    member = Member(coordinator := Coordinator())
    member.is_owner = True
    coordinator.fates = lambda: str(code)
    member.later(4)
    waiting = asyncio.ensure_future(member.commits.commit({A: at(5)}, 60_000))
    await turns()
    assert (waiting.done(), member.outcomes) == (False, [])
    coordinator.fates = lambda: "ok"
    coordinator.generation = member.generation = 2
    member.commits.retain([A])
    await asyncio.wait_for(waiting, 5)
    assert (coordinator.committed, member.outcomes) == ({A: at(5)}, [(4, "NoneType")])


async def test_pending_callbacks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the coordinator is unavailable the oldest callbacks get a retriable error. The newest offsets are
    committed."""
    monkeypatch.setattr("penstock.shared.clients.consumer.commit_request_manager.WAITING_MAX", 3)
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    for offset in range(1, 8):
        member.later(offset)
    await asyncio.sleep(0)
    assert member.outcomes == [(offset, "CoordinatorNotAvailable") for offset in range(1, 5)]
    coordinator.gate.set()
    await member.commits.commit({}, 5_000)
    assert member.outcomes[4:] == [(5, "NoneType"), (6, "NoneType"), (7, "NoneType")]
    assert coordinator.committed == {A: at(7)}


async def test_callbacks_are_called_before_a_sync_commit_returns() -> None:
    """A sync commit completes the pending commits before it, and their callbacks are called first."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(str(LOADING), "delay5")
    member.later(3)
    member.later(7, B)
    await member.commits.commit({A: at(5)}, 5_000)
    assert member.outcomes == [(3, "NoneType"), (7, "NoneType")]
    assert coordinator.committed == {A: at(5), B: at(7)}


async def test_an_empty_commit_waits_for_pending_commits() -> None:
    """An empty commit returns when all earlier commits are done."""
    member = Member(coordinator := Coordinator())
    await member.commits.commit({}, 5_000)
    coordinator.gate = asyncio.Event()
    member.later(1)
    waiting = asyncio.create_task(member.commits.commit({}, 5_000))
    await turns()
    assert not waiting.done()
    coordinator.gate.set()
    await waiting
    assert member.outcomes == [(1, "NoneType")]
    coordinator.gate = asyncio.Event()
    member.later(2)
    with pytest.raises(KafkaTimeout, match="within 5 ms"):
        await member.commits.commit({}, 5)
    await member.commits.close()


@pytest.mark.parametrize("code", [UNKNOWN, GENERATION, REBALANCE])
async def test_a_revocation_continues_if_a_commit_cannot_succeed(code: int) -> None:
    """The drain of a revocation ends at once if offsets wait for a new generation, and at its deadline without a
    response."""
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


async def test_a_drain_sends_the_pending_offsets_once_more() -> None:
    """Offsets that wait for a new generation are committed if the coordinator accepts them by then."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(str(REBALANCE))
    member.later(1)
    await turns()
    assert (coordinator.committed, member.outcomes) == ({}, [(1, "RebalanceInProgress")])
    await member.commits.drain(5_000)
    assert coordinator.committed == {A: at(1)}


async def test_a_drain_does_not_wait_for_a_read_back() -> None:
    """A drain ends as soon as all offsets are stored, although they are read back without a response."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted("timeout, late")
    coordinator.fetch_gate = asyncio.Event()
    member.later(1)
    await turns()
    assert (coordinator.committed, len(coordinator.fetched)) == ({A: at(1)}, 1)
    async with asyncio.timeout(5):
        await member.commits.drain(60_000)
    await member.commits.close()


async def test_a_callback_that_raises_affects_nothing_else() -> None:
    """The exception of a callback is logged. Other callbacks are called, and commits continue."""
    member = Member(coordinator := Coordinator())

    def broken(*_: object) -> None:
        raise RuntimeError("in the callback")

    member.commits.commit_async({A: at(1)}, broken)
    member.later(2)
    await turns()
    assert member.outcomes == [(2, "NoneType")]
    assert coordinator.committed == {A: at(2)}


async def test_failed_offsets_are_committed_in_the_new_generation() -> None:
    """After a rejection due to a rebalance, a kept partition is committed in the new generation. The offset of a
    revoked one is dropped, and its callback is called."""
    member = Member(coordinator := Coordinator())
    coordinator.generation = 2
    member.later(5)
    member.commits.commit_async({B: at(6)}, lambda o, e: member.outcomes.append((o[B].offset, type(e).__name__)))
    await turns()
    assert (coordinator.committed, member.outcomes) == ({}, [(5, "IllegalGeneration"), (6, "IllegalGeneration")])
    member.generation = 2
    member.commits.retain([A])
    await turns()
    assert coordinator.committed == {A: at(5)}


async def test_dropped_offsets_are_logged() -> None:
    """The log names the lost partitions with pending offsets. It has no line if none of them has any."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    member.later(5)
    member.later(6, B)
    await turns()
    with capture_logs() as logged:
        member.commits.retain([A])
        member.commits.retain([A])
    assert [(one["event"], one["partitions"]) for one in logged] == [
        ("pending offsets dropped with their partitions", ["t-1"])
    ]
    await member.commits.close()


async def test_a_commit_of_lost_partitions_ends_at_once() -> None:
    """A sync commit without a response ends at once when its partitions are lost."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    waiting = asyncio.ensure_future(member.commits.commit({A: at(5)}, 60_000))
    await turns()
    member.commits.retain([B])
    with pytest.raises(CommitFailed, match=r"partitions .*taken away"):
        await asyncio.wait_for(waiting, 5)
    await member.commits.close()


async def test_a_commit_during_close_ends_at_once() -> None:
    """A sync commit without a response ends at once when the consumer is closed, and nothing is sent after that."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    waiting = asyncio.ensure_future(member.commits.commit({A: at(5)}, 200))
    member.later(6, B)
    await turns()
    for _ in range(2):
        await member.commits.close()
        assert member.outcomes == [(6, "CommitFailed")]
    with pytest.raises(CommitFailed):
        await waiting
    await turns()
    assert len(coordinator.sent) == 1


async def test_close_ends_all_tasks() -> None:
    """After `close`, neither a commit nor a read-back without a response waits for it any more."""
    tasks = asyncio.all_tasks()
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted("timeout, late")
    await member.commits.commit({A: at(5)}, 5_000)
    coordinator.gate = coordinator.fetch_gate = asyncio.Event()
    member.later(6)
    member.clock.advance(LATE_MS)
    member.commits._start_late_read_back()
    await turns()
    assert len(asyncio.all_tasks() - tasks) == 2
    await member.commits.close()
    assert asyncio.all_tasks() == tasks


async def test_the_callback_of_a_commit_of_lost_partitions_is_called_at_once() -> None:
    """A commit without a response fails when one of its partitions is lost. Those of kept partitions still wait."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    member.later(5)
    member.commits.commit_async(
        {A: at(6), B: at(7)}, lambda o, e: member.outcomes.append((o[B].offset, type(e).__name__))
    )
    await turns()
    member.commits.retain([A, TopicPartition("t", 2)])
    assert member.outcomes == [(7, "CommitFailed")]
    coordinator.gate.set()
    await turns()
    assert member.outcomes == [(7, "CommitFailed"), (5, "NoneType")]


async def test_committed_offsets_are_fetched() -> None:
    """An offset of 0 is a commit, -1 is none. A retriable error of the group is retried, another one is raised."""
    member = Member(coordinator := Coordinator())
    coordinator.committed = {A: at(0), B: at(-1)}
    codes = [LOADING, 0, NOT_AUTHORIZED]
    coordinator.fetch_codes = lambda: codes.pop(0)
    assert await member.commits.fetch([A, B], 5_000) == {A: at(0)}
    with pytest.raises(AuthorizationFailed):
        await member.commits.fetch([A, B], 5_000)
    assert codes == []


async def test_the_metadata_and_leader_epoch_of_committed_offsets() -> None:
    """They are returned as they were committed. Without metadata the text is empty."""
    member = Member(Coordinator())
    await member.commits.commit({A: OffsetAndMetadata(5, "text", 3), B: at(6)}, 5_000)
    found = await member.commits.fetch([A, B], 5_000)
    assert {tp: tuple(offset) for tp, offset in found.items()} == {A: (5, "text", 3), B: (6, "", -1)}


async def test_an_error_of_a_partition_whose_offset_is_fetched() -> None:
    """A retriable error of a partition is retried, another one is raised and names the partition."""
    member = Member(coordinator := Coordinator())
    coordinator.committed = {A: at(1), B: at(2)}
    codes = [UNSTABLE, 0, TOPIC_DENIED]
    coordinator.partition_codes = lambda tp: codes.pop(0) if tp == B else 0
    assert await member.commits.fetch([A, B], 5_000) == {A: at(1), B: at(2)}
    with pytest.raises(AuthorizationFailed, match="t-1"):
        await member.commits.fetch([A, B], 5_000)
    assert codes == []


async def test_the_request_for_committed_offsets() -> None:
    """It has the group and the partitions of each topic, and open transactions have to end first."""
    member = Member(coordinator := Coordinator())
    await member.commits.fetch([A, B, TopicPartition("u", 0)], 5_000)
    assert coordinator.fetched == [("g", [("t", [0, 1], {}), ("u", [0], {})], True, {})]


async def test_an_error_of_the_old_generation_is_ignored() -> None:
    """A commit in flight during a rebalance is rejected. A sync commit made since continues in the new generation."""
    member = Member(coordinator := Coordinator())
    coordinator.gate = asyncio.Event()
    member.later(5)
    await turns()
    coordinator.generation = member.generation = 2
    member.commits.retain([A])
    waiting = asyncio.ensure_future(member.commits.commit({A: at(6)}, 5_000))
    await turns()
    coordinator.gate.set()
    await waiting
    assert coordinator.committed == {A: at(6)}
    assert member.outcomes == [(5, "NoneType")]


@pytest.mark.parametrize("generation", [3, 1])
async def test_a_commit_of_the_old_generation_is_retried(generation: int) -> None:
    """A commit in flight during a rebalance is sent again, even if no other commit follows. The generations of a group
    that was deleted begin again at 1."""
    member = Member(coordinator := Coordinator(2))
    coordinator.gate = asyncio.Event()
    member.later(5)
    await turns()
    coordinator.generation = member.generation = generation
    member.commits.retain([A])
    coordinator.gate.set()
    await turns()
    assert (coordinator.committed, member.outcomes) == ({A: at(5)}, [(5, "NoneType")])


async def test_a_sync_commit_has_a_deadline() -> None:
    """At its deadline a sync commit raises KafkaTimeout with the last failure."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = lambda: str(LOADING)
    with pytest.raises(KafkaTimeout, match=r"20 ms.*COORDINATOR_LOAD_IN_PROGRESS"):
        await member.commits.commit({A: at(5)}, 20)
    await member.commits.close()


async def test_the_deadline_of_a_sync_commit_has_no_error_of_an_earlier_one() -> None:
    """Only failures during the wait are in the KafkaTimeout."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(str(NOT_AUTHORIZED))
    member.later(1)
    await turns()
    coordinator.gate = asyncio.Event()
    with pytest.raises(KafkaTimeout, match=r"within 0 ms$") as raised:
        await member.commits.commit({A: at(2)}, 0)
    assert raised.value.__cause__ is None
    await member.commits.close()


async def test_a_commit_with_a_response_is_not_read_back() -> None:
    """Only a commit without a response can be applied late."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(str(LOADING))
    await member.commits.commit({A: at(5)}, 5_000)
    assert (len(coordinator.sent), coordinator.fetched) == (2, [])


async def test_a_late_commit_below_the_next_one_is_covered_at_once() -> None:
    """The next commit is read back. If the late one was applied after it, the newest offset is sent again."""
    member = Member(coordinator := Coordinator())

    def fate() -> str:
        if coordinator.sent[1:]:
            return "ok"
        member.later(9)
        return "timeout, late"

    def apply_late() -> int:
        if coordinator.late:
            coordinator.apply_late()
        return 0

    coordinator.fates = fate
    coordinator.fetch_codes = apply_late
    member.later(5)
    await turns()
    assert [sent[A].offset for sent in coordinator.sent] == [5, 9, 9]
    assert (coordinator.committed, member.outcomes) == ({A: at(9)}, [(5, "NoneType"), (9, "NoneType")])
    await member.commits.close()


@pytest.mark.parametrize("fate", ["timeout, late", "closed, late"])
async def test_a_late_commit_is_covered_when_it_cannot_land_any_more(fate: str) -> None:
    """If an unanswered commit is applied after a newer one was read back, the newest is committed again after
    LATE_MS."""
    member = Member(coordinator := Coordinator())
    coordinator.fates = scripted(fate)
    member.later(5)
    await turns(5)
    await member.commits.commit({A: at(9)}, 5_000)
    await turns()
    assert coordinator.committed == {A: at(9)}
    coordinator.apply_late()
    assert coordinator.committed == {A: at(5)}
    member.clock.advance(LATE_MS)
    member.commits._start_late_read_back()
    await turns()
    assert coordinator.committed == {A: at(9)}
    await member.commits.close()


FATES = ["ok", "ok", "ok", "delay1", "delay7", "half", *(f"{fate}{end}" for fate in ("timeout", "closed")
         for end in ("", ", applied")), "timeout, late", str(LOADING), str(MOVED), str(REBALANCE)]  # fmt: skip
STEPS = ["process"] * 5 + ["async"] * 4 + ["sync", "turns", "turns", "land", "rebalance", "drain and revoke"]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=50), st.integers(0, 2**32))
async def test_committed_offsets_never_go_backwards_or_ahead(steps: list[str], seed: int) -> None:
    """Under any failures, delays and rebalances, no commit exceeds the processed records. Neither acknowledged commits
    nor the offsets that the next owner finds go backwards. In the end the newest offset is committed."""
    rng = random.Random(seed)
    member = Member(coordinator := Coordinator())
    processed = {A: 0, B: 0}
    acknowledged, found = {A: 0, B: 0}, {A: 0, B: 0}
    coordinator.fates = lambda: rng.choice(FATES)

    def on_commit(offsets: Any, error: Exception | None) -> None:
        if error is None:
            for tp, offset in offsets.items():
                acknowledged[tp] = max(acknowledged[tp], offset.offset)

    def current() -> dict[TopicPartition, OffsetAndMetadata]:
        return {tp: at(offset) for tp, offset in processed.items() if offset}

    for step in steps:
        if step == "process":
            processed[rng.choice([A, B])] += rng.randint(1, 9)
        elif step == "async" and current():
            member.commits.commit_async(current(), on_commit)
        elif step == "sync" and (offsets := current()):
            try:
                await member.commits.commit(offsets, 5_000)
                on_commit(offsets, None)
            except (RetriableError, CommitFailed):
                pass
        elif step == "turns":
            await turns(rng.randint(1, 6))
        elif step == "land":
            coordinator.land(rng)
        elif step in ("rebalance", "drain and revoke"):
            if step == "drain and revoke":
                await member.commits.drain(5_000)
            coordinator.generation += 1  # earlier commits are rejected from here on
            for tp, offset in coordinator.committed.items():
                assert offset.offset <= processed[tp]
                assert found[tp] <= offset.offset or tp in coordinator.overlaid
                found[tp] = max(found[tp], offset.offset)
            coordinator.overlaid = set(coordinator.committed)  # the next owner may go on from lower
            if step == "drain and revoke":  # another had them and gave them back as they were
                member.commits.retain(())
            member.generation = coordinator.generation
            member.commits.retain((A, B))
        assert all(sent[tp].offset <= processed[tp] for sent in coordinator.sent for tp in sent)
    coordinator.fates = lambda: "ok"
    if current():
        await member.commits.commit(current(), 5_000)
    coordinator.land(rng)
    member.clock.advance(LATE_MS)
    member.commits._start_late_read_back()
    await turns()
    assert coordinator.committed == current()
    assert all(acknowledged[tp] <= offset.offset for tp, offset in coordinator.committed.items())
    by_partition = {tp: [sent[tp].offset for sent in coordinator.sent if tp in sent] for tp in (A, B)}
    assert all(offsets == sorted(offsets) for offsets in by_partition.values())
    await member.commits.close()
