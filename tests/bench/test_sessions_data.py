"""The input of the benchmark of sessions."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from bench._sessions_data import (
    BEHIND_MS_MAX,
    BULK,
    DAY_MS,
    EVEN_KEYS,
    HOUR_MS,
    KEYS,
    LATE_SHARE,
    LAWS,
    VALUE_BYTES,
    clicks,
    topic_of,
)


def test_clicks_are_as_described() -> None:
    """The records cover a recent day, with a twentieth out of order, few keys that have most records, and 100 bytes of
    JSON each."""
    count = 60_000
    bulks = list(clicks(count, "zipf", "clicks-zipf"))
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


@pytest.mark.parametrize(
    ("law", "keys", "least", "most"),
    [("zipf", KEYS, 0.08, 0.11), ("power", KEYS, 0.009, 0.013), ("even", EVEN_KEYS, 0.0005, 0.001)],
)
def test_laws_of_keys(law: str, keys: int, least: float, most: float) -> None:
    """Each distribution numbers its keys from 0 and has its own share of the most frequent key."""
    numbers = LAWS[law](np.random.default_rng(1), 200_000)
    assert numbers.dtype == np.int64
    assert 0 <= numbers.min() <= numbers.max() < keys
    assert least < np.bincount(numbers).max() / len(numbers) < most
    assert topic_of(law) != topic_of(next(other for other in LAWS if other != law))


def test_the_first_records_are_as_dense_as_the_whole_day() -> None:
    """A tenth of the records is the first tenth of the day, not a day with a tenth of the records."""
    count = 10 * BULK
    (first,) = clicks(count, "power", "few", first=BULK)
    whole = next(clicks(count, "power", "many"))
    assert first.topic == "few"
    assert (first.keys, first.values) == (whole.keys, whole.values)
    times = np.array(first.timestamps)
    assert DAY_MS / 10 - 10_000 < times.max() - times.min() <= DAY_MS / 10 + BEHIND_MS_MAX
