"""The decisions of a sink task: commits, redelivery, rewinds and rebalances."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.runtime.sink_task_state import REDELIVERY_MS, SinkTaskState

A, B, C = (TopicPartition("t", partition) for partition in range(3))
FIVE = OffsetAndMetadata(5)


def state(*partitions: TopicPartition) -> SinkTaskState:
    made = SinkTaskState(offset_flush_interval_ms=1_000, offset_flush_timeout_ms=100, now_ms=0)
    made.opened(dict.fromkeys(partitions or (A,), 0))
    return made


def record(tp: TopicPartition, offset: int) -> SinkRecord:
    return SinkRecord(tp.topic, tp.partition, None, None, None, "v", kafka_offset=offset)


def test_a_commit_that_takes_too_long_counts_as_failed() -> None:
    """A commit that times out counts as failed, another may begin, and its late response is ignored."""
    task = state()
    assert task.begin_commit(1_000) is not None
    assert not task.commit_is_due(5_000)
    assert not task.commit_expired(1_099)
    assert task.commit_expired(1_100)
    assert (task.commit_failures, task.committing) == (1, False)
    assert task.commit_is_due(2_000)
    assert task.begin_commit(2_000) is not None
    assert task.commit_completed(1, None, {A: FIVE}, 2_001) is None
    assert task.committing


def test_expired_commits_back_off_until_one_is_answered() -> None:
    """Each expired commit delays the next one longer, up to a limit; a response, even a late one, resets the delay."""
    task = state()
    task.received({A: 5})
    task.delivered()
    now_ms, waits = 1_000, []
    for _ in range(6):
        begun = task.begin_commit(now_ms)
        assert task.commit_expired(now_ms + 100)
        waited_ms = next(ms for ms in range(0, 20_000, 100) if task.commit_is_due(now_ms + 100 + ms))
        waits.append(waited_ms)
        now_ms += 100 + waited_ms
    assert waits == [900, 1_000, 2_000, 4_000, 8_000, 10_000]
    assert begun is not None
    assert task.commit_completed(begun[0], None, {A: FIVE}, now_ms - 9_900) == 200
    assert (task.commit_failures, task.last_committed[A]) == (0, FIVE)
    assert task.commit_is_due(now_ms - 8_900)


def test_only_the_newest_commits_response_counts() -> None:
    """A response of an older commit is ignored."""
    task = state()
    task.received({A: 5})
    task.delivered()
    task.begin_commit(0)
    task.begin_commit(1)
    assert task.commit_completed(2, None, {A: FIVE}, 7) == 6
    assert task.commit_completed(1, ValueError("late"), {A: OffsetAndMetadata(3)}, 8) is None
    assert (task.last_committed[A], task.commit_failures) == (FIVE, 0)


def test_a_failed_commit_keeps_the_committed_offsets() -> None:
    """A failed commit changes no committed offset, and failures are counted until one succeeds."""
    task = state()
    for failures in (1, 2):
        begun = task.begin_commit(0)
        assert begun is not None
        task.commit_completed(begun[0], ValueError("no"), {A: FIVE}, 1)
        assert (task.commit_failures, task.last_committed[A].offset) == (failures, 0)
    task.begin_commit(0)
    task.commit_completed(3, None, None, 1)
    assert task.commit_failures == 0


def test_the_next_commit_is_an_interval_after_the_last_one() -> None:
    """The next scheduled commit is one interval after the last commit, however many commits the task requested."""
    task = state()
    assert task.poll_timeout_ms(300) == 700
    for seqno, now_ms in enumerate((300, 310, 320), start=1):
        task.commit_requested = True
        assert task.commit_is_due(now_ms)
        task.begin_commit(now_ms)
        task.commit_completed(seqno, None, None, now_ms)
        assert not task.commit_is_due(now_ms)
    assert (task.commit_is_due(1_319), task.commit_is_due(1_320)) == (False, True)


def test_a_commit_that_is_requested_during_another_one_follows_it() -> None:
    """A commit that the task requests while another one is in progress begins when that one has ended."""
    task = state()
    task.begin_commit(0)
    task.commit_requested = True
    assert not task.commit_is_due(5)
    task.commit_completed(1, None, {}, 5)
    assert (task.commit_is_due(5), task.next_commit_in_ms(5)) == (True, 0)


def test_a_late_loop_does_not_commit_in_a_row() -> None:
    """A loop that missed many intervals commits once."""
    task = state()
    task.begin_commit(10_000)
    task.commit_completed(1, None, None, 10_000)
    assert task.poll_timeout_ms(10_000) == 1_000


def test_a_late_loop_notices_what_it_missed() -> None:
    """Long after a commit was due or has timed out, it is still due or expired, and the poll does not wait."""
    task = state()
    assert task.commit_is_due(5_000)
    assert (task.next_commit_in_ms(5_000), task.poll_timeout_ms(5_000)) == (0, 0)
    task.begin_commit(5_000)
    assert task.commit_expired(9_000)


def test_without_offsets_there_is_nothing_to_commit() -> None:
    """A task without partitions begins no commit."""
    task = SinkTaskState(1_000, 100, 0)
    assert task.begin_commit(5_000) is None
    assert not task.committing


def test_only_new_offsets_of_own_delivered_records_are_committed() -> None:
    """Offsets of other partitions, of undelivered records and already committed ones are not committed."""
    task = state(A, B)
    task.received({A: 5, B: 9})
    task.delivered()
    foreign = TopicPartition("other", 0)
    given = {A: FIVE, B: OffsetAndMetadata(10), foreign: OffsetAndMetadata(1)}
    assert task.committable(given) == {A: FIVE}
    task.begin_commit(0)
    task.commit_completed(1, None, {A: FIVE}, 1)
    assert task.committable({A: OffsetAndMetadata(5)}) == {}
    assert task.committable({A: OffsetAndMetadata(3)}) == {A: OffsetAndMetadata(3)}, "the task wants to go back"
    task.received({A: 8})
    task.delivered()
    assert task.committable({A: OffsetAndMetadata(8)}) == {A: OffsetAndMetadata(8)}


def test_the_start_offset_is_committed_once() -> None:
    """A partition without records gets a committed offset, unless the task returns none."""
    task, start = state(A, B), OffsetAndMetadata(0)
    assert task.committable({}) == {}
    assert task.committable({A: start, B: start}) == {A: start, B: start}
    task.begin_commit(0)
    task.commit_completed(1, None, {A: start, B: start}, 1)
    assert task.committable({A: start, B: start}) == {}
    task.closed([A, B])
    task.opened({A: 0})
    assert task.never_committed == {A}
    task.closed([A])
    assert task.never_committed == set()


def test_a_failed_flush_rewinds_to_the_last_commit() -> None:
    """A failed flush rewinds to the last commit and drops the batch."""
    task = state(A, B)
    task.received({A: 5})
    task.delivered()
    task.batch = [record(B, 3)]
    assert task.pre_commit_failed() == {A: 0, B: 0}
    assert (task.current[A].offset, task.batch) == (0, [])


def test_redelivery_keeps_the_batch_and_resumes_what_it_paused() -> None:
    """During a redelivery all partitions are paused; afterwards those that the task paused stay paused."""
    task = state(A, B)
    task.received({A: 5})
    task.batch = [record(A, 4)]
    task.paused_by_task.add(B)
    assert task.delivery_failed() == {A, B}
    assert task.current[A].offset == 0
    with pytest.raises(IllegalState, match="being redelivered"):
        task.received({A: 6})
    assert task.delivered() == {A}
    assert (task.current[A], task.batch, task.paused_for_redelivery) == (FIVE, [], False)


def test_the_task_sets_the_redelivery_timeout() -> None:
    """The task's timeout is used once; without one a redelivery uses the default."""
    task = state()
    task.retry_timeout_ms = 20
    assert task.poll_timeout_ms(0) == 20
    assert task.poll_timeout_ms(0) == 1_000
    waiting = SinkTaskState(60_000, 100, 0)
    waiting.opened({A: 0})
    waiting.delivery_failed()
    assert waiting.poll_timeout_ms(0) == REDELIVERY_MS


def test_a_rewind_counts_as_committed() -> None:
    """A rewind sets the current and the committed offset and drops that partition's records."""
    task = state(A, B)
    task.batch = [record(A, 4), record(B, 1)]
    task.rewinds = {A: 2, TopicPartition("other", 0): 7}
    assert task.take_rewinds() == {A: 2}
    assert task.take_rewinds() == {}
    assert (task.current[A].offset, task.last_committed[A].offset) == (2, 2)
    assert [one.kafka_offset for one in task.batch] == [1]


def test_a_redelivery_drops_the_records_of_revoked_partitions() -> None:
    """A redelivery drops the records of revoked partitions and keeps the others."""
    task = state(A, B)
    task.received({A: 5, B: 2})
    task.batch = [record(A, 4), record(B, 1)]
    task.delivery_failed()
    task.closed([B])
    assert [one.kafka_partition for one in task.batch] == [0]
    assert task.opened({}) == {A}
    assert task.delivered() == {A}
    assert task.current == {A: FIVE}


def test_partitions_are_resumed_after_the_whole_batch_was_revoked() -> None:
    """If a rebalance takes all records of a redelivery, the next delivery resumes kept and new partitions."""
    task = state(A, B)
    task.batch = [record(A, 4)]
    assert task.delivery_failed() == {A, B}
    task.closed([A])
    assert task.opened({C: 0}) == {B, C}
    assert (task.batch, task.delivered()) == ([], {B, C})


def test_a_pause_outlives_a_rebalance_only_with_its_partition() -> None:
    """A partition that the task paused stays paused if it is assigned again right away."""
    task = state(A, B)
    task.paused_by_task = {A, B}
    task.closed([B])
    assert task.resumable() == frozenset()
    task.closed([A])
    assert task.opened({A: 0}) == {A}
    assert task.paused_by_task == {A}


def test_records_of_an_earlier_assignment_are_recognized() -> None:
    """Records that were read before a partition was revoked and assigned again are not the task's own."""
    task = state(A)
    before = task.resets
    assert task.is_still_ours(A, before)
    task.closed([A])
    assert not task.is_still_ours(A, before)
    task.opened({A: 0})
    assert not task.is_still_ours(A, before)
    assert task.is_still_ours(A, task.resets)
    task.opened({B: 0})
    assert task.is_still_ours(A, task.resets)
    assert task.never_committed == {A, B}


@pytest.mark.parametrize("reset", [SinkTaskState.pre_commit_failed, SinkTaskState.take_rewinds])
def test_records_that_were_polled_before_a_reset_are_recognized(reset: Callable[[SinkTaskState], object]) -> None:
    """After a failed flush or a rewind, records that were polled before are not delivered."""
    task = state(A)
    before = task.resets
    task.rewinds[A] = 0
    reset(task)
    assert not task.is_still_ours(A, before)
    assert task.is_still_ours(A, task.resets)


def test_a_commit_of_some_partitions_leaves_the_interval_alone() -> None:
    """A commit of revoked partitions does not change the time of the next scheduled commit."""
    task = state(A, B)
    begun = task.begin_commit(10, [B])
    assert begun is not None
    assert begun[1] == {B: OffsetAndMetadata(0)}
    task.commit_completed(begun[0], None, None, 11)
    assert task.poll_timeout_ms(10) == 990


def test_the_first_commit_is_an_interval_after_the_start() -> None:
    """The first commit is one interval after the start, and the next is one interval after the first began."""
    task = SinkTaskState(offset_flush_interval_ms=1_000, offset_flush_timeout_ms=100, now_ms=50_000)
    assert (task.commit_is_due(50_999), task.commit_is_due(51_000)) == (False, True)
    assert task.poll_timeout_ms(50_400) == 600
    task.opened({A: 0})
    assert task.begin_commit(51_300) is not None
    assert task.commit_completed(1, None, None, 51_310) == 10
    assert task.poll_timeout_ms(51_310) == 990


def test_a_commit_that_was_requested_is_begun_once() -> None:
    """A requested commit begins once, and not while another is in progress."""
    task = state()
    task.commit_requested = True
    task.begin_commit(10)
    task.commit_requested = True
    assert not task.commit_is_due(20)
    assert not task.commit_expired(20)
    task.commit_completed(1, None, None, 20)
    assert task.commit_is_due(20)
    task.begin_commit(20)
    task.commit_completed(2, None, None, 30)
    assert not task.commit_is_due(30)
    assert not task.commit_expired(10**6), "none is in progress"


def test_a_success_after_failures_brings_the_interval_back() -> None:
    """A success after failures resets the delay; a success without failures keeps the next commit's time."""
    task = state()
    task.begin_commit(1_000)
    task.commit_completed(1, None, None, 1_010)
    assert task.next_commit_in_ms(1_010) == 990
    task.begin_commit(2_000)
    for now_ms, next_in_ms in ((2_100, 900), (2_200, 1_000), (2_300, 2_000)):
        assert task.commit_expired(now_ms)
        assert task.next_commit_in_ms(now_ms) == next_in_ms
        task.begin_commit(now_ms, [A])
    task.commit_completed(task.commit_seqno, None, None, 2_310)
    assert (task.commit_failures, task.next_commit_in_ms(2_310)) == (0, 1_000)
    task.begin_commit(2_320, [A])
    task.commit_completed(task.commit_seqno, None, None, 2_330)
    assert task.next_commit_in_ms(2_330) == 980


def test_a_response_ignores_closed_partitions() -> None:
    """A commit's response ignores partitions that were closed meanwhile."""
    task = state(A, B)
    task.received({A: 5, B: 5})
    task.delivered()
    task.begin_commit(0)
    task.closed([B])
    task.commit_completed(1, None, {A: FIVE, B: FIVE}, 1)
    assert task.last_committed == {A: FIVE}
    assert (task.never_committed, task.committing) == (set(), False)


def test_records_read_and_not_delivered_are_counted() -> None:
    """The lag is the maximum of undelivered records over open partitions."""
    task = state(A, B)
    assert task.lag_max() == 0
    task.received({A: 5, B: 9, TopicPartition("other", 0): 99})
    assert task.lag_max() == 9
    task.closed([B])
    assert task.lag_max() == 5
    task.delivered()
    assert (task.lag_max(), task.current) == (0, {A: FIVE})
    task.received({A: 9})
    assert task.lag_max() == 4


def test_records_of_several_polls_are_delivered_together() -> None:
    """Records of several polls are delivered together, and an empty poll is allowed during a redelivery."""
    task = state(A, B)
    task.received({A: 3})
    task.received({B: 4})
    task.batch = [record(A, 2)]
    task.received({})
    assert task.delivered() == frozenset()
    assert {tp: end.offset for tp, end in task.current.items()} == {A: 3, B: 4}
    assert task.pending == {}


def test_a_failed_flush_drops_pending_offsets() -> None:
    """After a failed flush pending offsets are not delivered."""
    task = state(A)
    task.received({A: 5})
    assert task.pre_commit_failed() == {A: 0}
    task.delivered()
    assert task.current[A].offset == 0


def test_a_rewind_drops_pending_offsets() -> None:
    """A rewind drops the pending offsets of its partition only."""
    task = state(A, B)
    task.received({A: 5, B: 6})
    task.rewinds = {A: 2}
    task.take_rewinds()
    task.delivered()
    assert {tp: end.offset for tp, end in task.current.items()} == {A: 2, B: 6}
    task.rewinds = {B: 1}
    task.closed([B])
    task.opened({B: 3})
    assert task.take_rewinds() == {}


@pytest.mark.parametrize("timeout_ms", [0, -1])
def test_a_timeout_that_is_not_positive_is_none(timeout_ms: int) -> None:
    """A timeout of zero or less is treated as none."""
    task = SinkTaskState(60_000, 100, 0)
    task.opened({A: 0})
    task.retry_timeout_ms = timeout_ms
    assert task.poll_timeout_ms(0) == 60_000
    task.delivery_failed()
    task.retry_timeout_ms = timeout_ms
    assert task.poll_timeout_ms(0) == REDELIVERY_MS


def test_a_timeout_ends_before_the_next_commit() -> None:
    """A timeout never exceeds the time to the next commit."""
    task = SinkTaskState(60_000, 100, 0)
    task.opened({A: 0})
    task.delivery_failed()
    assert task.poll_timeout_ms(59_000) == 1_000
    task.retry_timeout_ms = 1
    assert task.poll_timeout_ms(0) == 1
    task.retry_timeout_ms = 5_000
    assert task.poll_timeout_ms(0) == 5_000
    task.retry_timeout_ms = 5_000
    assert task.poll_timeout_ms(59_000) == 1_000


def test_repr() -> None:
    """The state's repr has partitions, records and flags."""
    task = state(A, B)
    task.batch = [record(A, 4)]
    assert repr(task) == "<SinkTaskState 2 partitions, 1 records >"
    task.delivery_failed()
    task.begin_commit(0)
    assert repr(task) == "<SinkTaskState 2 partitions, 1 records redelivering committing>"


def test_the_poll_timeout_covers_a_commit_in_progress() -> None:
    """While a commit is in progress, the poll timeout lasts until it expires."""
    task = state()
    task.begin_commit(1_000)
    assert task.poll_timeout_ms(5_000) == 0  # it has expired
    task.begin_commit(5_000)
    assert task.poll_timeout_ms(5_010) == 90
