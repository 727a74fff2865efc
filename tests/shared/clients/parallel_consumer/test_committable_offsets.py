"""The committable position of a partition, and the finished records behind it, which the commit's metadata keeps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.parallel_consumer.commit_metadata import (
    Ranges,
    decode_finished,
    encode_finished,
    encoded_bytes_max,
)
from penstock.shared.clients.parallel_consumer.partition_progress import Lane, PartitionProgress, Work
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import OFFSET_METADATA_MAX_BYTES, Columns, ConsumerRecord, OffsetAndMetadata


def work_at(offset: int) -> Work:
    work = Work(Columns.of([ConsumerRecord("t", 0, offset, 0, None, None)]), 0, offset)
    work.lane = Lane(None)
    return work


def test_the_first_commit_is_due_once() -> None:
    """The first commit of a partition is due once its position is known, from a record or a reset."""
    for committed, is_due in ((None, True), (OffsetAndMetadata(0), False)):
        progress = PartitionProgress(committed, ())
        progress.deliver(work_at(4))
        assert progress.pass_over(5) is is_due
        assert progress.pass_over(5) is False
        assert progress.committable() == OffsetAndMetadata(4)


def test_no_commit_is_due_while_a_partition_is_draining() -> None:
    """A position that is not taken makes nothing committable, so that no commit is due for it."""
    progress = PartitionProgress(None, ())
    progress.draining = True
    assert progress.pass_over(5) is False
    assert progress.committable() is None
    progress.draining = False
    assert progress.pass_over(5) is True
    assert progress.committable() == OffsetAndMetadata(5)


def test_a_position_never_goes_back_without_records() -> None:
    """A position below the current one is ignored."""
    progress = PartitionProgress(OffsetAndMetadata(7), ())
    progress.pass_over(5)
    assert progress.committable() == OffsetAndMetadata(7)


def ranges_of(progress: PartitionProgress) -> tuple[int, list[tuple[int, int]]]:
    at = progress.committable()
    assert at is not None
    return at.offset, list(decode_finished(at))


@pytest.mark.parametrize("seed", range(20))
def test_finished_records_are_kept_as_ranges(seed: int) -> None:
    """Records may finish in any order. A range ends at the next unfinished record, regardless of gaps in the
    offsets."""
    chance = random.Random(seed)
    progress = PartitionProgress(None, ())
    works = [work_at(offset) for offset in sorted(chance.sample(range(60), 25))]
    for work in works:
        assert progress.deliver(work)
    position = works[-1].offset + 1
    unfinished = {work.offset for work in works}
    for work in sorted(works, key=lambda _: chance.random()):
        progress.finish(work)
        unfinished.remove(work.offset)
        expected: list[tuple[int, int]] = []
        first = min(unfinished, default=position)
        for each in works:
            if each.offset in unfinished or each.offset < first:
                is_new = True
            elif is_new:
                expected.append((each.offset, each.offset))
                is_new = False
            else:
                expected[-1] = (expected[-1][0], each.offset)
        assert ranges_of(progress) == (first, expected)
        assert (progress.runs, progress.unfinished) == (len(expected), len(unfinished))


def test_records_that_an_earlier_owner_finished_are_known() -> None:
    """Records that an earlier owner finished are not processed again, and stay finished in later commits."""
    progress = PartitionProgress(OffsetAndMetadata(5, "", 3), ((7, 8), (12, 12), (20, 20)))
    assert (progress.highest, progress.leader_epoch, progress.is_new) == (20, 3, False)
    assert ranges_of(progress) == (5, [(7, 8), (12, 12), (20, 20)])
    works = {offset: work_at(offset) for offset in range(5, 14)}
    assert [offset for offset, work in works.items() if progress.deliver(work)] == [5, 6, 9, 10, 11, 13]
    assert ranges_of(progress) == (5, [(7, 8), (12, 12), (20, 20)])
    assert progress.runs == 2
    progress.finish(works[6])
    progress.finish(works[10])
    assert ranges_of(progress) == (5, [(6, 8), (10, 10), (12, 12), (20, 20)])
    assert progress.runs == 3
    progress.finish(works[5])
    assert ranges_of(progress)[0] == 9
    assert progress.runs == 2


def test_a_redelivery_resets_the_progress() -> None:
    """After a seek or a truncation the same offsets are different records."""
    progress = PartitionProgress(OffsetAndMetadata(5, "", 3), ((7, 8),))
    works = [work_at(offset) for offset in (5, 6)]
    for work in works:
        progress.deliver(work)
    progress.finish(works[1])
    assert progress.deliver(work_at(4))
    assert progress.deliver(work_at(7))
    assert ranges_of(progress) == (4, [])
    assert (progress.unfinished, progress.runs, progress.highest, progress.leader_epoch) == (2, 0, -1, -1)


@pytest.mark.parametrize(
    ("at", "first", "finished"),
    [(9, 5, [(6, 6), (8, 8)]), (6, 5, []), (7, 5, [(6, 6)]), (5, None, []), (12, None, [])],
)
def test_a_truncation_keeps_what_is_before_it(at: int, first: int | None, finished: list[tuple[int, int]]) -> None:
    """Records before it are delivered again from the first unfinished one on, and those that were finished are
    skipped."""
    progress = PartitionProgress(OffsetAndMetadata(5), ())
    works = {offset: work_at(offset) for offset in range(5, 12)}
    for work in works.values():
        progress.deliver(work)
    for offset in (6, 8, 9, 10):
        progress.finish(works[offset])
    assert progress.truncate(at) == first
    if first is None:
        assert progress.unfinished == 3
        return
    assert ranges_of(progress) == (first, finished)
    skipped = {offset for known in finished for offset in known}
    assert {offset for offset in range(first, 12) if not progress.deliver(work_at(offset))} == skipped
    assert progress.epoch == 1, "results of running records are ignored"


def test_a_partition_at_the_log_start() -> None:
    """Offset 0 is a valid position."""
    progress = PartitionProgress(None, ())
    assert (progress.committable(), progress.leader_epoch) == (None, -1)
    assert progress.pass_over(0)
    assert progress.committable() == OffsetAndMetadata(0)
    assert work_at(0).attempts == 0


def test_skipped_ranges_are_not_committed_again() -> None:
    """Finished ranges below the position are dropped. A range that contains the position starts there."""
    progress = PartitionProgress(OffsetAndMetadata(5), ((7, 8), (20, 22)))
    progress.pass_over(21)
    assert ranges_of(progress) == (21, [(21, 22)])


def test_the_first_unfinished_record_may_always_start() -> None:
    """The first unfinished record may start, whatever the number of finished ranges. Others wait if the ranges exceed
    the metadata limit."""
    for runs, fits in ((10, True), (20_000, False)):
        progress = PartitionProgress(OffsetAndMetadata(0), tuple((3 * run, 3 * run) for run in range(1, runs)))
        head, other = work_at(0), work_at(1)
        assert progress.deliver(head)
        assert progress.may_start(head)
        assert progress.deliver(other)
        assert progress.may_start(other) is fits


def test_a_long_known_range_is_committed_whole() -> None:
    """Redelivered records of a finished range stay one range, from its first record to its last."""
    progress = PartitionProgress(OffsetAndMetadata(5), ((6, 9),))
    works = [work_at(offset) for offset in range(5, 10)]
    assert [progress.deliver(work) for work in works] == [True, False, False, False, False]
    assert ranges_of(progress) == (5, [(6, 9)])


def test_rewinds_are_counted_and_keep_only_running_lanes() -> None:
    """After each rewind the epoch is another one, and lanes with a running record have no waiting ones."""
    progress = PartitionProgress(None, ())
    busy = Lane("busy", running=1)
    busy.queue.append(work_at(2))
    progress.lanes = {"busy": busy, "idle": Lane("idle")}
    progress.running = 1
    progress.rewind()
    assert (progress.lanes, progress.running, progress.epoch, list(busy.queue)) == ({"busy": busy}, 1, 1, [])
    progress.rewind()
    assert progress.epoch == 2


SPAN = 30_000
RANGES_MAX = 1_412
"""So many ranges over SPAN offsets fit into the metadata of a commit for certain."""


@pytest.mark.parametrize(("running", "is_allowed"), [(3, True), (211, True), (212, False), (1_000, False)])
def test_a_record_may_start_if_its_range_fits_for_certain(running: int, is_allowed: bool) -> None:
    """Ranges behind unfinished records, known ranges and running records count, each as one range, and so does the
    record."""
    known = tuple((at, at) for at in range(SPAN, SPAN + 400, 2))
    progress = PartitionProgress(OffsetAndMetadata(400), known)
    assert progress.deliver(work_at(400))
    progress.runs += 1_000
    progress.running += running
    work = work_at(SPAN)
    assert progress.highest - 400 + 1 == SPAN - 1
    assert progress.may_start(work) is is_allowed
    assert (
        encoded_bytes_max(RANGES_MAX, SPAN - 1)
        <= OFFSET_METADATA_MAX_BYTES
        < encoded_bytes_max(RANGES_MAX + 1, SPAN - 1)
    )


@pytest.mark.parametrize(("last", "is_allowed"), [(24_478, True), (24_479, False)])
def test_a_record_may_start_if_a_bitmap_fits(last: int, is_allowed: bool) -> None:
    """With any number of ranges, the limit is the bitmap of all offsets from the first unfinished one to the last
    finished one."""
    progress = PartitionProgress(OffsetAndMetadata(0), ((10, last),))
    assert progress.deliver(work_at(0))
    progress.runs = SPAN
    assert progress.may_start(work_at(5)) is is_allowed


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, Ranges]:
    base = draw(st.integers(0, 2**62))
    steps = st.tuples(
        st.one_of(st.integers(1, 3), st.integers(1, 200_000)), st.one_of(st.integers(0, 3), st.integers(0, 200_000))
    )
    at, out = base, []
    for gap, length in draw(st.lists(steps, max_size=300)):
        out.append((at + gap, at + gap + length))
        at += gap + length + 1
    return base, tuple(out)


@given(ranges())
def test_encoded_ranges_are_decoded_unchanged(given_ranges: tuple[int, Ranges]) -> None:
    """The text gives back exactly the ranges, in runs or as a bitmap."""
    base, finished = given_ranges
    assert decode_finished(OffsetAndMetadata(base, encode_finished(base, finished))) == finished


@given(ranges())
def test_the_bound_holds(given_ranges: tuple[int, Ranges]) -> None:
    """No encoding is longer than the bound that the scheduler plans with."""
    base, finished = given_ranges
    span = finished[-1][1] - base + 1 if finished else 0
    assert len(encode_finished(base, finished)) <= encoded_bytes_max(len(finished), span)


def test_alternating_offsets_become_a_bitmap() -> None:
    """Every second offset of 24,000 fits into a commit, which runs alone would not."""
    finished = [(offset, offset) for offset in range(1_001, 25_000, 2)]
    text = encode_finished(1_000, finished)
    assert text.startswith("p1b:")
    assert len(text) <= OFFSET_METADATA_MAX_BYTES
    assert decode_finished(OffsetAndMetadata(1_000, text)) == tuple(finished)


def test_a_long_run_is_short() -> None:
    """A million finished records behind one unfinished cost a few bytes."""
    assert len(encode_finished(5, [(6, 1_000_006)])) < 20


@pytest.mark.parametrize("text", ["", "my own note", "p2r:AAAA"])
def test_other_metadata_means_nothing_finished(text: str) -> None:
    """Metadata of another program or a later version is no error, and contains no finished offsets."""
    assert decode_finished(OffsetAndMetadata(7, text)) == ()


@pytest.mark.parametrize("text", ["p1r:", "p1r:!", "p1r:BwE=", "p1r:BwGA", "p1b:////////////////////"])
def test_damaged_metadata_is_rejected(text: str) -> None:
    """Metadata of ours that is cut off or mangled is named with a reason, not guessed at."""
    with pytest.raises(DataError, match=r"offset 7 is damaged: \w"):
        decode_finished(OffsetAndMetadata(7, text))


def test_metadata_of_another_offset_is_rejected() -> None:
    """An offset that was altered while its metadata stayed cannot mark the wrong records as finished."""
    with pytest.raises(DataError, match="belongs to offset 7"):
        decode_finished(OffsetAndMetadata(8, encode_finished(7, [(9, 9)])))


@given(st.binary(max_size=60), st.sampled_from(["p1r:", "p1b:"]))
def test_any_bytes_are_ranges_or_rejected(data: bytes, prefix: str) -> None:
    """Arbitrary bytes give rising ranges or a DataError, never another exception."""
    import base64

    try:
        got = decode_finished(OffsetAndMetadata(0, prefix + base64.b64encode(b"\0" + data).decode()))
    except DataError:
        return
    edges = [edge for pair in got for edge in pair]
    assert edges == sorted(edges)
