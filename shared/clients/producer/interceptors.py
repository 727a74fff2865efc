"""Interceptors: see every record on its way out and its fate; what they raise is logged and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from shared.common.log import get_logger
from shared.common.records import ProducerRecord, RecordMetadata

log = get_logger(__name__)


class ProducerInterceptor:
    """Base with both methods doing nothing; override what is wanted. They run on the event loop and must not block."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """The record (key and value not yet serialized) to send in this one's place."""
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None) -> None:
        """One record's fate: its metadata, or the error it ended in."""


class Interceptors:
    """A chain, each called with what the one before returned."""

    def __init__(self, chain: Sequence[ProducerInterceptor]) -> None:
        self._chain = tuple(chain)

    def __bool__(self) -> bool:
        return bool(self._chain)

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        """Through all; one that raises is passed over."""
        for interceptor in self._chain:
            try:
                record = interceptor.on_send(record)
            except Exception:
                log.exception(
                    "interceptor failed", interceptor=type(interceptor).__name__, on="send", topic=record.topic
                )
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None) -> None:
        """To all, whatever one raises."""
        for interceptor in self._chain:
            try:
                interceptor.on_acknowledgement(metadata, error)
            except Exception:
                log.exception("interceptor failed", interceptor=type(interceptor).__name__, on="acknowledgement")
