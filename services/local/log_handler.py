"""The default handler: writes every record as a log line."""

from __future__ import annotations

from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord

log = get_logger(__name__)

VALUE_CHARACTERS_MAX = 500


async def log_record(record: ConsumerRecord) -> None:
    """Handle a record by a log line with its topic, partition, offset, key and value; the default of `penstock up`."""
    log.info(
        "record",
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=_decode_text(record.key),
        value=_decode_text(record.value),
    )


def _decode_text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="replace")[:VALUE_CHARACTERS_MAX]
