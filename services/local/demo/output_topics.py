"""Reads the output topics of the demo's aggregator: the published sessions, and the dead letters."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter import MESSAGE
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings

RESULTS_POLL_MS = 500
RESULTS_POLL_RECORDS = 10_000
# Beyond this many dead letters, a further reason is unlikely.
DEAD_LETTERS_READ_MAX = 100_000
RESULTS_CONSUMER = ConsumerSettings(
    isolation_level="read_committed", auto_offset_reset="earliest", commit_strategy="none"
)


@dataclass(slots=True)
class Published:
    """The content of the demo's results topic.

    `longest` are its longest sessions, longest first. `ends` has the offset after the last record of each partition
    that has records. A partition's end may be higher, since a transaction marker may follow the last record.
    """

    longest: list[dict[str, Any]]
    ends: dict[TopicPartition, int]


async def read_published_sessions(kafka: KafkaSettings, topic: str, partitions: int, most: int) -> Published:
    """Read the demo's results topic to its end. Keeps the `most` longest sessions."""
    at = [TopicPartition(topic, p) for p in range(partitions)]
    heap: list[tuple[int, int, dict[str, Any]]] = []
    seen = 0
    last = {}
    async with Consumer(kafka, RESULTS_CONSUMER) as consumer:
        consumer.assign(at)
        ends = await consumer.end_offsets(at)
        while any([await consumer.position(p) < ends[p] for p in at]):
            for tp, columns in (await consumer.poll(RESULTS_POLL_MS, RESULTS_POLL_RECORDS)).items():
                if len(columns):
                    last[tp] = columns.offsets[-1] + 1
                for value in columns.values:
                    session = msgspec.json.decode(value or b"{}")
                    seen += 1
                    item = (session["end"] - session["start"], -seen, session)
                    (heapq.heappush if len(heap) < most else heapq.heappushpop)(heap, item)
    return Published([session for _, _, session in sorted(heap, reverse=True)], last)


async def read_dead_letter_reasons(kafka: KafkaSettings, topic: str, partitions: int, most: int) -> list[str]:
    """Return at most `most` different reasons in the dead-letter topic `topic`.

    Stops reading after about DEAD_LETTERS_READ_MAX dead letters.
    """
    at = [TopicPartition(topic, p) for p in range(partitions)]
    reasons: dict[str, None] = {}
    left = DEAD_LETTERS_READ_MAX
    async with Consumer(kafka, RESULTS_CONSUMER) as consumer:
        consumer.assign(at)
        ends = await consumer.end_offsets(at)
        while len(reasons) < most and left > 0 and any([await consumer.position(p) < ends[p] for p in at]):
            for columns in (await consumer.poll(RESULTS_POLL_MS, RESULTS_POLL_RECORDS)).values():
                left -= len(columns)
                for headers in columns.headers or ():
                    reasons.setdefault((dict(headers).get(MESSAGE) or b"").decode(errors="replace"))
    return list(reasons)[:most]
