"""Whether what a handler returned can be written at all: asked when it returns, so that it is that attempt's failure.

Under exactly-once the records wait for a transaction that holds other records' output too; one among them that is no
record of Kafka's must not get that far.

>>> check_output([ProducerRecord("out", b"5")])
>>> check_output([ProducerRecord("out", 5)])
Traceback (most recent call last):
...
penstock.errors.SerializationError: out: expected bytes, got int; set a serializer for other types
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shared.clients.producer.record_validation import checked_headers, checked_partition, checked_timestamp
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.serialization import bytes_serializer
from penstock.shared.common.topic_names import check_topic_name


def check_output(records: Iterable[ProducerRecord]) -> None:
    """DataError for the first that no topic can take: its topic's name, key, value, headers, partition, timestamp."""
    for record in records:
        topic = record.topic
        check_topic_name(topic)
        checked_timestamp(topic, record.timestamp)
        checked_partition(topic, record.partition)
        bytes_serializer(topic, record.key)
        bytes_serializer(topic, record.value)
        checked_headers(topic, record.headers)
