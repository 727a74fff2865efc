"""The partitioner: Java's murmur2 for keys, sticky and adaptive choices without (statistics under a fixed seed)."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from penstock.shared.clients.producer.partitioner import StickyPartition, for_key, murmur2
from penstock.shared.common.records import TopicPartition

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "murmur2.jsonl").read_text().splitlines()]
DRAWS = 11_000


def chosen(
    sticky: StickyPartition, queued: tuple[int, ...], slow: frozenset[int] = frozenset(), available: object = None
) -> int:
    numbers = list(range(len(queued)))
    return sticky.choose(
        "t",
        numbers if available is None else list(available),  # type: ignore[call-overload]
        numbers,
        lambda tp: queued[tp.partition],
        lambda tp: tp.partition in slow,
    )


def draws(sticky: StickyPartition, queued: tuple[int, ...], slow: frozenset[int] = frozenset()) -> Counter[int]:
    found: Counter[int] = Counter()
    for _ in range(DRAWS):
        found[chosen(sticky, queued, slow)] += 1
        sticky.produced(100)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(len(base64.b64decode(c["key"]))) + "-bytes")
def test_murmur2_is_javas(case: dict[str, object]) -> None:
    """Hash and partition of a key are what Java's client computes."""
    key = base64.b64decode(str(case["key"]))
    assert murmur2(key) == case["murmur2"]
    assert for_key(key, 7) == case["partition_of_7"]


def test_the_choice_is_sticky_for_batch_size_bytes() -> None:
    """It changes once that many bytes were produced, not before, however many batches that took."""
    sticky = StickyPartition(100, adaptive=False, rng=random.Random(3))
    first = chosen(sticky, (0,) * 50)
    for _ in range(9):
        sticky.produced(11)
        assert chosen(sticky, (0,) * 50) == first
    sticky.produced(1)
    assert chosen(sticky, (0,) * 50) != first
    assert repr(sticky) == f"<StickyPartition {sticky.partition}, 0 bytes>"


def test_uniform() -> None:
    """Without adaptive partitioning every partition is drawn as often, whatever its queue."""
    found = draws(StickyPartition(100, adaptive=False, rng=random.Random(1)), (1, 7, 2))
    assert all(abs(found[p] - DRAWS / 3) < 0.05 * DRAWS / 3 for p in range(3))


def test_uniform_where_queues_are_equal() -> None:
    """Adaptive partitioning is uniform while no queue is longer than another."""
    found = draws(StickyPartition(100, adaptive=True, rng=random.Random(1)), (4, 4, 4))
    assert all(abs(found[p] - DRAWS / 3) < 0.05 * DRAWS / 3 for p in range(3))


def test_adaptive() -> None:
    """With queues of 1, 7 and 2 batches partitions are drawn 7 : 1 : 6."""
    found = draws(StickyPartition(100, adaptive=True, rng=random.Random(1)), (1, 7, 2))
    for partition, weight in enumerate((7, 1, 6)):
        expected = DRAWS * weight / 14
        assert abs(found[partition] - expected) < 0.1 * expected


def test_slow_brokers_are_passed_over() -> None:
    """No draw falls on a partition whose broker is slow, unless all are."""
    slow = frozenset({0, 1})
    assert set(draws(StickyPartition(100, adaptive=True, rng=random.Random(1)), (1, 7, 2), slow)) == {2}
    assert set(draws(StickyPartition(100, adaptive=True, rng=random.Random(1)), (0, 0), slow)) == {0, 1}


@pytest.mark.parametrize("adaptive", [True, False])
def test_partitions_without_a_leader_are_avoided(adaptive: bool) -> None:
    """Only available partitions are chosen; all are where none is available."""
    sticky = StickyPartition(1, adaptive=adaptive, rng=random.Random(1))
    for available, wanted in (([1], {1}), ([], {0, 1, 2})):
        found = set()
        for _ in range(60):
            found.add(chosen(sticky, (0, 0, 0), available=available))
            sticky.produced(1)
        assert found == wanted


def test_a_choice_that_is_no_longer_available_is_left() -> None:
    """Though it has not had its bytes yet."""
    sticky = StickyPartition(1_000, adaptive=True, rng=random.Random(1))
    first = chosen(sticky, (0, 0, 0))
    rest = [p for p in range(3) if p != first]
    assert chosen(sticky, (0, 0, 0), available=rest) in rest
    assert TopicPartition("t", first).partition == first
