"""Where a record of a repartition topic came from: the source record's place and raw key, carried in headers.

A key that was changed sends a record through a topic of the application's own. What is late or refused behind it would
name that topic and an offset in it, which mean nothing to whoever looks for the record; so what goes into such a topic
says where the source record stands, and what comes out of it too late is told by that place. A dead letter keeps the
topic's own, to which it can be replayed, and has these headers beside it. Behind several such topics it is still the
first source's. What a punctuation or a commit forwards has no source record, and so no such headers.

>>> source = ConsumerRecord("orders", 3, 17, 5, b"order-1", b"{}", (("trace", b"a"),))
>>> again = ConsumerRecord("app-by-user-repartition", 0, 2, 5, b"ann", b"{}", source.headers + origin_headers(source))
>>> original(again)
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
"""A longer raw key is not carried: what is told then has the key that the record was given."""


def origin_headers(record: ConsumerRecord) -> Headers:
    """What a repartition topic's record says of its source record."""
    place = ((TOPIC, record.topic.encode()), (PARTITION, b"%d" % record.partition), (OFFSET, b"%d" % record.offset))
    return place if len(record.key or b"") > KEY_BYTES_MAX else (*place, (KEY, record.key))


def without_origin(headers: Headers) -> Headers:
    """The headers that a user gave the record."""
    return tuple(header for header in headers if not header[0].startswith(PREFIX))


def original(record: ConsumerRecord) -> ConsumerRecord:
    """A repartition topic's record by its source record's place and key; as it is where it names none."""
    said = dict(record.headers)
    topic, partition, offset = said.get(TOPIC), said.get(PARTITION), said.get(OFFSET)
    if topic is None or partition is None or offset is None:
        return record
    return replace(
        record,
        topic=topic.decode(),
        partition=int(partition),
        offset=int(offset),
        key=said.get(KEY, record.key),
        headers=without_origin(record.headers),
    )
