"""Checks offsets and times from callers before they are sent, because some numbers have a special meaning to a broker.

>>> checked_offset(TopicPartition("clicks", 0), 7)
7
>>> checked_time("clicks-0", -1)  # in a lookup: the end
Traceback (most recent call last):
...
ValueError: clicks-0: time -1 is below 0; it is in ms since the epoch
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

OFFSET_METADATA_MAX_BYTES = 4_096
"""The metadata that a broker stores with an offset (its `offset.metadata.max.bytes` by default)."""


def checked_offset(tp: TopicPartition, offset: object) -> int:
    """The offset, if it is valid. Raises TypeError or ValueError."""
    if not isinstance(tp, TopicPartition):
        raise TypeError(f"{tp!r} is not a TopicPartition")
    # True is an int too.
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise TypeError(f"{tp}: {offset!r} is not an offset, which is an int")
    if offset < 0:
        raise ValueError(f"{tp}: offset {offset} is below 0")
    return offset


def checked_offsets(
    given: Mapping[TopicPartition, OffsetAndMetadata | int],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """The offsets to commit, if they are valid. TypeError and ValueError name the partition."""
    checked = {}
    for tp, value in given.items():
        at = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
        checked_offset(tp, at.offset)
        if not isinstance(at.metadata, str):
            raise TypeError(f"{tp}: the metadata is not a text but {at.metadata!r}")
        if (size := len(at.metadata.encode())) > OFFSET_METADATA_MAX_BYTES:
            raise ValueError(f"{tp}: {size} bytes of metadata, above the {OFFSET_METADATA_MAX_BYTES} that are kept")
        checked[tp] = at
    return checked


def checked_time(what: object, time_ms: object) -> int:
    """The time in ms, if it is valid. Raises TypeError or ValueError."""
    if not isinstance(time_ms, int) or isinstance(time_ms, bool):
        raise TypeError(f"{what}: {time_ms!r} is not a time, which is an int")
    if time_ms < 0:
        raise ValueError(f"{what}: time {time_ms} is below 0; it is in ms since the epoch")
    return time_ms


def checked_spec(what: object, spec: object) -> str | int:
    """The position to look up: `earliest`, `latest` or a time in ms. Raises TypeError or ValueError."""
    if isinstance(spec, str):
        if spec not in ("earliest", "latest"):
            raise ValueError(f"{what}: {spec!r} is neither earliest nor latest, nor a time")
        return spec
    return checked_time(what, spec)
