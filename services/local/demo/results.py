"""Reads the demo's published results back from their topic (an edge)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter import MESSAGE
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings

POLL_MS = 500
POLL_RECORDS = 10_000
DEAD_LETTERS_READ_MAX = 100_000  # enough to find the few different reasons
SETTINGS = ConsumerSettings(isolation_level="read_committed", auto_offset_reset="earliest", commit_strategy="none")


@dataclass(slots=True)
class Published:
    """A results topic: its longest sessions, longest first, and the offset after each partition's last record.

    The marker of the last transaction may follow the last record. No consumer commits it.
    """

    longest: list[dict[str, Any]]
    ends: dict[TopicPartition, int]


async def published_sessions(kafka: KafkaSettings, topic: str, partitions: int, most: int) -> Published:
    """Read a results topic to its end. Keeps the `most` longest sessions."""
    at = [TopicPartition(topic, p) for p in range(partitions)]
    heap: list[tuple[int, int, dict[str, Any]]] = []
    seen = 0
    last = {}
    async with Consumer(kafka, SETTINGS) as consumer:
        consumer.assign(at)
        ends = await consumer.end_offsets(at)
        while any([await consumer.position(p) < ends[p] for p in at]):
            for tp, columns in (await consumer.poll(POLL_MS, POLL_RECORDS)).items():
                if len(columns):
                    last[tp] = columns.offsets[-1] + 1
                for value in columns.values:
                    session = msgspec.json.decode(value or b"{}")
                    seen += 1
                    item = (session["end"] - session["start"], -seen, session)
                    (heapq.heappush if len(heap) < most else heapq.heappushpop)(heap, item)
    return Published([session for _, _, session in sorted(heap, reverse=True)], last)


async def dead_letter_reasons(kafka: KafkaSettings, topic: str, partitions: int, most: int) -> list[str]:
    """Return the different reasons in the first dead letters of a topic, at most `most`."""
    at = [TopicPartition(topic, p) for p in range(partitions)]
    reasons: dict[str, None] = {}
    left = DEAD_LETTERS_READ_MAX
    async with Consumer(kafka, SETTINGS) as consumer:
        consumer.assign(at)
        ends = await consumer.end_offsets(at)
        while len(reasons) < most and left > 0 and any([await consumer.position(p) < ends[p] for p in at]):
            for columns in (await consumer.poll(POLL_MS, POLL_RECORDS)).values():
                left -= len(columns)
                for headers in columns.headers or ():
                    reasons.setdefault((dict(headers).get(MESSAGE) or b"").decode(errors="replace"))
    return list(reasons)[:most]


def count_notable(path: Path) -> int:
    """Return the number of different sessions that the handler kept."""
    if not path.exists():
        return 0
    return len(set(path.read_bytes().splitlines()))
