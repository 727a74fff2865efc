"""Dead-letter and late topics through Kafka: implements `api.letters.Letters` (an edge)."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from shared.clients.admin import Admin
from shared.clients.consumer import Consumer, ConsumerSettings
from shared.clients.consumer.dead_letters import parse_dead_letter
from shared.clients.dead_letter_log import DeadLetterLog, wanted_by
from shared.clients.producer import Producer, ProducerSettings
from shared.common.errors import DataError, InvalidRequest
from shared.common.records import ConsumerRecord, TopicPartition
from shared.common.settings import KafkaSettings
from shared.common.topic_names import DEAD_LETTER_SUFFIX, LATE_SUFFIX, check_topic_name

POLL_MS = 500
LOOK_MS = 15_000
"""How long one look may read."""
LARGEST_RECORD_BYTES = 64 * 1024 * 1024
"""A dead letter was a stored record once: how large it may be is the broker's to say."""
TEXT_CHARACTERS_MAX = 2_000
"""Of a key, a value or a header in an answer; the record itself is never cut."""


class KafkaLetters:
    """See `api.letters.Letters`."""

    def __init__(self, kafka: KafkaSettings, admin: Admin) -> None:
        self._kafka, self._admin = kafka, admin
        self._replaying = asyncio.Lock()

    async def topics(self) -> list[dict[str, Any]]:
        """See the protocol; the number of records is that between the first offset and the end."""
        names = [name for name in await self._admin.list_topics() if _kind(name)]
        found = await self._admin.describe_topics(names) if names else {}
        tps = [TopicPartition(name, p.partition) for name, topic in found.items() for p in topic.partitions]
        first = await self._admin.list_offsets(dict.fromkeys(tps, "earliest")) if tps else {}
        ends = await self._admin.list_offsets(dict.fromkeys(tps, "latest")) if tps else {}
        return [
            {
                "topic": name,
                "kind": _kind(name),
                "source": name.removesuffix(DEAD_LETTER_SUFFIX).removesuffix(LATE_SUFFIX),
                "records": sum(ends[tp] - first[tp] for tp in tps if tp.topic == name),
            }
            for name in sorted(names)
        ]

    async def look(self, topic: str, limit: int, stage: str | None) -> list[dict[str, Any]]:
        """See the protocol; of each partition the newest `limit` are looked at."""
        self._check(topic)
        described = (await self._admin.describe_topics([topic]))[topic]
        tps = [TopicPartition(topic, p.partition) for p in described.partitions]
        first = await self._admin.list_offsets(dict.fromkeys(tps, "earliest"))
        ends = await self._admin.list_offsets(dict.fromkeys(tps, "latest"))
        tps = [tp for tp in tps if ends[tp] > first[tp]]
        newest: deque[ConsumerRecord] = deque()
        settings = ConsumerSettings(
            auto_offset_reset="earliest", commit_strategy="none", isolation_level="read_committed"
        )
        if tps:
            async with Consumer(self._kafka, settings) as consumer, asyncio.timeout(LOOK_MS / 1000):
                consumer.assign(tps)
                stable = await consumer.end_offsets(tps)
                for tp in tps:
                    consumer.seek(tp, max(first[tp], stable[tp] - limit))
                while [tp for tp in tps if await consumer.position(tp) < stable[tp]]:
                    for columns in (await consumer.poll(POLL_MS)).values():
                        newest.extend(columns.records())
        rows = [_row(record) for record in sorted(newest, key=lambda record: -record.timestamp)]
        return [row for row in rows if stage is None or row.get("stage") == stage][:limit]

    async def replay(
        self, topic: str, *, limit: int, stage: str | None, exception: str | None, again: bool, dry_run: bool
    ) -> dict[str, Any]:
        """See the protocol; one replay at a time, since each goes on where the one before it ended."""
        self._check(topic)
        if not topic.endswith(DEAD_LETTER_SUFFIX):
            raise InvalidRequest(f"{topic}: only dead letters are replayed")
        wanted = wanted_by(stage, exception)
        async with self._replaying, DeadLetterLog(self._kafka, topic) as letters:
            if dry_run:
                count = 0
                async with aclosing(letters.entries()) as entries:
                    async for entry in entries:
                        fits = entry.letter is not None and wanted(entry.letter)
                        count += fits and (again or not entry.replayed)
                return {"would_send": min(count, limit)}
            settings = ProducerSettings(max_request_size=LARGEST_RECORD_BYTES, buffer_memory=2 * LARGEST_RECORD_BYTES)
            async with Producer(self._kafka, settings) as producer:
                return asdict(await letters.replay(producer, wanted, limit=limit, again=again))

    def _check(self, topic: str) -> None:
        check_topic_name(topic)
        if not _kind(topic):
            raise InvalidRequest(f"{topic}: neither a dead-letter topic (…{DEAD_LETTER_SUFFIX}) nor a late one")


def _kind(topic: str) -> str:
    return "dead_letters" if topic.endswith(DEAD_LETTER_SUFFIX) else "late" if topic.endswith(LATE_SUFFIX) else ""


def _row(record: ConsumerRecord) -> dict[str, Any]:
    row: dict[str, Any] = {
        "partition": record.partition,
        "offset": record.offset,
        "written_ms": record.timestamp,
        "key": _text(record.key),
        "value": _text(record.value),
    }
    try:
        letter = parse_dead_letter(record)
    except DataError:
        return row | {"headers": [[name, _text(value)] for name, value in record.headers]}
    source = letter.record
    return row | {
        "source": {"topic": source.topic, "partition": source.partition, "offset": source.offset},
        "timestamp_ms": source.timestamp,
        "stage": letter.stage,
        "exception": letter.exception,
        "message": letter.message,
        "attempts": letter.attempts,
        "group": letter.group,
        "headers": [[name, _text(value)] for name, value in source.headers],
    }


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="backslashreplace")[:TEXT_CHARACTERS_MAX]
