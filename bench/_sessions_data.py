"""What the benchmark of sessions reads: a day of clicks, out of order by minutes, few keys with most of them.

Keys follow Zipf's law (the n-th of them has 1/n of the first one's records). Event times rise over one day that ended
an hour ago; every twentieth record is up to six minutes behind its place, so that of those one in six is behind the
grace period. Values are JSON objects of 100 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import RecordColumns
from penstock.shared.common.settings import KafkaSettings

TOPIC = "clicks"
PARTITIONS = 4
KEYS = 20_000
DAY_MS = 86_400_000
HOUR_MS = 3_600_000
GAP_MS, GRACE_MS = 30 * 60_000, 5 * 60_000
LATE_SHARE, BEHIND_MS_MAX = 0.05, 6 * 60_000
BULK = 50_000
SEED = 1
VALUE_BYTES = 100


def clicks(count: int, seed: int = SEED, topic: str = TOPIC) -> Iterator[RecordColumns]:
    """All records, in bulks."""
    random = np.random.default_rng(seed)
    weights = np.cumsum(1 / np.arange(1, KEYS + 1))
    first_ms = int(time.time() * 1000) - HOUR_MS - DAY_MS
    for start in range(0, count, BULK):
        size = min(BULK, count - start)
        keys = np.searchsorted(weights, random.random(size) * weights[-1])
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


async def fill(kafka: KafkaSettings, count: int, topic: str = TOPIC) -> None:
    """Write the topic, which exists."""
    async with Producer(kafka, ProducerSettings(batch_size=65_536, linger_ms=20)) as producer:
        for bulk in clicks(count, topic=topic):
            if (error := await (await producer.send_many(bulk)).first_error()) is not None:
                raise error
