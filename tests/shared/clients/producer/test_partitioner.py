"""The partitioner: Java's murmur2 for keys, sticky batches without."""

from __future__ import annotations

import base64
import itertools
import json
import random
from pathlib import Path

import pytest

from shared.clients.producer import partitioner
from shared.clients.producer.partitioner import Partitioner, murmur2

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "murmur2.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(len(base64.b64decode(c["key"]))) + "-bytes")
def test_murmur2_is_javas(case: dict[str, object]) -> None:
    """Hash and partition of a key are what Java's client computes."""
    key = base64.b64decode(str(case["key"]))
    assert murmur2(key) == case["murmur2"]
    assert Partitioner(1).for_key(key, 7) == case["partition_of_7"]


def test_the_cache_is_bounded_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more keys than the cache holds, every key still goes where its hash says."""
    monkeypatch.setattr(partitioner, "KEY_CACHE_MAX", 10)
    chosen = Partitioner(1)
    keys = [b"%d" % i for i in range(35)]
    for _ in range(2):
        assert [chosen.for_key(k, 5) for k in keys] == [(murmur2(k) & 0x7FFFFFFF) % 5 for k in keys]
        assert len(chosen._hashes) <= 10


def test_sticky_changes_after_batch_size_bytes() -> None:
    """Records without a key stay on one partition for batch_size bytes, then go to another one."""
    chosen = Partitioner(100, random.Random(1))
    got = [chosen.sticky("t", 50, [0, 1, 2], [0, 1, 2]) for _ in range(40)]
    pairs = [got[i : i + 2] for i in range(0, 40, 2)]
    assert all(a == b for a, b in pairs)
    assert all(one != two for (one, _), (two, _) in itertools.pairwise(pairs))
    assert set(got) == {0, 1, 2}


def test_sticky_avoids_partitions_without_a_leader() -> None:
    """Only available partitions are chosen; all are where none is available."""
    chosen = Partitioner(1, random.Random(1))
    assert {chosen.sticky("t", 5, [1], [0, 1, 2]) for _ in range(20)} == {1}
    assert {chosen.sticky("t", 5, [], [0, 1, 2]) for _ in range(50)} == {0, 1, 2}
