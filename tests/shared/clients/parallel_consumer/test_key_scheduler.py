"""The key scheduler: processing order, completeness, and committable offsets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.clients.parallel_consumer.commit_metadata import (
    decode_finished,
    encode_finished,
    encoded_bytes_max,
)
from penstock.shared.clients.parallel_consumer.key_scheduler import Execution, KeyScheduler, Ordering
from penstock.shared.clients.parallel_consumer.partition_progress import SPAN_ALWAYS_FITS
from penstock.shared.common.errors import DataError, IllegalState
from penstock.shared.common.records import (
    OFFSET_METADATA_MAX_BYTES,
    Columns,
    ConsumerRecord,
    OffsetAndMetadata,
    TopicPartition,
)
from tests.property_tests import examples

TP = TopicPartition("clicks", 0)
OTHER = TopicPartition("clicks", 1)


def columns(offsets: Sequence[int], keys: Sequence[bytes | None] | None = None, tp: TopicPartition = TP) -> Columns:
    keys = [b"k%d" % offset for offset in offsets] if keys is None else keys
    return Columns.of([ConsumerRecord(*tp, o, 0, k, b"") for o, k in zip(offsets, keys, strict=True)])


def scheduler_of(offsets: Sequence[int], keys: Sequence[bytes | None] | None = None, **options: object) -> KeyScheduler:
    scheduler = KeyScheduler(**options)  # type: ignore[arg-type]
    scheduler.assign(TP, None)
    scheduler.deliver(columns(offsets, keys))
    return scheduler


def take_all(scheduler: KeyScheduler, now_ms: int = 0) -> dict[int, Execution]:
    taken = iter(lambda: scheduler.take(now_ms), None)
    return {execution.works[0].offset: execution for execution in taken if execution}


def finish(scheduler: KeyScheduler, *executions: Execution) -> None:
    for execution in executions:
        scheduler.settle(execution, finished=execution.works)


def test_one_key_runs_one_at_a_time() -> None:
    """The second record of a key starts after the first has finished. Other keys run concurrently."""
    scheduler = scheduler_of([0, 1, 2], [b"a", b"a", b"b"])
    running = take_all(scheduler)
    assert sorted(running) == [0, 2]
    finish(scheduler, running[0])
    assert sorted(take_all(scheduler)) == [1]


def test_partition_ordering_is_sequential_in_a_partition() -> None:
    """With ordering `partition` records of a partition run one after another, whatever their keys."""
    assert sorted(take_all(scheduler_of([0, 1, 2], ordering="partition"))) == [0]


def test_unordered_runs_records_of_a_key_concurrently() -> None:
    """With ordering `unordered` even records of one key run concurrently."""
    assert sorted(take_all(scheduler_of([0, 1, 2], [b"a"] * 3, ordering="unordered"))) == [0, 1, 2]


def test_records_without_a_key_have_no_order() -> None:
    """A record without a key waits for no other record."""
    assert sorted(take_all(scheduler_of([0, 1, 2], [None, None, b"a"]))) == [0, 1, 2]


def test_concurrency_is_bounded() -> None:
    """At most `max_concurrency` executions are in flight. A settled one makes room."""
    scheduler = scheduler_of(range(10), max_concurrency=3)
    running = take_all(scheduler)
    assert len(running) == scheduler.in_flight == 3
    finish(scheduler, running[0])
    assert sorted(take_all(scheduler)) == [3]


def test_partitions_take_turns() -> None:
    """A partition with many records does not block another one."""
    scheduler = scheduler_of(range(100), max_concurrency=4)
    scheduler.assign(OTHER, None)
    scheduler.deliver(columns(range(2), tp=OTHER))
    taken = [scheduler.take(0) for _ in range(4)]
    assert sorted(e.topic_partition.partition for e in taken if e) == [0, 0, 1, 1]


def test_a_retrying_record_blocks_its_key_alone() -> None:
    """While a record waits for its retry, its key waits too and other keys continue."""
    scheduler = scheduler_of([0, 1, 2], [b"a", b"a", b"b"])
    running = take_all(scheduler)
    scheduler.settle(running[0], retry=running[0].works, due_ms=500)
    finish(scheduler, running[2])
    scheduler.deliver(columns([3], [b"b"]))
    assert sorted(take_all(scheduler, now_ms=499)) == [3]
    assert scheduler.next_due_ms() == 500
    assert sorted(take_all(scheduler, now_ms=500)) == [0]
    assert scheduler.next_due_ms() is None


def test_a_batch_keeps_each_key_in_order_and_a_retry_runs_alone() -> None:
    """A batch may hold several records of a key, in order. A record marked to run alone shares no batch."""
    scheduler = scheduler_of([0, 1, 2, 3], [b"a", b"a", b"b", b"a"], batch_records_max=3)
    batch = scheduler.take(0)
    assert batch is not None
    assert [work.offset for work in batch.works] == [0, 1, 2]
    assert scheduler.take(0) is None  # offset 3 waits for its key
    for work in batch.works:
        work.alone = True
    scheduler.settle(batch, retry=batch.works)
    assert [sorted(w.offset for w in e.works) for e in take_all(scheduler).values()] == [[0], [2]]


def test_the_committable_offset_is_contiguous_over_delivered_records() -> None:
    """Gaps in the offsets do not hold a commit back. An unfinished record does."""
    scheduler = scheduler_of([3, 7, 20, 21])
    running = take_all(scheduler)
    finish(scheduler, running[7], running[21])
    assert scheduler.committable() == {TP: OffsetAndMetadata(3, encode_finished(3, [(7, 7), (21, 21)]))}
    finish(scheduler, running[3])
    assert scheduler.committable() == {TP: OffsetAndMetadata(20, encode_finished(20, [(21, 21)]))}
    finish(scheduler, running[20])
    assert scheduler.committable() == {TP: OffsetAndMetadata(22)}


def test_a_committed_position_is_not_returned_again() -> None:
    """Only a changed position is committable."""
    scheduler = scheduler_of([0])
    finish(scheduler, *take_all(scheduler).values())
    offsets = scheduler.committable()
    scheduler.committed(offsets)
    assert offsets == {TP: OffsetAndMetadata(1)}
    assert scheduler.committable() == {}


def test_a_restart_keeps_what_it_has_not_seen_again() -> None:
    """A commit soon after a restart keeps the finished offsets of the old commit that were not delivered yet."""
    scheduler = KeyScheduler()
    scheduler.assign(TP, OffsetAndMetadata(10, encode_finished(10, [(11, 20), (30, 31)])))
    assert scheduler.deliver(columns([10, 11, 12])) == 2
    assert (
        decode_finished(scheduler.committable([TP]).get(TP, OffsetAndMetadata(0))) == ()
    )  # unchanged: nothing to commit
    finish(scheduler, *take_all(scheduler).values())
    assert scheduler.committable()[TP] == OffsetAndMetadata(13, encode_finished(13, [(13, 20), (30, 31)]))


def test_damaged_metadata_is_rejected_and_can_be_left_out() -> None:
    """Corrupt commit metadata raises an error. The partition can then be assigned without it."""
    scheduler = KeyScheduler()
    with pytest.raises(DataError):
        scheduler.assign(TP, OffsetAndMetadata(10, "p1r:!"))
    scheduler.assign(TP, OffsetAndMetadata(10))
    assert scheduler.partitions == {TP}


def test_a_partition_pauses_if_metadata_would_not_fit() -> None:
    """If one record is stuck and the finished ranges would exceed the metadata limit, the partition pauses with reason
    `metadata`."""
    offsets = range(0, 90_000, 3)  # with holes, so that a bitmap is no way out
    keys = [b"stuck" if index % 2 == 0 else None for index in range(len(offsets))]
    scheduler = scheduler_of(offsets, keys, buffered_records_max=100_000)
    stuck = scheduler.take(0)
    while execution := scheduler.take(0):
        finish(scheduler, execution)
    assert scheduler.paused() == {TP: "metadata"}
    assert not scheduler.is_wanted(TP)
    assert "metadata full" in repr(scheduler)
    text = scheduler.committable()[TP].metadata
    assert 0.9 * OFFSET_METADATA_MAX_BYTES < len(text) <= OFFSET_METADATA_MAX_BYTES
    assert stuck is not None
    finish(scheduler, stuck)
    while execution := scheduler.take(0):
        finish(scheduler, execution)
    assert scheduler.paused() == {}
    assert scheduler.committable() == {TP: OffsetAndMetadata(offsets[-1] + 1)}


def test_the_span_that_always_fits_does() -> None:
    """Within the safe span, every pattern of finished offsets fits into a commit's metadata."""
    assert encoded_bytes_max(SPAN_ALWAYS_FITS, SPAN_ALWAYS_FITS) <= OFFSET_METADATA_MAX_BYTES


def test_a_full_buffer_pauses_until_half_of_it_is_done() -> None:
    """A full buffer pauses a partition until half of it is done, so that the partition does not alternate."""
    scheduler = scheduler_of(range(10), buffered_records_max=10)
    assert scheduler.paused() == {TP: "buffer"}
    for count, execution in enumerate(take_all(scheduler).values(), 1):
        finish(scheduler, execution)
        assert (TP in scheduler.paused()) == (count <= 5)


def test_when_a_paused_partition_is_resumed() -> None:
    """A partition resumes once half of its buffer is done or it is no longer assigned, but not while the metadata is
    full."""
    scheduler = scheduler_of(range(10), buffered_records_max=10)
    assert not scheduler.is_wanted(TP)
    executions = list(take_all(scheduler).values())
    for done, execution in enumerate(executions, start=1):
        finish(scheduler, execution)
        assert scheduler.is_wanted(TP) == (10 - done < 5)
    scheduler.lost([TP])
    assert scheduler.is_wanted(TP)


def test_revocation_drains_and_starts_nothing_more() -> None:
    """After a revocation only executions in flight finish, and they count. New records are left to the next owner."""
    scheduler = scheduler_of(range(6), max_concurrency=2)
    running = take_all(scheduler)
    draining = scheduler.revoke([TP, OTHER])
    assert {e.works[0].offset for e in draining} == {0, 1}
    finish(scheduler, running[1])
    scheduler.settle(running[0], retry=running[0].works, due_ms=0)
    assert scheduler.deliver(columns([6])) == 0
    assert scheduler.take(10) is None
    assert scheduler.committable([TP]) == {TP: OffsetAndMetadata(0, encode_finished(0, [(1, 1)]))}
    assert scheduler.lost([TP]) == []
    assert scheduler.partitions == frozenset()


def test_a_revoked_partition_starts_no_retry() -> None:
    """A retry that becomes due after the revocation is left to the next owner. Other partitions continue."""
    scheduler = scheduler_of([0])
    scheduler.assign(OTHER, None)
    scheduler.deliver(columns([1], tp=OTHER))
    running = take_all(scheduler)
    for execution in running.values():
        scheduler.settle(execution, retry=execution.works, due_ms=500)
    assert scheduler.revoke([TP]) == []
    assert sorted(take_all(scheduler, now_ms=500)) == [1]


def test_results_after_a_loss_are_ignored() -> None:
    """A lost partition that is assigned again starts fresh. Results of the former ownership are ignored."""
    scheduler = scheduler_of([0, 1])
    before = take_all(scheduler)
    assert len(scheduler.lost([TP])) == 2
    scheduler.assign(TP, OffsetAndMetadata(0))
    scheduler.deliver(columns([0, 1]))
    assert not scheduler.settle(before[0], finished=before[0].works)
    assert scheduler.committable() == {}
    assert sorted(take_all(scheduler)) == [0, 1]


def test_records_of_an_unassigned_partition_are_rejected() -> None:
    """Records of an unassigned partition are rejected, because they would break contiguity."""
    with pytest.raises(IllegalState, match="clicks-0"):
        KeyScheduler().deliver(columns([0]))


def test_redelivered_records_are_processed_again_in_order() -> None:
    """After a seek back, records run again. A key still waits for its earlier execution, whose result is ignored."""
    scheduler = scheduler_of([5, 6], [b"a", b"b"])
    before = take_all(scheduler)
    scheduler.deliver(columns([4, 5], [b"c", b"a"]))
    again = take_all(scheduler)
    assert sorted(again) == [4]
    assert not scheduler.settle(before[5], finished=before[5].works)
    assert sorted(take_all(scheduler)) == [5]
    finish(scheduler, again[4])
    assert scheduler.committable() == {TP: OffsetAndMetadata(5)}


class Drive:
    """Runs random deliveries, takes, results and retries on a scheduler, and checks invariants after each."""

    def __init__(self, scheduler: KeyScheduler, key_of: dict[int, bytes | None], finished: set[int]) -> None:
        self.scheduler, self.key_of, self.finished = scheduler, key_of, set(finished)
        self.executed: list[int] = []
        self.delivered: set[int] = set()
        self.running: list[Execution] = []

    def run(self, offsets: Sequence[int], rng: random.Random, steps: int) -> None:
        pending = [offsets[start : start + 7] for start in range(0, len(offsets), 7)]
        for now_ms in range(steps):
            choice = rng.random()
            if choice < 0.2 and pending:
                chunk = pending.pop(0)
                assert self.scheduler.deliver(columns(chunk, [self.key_of[o] for o in chunk])) == len(
                    self.finished.intersection(chunk)
                )
                self.delivered |= set(chunk)
            elif choice < 0.6:
                self.start(now_ms)
            elif self.running:
                self.end(self.running.pop(rng.randrange(len(self.running))), rng, now_ms)
            self.check_committable()

    def start(self, now_ms: int) -> None:
        execution = self.scheduler.take(now_ms)
        if execution is None:
            return
        batch = [work.offset for work in execution.works]
        assert batch == sorted(batch)
        for offset in batch:
            assert {o for o in self.lane(offset) if o < offset} <= self.finished | set(batch)
        self.running.append(execution)

    def end(self, execution: Execution, rng: random.Random, now_ms: int) -> None:
        cut = len(execution.works) if rng.random() < 0.7 else rng.randrange(len(execution.works))
        done, retried = execution.works[:cut], execution.works[cut:]
        assert self.scheduler.settle(execution, done, retried, due_ms=now_ms + rng.randrange(5))
        self.finished |= {work.offset for work in done}
        self.executed += [work.offset for work in done]

    def lane(self, offset: int) -> set[int]:
        key = self.key_of[offset]
        if self.scheduler.ordering == "unordered" or (self.scheduler.ordering == "key" and key is None):
            return set()
        return {o for o in self.delivered if self.scheduler.ordering == "partition" or self.key_of[o] == key}

    def check_committable(self) -> None:
        unfinished = self.delivered - self.finished
        for position in self.scheduler.committable().values():
            assert position.offset <= min(unfinished, default=position.offset)
            assert len(position.metadata) <= OFFSET_METADATA_MAX_BYTES
            covered = decode_finished(position)
            assert not any(first <= offset <= last for first, last in covered for offset in unfinished)


@settings(max_examples=examples(150))
@given(
    holes=st.lists(st.integers(1, 4), min_size=1, max_size=60),
    keys=st.integers(1, 8),
    ordering=st.sampled_from(["key", "partition", "unordered"]),
    batch=st.sampled_from([1, 1, 4]),
    steps=st.integers(0, 300),
    seed=st.integers(0, 2**32),
)
def test_a_restart_processes_only_unfinished_records(
    holes: list[int], keys: int, ordering: Ordering, batch: int, steps: int, seed: int
) -> None:
    """Order holds, nothing is lost, and the next owner runs exactly the records that the last commit did not cover."""
    rng = random.Random(seed)
    offsets = [sum(holes[: i + 1]) for i in range(len(holes))]
    key_of = {offset: rng.choice([None, *(b"%d" % key for key in range(keys))]) for offset in offsets}

    first = Drive(KeyScheduler(ordering, max_concurrency=5, batch_records_max=batch), key_of, set())
    first.scheduler.assign(TP, None)
    first.run(offsets, rng, steps)
    committed = first.scheduler.committable().get(TP)

    second = Drive(KeyScheduler(ordering, max_concurrency=5, batch_records_max=batch), key_of, first.finished)
    second.scheduler.assign(TP, committed)
    second.run([o for o in offsets if committed is None or o >= committed.offset], rng, 3_000)
    assert sorted(second.executed) == sorted(set(offsets) - first.finished)
    last = second.scheduler.committable().get(TP, committed)
    assert last == OffsetAndMetadata(offsets[-1] + 1)


def test_a_commit_has_a_leader_epoch() -> None:
    """A commit has the leader epoch of the last delivery, or of the initial commit. After a step back it has none."""
    scheduler = KeyScheduler()
    scheduler.assign(TP, OffsetAndMetadata(0, "", 2))
    scheduler.deliver(columns([0, 1]))
    finish(scheduler, *take_all(scheduler).values())
    assert scheduler.committable()[TP].leader_epoch == 2
    scheduler.deliver(replace(columns([2]), leader_epoch=5))
    finish(scheduler, *take_all(scheduler).values())
    assert scheduler.committable()[TP].leader_epoch == 5
    scheduler.deliver(columns([1]))
    assert scheduler.committable()[TP].leader_epoch == -1


def test_positions_without_a_record_are_committable() -> None:
    """A position from a reset or after markers is committable, unless it is after unfinished records or the partition
    was revoked."""
    scheduler = KeyScheduler()
    scheduler.assign(TP, None)
    assert scheduler.committable() == {}
    assert scheduler.pass_over(TP, 5)
    assert scheduler.committable() == {TP: OffsetAndMetadata(5)}
    scheduler.deliver(columns([7]))
    assert not scheduler.pass_over(TP, 8), "reported once"
    assert scheduler.committable() == {TP: OffsetAndMetadata(7)}
    execution = scheduler.take(0)
    assert execution is not None
    scheduler.settle(execution, finished=execution.works)
    scheduler.pass_over(TP, 10)
    assert scheduler.committable() == {TP: OffsetAndMetadata(10)}
    scheduler.revoke([TP])
    scheduler.pass_over(TP, 12)
    assert scheduler.committable() == {TP: OffsetAndMetadata(10)}


def test_a_committed_partition_has_no_urgent_commit() -> None:
    """The next commit of a partition with a committed offset is not urgent."""
    scheduler = KeyScheduler()
    scheduler.assign(TP, OffsetAndMetadata(5))
    assert not scheduler.pass_over(TP, 5)
    assert scheduler.committable() == {}


def test_a_lost_partition_has_nothing_to_commit() -> None:
    """A lost partition has no committable position."""
    scheduler = KeyScheduler()
    scheduler.assign(TP, None)
    scheduler.deliver(columns([1]))
    scheduler.lost([TP])
    assert scheduler.committable([TP]) == {}
