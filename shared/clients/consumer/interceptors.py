"""Interceptors: see the records that are handed out and what is committed; what they raise is logged, no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition

log = get_logger(__name__)


class ConsumerInterceptor:
    """Base with both methods doing nothing; override what is wanted. They run on the event loop and must not block.

    Source of the semantics: Kafka's ConsumerInterceptor.
    """

    def on_consume(self, topic_partition: TopicPartition, records: Columns[Any, Any]) -> Columns[Any, Any]:
        """Records of one partition before they are handed out, once: those to hand out in their place.

        Keys and values are deserialized. What is given must be as many records as were taken, at the same offsets.
        """
        return records

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Offsets that the group has committed now."""


class ConsumerInterceptors:
    """A chain, each called with what the one before returned."""

    def __init__(self, chain: Sequence[ConsumerInterceptor]) -> None:
        self._chain = tuple(chain)

    def __bool__(self) -> bool:
        return bool(self._chain)

    def on_consume(self, topic_partition: TopicPartition, records: Columns[Any, Any]) -> Columns[Any, Any]:
        """Through all; one that raises, or gives other records, is passed over."""
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
        """To all, whatever one raises."""
        for interceptor in self._chain:
            try:
                interceptor.on_commit(dict(offsets))
            except Exception:
                log.exception("interceptor failed", interceptor=type(interceptor).__name__, on="commit")
