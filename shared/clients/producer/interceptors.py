"""Interceptors: see every record on its way out and its fate; what they raise is logged and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.shared.clients.producer.batch import OnDelivery
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Headers, ProducerRecord, RecordMetadata

log = get_logger(__name__)


class ProducerInterceptor:
    """Base with both methods doing nothing; override what is wanted. They run on the event loop and must not block."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """The record (key and value not yet serialized) to send in this one's place."""
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        """One record's fate: its metadata, or the error it ended in.

        It is told once of every record that `on_send` saw. `headers` are those that it was sent with: what `on_send`
        put there says which record it is.
        """


class Interceptors:
    """A chain, each called with what the one before returned."""

    def __init__(self, chain: Sequence[ProducerInterceptor]) -> None:
        self._chain = tuple(chain)

    def __bool__(self) -> bool:
        return bool(self._chain)

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Through all; one that raises, or gives no record, is passed over."""
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

    def told_too(self, record: ProducerRecord, on_delivery: OnDelivery | None) -> OnDelivery:
        """A callback that tells the chain of what became of `record`, then `on_delivery`."""
        headers = record.headers

        def tell(metadata: RecordMetadata | None, error: Exception | None) -> None:
            self.on_acknowledgement(metadata, error, headers)
            if on_delivery is not None:
                on_delivery(metadata, error)

        return tell

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        """To all, whatever one raises."""
        for interceptor in self._chain:
            try:
                interceptor.on_acknowledgement(metadata, error, headers)
            except Exception:
                log.exception("interceptor failed", interceptor=type(interceptor).__name__, on="acknowledgement")
