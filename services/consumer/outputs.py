"""Validates a handler's output when the handler returns, so that an invalid record fails that attempt.

Under exactly-once, output waits for a transaction that holds other records' output too. A record that is invalid for
Kafka must not reach that transaction.

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
    """Raises DataError for the first record that no topic can accept.

    Checks the topic's name, the key, value, headers, partition and timestamp.
    """
    for record in records:
        topic = record.topic
        check_topic_name(topic)
        checked_timestamp(topic, record.timestamp)
        checked_partition(topic, record.partition)
        bytes_serializer(topic, record.key)
        bytes_serializer(topic, record.value)
        checked_headers(topic, record.headers)
