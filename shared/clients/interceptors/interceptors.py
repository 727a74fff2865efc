"""Interceptors of a producer see every record before it is sent, and then its fate. Interceptors of a consumer see the
records that are handed out and the committed offsets.

Exceptions that they raise are logged and have no other effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.common.records import (
    Columns,
    Headers,
    OffsetAndMetadata,
    OnDelivery,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
)

log = get_logger(__name__)


class ProducerInterceptor:
    """Base class whose methods do nothing; override those you need. They run on the event loop and must not block."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Return the record to send instead of `record`; its key and value are not yet serialized."""
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        """Called with a record's metadata, or with its error.

        It is called once for every record that `on_send` was called with. `headers` are those that the record was sent
        with, so a header added by `on_send` can identify the record.
        """


class ProducerInterceptors:
    """A chain of interceptors. Each one gets the record that the previous one returned."""

    def __init__(self, chain: Sequence[ProducerInterceptor]) -> None:
        self._chain = tuple(chain)

    def __bool__(self) -> bool:
        return bool(self._chain)

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Call all interceptors. The result of one that raises, or that returns no record, is ignored."""
        for interceptor in self._chain:
            try:
                changed = interceptor.on_send(record)
                if not isinstance(changed, ProducerRecord):
                    raise TypeError(f"on_send gave {type(changed).__name__}, not a ProducerRecord")
                record = changed.with_header_pairs()
            except Exception:
                log.exception(
                    "interceptor failed", interceptor=type(interceptor).__name__, on="send", topic=record.topic
                )
        return record

    def observed(self, record: ProducerRecord, on_delivery: OnDelivery | None) -> OnDelivery:
        """Return a callback that passes the fate of `record` to the chain, then to `on_delivery`."""
        headers = record.headers

        def call_on_acknowledgement(metadata: RecordMetadata | None, error: Exception | None) -> None:
            self.on_acknowledgement(metadata, error, headers)
            if on_delivery is not None:
                on_delivery(metadata, error)

        return call_on_acknowledgement

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        """Call all, also if one raises."""
        for interceptor in self._chain:
            try:
                interceptor.on_acknowledgement(metadata, error, headers)
            except Exception:
                log.exception("interceptor failed", interceptor=type(interceptor).__name__, on="acknowledgement")


class ConsumerInterceptor:
    """Base class whose methods do nothing; override those you need. They run on the event loop and must not block.

    Source of the semantics: Kafka's ConsumerInterceptor.
    """

    def on_consume(self, topic_partition: TopicPartition, records: Columns[Any, Any]) -> Columns[Any, Any]:
        """Called with records of one partition before they are handed out. Returns the records to hand out instead: as
        many, at the same offsets.

        A record is passed at most once each time it is fetched, even if an `async for` hands out the records one by
        one. Keys and values are deserialized.
        """
        return records

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Called with offsets that this consumer has just committed."""


class ConsumerInterceptors:
    """A chain of interceptors. Each one gets the records that the previous one returned, unless that result is ignored
    (see `on_consume`)."""

    def __init__(self, chain: Sequence[ConsumerInterceptor]) -> None:
        self._chain = tuple(chain)

    def __bool__(self) -> bool:
        return bool(self._chain)

    def on_consume(self, topic_partition: TopicPartition, records: Columns[Any, Any]) -> Columns[Any, Any]:
        """Call all interceptors. The result of one that raises, or that returns records at other offsets, is
        ignored."""
        offsets = records.offsets.tolist()
        for interceptor in self._chain:
            try:
                changed = interceptor.on_consume(topic_partition, records)
                if not isinstance(changed, Columns) or changed.offsets.tolist() != offsets:
                    raise TypeError("on_consume must give as many records as it took, at the same offsets")
                records = changed
            except Exception:
                log.exception(
                    "interceptor failed",
                    interceptor=type(interceptor).__name__,
                    on="consume",
                    partition=str(topic_partition),
                )
        return records

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Call all, also if one raises."""
        for interceptor in self._chain:
            try:
                interceptor.on_commit(dict(offsets))
            except Exception:
                log.exception("interceptor failed", interceptor=type(interceptor).__name__, on="commit")
