"""The origin of a repartition topic's record: the source record's coordinates and raw key, carried in headers.

The coordinates of a record in a repartition topic mean nothing to the user. So the record carries the coordinates of
its source record in headers. Behind several repartition topics these are still the coordinates in the first source
topic.

If a record of a repartition topic is late or becomes a dead letter as a whole, it has its coordinates in that topic, to
which it can be replayed, and the origin's headers in addition. Its value may differ from the source record's, so it is
never replayed to the source topic. A record from a punctuation or a commit has no source record, and no such headers.

>>> source = ConsumerRecord("orders", 3, 17, 5, b"order-1", b"{}", (("trace", b"a"),))
>>> again = ConsumerRecord("app-by-user-repartition", 0, 2, 5, b"ann", b"{}", source.headers + origin_headers(source))
>>> original_record(again)
ConsumerRecord(topic='orders', partition=3, offset=17, timestamp=5, key=b'order-1', value=b'{}', \
headers=(('trace', b'a'),))
"""

from __future__ import annotations

from msgspec.structs import replace

from penstock.shared.common.records import ConsumerRecord, Headers

PREFIX = "penstock.origin."
TOPIC = PREFIX + "topic"
PARTITION = PREFIX + "partition"
OFFSET = PREFIX + "offset"
KEY = PREFIX + "key"

KEY_BYTES_MAX = 1_024
"""A longer raw key is not carried."""


def origin_headers(record: ConsumerRecord) -> Headers:
    """Return the headers that carry a source record's coordinates, and its raw key unless it is null or too long."""
    coordinates = (
        (TOPIC, record.topic.encode()),
        (PARTITION, b"%d" % record.partition),
        (OFFSET, b"%d" % record.offset),
    )
    if record.key is None or len(record.key) > KEY_BYTES_MAX:
        return coordinates
    return (*coordinates, (KEY, record.key))


def without_origin_headers(headers: Headers) -> Headers:
    """Return the headers without those that carry an origin."""
    return tuple(header for header in headers if not header[0].startswith(PREFIX))


def original_record(record: ConsumerRecord) -> ConsumerRecord:
    """Return a repartition topic's record with its source record's coordinates and key, without the origin's headers.

    The key is None if it was not carried. A record without an origin is returned unchanged.
    """
    headers = dict(record.headers)
    topic = headers.get(TOPIC)
    partition = headers.get(PARTITION)
    offset = headers.get(OFFSET)
    if topic is None or partition is None or offset is None:
        return record
    return replace(
        record,
        topic=topic.decode(),
        partition=int(partition),
        offset=int(offset),
        key=headers.get(KEY),
        headers=without_origin_headers(record.headers),
    )
