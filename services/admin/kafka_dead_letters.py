"""Dead-letter and late topics through Kafka: implements `penstock.api.admin.dead_letters.DeadLetters`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import asdict
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from penstock.shared.clients.admin import Admin, TopicDescription
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.clients.dead_letters.dead_letter_log import (
    DeadLetterLog,
    dead_letter_filter,
    replay_producer_settings,
)
from penstock.shared.clients.dead_letters.late_record_headers import STAGE_LATE, parse_late_record
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import DataError, InvalidRequest, KafkaTimeout, PenstockError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, ConsumerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import DEAD_LETTER_SUFFIX, LATE_SUFFIX, check_topic_name, is_internal

log = get_logger(__name__)

POLL_MS = 500
READ_TIMEOUT_MS = 15_000
"""The time limit of one `read_newest`."""
SCANNED_MAX = 20_000
"""The most records of a topic that one scan of `read_newest` reads, approximately, from the newest back.

It may read more if the topic has many partitions: up to `2 * limit` of each.
"""
COUNT_TIMEOUT_MS = 3_000
"""The time limit of one call that counts records. Later calls continue the count."""
TEXT_CHARACTERS_MAX = 2_000
"""The most characters of a key, a value or a header in a response. The record itself is never cut."""


class Span(NamedTuple):
    """Offsets from `first` to before `end`, in a partition of the topic with this id."""

    topic_id: str | None
    first: int
    end: int


class DeadLetterCount(NamedTuple):
    """The number of records in a partition; an upper bound if not `exact`, since counting has not finished."""

    records: int
    exact: bool


class DeadLetterCounter:
    """Counts dead letters and late records by reading them, since transaction markers have offsets too.

    Counts are kept, so each call reads only records that no earlier call has counted. A partition is counted from its
    beginning if its first records were deleted, or if the topic was created again.
    """

    def __init__(self, kafka: KafkaSettings, limit_ms: int = COUNT_TIMEOUT_MS) -> None:
        self._kafka = kafka
        self._limit_ms = limit_ms
        self._counted: dict[TopicPartition, tuple[Span, int]] = {}
        """The offsets of each partition that were read, and the number of records in them."""
        self._lock = asyncio.Lock()

    async def count(self, spans: Mapping[TopicPartition, Span]) -> dict[TopicPartition, DeadLetterCount]:
        """Return the number of records in these spans, for the admin service's list of dead-letter topics."""
        async with self._lock:
            for tp, span in spans.items():
                read, _ = self._counted.get(tp, (None, 0))
                is_same_log = read is not None and (read.topic_id, read.first) == (span.topic_id, span.first)
                if read is None or not is_same_log or read.end > span.end:
                    self._counted[tp] = (span._replace(end=span.first), 0)
            for tp in self._counted.keys() - spans.keys():
                del self._counted[tp]
            starts = {tp: self._counted[tp][0].end for tp, span in spans.items() if self._counted[tp][0].end < span.end}
            if starts:
                await self._count_records(starts, spans)
            counts = {}
            for tp, span in spans.items():
                read, records = self._counted[tp]
                counts[tp] = DeadLetterCount(records + span.end - read.end, exact=read.end == span.end)
            return counts

    async def _count_records(self, starts: Mapping[TopicPartition, int], spans: Mapping[TopicPartition, Span]) -> None:
        """Continue the count within the time limit of one call. The next call counts the records that remain.

        An error of Kafka ends the count of this call too, and is logged.
        """
        try:
            async with (
                asyncio.timeout(self._limit_ms / 1000),
                aclosing(committed_records(self._kafka, starts)) as batches,
            ):
                async for columns in batches:
                    tp = columns.topic_partition
                    read, records = self._counted[tp]
                    columns = columns[: int(columns.offsets.searchsorted(spans[tp].end))]
                    if len(columns):
                        end = int(columns.offsets[-1]) + 1
                        self._counted[tp] = (read._replace(end=end), records + len(columns))
                # The end was reached, so the remaining offsets of a span have no committed records.
                for tp in starts:
                    read, records = self._counted[tp]
                    self._counted[tp] = (read._replace(end=spans[tp].end), records)
        except TimeoutError:
            log.debug("not all records are counted yet", partitions=len(starts))
        except PenstockError as e:
            log.warning("records cannot be counted", reason=str(e))


async def committed_records(
    kafka: KafkaSettings, starts: Mapping[TopicPartition, int]
) -> AsyncGenerator[Columns, None]:
    """Yield the committed records from these offsets, at least to the current end, for the admin's dead letters."""
    if not starts:
        return
    settings = ConsumerSettings(auto_offset_reset="earliest", commit_strategy="none", isolation_level="read_committed")
    async with Consumer(kafka, settings) as consumer:
        consumer.assign(list(starts))
        ends = await consumer.end_offsets(list(starts))
        for tp, start in starts.items():
            consumer.seek(tp, min(start, ends[tp]))
        while [tp for tp in starts if await consumer.position(tp) < ends[tp]]:
            for columns in (await consumer.poll(POLL_MS)).values():
                yield columns


class KafkaDeadLetters:
    """Lists, reads and replays the records of dead-letter and late topics, through Kafka clients.

    Implements `penstock.api.admin.dead_letters.DeadLetters`.
    """

    def __init__(self, kafka: KafkaSettings, admin: Admin) -> None:
        self._kafka = kafka
        self._admin = admin
        self._counter = DeadLetterCounter(kafka)
        self._replaying = asyncio.Lock()

    async def topics(self) -> list[dict[str, Any]]:
        """Return each dead-letter and late topic with the number of its records (see `DeadLetters.topics`).

        The counts are kept between calls (see `DeadLetterCounter`).
        """
        names = [name for name in await self._admin.list_topics() if _dead_letter_topic_kind(name)]
        descriptions = await self._admin.describe_topics(names) if names else {}
        counts = await self._counter.count(await self._committed_spans(descriptions.values()))
        return [
            {
                "topic": name,
                "kind": _dead_letter_topic_kind(name),
                # One suffix: a late topic may have a dead-letter topic.
                "source": name.removesuffix(DEAD_LETTER_SUFFIX if name.endswith(DEAD_LETTER_SUFFIX) else LATE_SUFFIX),
                "records": sum(count.records for tp, count in counts.items() if tp.topic == name),
                "exact": all(p.leader is not None for p in descriptions[name].partitions)
                and all(count.exact for tp, count in counts.items() if tp.topic == name),
            }
            for name in sorted(names)
        ]

    async def _committed_spans(self, topics: Iterable[TopicDescription]) -> dict[TopicPartition, Span]:
        """Return the offsets of each partition that has a leader, up to the last stable offset."""
        ids = {
            TopicPartition(topic.name, p.partition): topic.topic_id
            for topic in topics
            for p in topic.partitions
            if p.leader is not None
        }
        if not ids:
            return {}
        first = await self._admin.list_offsets(dict.fromkeys(ids, "earliest"))
        ends = await self._admin.list_offsets(dict.fromkeys(ids, "latest"), "read_committed")
        return {tp: Span(topic_id, first[tp], ends[tp]) for tp, topic_id in ids.items()}

    async def read_newest(self, topic: str, limit: int, stage: str | None) -> dict[str, Any]:
        """Read a topic's newest records (see `DeadLetters.read_newest`). Raises KafkaTimeout after READ_TIMEOUT_MS.

        Searches only the newest offsets of each partition: at most `2 * limit`, or an equal share of SCANNED_MAX if
        that is more. So fewer than `limit` records may be found.
        """
        self._check_dead_letter_topic(topic)
        description = (await self._admin.describe_topics([topic]))[topic]
        spans = {tp: span for tp, span in (await self._committed_spans([description])).items() if span.end > span.first}
        scan_max = max(limit, SCANNED_MAX // max(1, len(spans)))
        # The number of offsets of each partition to scan. Transaction markers have offsets too. If a partition has
        # fewer than `limit` records in its offsets, the next scan reads up to four times as many offsets.
        scan = 2 * limit if stage is None else scan_max
        try:
            async with asyncio.timeout(READ_TIMEOUT_MS / 1000):
                while True:
                    starts = {tp: max(span.first, span.end - scan) for tp, span in spans.items()}
                    newest, scanned = await self._scan_newest_rows(starts, limit, stage)
                    is_short = any(len(newest[tp]) < limit and starts[tp] > spans[tp].first for tp in spans)
                    if not is_short or scan >= scan_max:
                        break
                    scan = min(4 * scan, scan_max)
        except TimeoutError:
            raise KafkaTimeout(f"{topic}: not read within {READ_TIMEOUT_MS} ms") from None
        if topic.endswith(LATE_SUFFIX):
            # A late record has its event time as timestamp. So take the newest offsets of each partition in turn.
            turns = zip_longest(*(reversed(rows) for rows in newest.values()))
            newest_first = [row for turn in turns for row in turn if row is not None]
        else:
            every = chain.from_iterable(newest.values())
            newest_first = sorted(every, key=lambda row: (row["written_ms"], row["offset"]), reverse=True)
        return {"records": newest_first[:limit], "scanned": scanned}

    async def _scan_newest_rows(
        self, starts: Mapping[TopicPartition, int], limit: int, stage: str | None
    ) -> tuple[dict[TopicPartition, deque[dict[str, Any]]], int]:
        """Return the newest rows of each partition from these offsets on, and the number of records read."""
        newest: dict[TopicPartition, deque[dict[str, Any]]] = {tp: deque(maxlen=limit) for tp in starts}
        scanned = 0
        async with aclosing(committed_records(self._kafka, starts)) as batches:
            async for columns in batches:
                scanned += len(columns.offsets)
                rows = (_dead_letter_row(record) for record in columns.records())
                newest[columns.topic_partition].extend(
                    row for row in rows if stage is None or row.get("stage") == stage
                )
        return newest, scanned

    async def replay(
        self,
        topic: str,
        *,
        limit: int,
        stage: str | None,
        exception: str | None,
        include_replayed: bool,
        dry_run: bool,
        to: str | None = None,
    ) -> dict[str, Any]:
        """Replay dead letters (see `DeadLetters.replay`). A replay waits until the previous one, of any topic, ends.

        Raises InvalidRequest if `topic` is not a dead-letter or late topic, if `to` is `topic` or a topic that Kafka or
        Penstock writes itself, or if `stage` or `exception` is given for a late topic. Raises UnknownTopicOrPartition
        if one of the two topics does not exist, and InvalidTopic if Kafka does not allow one of the names. Raises also
        what `DeadLetterLog.replay` raises: InvalidRequest if too many records of a partition are left out.
        """
        self._check_dead_letter_topic(topic)
        is_late = topic.endswith(LATE_SUFFIX)
        if is_late and (stage or exception):
            raise InvalidRequest(f"{topic}: late records have no stage and no exception")
        if to is not None:
            await self._check_target(topic, to)
        selects = dead_letter_filter(stage, exception)
        parse = parse_late_record if is_late else parse_dead_letter
        # One at a time: each replay continues from the offsets that the previous one committed.
        async with self._replaying, DeadLetterLog(self._kafka, topic, parse) as dead_letters:
            if dry_run:
                count = 0
                async with aclosing(dead_letters.entries()) as entries:
                    async for entry in entries:
                        count += entry.is_replayable(selects, include_replayed=include_replayed)
                return {"would_send": min(count, limit)}
            async with Producer(self._kafka, replay_producer_settings()) as producer:
                return asdict(
                    await dead_letters.replay(producer, selects, limit=limit, include_replayed=include_replayed, to=to)
                )

    def _check_dead_letter_topic(self, topic: str) -> None:
        """Raise InvalidRequest if the topic is neither a dead-letter nor a late topic."""
        check_topic_name(topic)
        if not _dead_letter_topic_kind(topic):
            raise InvalidRequest(f"{topic}: neither a dead-letter topic (…{DEAD_LETTER_SUFFIX}) nor a late one")

    async def _check_target(self, topic: str, to: str) -> None:
        check_topic_name(to)
        if to == topic or is_internal(to):
            raise InvalidRequest(f"to: {to} cannot receive replayed records: it is the topic itself or an internal one")
        await self._admin.describe_topics([to])


def _dead_letter_topic_kind(topic: str) -> str:
    """Return the kind of a dead-letter or late topic by its suffix: `dead_letters`, `late`, or "" for another topic."""
    if topic.endswith(DEAD_LETTER_SUFFIX):
        return "dead_letters"
    return "late" if topic.endswith(LATE_SUFFIX) else ""


def _dead_letter_row(record: ConsumerRecord) -> dict[str, Any]:
    """Return a record of a dead-letter or late topic as a `DeadLetterRow`."""
    is_late = record.topic.endswith(LATE_SUFFIX)
    row: dict[str, Any] = {
        "partition": record.partition,
        "offset": record.offset,
        "key": _text_in_row(record.key),
        "value": _text_in_row(record.value),
    }
    if not is_late:
        row["written_ms"] = record.timestamp
    try:
        dead_letter = parse_late_record(record) if is_late else parse_dead_letter(record)
    except DataError:
        return row | {"headers": [[name, _text_in_row(value)] for name, value in record.headers]}
    source = dead_letter.record
    row |= {
        "source": {"topic": source.topic, "partition": source.partition, "offset": source.offset},
        "timestamp_ms": source.timestamp,
        "stage": dead_letter.stage,
        "message": dead_letter.message,
        "headers": [[name, _text_in_row(value)] for name, value in source.headers],
    }
    if dead_letter.stage == STAGE_LATE:
        return row
    return row | {"exception": dead_letter.exception, "attempts": dead_letter.attempts, "group": dead_letter.group}


def _text_in_row(data: bytes | None) -> str | None:
    """Return a key, value or header from Kafka as text for `_dead_letter_row`.

    The text is cut to TEXT_CHARACTERS_MAX. Bytes that are not UTF-8 become escapes (`\\xff`).
    """
    return None if data is None else data.decode(errors="backslashreplace")[:TEXT_CHARACTERS_MAX]
