"""Late records on their way to the late topic: the source record as it was, and headers that say how late it came."""

from __future__ import annotations

from shared.common.records import ConsumerRecord, ProducerRecord

TOPIC = "penstock.late.topic"
PARTITION = "penstock.late.partition"
OFFSET = "penstock.late.offset"
LATENESS_MS = "penstock.late.lateness_ms"
CLOSE_TIME_MS = "penstock.late.close_time_ms"
STREAM_TIME_MS = "penstock.late.stream_time_ms"
STORE = "penstock.late.store"


def late_record(
    record: ConsumerRecord, late_topic: str, close_time_ms: int, stream_time_ms: int, store: str
) -> ProducerRecord:
    """The record for the late topic; header values are text in UTF-8, numbers in decimal.

    `lateness_ms` is how far the record's time lies behind the close time: 1 or more. `store` is the store whose window
    it came too late for: another store of the same source may have taken it.
    """
    headers = (
        (TOPIC, record.topic.encode()),
        (PARTITION, b"%d" % record.partition),
        (OFFSET, b"%d" % record.offset),
        (LATENESS_MS, b"%d" % (close_time_ms - record.timestamp)),
        (CLOSE_TIME_MS, b"%d" % close_time_ms),
        (STREAM_TIME_MS, b"%d" % stream_time_ms),
        (STORE, store.encode()),
    )
    return ProducerRecord(late_topic, record.value, record.key, record.headers + headers, None, record.timestamp)
