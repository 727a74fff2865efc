"""The headers of a record in a late topic, and the source record that they describe.

`streams.task.late_records` writes them. Services read late records by this module, without the streams engine.
"""

from __future__ import annotations

from msgspec.structs import replace

from penstock.shared.clients.dead_letters.dead_letter import DeadLetter
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import ConsumerRecord, Headers, coordinates_of

TOPIC = "penstock.late.topic"
PARTITION = "penstock.late.partition"
OFFSET = "penstock.late.offset"
LATENESS_MS = "penstock.late.lateness_ms"
CLOSE_TIME_MS = "penstock.late.close_time_ms"
STREAM_TIME_MS = "penstock.late.stream_time_ms"
STORE = "penstock.late.store"
APPLICATION = "penstock.late.application"
CHANGELOG_ID = "penstock.late.changelog_id"
HEADERS = (TOPIC, PARTITION, OFFSET, LATENESS_MS, CLOSE_TIME_MS, STREAM_TIME_MS, STORE, APPLICATION)
"""The headers of every late record that is a source record. If there is a changelog, it also has CHANGELOG_ID."""
STAGE_LATE = "late"
"""The `stage` of the DeadLetter that `parse_late_record` returns."""


def parse_late_record(record: ConsumerRecord) -> DeadLetter:
    """Return the source record of a record in a late topic, with the reason, in the form of a dead letter.

    Raises DataError if the record lacks the headers of a source record, or if they are invalid.
    """
    # The source record's headers come first. They include those of an older late record if an application reads a late
    # topic. So only the last header of each name is this late record's own.
    indexes = {name: index for index, (name, _) in enumerate(record.headers) if name in HEADERS}
    where = coordinates_of(record)
    missing = [name for name in HEADERS if name not in indexes]
    # A record that a processor forwarded has no coordinates of its own, but may have those of an older late record.
    if not missing and [indexes[name] - indexes[TOPIC] for name in HEADERS] != list(range(len(HEADERS))):
        missing = [TOPIC, PARTITION, OFFSET]
    if missing:
        raise DataError(f"{where} is not the late record of a source record: it lacks the headers {', '.join(missing)}")
    text = {name: (record.headers[index][1] or b"").decode(errors="replace") for name, index in indexes.items()}
    numbers = {name: text[name] for name in (PARTITION, OFFSET, LATENESS_MS)}
    for name, value in numbers.items():
        if not (value.isascii() and value.isdigit()):
            raise DataError(f"{where} is not a late record: the header {name} is {value!r}, not a number")
    behind = range(max(indexes.values()) + 1, len(record.headers))
    own = {*indexes.values(), *(index for index in behind if record.headers[index][0] == CHANGELOG_ID)}
    source_headers: Headers = tuple(header for index, header in enumerate(record.headers) if index not in own)
    partition = int(text[PARTITION])
    offset = int(text[OFFSET])
    source = replace(record, topic=text[TOPIC], partition=partition, offset=offset, headers=source_headers)
    message = f"{text[LATENESS_MS]} ms too late for {text[STORE]}"
    return DeadLetter(source, STAGE_LATE, "", message, 1, text[APPLICATION])
