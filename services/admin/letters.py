"""Dead-letter and late topics through Kafka: implements `api.letters.Letters` (an edge)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from shared.clients.admin import Admin
from shared.clients.consumer import Consumer, ConsumerSettings
from shared.clients.consumer.dead_letters import parse_dead_letter
from shared.clients.dead_letter_log import DeadLetterLog, wanted_by
from shared.clients.producer import Producer, ProducerSettings
from shared.common.errors import DataError, InvalidRequest, KafkaTimeout
from shared.common.records import Columns, ConsumerRecord, TopicPartition
from shared.common.settings import KafkaSettings
from shared.common.topic_names import DEAD_LETTER_SUFFIX, LATE_SUFFIX, check_topic_name, is_internal
from shared.streams.late_records import STAGE_LATE, parse_late_record

POLL_MS = 500
LOOK_MS = 15_000
"""How long one look may read."""
LOOKED_AT_MAX = 20_000
"""Newest records of a topic that a look for a stage reads."""
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

    async def look(self, topic: str, limit: int, stage: str | None) -> dict[str, Any]:
        """See the protocol; of all partitions together about `LOOKED_AT_MAX` records where a stage is asked for."""
        self._check(topic)
        described = (await self._admin.describe_topics([topic]))[topic]
        tps = [TopicPartition(topic, p.partition) for p in described.partitions]
        first = await self._admin.list_offsets(dict.fromkeys(tps, "earliest"))
        ends = await self._admin.list_offsets(dict.fromkeys(tps, "latest"))
        tps = [tp for tp in tps if ends[tp] > first[tp]]
        each = limit if stage is None else max(limit, LOOKED_AT_MAX // max(1, len(tps)))
        starts = {tp: max(first[tp], ends[tp] - each) for tp in tps}
        newest: dict[TopicPartition, deque[dict[str, Any]]] = {tp: deque(maxlen=limit) for tp in tps}
        looked_at = 0
        try:
            async with asyncio.timeout(LOOK_MS / 1000), aclosing(self._records(starts)) as batches:
                async for columns in batches:
                    looked_at += len(columns.offsets)
                    rows = (_row(record) for record in columns.records())
                    found = (row for row in rows if stage is None or row.get("stage") == stage)
                    newest[columns.topic_partition].extend(found)
        except TimeoutError:
            raise KafkaTimeout(f"{topic}: not read within {LOOK_MS} ms") from None
        letters = sorted((row for rows in newest.values() for row in rows), key=lambda row: -row["written_ms"])
        return {"letters": letters[:limit], "looked_at": looked_at}

    async def _records(self, starts: Mapping[TopicPartition, int]) -> AsyncGenerator[Columns, None]:
        """What is committed, from these offsets to the end."""
        if not starts:
            return
        settings = ConsumerSettings(
            auto_offset_reset="earliest", commit_strategy="none", isolation_level="read_committed"
        )
        async with Consumer(self._kafka, settings) as consumer:
            consumer.assign(list(starts))
            stable = await consumer.end_offsets(list(starts))
            for tp, start in starts.items():
                consumer.seek(tp, min(start, stable[tp]))
            while [tp for tp in starts if await consumer.position(tp) < stable[tp]]:
                for columns in (await consumer.poll(POLL_MS)).values():
                    yield columns

    async def replay(
        self,
        topic: str,
        *,
        limit: int,
        stage: str | None,
        exception: str | None,
        again: bool,
        dry_run: bool,
        to: str | None = None,
    ) -> dict[str, Any]:
        """See the protocol; one replay at a time, since each goes on where the one before it ended."""
        self._check(topic)
        late = topic.endswith(LATE_SUFFIX)
        if late and (stage or exception):
            raise InvalidRequest(f"{topic}: late records have no stage and no exception")
        if to is not None:
            await self._check_target(topic, to)
        wanted, parse = wanted_by(stage, exception), parse_late_record if late else parse_dead_letter
        async with self._replaying, DeadLetterLog(self._kafka, topic, parse) as letters:
            if dry_run:
                count = 0
                async with aclosing(letters.entries()) as entries:
                    async for entry in entries:
                        fits = entry.letter is not None and wanted(entry.letter)
                        count += fits and (again or not entry.replayed)
                return {"would_send": min(count, limit)}
            settings = ProducerSettings(
                max_request_size=LARGEST_RECORD_BYTES,
                buffer_memory=2 * LARGEST_RECORD_BYTES,
                compression_type="zstd",
            )
            async with Producer(self._kafka, settings) as producer:
                return asdict(await letters.replay(producer, wanted, limit=limit, again=again, to=to))

    def _check(self, topic: str) -> None:
        check_topic_name(topic)
        if not _kind(topic):
            raise InvalidRequest(f"{topic}: neither a dead-letter topic (…{DEAD_LETTER_SUFFIX}) nor a late one")

    async def _check_target(self, topic: str, to: str) -> None:
        check_topic_name(to)
        if to == topic or is_internal(to):
            raise InvalidRequest(f"to: {to} is not a topic for records of sources")
        await self._admin.describe_topics([to])


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
        letter = parse_late_record(record) if record.topic.endswith(LATE_SUFFIX) else parse_dead_letter(record)
    except DataError:
        return row | {"headers": [[name, _text(value)] for name, value in record.headers]}
    source = letter.record
    row |= {
        "source": {"topic": source.topic, "partition": source.partition, "offset": source.offset},
        "timestamp_ms": source.timestamp,
        "stage": letter.stage,
        "message": letter.message,
        "headers": [[name, _text(value)] for name, value in source.headers],
    }
    if letter.stage == STAGE_LATE:
        return row
    return row | {"exception": letter.exception, "attempts": letter.attempts, "group": letter.group}


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="backslashreplace")[:TEXT_CHARACTERS_MAX]
