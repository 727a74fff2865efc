"""Interceptors see the records that are handed out and the committed offsets.

Exceptions that they raise are logged and have no other effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition

log = get_logger(__name__)


class ConsumerInterceptor:
    """Base class whose methods do nothing; override those you need. They run on the event loop and must not block.

    Source of the semantics: Kafka's ConsumerInterceptor.
    """

    def on_consume(self, topic_partition: TopicPartition, records: Columns[Any, Any]) -> Columns[Any, Any]:
        """Called once with records of one partition before they are handed out. Returns the records to hand out
        instead.

        Keys and values are deserialized. The result must have as many records, at the same offsets.
        """
        return records

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Called with offsets that the group has just committed."""


class ConsumerInterceptors:
    """A chain of interceptors. Each one gets the records that the previous one returned."""

    def __init__(self, chain: Sequence[ConsumerInterceptor]) -> None:
        self._chain = tuple(chain)

    def __bool__(self) -> bool:
        return bool(self._chain)

    def on_consume(self, topic_partition: TopicPartition, records: Columns[Any, Any]) -> Columns[Any, Any]:
        """Call all interceptors. One that raises, or returns records at other offsets, is skipped."""
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
