"""The commit sequence: committed offsets never go backwards and never beyond processed records."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.clients.consumer.commit_sequence import LATE_MS, Commit, CommitSequence
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from tests.property_tests import examples

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def at(offset: int) -> OffsetAndMetadata:
    return OffsetAndMetadata(offset)


def next_of(sequence: CommitSequence, generation: int = 1) -> Commit:
    commit = sequence.next_commit(generation)
    assert commit is not None
    return commit


def test_a_failure_is_repeated_only_while_it_is_the_newest() -> None:
    """A failed offset is not sent again if a newer one replaces it."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    commit = next_of(sequence)
    sequence.register({A: at(9)})
    sequence.on_failure(commit)
    assert next_of(sequence).offsets == {A: at(9)}


def test_partitions_have_their_own_sequence() -> None:
    """A newer commit for one partition does not drop the failed offset of another. The next commit has both."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    failed = next_of(sequence)
    sequence.on_failure(failed)
    sequence.register({B: at(3)})
    assert next_of(sequence).offsets == {A: at(5), B: at(3)}


def test_done_means_these_or_newer() -> None:
    """A registered offset is done once it, or a newer one of its partition, has been committed."""
    sequence = CommitSequence()
    old = sequence.register({A: at(5)})
    new = sequence.register({A: at(9)})
    assert not sequence.is_dropped(old)
    commit = next_of(sequence)
    assert not sequence.is_done(old)
    sequence.on_success(commit)
    assert sequence.is_done(old)
    assert sequence.is_done(new)
    assert sequence.is_drained


def test_an_offset_registered_during_a_commit_stays_pending() -> None:
    """A successful commit of an older offset leaves the newer one pending."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    commit = next_of(sequence)
    sequence.register({A: at(9)})
    sequence.on_success(commit)
    assert not sequence.is_drained
    assert next_of(sequence).offsets == {A: at(9)}


def test_a_commit_of_unknown_outcome_is_read_back() -> None:
    """After a commit of unknown outcome, the next success is read back. It is committed again if the older commit was
    applied last."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    sequence.on_failure(next_of(sequence), unknown_at_ms=0)
    sequence.register({A: at(9)})
    unsure = sequence.on_success(next_of(sequence))
    assert unsure == {A}
    sequence.on_read_back({A: at(5)}, unsure, requested_ms=0)
    assert next_of(sequence).offsets == {A: at(9)}


def test_a_read_back_leaves_a_newer_offset_pending() -> None:
    """An offset registered meanwhile is committed next, whichever of the older commits was applied last."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    sequence.on_failure(next_of(sequence), unknown_at_ms=0)
    sequence.register({A: at(9)})
    unsure = sequence.on_success(next_of(sequence))
    sequence.register({A: at(12)})
    sequence.on_read_back({A: at(5)}, unsure, requested_ms=0)
    assert next_of(sequence).offsets == {A: at(12)}


def test_read_backs_continue_until_late_ms_has_passed() -> None:
    """Every success within LATE_MS is read back, and once more after LATE_MS. Then the committed offset is certain."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    sequence.on_failure(next_of(sequence), unknown_at_ms=100)
    sequence.on_success(next_of(sequence))
    sequence.on_read_back({A: at(5)}, {A}, requested_ms=200)
    assert sequence.is_drained
    assert sequence.read_back_at_ms() == 100 + LATE_MS
    assert sequence.to_read_back(now_ms=LATE_MS) == frozenset()
    assert sequence.to_read_back(now_ms=100 + LATE_MS) == {A}
    sequence.on_read_back({A: at(3)}, {A}, requested_ms=100 + LATE_MS)
    assert next_of(sequence).offsets == {A: at(5)}
    assert sequence.read_back_at_ms() is None


def test_only_the_commits_own_partitions_are_read_back() -> None:
    """A commit of unknown outcome affects only its own partitions, and none that was dropped meanwhile."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    first = next_of(sequence)
    sequence.register({B: at(6)})
    sequence.on_failure(first, unknown_at_ms=0)
    second = next_of(sequence)
    assert second.offsets == {A: at(5), B: at(6)}
    assert sequence.on_success(second) == {A}
    sequence.register({A: at(7)})
    third = next_of(sequence)
    sequence.retain({B})
    sequence.on_failure(third, unknown_at_ms=0)
    assert sequence.read_back_at_ms() is None


def test_a_rejected_commit_is_not_read_back() -> None:
    """A rejected commit is not read back, because it changed nothing."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    sequence.on_failure(next_of(sequence))
    assert sequence.read_back_at_ms() is None
    assert sequence.on_success(next_of(sequence)) == frozenset()


def test_a_read_back_of_other_partitions_changes_nothing() -> None:
    """A read-back changes nothing for a partition that was dropped meanwhile, or that has no successful commit."""
    sequence = CommitSequence()
    sequence.register({A: at(5)})
    sequence.on_failure(commit := next_of(sequence), unknown_at_ms=0)
    sequence.give_up(commit)
    sequence.on_read_back({A: at(3), B: at(3)}, {A, B}, requested_ms=0)
    assert sequence.is_drained


def test_a_late_commit_of_a_higher_offset_is_covered_too() -> None:
    """After a seek back, the lower offset is the newest one. A read-back after LATE_MS is the last one."""
    sequence = CommitSequence()
    sequence.register({A: at(5), B: at(9)})
    sequence.on_failure(next_of(sequence), unknown_at_ms=0)
    sequence.register({B: at(3)})
    sequence.on_success(next_of(sequence))
    sequence.register({A: at(6)})
    assert sequence.to_read_back(LATE_MS + 1) == {A, B}
    sequence.on_read_back({A: at(5), B: at(9)}, [A, B], requested_ms=LATE_MS + 1)
    assert sequence.read_back_at_ms() is None
    assert next_of(sequence).offsets == {A: at(6), B: at(3)}


def test_only_the_rejected_partition_stays_pending() -> None:
    """If one partition of a commit is rejected, the others are done, in any order."""
    sequence = CommitSequence()
    numbers = sequence.register({A: at(5), B: at(6)})
    sequence.on_success(next_of(sequence), rejected=[A])
    assert sequence.is_done({B: numbers[B]})
    assert not sequence.is_done({A: numbers[A]})
    assert sequence.committed([A, B]) == {B: 6}
    assert next_of(sequence).offsets == {A: at(5)}


def test_kept_partitions_are_committed_in_the_new_generation() -> None:
    """After a rebalance the failed offset of a kept partition is sent with the new generation. That of a revoked
    partition is dropped."""
    sequence = CommitSequence()
    sequence.register({A: at(5), B: at(6)})
    sequence.on_failure(next_of(sequence))
    assert sequence.retain({A}) == {B}
    commit = next_of(sequence, generation=2)
    assert (commit.offsets, commit.generation) == ({A: at(5)}, 2)


def test_a_dropped_offset_is_never_done() -> None:
    """A dropped offset is never done, even if its partition is assigned and committed again."""
    sequence = CommitSequence()
    old = sequence.register({A: at(5)})
    sequence.retain(())
    assert sequence.is_dropped(old)
    sequence.register({B: at(1)})
    new = sequence.register({A: at(5)})
    assert not sequence.is_dropped(new)
    sequence.on_success(next_of(sequence))
    assert sequence.is_done(new)


def test_an_abandoned_offset_is_not_sent_again() -> None:
    """An abandoned offset is not sent again, unless it was registered again in between."""
    sequence = CommitSequence()
    sequence.register({A: at(5), B: at(6)})
    commit = next_of(sequence)
    sequence.register({B: at(7)})
    sequence.on_failure(commit)
    sequence.give_up(commit)
    assert next_of(sequence).offsets == {B: at(7)}


class Coordinator:
    """A fake coordinator that applies commits at once, never, or late, as scripted."""

    def __init__(self) -> None:
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self.late: list[Commit] = []

    def apply(self, commit: Commit) -> None:
        self.committed.update(commit.offsets)

    def land(self, rng: random.Random) -> None:
        """Applies some of the late commits, in any order."""
        rng.shuffle(self.late)
        for _ in range(rng.randint(0, len(self.late))):
            self.apply(self.late.pop())


STEPS = ["process", "process", "send", "answer", "refuse", "time out, lost", "time out, lands late", "land"]


@settings(max_examples=examples(300))
@given(st.lists(st.sampled_from(STEPS), max_size=60), st.integers(0, 2**32))
def test_committed_offsets_never_go_backwards_or_ahead(steps: list[str], seed: int) -> None:
    """Under any failures and delays, no successful commit is below an earlier one or beyond processed records. In the
    end the newest offset is committed."""
    rng = random.Random(seed)
    sequence, coordinator = CommitSequence(), Coordinator()
    processed = {A: 0, B: 0}
    acknowledged = {A: 0, B: 0}
    out: Commit | None = None

    def succeed(commit: Commit) -> None:
        coordinator.apply(commit)
        for tp, value in commit.offsets.items():
            assert acknowledged[tp] <= value.offset <= processed[tp]
            acknowledged[tp] = value.offset
        unsure = sequence.on_success(commit)
        if unsure:
            coordinator.land(rng)
            sequence.on_read_back(dict(coordinator.committed), unsure, requested_ms=0)

    for step in [*steps, "answer"]:
        if step == "process":
            tp = rng.choice([A, B])
            processed[tp] += rng.randint(1, 9)
            sequence.register({tp: at(processed[tp])})
        elif step == "land":
            coordinator.land(rng)
        elif step == "send":
            out = out or sequence.next_commit(1)
        elif out is not None:
            commit, out = out, None
            if step == "answer":
                succeed(commit)
            elif step == "refuse":
                sequence.on_failure(commit)
            else:
                if step == "time out, lands late":
                    coordinator.late.append(commit)
                sequence.on_failure(commit, unknown_at_ms=0)
    while (commit := sequence.next_commit(1)) is not None:
        succeed(commit)
    coordinator.land(rng)
    if unsure := sequence.to_read_back(LATE_MS):
        sequence.on_read_back(dict(coordinator.committed), unsure, requested_ms=LATE_MS)
    while (commit := sequence.next_commit(1)) is not None:
        succeed(commit)
    assert sequence.is_drained
    assert {tp: v.offset for tp, v in coordinator.committed.items()} == {tp: o for tp, o in processed.items() if o}
