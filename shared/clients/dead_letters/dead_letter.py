"""Dead letters: records that could not be handled, as bytes that can be read, explained and replayed.

Key and value are the raw bytes. The original headers come first. Nine headers of Penstock follow, with the record's
origin and the error. Then comes `penstock.dlq.changelog_id`, if an application with a changelog wrote the dead letter.
The last one is `penstock.dlq.cut`, if the record was shortened to fit. Numbers are decimal text in UTF-8. The timestamp
is the time at which the dead letter was written: an old event time would let it expire too early. If a record is
dead-lettered twice, because the consumer of a dead-letter topic fails too, the last header of each name is the newest.

>>> source = ConsumerRecord("clicks", 3, 17, 1_000, b"ann", b"{", (("trace", b"a1"),))
>>> letter = DeadLetter(source, "deserialize", "SerializationError", "clicks: not JSON", attempts=1, group="alerts")
>>> record = dead_letter_record("clicks-dlq", letter)
>>> record.topic, record.key, record.value, record.headers[:4]
('clicks-dlq', b'ann', b'{', (('trace', b'a1'), ('penstock.dlq.topic', b'clicks'), ('penstock.dlq.partition', b'3'), \
('penstock.dlq.offset', b'17')))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from penstock.shared.common.errors import DataError, error_text
from penstock.shared.common.records import ConsumerRecord, Headers, ProducerRecord, coordinates_of

PREFIX = "penstock.dlq."
TOPIC = PREFIX + "topic"
PARTITION = PREFIX + "partition"
OFFSET = PREFIX + "offset"
TIMESTAMP = PREFIX + "timestamp"
STAGE = PREFIX + "stage"
EXCEPTION = PREFIX + "exception"
MESSAGE = PREFIX + "message"
ATTEMPTS = PREFIX + "attempts"
GROUP = PREFIX + "group"
NODE = PREFIX + "node"
STORE = PREFIX + "store"
WINDOW_START = PREFIX + "window_start"
WINDOW_END = PREFIX + "window_end"
CHANGELOG_ID = PREFIX + "changelog_id"
"""The id of the changelog topic of the application that wrote it. A reset creates another topic. So the id separates
this incarnation of the application from earlier ones, which may have handled the record."""
CUT = PREFIX + "cut"
"""The last header, if the record did not fit into the dead-letter topic: the parts that were cut, with their sizes."""
HEADERS = (TOPIC, PARTITION, OFFSET, TIMESTAMP, STAGE, EXCEPTION, MESSAGE, ATTEMPTS, GROUP)

STAGE_DESERIALIZE = "deserialize"
STAGE_PROCESS = "process"
STAGE_PRODUCE = "produce"
DeadLetterStage = Literal["deserialize", "process", "produce"]

MESSAGE_BYTES_MAX = 4_096
"""Longer values of Penstock's headers, such as exception messages, are cut: they must add little to the record."""
SHORTENED_BYTES = (512 * 1024, 16 * 1024)
"""The sizes to which a dead letter is cut if its topic rejects it: below Kafka's default, then the least that still
identifies it."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record with its origin and its error; `exception` is the class's full name."""

    record: ConsumerRecord
    stage: str
    exception: str
    message: str
    attempts: int
    group: str
    cut: str = ""
    """The parts of the record that were cut, each with its original size in bytes: `value=3000000`.

    For `headers` it is the number of removed headers.
    """

    @classmethod
    def of(cls, record: ConsumerRecord, stage: str, error: BaseException, attempts: int, group: str) -> DeadLetter:
        """Make the dead letter of a record that failed at a stage with an error."""
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        return cls(record, stage, name, error_text(error), attempts, group)


def dead_letter_record(topic: str, dead_letter: DeadLetter, changelog_id: str | None = None) -> ProducerRecord:
    """Return the dead letter as a record for the dead-letter topic; for `changelog_id` see CHANGELOG_ID."""
    source = dead_letter.record
    values = (
        source.topic,
        str(source.partition),
        str(source.offset),
        str(source.timestamp),
        dead_letter.stage,
        dead_letter.exception,
        dead_letter.message,
        str(dead_letter.attempts),
        dead_letter.group,
    )
    own = tuple((name, header_text(value)) for name, value in zip(HEADERS, values, strict=True))
    if changelog_id is not None:
        own += ((CHANGELOG_ID, changelog_id.encode()),)
    return ProducerRecord(topic, source.value, source.key, (*source.headers, *own))


def shortened(record: ProducerRecord) -> ProducerRecord | None:
    """Shorten a dead letter that was rejected as too large, to the next smaller size in `SHORTENED_BYTES`.

    Penstock's headers are kept. Where needed, the original headers are removed, and the key and the value are cut.
    Returns None if `record` is not a dead letter, or cannot be cut further.
    """
    # 1. Take the headers apart: the original ones, Penstock's (`own`), and what earlier calls have cut.
    cut = {}
    headers = record.headers
    if headers and headers[-1][0] == CUT:
        cut = dict(part.split("=") for part in (headers[-1][1] or b"").decode().split(","))
        headers = headers[:-1]
    ours = len(HEADERS) + (1 if headers and headers[-1][0] == CHANGELOG_ID else 0)
    own = headers[-ours:]
    original = headers[:-ours]
    if tuple(name for name, _ in own[: len(HEADERS)]) != HEADERS:
        return None
    # 2. Find the next smaller size, and what Penstock's headers leave of it.
    key = record.key or b""
    value = record.value or b""
    size = len(key) + len(value) + _headers_bytes(headers)
    free_bytes = next((most for most in SHORTENED_BYTES if most < size), 0) - _headers_bytes(own)
    if free_bytes <= 0:
        return None
    # 3. The original headers and the key may together take half of the bytes, so that the value gets the other half. If
    #    they take more, remove these headers and cut the key.
    if len(key) + _headers_bytes(original) > free_bytes // 2:
        if original:
            cut.setdefault("headers", str(len(original)))
        original = ()
        if len(key) > free_bytes // 2:
            cut.setdefault("key", str(len(key)))
            key = key[: free_bytes // 2]
    # 4. The value gets the rest.
    left = free_bytes - len(key) - _headers_bytes(original)
    if len(value) > left:
        cut.setdefault("value", str(len(value)))
        value = value[:left]
    # 5. Record the original sizes of all that was cut.
    mark = (CUT, ",".join(f"{name}={was}" for name, was in cut.items()).encode())
    return ProducerRecord(
        record.topic,
        None if record.value is None else value,
        None if record.key is None else key,
        (*original, *own, mark),
    )


def _headers_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") for name, value in headers)


def parse_dead_letter(record: ConsumerRecord) -> DeadLetter:
    """Parse a record of a dead-letter topic.

    Raises DataError if a header is missing or invalid, or if the record is a rejected input of a node after a store.
    """
    indexes = {name: index for index, (name, _) in enumerate(record.headers) if name in HEADERS}
    missing = [name for name in HEADERS if name not in indexes]
    where = coordinates_of(record)
    # The original headers come first. They include those of an older dead letter if an application that reads a
    # dead-letter topic forwarded them. So the last header named TOPIC or NODE shows the kind of this dead letter.
    last, node = next((header for header in reversed(record.headers) if header[0] in (TOPIC, NODE)), ("", None))
    if last == NODE:
        name = (node or b"").decode(errors="replace")
        raise DataError(
            f"{where} is a rejected input of node {name!r} after a store: it has no source record to replay"
        )
    if missing:
        raise DataError(f"{where} is not a dead letter: without {', '.join(missing)}")
    text = {name: (record.headers[index][1] or b"").decode(errors="replace") for name, index in indexes.items()}
    numbers = {}
    for name in (PARTITION, OFFSET, TIMESTAMP, ATTEMPTS):
        try:
            numbers[name] = int(text[name])
        except ValueError:
            raise DataError(f"{where} is not a dead letter: {name} is {text[name]!r}, not a number") from None
    is_cut = record.headers[-1][0] == CUT
    behind = range(max(indexes.values()) + 1, len(record.headers))
    own = {*indexes.values(), *(index for index in behind if record.headers[index][0] in (CHANGELOG_ID, CUT))}
    original: Headers = tuple(header for index, header in enumerate(record.headers) if index not in own)
    source = replace(
        record,
        topic=text[TOPIC],
        partition=numbers[PARTITION],
        offset=numbers[OFFSET],
        timestamp=numbers[TIMESTAMP],
        headers=original,
    )
    cut = (record.headers[-1][1] or b"").decode(errors="replace") if is_cut else ""
    return DeadLetter(
        record=source,
        stage=text[STAGE],
        exception=text[EXCEPTION],
        message=text[MESSAGE],
        attempts=numbers[ATTEMPTS],
        group=text[GROUP],
        cut=cut,
    )


def replay_record(dead_letter: DeadLetter, partition: int | None) -> ProducerRecord:
    """Return the record for its source topic, with raw key and value, original headers and timestamp."""
    source = dead_letter.record
    timestamp = source.timestamp if source.timestamp >= 0 else None
    return ProducerRecord(source.topic, source.value, source.key, source.headers, partition, timestamp)


def header_text(value: str) -> bytes:
    """Encode a header's value: UTF-8, cut at `MESSAGE_BYTES_MAX`."""
    data = value.encode(errors="backslashreplace")
    return data if len(data) <= MESSAGE_BYTES_MAX else data[:MESSAGE_BYTES_MAX].decode(errors="ignore").encode()
