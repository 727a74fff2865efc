"""Commits and listeners during rebalances, late polls, and the deadline of `close`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.clients.consumer.consumer import LEAVE_TIME_MS
from penstock.shared.common.errors import CommitFailed, IllegalState, KafkaTimeout
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Action, Api, Close, Delay, Drop, ErrorCode, Fail, FakeCluster, Request
from tests.shared.clients.consumer.filled import filled

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
RECORDS = 400

Partitions = frozenset[TopicPartition]


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with filled(RECORDS, partitions=2) as cluster:
        yield cluster


def member(cluster: FakeCluster, **given: object) -> Consumer:
    kafka = KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers,
        client_id=given.pop("client_id", None),  # type: ignore[arg-type]
        request_timeout_ms=given.pop("request_timeout_ms", 2_000),  # type: ignore[arg-type]
        retry_backoff_ms=5,
    )
    settings = {"group_id": "g", "auto_offset_reset": "earliest", "heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20}
    return Consumer(kafka, ConsumerSettings.model_validate({"max_poll_records": 3, **settings, **given}))


@asynccontextmanager
async def opened(cluster: FakeCluster, **given: object) -> AsyncIterator[Consumer]:
    async with asyncio.timeout(20), member(cluster, **given) as consumer:
        yield consumer


async def until(consumer: Consumer, true: Callable[[], object]) -> int:
    """Polls until a condition holds, and returns the number of records."""
    records = 0
    while not true():
        records += sum(map(len, (await consumer.poll(10)).values()))
    return records


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_a_plain_loop_survives_ordinary_rebalances(cluster: FakeCluster, strategy: str) -> None:
    """With `sync` no poll raises for an ordinary rebalance, no committed offset goes backwards, and all records are
    read."""
    cluster.control(Api.SYNC_GROUP, Delay(20))
    committed: dict[TopicPartition, int] = defaultdict(int)
    seen: set[tuple[int, int]] = set()
    joined = asyncio.Event()

    def note(_: Request) -> None:
        for tp, at in cluster.committed("g").items():
            assert at.offset >= committed[tp]
            committed[tp] = at.offset

    cluster.control(Api.OFFSET_COMMIT, note)

    async def read(consumer: Consumer, is_over: Callable[[], object]) -> None:
        while not is_over():
            for tp, columns in (await consumer.poll(10)).items():
                seen.update((tp.partition, offset) for offset in columns.offsets.tolist())
            await asyncio.wait_for(asyncio.shield(consumer.committed(A)), 5)  # as one that works on them

    given = {"commit_strategy": "sync", "partition_assignment_strategy": strategy}
    async with opened(cluster, **given) as first:
        first.subscribe(["t"])

        async def come_and_go() -> None:
            for _ in range(3):
                async with opened(cluster, **given) as second:
                    second.subscribe(["t"])
                    before = len(seen)
                    await read(second, lambda s=second, b=before: s.assignment() and len(seen) > b + 12)
            joined.set()

        coming = asyncio.create_task(come_and_go())
        await read(first, lambda: coming.done() and len(seen) == 2 * RECORDS)
        await coming
    assert joined.is_set()
    assert {tp: at.offset for tp, at in cluster.committed("g").items()} == {A: RECORDS, B: RECORDS}


async def test_a_listener_that_raises_cancelled_error(cluster: FakeCluster) -> None:
    """A CancelledError from a listener is an error like any other: `poll` raises it once, and the member reads on."""

    class Cancels(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            worker = asyncio.create_task(asyncio.Event().wait())
            worker.cancel()
            await worker

    async with opened(cluster) as consumer:
        consumer.subscribe(["t"], Cancels())
        records = [0]

        def has_records() -> bool:
            return records[0] > 0

        while not has_records():
            records[0] += sum(map(len, (await consumer.poll(10)).values()))
        consumer.enforce_rebalance()
        with pytest.raises(IllegalState, match=r"group g.*on_partitions_revoked.*CancelledError"):
            await until(consumer, lambda: False)
        before = consumer.group_metadata().generation_id
        records[0] = 0
        while not has_records():
            records[0] += sum(map(len, (await consumer.poll(10)).values()))
        assert consumer.group_metadata().generation_id >= before
        assert consumer.assignment() == {A, B}
        with pytest.raises(IllegalState):
            await consumer.close()  # its revocation fails in the same way


def hold_up(seconds: float) -> None:
    """Blocks without awaiting, as CPU-bound code does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("then", ["poll", "commit", "poll without commits"])
async def test_a_late_poll_is_detected_whatever_blocked(cluster: FakeCluster, then: str) -> None:
    """The member has left: its partitions are lost, its commit fails with the reason, and it joins again."""
    lost: list[Partitions] = []

    class Listener(RebalanceListener):
        async def on_partitions_lost(self, partitions: Partitions) -> None:
            lost.append(partitions)

    left: list[Request] = []
    cluster.control(Api.LEAVE_GROUP, left.append)
    strategy = "sync" if then == "poll" else "none"
    async with opened(cluster, max_poll_interval_ms=150, commit_strategy=strategy) as consumer:
        consumer.subscribe(["t"], Listener())
        while not await consumer.poll(50):
            pass
        before = consumer.group_metadata().generation_id
        hold_up(0.3)
        if then == "poll without commits":
            await consumer.poll(10)
        else:
            with pytest.raises(CommitFailed, match=r"left.*max_poll_interval_ms=150"):
                await (consumer.poll(10) if then == "poll" else consumer.commit())
        await until(consumer, lambda: lost and consumer.group_metadata().generation_id > before)
        assert lost == [frozenset({A, B})]
        assert len(left) == 1
        await handed_out(consumer, 9)  # those that were lost among them
        await consumer.commit()
    assert len(lost) == 1


async def test_a_late_static_member_gets_the_reason(cluster: FakeCluster) -> None:
    """A static member sends no LeaveGroup and keeps its assignment. Its commit states which call came too late."""
    async with opened(cluster, max_poll_interval_ms=150, group_instance_id="i") as consumer:
        consumer.subscribe(["t"])
        while not await consumer.poll(50):
            pass
        hold_up(0.3)
        with pytest.raises(CommitFailed, match=r"session.*max_poll_interval_ms=150"):
            await consumer.commit()


async def test_a_close_has_one_deadline_and_sends_leave_group(cluster: FakeCluster) -> None:
    """Listener, commit and LeaveGroup share one deadline. LeaveGroup is sent, however long the listener hangs."""

    class Hangs(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            await asyncio.Event().wait()

    left: list[Request] = []
    cluster.control(Api.LEAVE_GROUP, left.append)
    for timeout_ms, left_so_far in ((600, 1), (0, 2)):
        consumer = member(cluster, commit_strategy="auto")
        await consumer.start()
        consumer.subscribe(["t"], Hangs())
        async with asyncio.timeout(10):
            while not await consumer.poll(20):
                pass
        async with asyncio.timeout(20):  # the listener's own limit is longer
            with pytest.raises(KafkaTimeout, match=r"group g.*on_partitions_revoked") as hung:
                await consumer.close(timeout_ms)
        (listener_ms,) = re.findall(r"not done within (\d+) ms", str(hung.value))
        assert int(listener_ms) <= max(0, timeout_ms - LEAVE_TIME_MS)
        assert len(left) == left_so_far


async def test_a_second_close_has_its_own_deadline(cluster: FakeCluster) -> None:
    """It ends the LeaveGroup of a close without one, which gets no response."""
    async with opened(cluster, request_timeout_ms=60_000) as consumer:
        consumer.subscribe(["t"])
        await until(consumer, consumer.assignment)
        leaving = asyncio.Event()

        def drop(_: Request) -> Drop:
            leaving.set()
            return Drop()

        with cluster.control(Api.LEAVE_GROUP, drop):
            closing = asyncio.create_task(consumer.close())
            await leaving.wait()
            closing.cancel()
            async with asyncio.timeout(5):
                await consumer.close(0)


async def test_a_cancelled_close_does_not_wait_for_the_response_to_leave_group(cluster: FakeCluster) -> None:
    """LeaveGroup is sent, and has LEAVE_TIME_MS, also if the close has no deadline."""
    began = asyncio.Event()

    class Hangs(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            began.set()
            await asyncio.Event().wait()

    left: list[Request] = []

    def drop(request: Request) -> Drop:
        left.append(request)
        return Drop()

    async with opened(cluster, request_timeout_ms=60_000) as consumer:
        consumer.subscribe(["t"], Hangs())
        await until(consumer, consumer.assignment)
        cluster.control(Api.LEAVE_GROUP, drop)
        closing = asyncio.create_task(consumer.close())
        await began.wait()
        closing.cancel()
        assert (await asyncio.wait({closing}, timeout=5))[0] == {closing}
        assert closing.cancelled()
        assert len(left) == 1


async def test_a_listener_may_wait_for_a_task_that_closes(cluster: FakeCluster) -> None:
    """The task that polls ends with the consumer's `async with`. Its close does not wait for the listener."""

    class WaitsForPolls(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            await asyncio.wait({polling})

    async def poll() -> None:
        async with consumer:
            consumer.subscribe(["t"], WaitsForPolls())
            while True:
                await consumer.poll(20)
                if consumer.assignment():
                    assigned.set()

    assigned = asyncio.Event()
    consumer = member(cluster)
    polling = asyncio.create_task(poll())
    async with asyncio.timeout(5):
        await assigned.wait()
        await consumer.close()
        with pytest.raises(IllegalState):
            await polling


async def test_a_revocation_stays_within_the_listener_timeout(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Listener and commit share one limit. If the listener hangs, no time is left for the commit."""

    class Hangs(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            await asyncio.Event().wait()

    joins: list[float] = []
    consumer = member(cluster, listener_timeout_ms=600)
    await consumer.start()
    consumer.subscribe(["t"], Hangs())
    async with asyncio.timeout(10):
        while not await consumer.poll(20):
            pass
        with cluster.control(Api.OFFSET_COMMIT, Drop()):
            cluster.control(Api.JOIN_GROUP, lambda _: joins.append(time.monotonic()))
            consumer.commit_async()  # gets no response, so that the revocation waits for it as well
            started = time.monotonic()
            consumer.enforce_rebalance()
            with pytest.raises(KafkaTimeout, match=r"on_partitions_revoked.*600 ms"):
                await until(consumer, lambda: False)
            while not joins:
                await consumer.poll(10)
        assert joins[0] - started > 0.5
        (waited_ms,) = re.findall(r"commits are pending .*waited_ms=(\d+)", caplog.text)
        assert int(waited_ms) < 100
        with contextlib.suppress(KafkaTimeout):
            await consumer.close()


class Commits(RebalanceListener):
    """The pattern of Kafka's documentation: commit in `on_partitions_revoked`."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.calls: list[tuple[str, Partitions]] = []

    async def on_partitions_revoked(self, partitions: Partitions) -> None:
        self.calls.append(("revoked", partitions))
        await self.consumer.commit()

    async def on_partitions_lost(self, partitions: Partitions) -> None:
        self.calls.append(("lost", partitions))


async def handed_out(consumer: Consumer, count: int) -> dict[TopicPartition, int]:
    """Polls until the given number of records has arrived, and returns the position of each partition."""
    positions: dict[TopicPartition, int] = {}
    records = 0
    while records < count:
        for tp, columns in (await consumer.poll(50)).items():
            records += len(columns)
            positions[tp] = columns.offsets.item(-1) + 1
    return positions


def offsets_of(cluster: FakeCluster) -> dict[TopicPartition, int]:
    return {tp: at.offset for tp, at in cluster.committed("g").items()}


async def heartbeats(cluster: FakeCluster, client_id: str, count: int) -> None:
    """Waits until the member has sent the given number of further heartbeats."""
    sent = [0]

    def note(request: Request) -> None:
        sent[0] += request.client_id == client_id

    with cluster.control(Api.HEARTBEAT, note):
        while sent[0] < count:  # noqa: ASYNC110 - beside the user's code
            await asyncio.sleep(0)


STRATEGIES = pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])


@STRATEGIES
async def test_a_listener_waits_for_the_poll(cluster: FakeCluster, strategy: str) -> None:
    """During processing the listener is not called and nothing is committed. The next poll marks the records as
    processed and calls it."""
    async with opened(cluster, partition_assignment_strategy=strategy, client_id="one") as first:
        listener = Commits(first)
        first.subscribe(["t"], listener)
        at = await handed_out(first, 9)
        async with opened(cluster, partition_assignment_strategy=strategy) as second:
            second.subscribe(["t"])
            joining = asyncio.create_task(until(second, second.assignment))
            await heartbeats(cluster, "one", 5)  # it knows of the rebalance by now
            assert listener.calls == []
            assert offsets_of(cluster) == {}
            assert not joining.done()
            while not joining.done():
                await first.poll(10, 1)
            await joining
        ((name, revoked),) = listener.calls
        assert name == "revoked"
        assert {tp: offsets_of(cluster)[tp] for tp in revoked & at.keys()} == {tp: at[tp] for tp in revoked & at.keys()}


@STRATEGIES
async def test_a_crash_in_the_middle_of_a_batch_loses_no_record(cluster: FakeCluster, strategy: str) -> None:
    """The listener that commits was not called, so the next member reads the records that the first had not
    processed."""
    given = {"partition_assignment_strategy": strategy, "session_timeout_ms": 300}
    crashed = member(cluster, client_id="one", **given)
    await crashed.start()
    crashed.subscribe(["t"], Commits(crashed))
    async with opened(cluster, **given) as second:
        await handed_out(crashed, 9)
        second.subscribe(["t"])
        joining = asyncio.create_task(until(second, lambda: second.assignment() == {A, B}))
        await heartbeats(cluster, "one", 5)
        await crashed._connection.close()  # as a process that is killed
        await joining
        assert {tp: await second.position(tp) for tp in (A, B)} != {A: 3, B: 3}
        assert offsets_of(cluster) == {}
    with contextlib.suppress(Exception):
        await crashed.close(100)


@STRATEGIES
async def test_an_iteration_calls_the_listener_before_the_next_record(cluster: FakeCluster, strategy: str) -> None:
    """The listener is called before the next record, also with unread records. Its commit includes the last record and
    no unread one."""
    async with opened(cluster, partition_assignment_strategy=strategy, max_poll_records=None, client_id="one") as first:
        listener = Commits(first)
        first.subscribe(["t"], listener)
        given: dict[TopicPartition, int] = {}
        async with opened(cluster, partition_assignment_strategy=strategy) as second:
            async for record in first:
                given[record.topic_partition] = record.offset + 1
                if sum(given.values()) == 5:
                    second.subscribe(["t"])
                    joining = asyncio.create_task(until(second, second.assignment))
                    await heartbeats(cluster, "one", 5)
                    assert (listener.calls, offsets_of(cluster)) == ([], {})
                    at_call = dict(given)
                elif listener.calls:
                    break
            assert first._positions.unread or given != at_call
            for tp, offset in at_call.items():
                assert offset <= offsets_of(cluster)[tp] <= given[tp]
            joining.cancel()
            await asyncio.wait([joining])


async def test_a_revocation_waits_for_max_poll_interval(cluster: FakeCluster) -> None:
    """The group waits `max_poll_interval_ms` for a member that processes. Then its partitions are lost."""
    async with opened(cluster, max_poll_interval_ms=400, client_id="one") as first:
        listener = Commits(first)
        first.subscribe(["t"], listener)
        await handed_out(first, 3)
        async with opened(cluster) as second:
            second.subscribe(["t"])
            started = time.monotonic()
            await until(second, lambda: second.assignment() == {A, B})
            assert time.monotonic() - started > 0.3
            assert listener.calls == []
            await first.poll(0)
            assert listener.calls == [("lost", frozenset({A, B}))]


async def test_rebalance_timeout_is_max_poll_interval(cluster: FakeCluster) -> None:
    """JoinGroup's rebalance timeout is `max_poll_interval_ms`."""
    timeouts_ms: list[int] = []
    cluster.control(Api.JOIN_GROUP, lambda request: timeouts_ms.append(request.body.rebalance_timeout_ms))
    async with opened(cluster, max_poll_interval_ms=12_345) as consumer:
        consumer.subscribe(["t"])
        await handed_out(consumer, 3)
    assert set(timeouts_ms) == {12_345}


async def test_a_listener_may_take_longer_than_a_session(cluster: FakeCluster) -> None:
    """Heartbeats continue while the listener is awaited, so the group keeps the member."""

    class Slow(RebalanceListener):
        calls: ClassVar[list[str]] = []

        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            await heartbeats(cluster, "one", 55)
            self.calls.append("revoked")

        async def on_partitions_lost(self, partitions: Partitions) -> None:
            self.calls.append("lost")

    async with opened(cluster, session_timeout_ms=1_000, client_id="one") as consumer:
        consumer.subscribe(["t"], Slow())
        await handed_out(consumer, 3)
        before = consumer.group_metadata().generation_id
        consumer.enforce_rebalance()
        await until(consumer, lambda: consumer.group_metadata().generation_id > before)
        assert Slow.calls == ["revoked"]


async def test_a_cancelled_poll_does_not_cancel_the_listener(cluster: FakeCluster) -> None:
    """The call continues and is not repeated. The next poll returns no records before it ends."""
    began, go_on = asyncio.Event(), asyncio.Event()
    calls: list[str] = []

    class Held(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            calls.append("began")
            began.set()
            await go_on.wait()
            calls.append("ended")

    async with opened(cluster) as consumer:
        consumer.subscribe(["t"], Held())
        await handed_out(consumer, 3)
        consumer.enforce_rebalance()
        poll = asyncio.create_task(until(consumer, lambda: False))
        await began.wait()
        poll.cancel()
        await asyncio.wait([poll])
        assert calls == ["began"]
        poll = asyncio.create_task(until(consumer, lambda: calls[-1] == "ended"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not poll.done()
        go_on.set()
        await poll
        assert calls == ["began", "ended"]


async def test_an_iteration_commits_nothing_during_a_call_of_the_listener(cluster: FakeCluster) -> None:
    """An automatic commit does not override a commit of the listener, also if the `async for` that called it was
    cancelled."""
    began, go_on = asyncio.Event(), asyncio.Event()

    class Held(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            await consumer.commit(dict.fromkeys(partitions, 1))
            began.set()
            await go_on.wait()

    async with opened(cluster, commit_strategy="auto", client_id="one") as consumer:
        consumer.subscribe(["t"], Held())
        await handed_out(consumer, 9)
        consumer.enforce_rebalance()
        iteration = asyncio.create_task(anext(consumer))
        await began.wait()
        iteration.cancel()
        await asyncio.wait([iteration])
        consumer._next_commit_ms = 0  # the interval has passed
        iteration = asyncio.create_task(anext(consumer))
        await heartbeats(cluster, "one", 3)
        during_call = offsets_of(cluster)
        go_on.set()
        await iteration
        assert during_call == {A: 1, B: 1}


@pytest.mark.parametrize("is_blocked", [True, False])
@pytest.mark.parametrize("what", ["commit", "commit given", "commit_async", "poll", "next"])
@pytest.mark.parametrize("strategy", ["none", "auto", "sync", "async"])
async def test_a_commit_after_max_poll_interval_fails_once(
    cluster: FakeCluster, strategy: str, what: str, is_blocked: bool
) -> None:
    """The commit, or the poll under a commit strategy, raises once that nothing was committed. Reading then
    continues."""
    left = asyncio.Event()
    cluster.control(Api.LEAVE_GROUP, lambda _: left.set())
    errors: list[Exception | None] = []
    given = {"commit_strategy": strategy, "auto_commit_interval_ms": 60_000}
    async with opened(cluster, **given) as consumer:
        consumer.subscribe(["t"])
        at = await handed_out(consumer, 3)
        before = offsets_of(cluster)
        consumer._coordinator._polled_ms -= 300_000  # the default of max_poll_interval_ms
        if not is_blocked:
            consumer._coordinator.wake()
            await asyncio.wait_for(left.wait(), 5)
        try:
            match what:
                case "commit":
                    await consumer.commit()
                case "commit given":
                    await consumer.commit(at)
                case "commit_async":
                    consumer.commit_async(callback=lambda _, error: errors.append(error))
                    await asyncio.sleep(0)
                case "poll":
                    await consumer.poll(50)
                case "next":
                    await anext(consumer)
        except CommitFailed as e:
            errors.append(e)
        is_silent = strategy == "none" and what in ("poll", "next")
        assert [type(e) for e in errors] == ([] if is_silent else [CommitFailed])
        assert all("no poll within max_poll_interval_ms=300000" in str(e) for e in errors)
        assert sum(offsets_of(cluster).values()) == sum(before.values())
        generation = consumer.group_metadata().generation_id
        await until(consumer, lambda: consumer.group_metadata().generation_id >= generation and consumer.assignment())
        await handed_out(consumer, 9)
        await consumer.commit()
        assert sum(offsets_of(cluster).values()) > sum(before.values())


@STRATEGIES
@pytest.mark.parametrize("call", ["commit", "commit_async"])
async def test_a_commit_during_a_rebalance_succeeds(cluster: FakeCluster, strategy: str, call: str) -> None:
    """A member that still processes its batch owns it. Its commit succeeds, and the records are not read again."""
    async with opened(cluster, partition_assignment_strategy=strategy, client_id="one") as first:
        first.subscribe(["t"])
        at = await handed_out(first, 9)
        async with opened(cluster, partition_assignment_strategy=strategy) as second:
            second.subscribe(["t"])
            joining = asyncio.create_task(until(second, second.assignment))
            await heartbeats(cluster, "one", 5)
            if call == "commit":
                await first.commit()
            else:
                outcome: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
                first.commit_async(callback=lambda _, error: outcome.set_result(error))
                assert await asyncio.wait_for(outcome, 5) is None
            assert offsets_of(cluster) == at
            again: dict[TopicPartition, int] = {}
            while not joining.done() or not again:
                for tp, columns in (await first.poll(10)).items():
                    again.setdefault(tp, columns.offsets.item(0))
            await joining
        assert all(offset >= at[tp] for tp, offset in again.items() if tp in at)


@STRATEGIES
async def test_an_uncommitted_revocation_is_reported_once(cluster: FakeCluster, strategy: str) -> None:
    """Without a listener and a strategy, a revocation commits nothing. The next commit that covers the records raises
    an error."""
    async with opened(cluster, partition_assignment_strategy=strategy) as first:
        first.subscribe(["t"])
        at = await handed_out(first, 40)
        async with opened(cluster, partition_assignment_strategy=strategy) as second:
            second.subscribe(["t"])
            joining = asyncio.create_task(until(second, second.assignment))
            while not joining.done() or not first.assignment():
                for tp, columns in (await first.poll(0, 1)).items():
                    at[tp] = max(at.get(tp, 0), columns.offsets.item(-1) + 1)
            await joining
            (gone,) = second.assignment()
            with pytest.raises(CommitFailed, match=f"not committed: .*{gone} offset {at[gone]}"):
                await first.commit()
            assert offsets_of(cluster).get(gone, 0) == 0
            await first.commit()  # the loss is reported once
            with pytest.raises(CommitFailed, match=f"{gone} offset 7"):
                await first.commit({gone: 7})  # another's now
            assert offsets_of(cluster).get(gone, 0) == 0


async def test_a_commit_of_redelivered_records_reports_no_loss(cluster: FakeCluster) -> None:
    """Records that were redelivered and then committed are not lost, so neither commit nor callback reports a loss."""
    async with opened(cluster) as consumer:
        consumer.subscribe(["t"])
        at = await handed_out(consumer, 9)
        consumer.enforce_rebalance()
        before = consumer.group_metadata().generation_id
        await until(consumer, lambda: consumer.group_metadata().generation_id > before)
        again: dict[TopicPartition, int] = {}
        while any(again.get(tp, 0) < offset for tp, offset in at.items()):
            again |= {tp: columns.offsets.item(-1) + 1 for tp, columns in (await consumer.poll(50)).items()}
        await consumer.commit()
        assert offsets_of(cluster).items() >= again.items()


@pytest.mark.parametrize(
    "fault", [Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), Fail(ErrorCode.REBALANCE_IN_PROGRESS), Close()], ids=repr
)
async def test_a_superseded_async_commit_succeeds(cluster: FakeCluster, fault: Action) -> None:
    """A failed async commit is not retried if a newer one exists. Its callback is called when the newer one is
    stored."""
    sent: list[int] = []
    outcomes: list[tuple[int, Exception | None]] = []
    over = asyncio.Event()

    def commit(offset: int) -> None:
        def note(_: object, error: Exception | None) -> None:
            outcomes.append((offset, error))
            if len(outcomes) == 2:
                over.set()

        consumer.commit_async({A: offset}, note)

    def fail_first(request: Request) -> Action | None:
        sent.extend(row.offset for topic in request.body.topics for row in topic.partitions)
        if len(sent) > 1:
            return None
        commit(2)
        return fault

    async with opened(cluster) as consumer:
        consumer.subscribe(["t"])
        await handed_out(consumer, 3)
        cluster.control(Api.OFFSET_COMMIT, fail_first)
        commit(1)
        await over.wait()
        assert sent == [1, 2]
        assert outcomes == [(1, None), (2, None)]
        assert offsets_of(cluster)[A] == 2


@pytest.mark.parametrize("strategy", ["auto", "async"])
@pytest.mark.parametrize("fault", [Drop(), Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)], ids=repr)
async def test_a_failed_auto_commit_in_a_revocation_is_silent(
    cluster: FakeCluster, strategy: str, fault: Action
) -> None:
    """The next owner reads the records again. Neither a poll during the rebalance nor a later commit raises."""
    given = {"commit_strategy": strategy, "auto_commit_interval_ms": 60_000, "listener_timeout_ms": 50}
    async with opened(cluster, **given) as consumer:
        consumer.subscribe(["t"])
        with cluster.control(Api.OFFSET_COMMIT, fault) as failing:
            await handed_out(consumer, 3)
            before = consumer.group_metadata().generation_id
            consumer.enforce_rebalance()
            await until(consumer, lambda: consumer.group_metadata().generation_id > before)
            assert failing.acted > 0
            assert offsets_of(cluster) == {}
        await consumer.commit()


async def test_a_member_that_has_left_is_idle_until_the_next_poll(cluster: FakeCluster) -> None:
    """The next poll reports the loss to the listener. Until then the group's task does nothing."""
    left = asyncio.Event()
    cluster.control(Api.LEAVE_GROUP, lambda _: left.set())
    async with opened(cluster, max_poll_interval_ms=60) as consumer:
        consumer.subscribe(["t"])
        await handed_out(consumer, 3)
        run_once, steps = consumer._coordinator.run_once, [0]

        async def count() -> None:
            steps[0] += 1
            await run_once()

        await left.wait()
        consumer._coordinator.run_once = count  # type: ignore[method-assign]
        for _ in range(500):
            await asyncio.sleep(0)
        assert steps[0] < 10


async def test_a_poll_does_not_wait_for_the_leave_response(cluster: FakeCluster) -> None:
    """A member that polls too late gets the loss at once, however long the coordinator takes."""
    async with opened(cluster, max_poll_interval_ms=100, request_timeout_ms=60_000) as consumer:
        listener = Commits(consumer)
        consumer.subscribe(["t"], listener)
        await handed_out(consumer, 3)
        with cluster.control(Api.LEAVE_GROUP, Delay(60_000)):  # longer than this test may take
            hold_up(0.15)
            await consumer.poll(0)
            assert listener.calls == [("lost", frozenset({A, B}))]
            await consumer.close(0)


async def test_a_close_after_a_late_commit_sends_leave_group(cluster: FakeCluster) -> None:
    """If blocking code kept the member from leaving, `close` sends LeaveGroup, so that its partitions are not held for
    the session timeout."""
    left: list[Request] = []
    cluster.control(Api.LEAVE_GROUP, left.append)
    async with opened(cluster, max_poll_interval_ms=100) as consumer:
        consumer.subscribe(["t"])
        await handed_out(consumer, 3)
        hold_up(0.15)
        with pytest.raises(CommitFailed):
            await consumer.commit()
    assert len(left) == 1


@pytest.mark.parametrize("way", ["poll", "next", "break"])
async def test_a_commit_in_close_excludes_unprocessed_records(cluster: FakeCluster, way: str) -> None:
    """If the block fails, or ends within an iteration, the last returned records are read again."""
    with contextlib.suppress(ZeroDivisionError):
        async with opened(cluster) as consumer:
            consumer.subscribe(["t"], Commits(consumer))
            if way == "poll":
                await handed_out(consumer, 1)
            else:
                first, second = await anext(consumer), await anext(consumer)
                assert (first.partition, first.offset + 1) == (second.partition, second.offset)
            if way != "break":
                raise ZeroDivisionError
    assert sum(offsets_of(cluster).values()) == (0 if way == "poll" else 1)


async def test_a_commit_in_close_does_not_go_below_user_commits(cluster: FakeCluster) -> None:
    """Although the block fails, the user's commits stay."""
    with contextlib.suppress(ZeroDivisionError):
        async with opened(cluster) as consumer:
            consumer.subscribe(["t"], Commits(consumer))
            at = await handed_out(consumer, 9)
            await consumer.commit()
            raise ZeroDivisionError
    assert offsets_of(cluster).items() >= at.items()


async def test_a_late_close_reports_lost_partitions(cluster: FakeCluster) -> None:
    """As in a late poll, the listener gets a loss and the group gets a LeaveGroup, whatever blocked."""
    left: list[Request] = []
    cluster.control(Api.LEAVE_GROUP, left.append)
    async with opened(cluster, max_poll_interval_ms=100) as consumer:
        listener = Commits(consumer)
        consumer.subscribe(["t"], listener)
        await handed_out(consumer, 3)
        hold_up(0.15)
    assert listener.calls == [("lost", frozenset({A, B}))]
    assert len(left) == 1


@pytest.mark.parametrize("way", ["poll", "cancelled poll", "close"])
@pytest.mark.parametrize("what", ["poll", "next", "close"])
async def test_a_listener_can_neither_poll_nor_close(cluster: FakeCluster, what: str, way: str) -> None:
    """A listener that polls or closes would wait for its own end. The call is rejected at once, and the member
    continues."""
    outcomes: asyncio.Queue[object] = asyncio.Queue()
    go_on = asyncio.Event()

    class Calls(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            await go_on.wait()
            try:
                match what:
                    case "poll":
                        outcomes.put_nowait(await consumer.poll(0))
                    case "next":
                        outcomes.put_nowait(await anext(consumer))
                    case "close":
                        outcomes.put_nowait(await consumer.close())
            except BaseException as e:
                outcomes.put_nowait(e)

    async with opened(cluster, listener_timeout_ms=2_000) as consumer:
        consumer.subscribe(["t"], Calls())
        await handed_out(consumer, 3)
        if way == "close":
            go_on.set()
            await consumer.close()
        else:
            before = consumer.group_metadata().generation_id
            consumer.enforce_rebalance()
            poll = asyncio.create_task(until(consumer, lambda: consumer.group_metadata().generation_id > before))
            coordinator = consumer._coordinator
            while not coordinator._calling:  # noqa: ASYNC110 - beside the poll
                await asyncio.sleep(0)
            if way == "cancelled poll":
                poll.cancel()
            go_on.set()
            await asyncio.wait([poll])
        outcome = await outcomes.get()
        if (what, way) == ("close", "close"):
            assert outcome is None  # it is being closed
        else:
            assert isinstance(outcome, IllegalState)
        if way != "close":
            await handed_out(consumer, 3)


async def test_a_poll_concurrent_with_close_returns_no_records(cluster: FakeCluster) -> None:
    """A poll ends with an error once `close` has begun. Another `close` does not call the listener again."""
    calls: list[str] = []

    class Fills(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            calls.append("revoked")
            consumer.resume(A, B)
            await heartbeats(cluster, "one", 2)
            await consumer.close()
            await consumer.commit()

    async with opened(cluster, client_id="one") as consumer:
        consumer.subscribe(["t"], Fills())
        await handed_out(consumer, 3)
        await consumer.commit()
        at = offsets_of(cluster)
        consumer.pause(A, B)
        poll = asyncio.create_task(consumer.poll(5_000))
        await asyncio.sleep(0)
        await consumer.close()
        with pytest.raises(IllegalState):
            await poll
    assert offsets_of(cluster) == at
    assert calls == ["revoked"]


async def test_a_close_does_not_repeat_an_abandoned_listener_call(cluster: FakeCluster) -> None:
    """A listener call that a cancelled poll left behind is cancelled, and `close` reports it."""
    calls: list[str] = []
    began = asyncio.Event()

    class Hangs(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            calls.append("revoked")
            began.set()
            await asyncio.Event().wait()

    async with opened(cluster) as consumer:
        consumer.subscribe(["t"], Hangs())
        await handed_out(consumer, 3)
        consumer.enforce_rebalance()
        poll = asyncio.create_task(until(consumer, lambda: False))
        await began.wait()
        poll.cancel()
        with pytest.raises(KafkaTimeout):
            await consumer.close(300)
    assert calls == ["revoked"]


async def test_a_pattern_that_matches_nothing_any_more_revokes(cluster: FakeCluster) -> None:
    """The listener is called for partitions of a deleted topic, although no topic is subscribed any more."""
    revoked: list[Partitions] = []

    class Listener(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            revoked.append(partitions)

    async with opened(cluster) as consumer:
        consumer.subscribe(re.compile("t"), Listener())
        await handed_out(consumer, 3)
        consumer.pause(A, B)
        cluster.delete_topic("t")
        consumer.ping()
        await until(consumer, lambda: not consumer.assignment())
        assert revoked == [frozenset({A, B})]


@pytest.mark.parametrize("what", ["commit", "commit_async", "sync"])
async def test_a_commit_waits_for_a_rebalance(cluster: FakeCluster, what: str) -> None:
    """The group rejects commits while it assigns. The commit waits and does not fail, even if the response comes after
    the rebalance."""
    strategy = "sync" if what == "sync" else "none"
    given = {"partition_assignment_strategy": "cooperative-sticky", "commit_strategy": strategy}
    async with opened(cluster, **given) as consumer:
        consumer.subscribe(["t"])
        at = await handed_out(consumer, 3)
        before = consumer.group_metadata().generation_id
        cluster.control(Api.SYNC_GROUP, Delay(50))
        late = cluster.control(Api.OFFSET_COMMIT, Delay(150, Fail(ErrorCode.REBALANCE_IN_PROGRESS)), times=1)
        consumer.enforce_rebalance()
        while consumer.group_metadata().generation_id == before:  # noqa: ASYNC110 - beside the user's code
            await asyncio.sleep(0)
        match what:
            case "commit":
                await consumer.commit()
            case "commit_async":
                outcome: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
                consumer.commit_async(callback=lambda _, error: outcome.set_result(error))
                assert await outcome is None
            case "sync":
                await consumer.poll(0)
        assert late.acted == 1
        assert offsets_of(cluster).items() >= at.items()


@pytest.mark.parametrize("strategy", ["none", "sync"])
@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION])
async def test_a_loss_detected_by_a_commit_is_reported_once(
    cluster: FakeCluster, strategy: str, code: ErrorCode
) -> None:
    """The next poll calls the listener without waiting for a heartbeat, and returns no record of a lost partition."""
    async with opened(cluster, commit_strategy=strategy, heartbeat_interval_ms=2_000) as consumer:
        listener = Commits(consumer)
        consumer.subscribe(["t"], listener)
        await handed_out(consumer, 3)
        cluster.control(Api.OFFSET_COMMIT, Fail(code))
        with pytest.raises(CommitFailed):
            await (consumer.commit() if strategy == "none" else consumer.poll(0))
        await consumer.poll(0)
        assert listener.calls == [("lost", frozenset({A, B}))]
        await consumer.commit()


async def test_a_loss_in_a_pending_commit_is_reported_once(cluster: FakeCluster) -> None:
    """The error of an earlier asynchronous commit covers the records returned since."""
    async with opened(cluster, session_timeout_ms=300) as consumer:
        consumer.subscribe(["t"])
        await handed_out(consumer, 9)
        consumer.pause(A, B)
        before = consumer.group_metadata().generation_id
        with (
            cluster.control(Api.OFFSET_COMMIT, Fail(ErrorCode.UNKNOWN_MEMBER_ID)),
            cluster.control(Api.HEARTBEAT, Fail(ErrorCode.UNKNOWN_MEMBER_ID), times=1),
        ):
            consumer.commit_async({A: 1})
            while consumer._coordinator.committable_partitions:  # noqa: ASYNC110 - beside the user's code
                await asyncio.sleep(0)
            with pytest.raises(CommitFailed):
                await consumer.commit()
        await until(consumer, lambda: consumer.group_metadata().generation_id > before)
        await consumer.commit()
