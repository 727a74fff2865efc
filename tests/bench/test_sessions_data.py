"""What the benchmark of sessions reads."""

from __future__ import annotations

import time

import msgspec
import numpy as np

from bench._sessions_data import BEHIND_MS_MAX, DAY_MS, HOUR_MS, KEYS, LATE_SHARE, VALUE_BYTES, clicks


def test_clicks_are_as_described() -> None:
    """A recent day, a twentieth of it out of order, few keys with most records, 100 bytes of JSON each."""
    count = 60_000
    bulks = list(clicks(count))
    keys = [key for bulk in bulks for key in bulk.keys]
    times = np.array([at for bulk in bulks for at in bulk.timestamps or ()])
    values = [value or b"" for bulk in bulks for value in bulk.values]
    assert len(keys) == len(times) == len(values) == count
    assert {len(value) for value in values} == {VALUE_BYTES}
    assert [msgspec.json.decode(value)["user"].encode() for value in values[:1000]] == keys[:1000]
    ends_ms = time.time() * 1000 - HOUR_MS
    assert ends_ms - DAY_MS - BEHIND_MS_MAX - 10_000 < times.min() < times.max() < ends_ms
    behind = np.maximum.accumulate(times) - times
    assert 0 < behind.max() <= BEHIND_MS_MAX
    assert 0.8 * LATE_SHARE < np.mean(behind > 0) <= LATE_SHARE * 1.1
    numbers = np.unique(keys, return_counts=True)[1]
    assert len(numbers) <= KEYS
    assert numbers.max() > count / 20
