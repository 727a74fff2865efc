"""The input of the benchmark of sessions: a day of clicks, out of order by minutes, skewed by key.

Each distribution of keys ("law") has a topic. By Zipf's law the n-th key has 1/n of the first key's records, which is a
tenth of all. The power law is flatter, with 1 % for the first key. The even law has fewer keys, each with the same
number of records. Event times ascend over one day that ended an hour ago. Every twentieth record is up to six minutes
late, so one in six of these is behind the grace period. Values are JSON objects of 100 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.random import Generator

from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import Int64Array, RecordColumns
from penstock.shared.common.settings import KafkaSettings

PARTITIONS = 4
KEYS, EVEN_KEYS = 20_000, 2_000
POWER = 2.2
DAY_MS = 86_400_000
HOUR_MS = 3_600_000
GAP_MS, GRACE_MS = 30 * 60_000, 5 * 60_000
LATE_SHARE, BEHIND_MS_MAX = 0.05, 6 * 60_000
BULK = 50_000
SEED = 1
VALUE_BYTES = 100


ZIPF_SUMS = np.cumsum(1 / np.arange(1, KEYS + 1))
LAWS: dict[str, Callable[[Generator, int], Int64Array]] = {
    "zipf": lambda random, size: np.searchsorted(ZIPF_SUMS, random.random(size) * ZIPF_SUMS[-1]).astype(np.int64),
    "power": lambda random, size: (KEYS * random.random(size) ** POWER).astype(np.int64),
    "even": lambda random, size: random.integers(0, EVEN_KEYS, size),
}
"""The laws: key numbers for a number of records."""


def topic_of(law: str) -> str:
    """The topic whose keys follow this law."""
    return f"clicks-{law}"


def clicks(count: int, law: str, topic: str, first: int | None = None, seed: int = SEED) -> Iterator[RecordColumns]:
    """The records of a day with `count` of them, in bulks; with `first`, only that many, from the beginning."""
    random = np.random.default_rng(seed)
    first_ms = int(time.time() * 1000) - HOUR_MS - DAY_MS
    end = count if first is None else first
    for start in range(0, end, BULK):
        size = min(BULK, end - start)
        keys = LAWS[law](random, size)
        times = first_ms + (np.arange(start, start + size) * DAY_MS) // count
        behind = random.random(size) < LATE_SHARE
        times = times - np.where(behind, random.integers(0, BEHIND_MS_MAX, size), 0)
        took = random.integers(1, 1_500, size)
        names = [b"u%d" % key for key in keys.tolist()]
        values = [_value(name, ms, start + i) for i, (name, ms) in enumerate(zip(names, took.tolist(), strict=True))]
        yield RecordColumns(topic, names, values, times.tolist())


def _value(user: bytes, ms: int, number: int) -> bytes:
    body = b'{"user":"%s","path":"/item/%d","ms":%d,"status":200,"session":"%08x"' % (
        user,
        number % 977,
        ms,
        number * 2654435761 % 2**32,
    )
    return body + b',"agent":"' + b"x" * (VALUE_BYTES - len(body) - 12) + b'"}'


async def make_topic(kafka: KafkaSettings, topic: str) -> None:
    """Create an event-time topic with the benchmark's partitions."""
    async with Admin(kafka) as admin:
        await admin.create_topics([event_time_topic(topic, PARTITIONS)])


async def fill(kafka: KafkaSettings, count: int, law: str, topic: str, first: int | None = None) -> None:
    """Write the topic, which must exist; see `clicks`."""
    async with Producer(kafka, ProducerSettings(batch_size=65_536, linger_ms=20)) as producer:
        for bulk in clicks(count, law, topic, first):
            if (error := await (await producer.send_many(bulk)).first_error()) is not None:
                raise error
