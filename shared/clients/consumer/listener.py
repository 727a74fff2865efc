"""The rebalance listener: a user's callbacks for a rebalance."""

from __future__ import annotations

from penstock.shared.common.records import TopicPartition


class RebalanceListener:
    """Base class whose methods do nothing; override those you need.

    They are called only inside `poll`, the next record of an `async for`, and `close`, each within
    `listener_timeout_ms`. Heartbeats continue meanwhile. That poll raises a method's exception, or KafkaTimeout if the
    method runs out of time. A `commit()` in a method covers everything that was handed out. In a `close` that ends an
    iteration, or that follows an exception in `async with`, it leaves out the records handed out last. The methods
    cannot poll, iterate or close.

    Source of the semantics: Java's ConsumerRebalanceListener.
    """

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """Called after every rebalance with the partitions that are newly owned. Seek here.

        For an eager member, which revoked everything before, these are all its partitions. For a cooperative member
        they are the new ones, possibly none.
        """

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """Called with partitions that are owned until this returns: finish their records and commit.

        For an eager member these are all its partitions, before it joins the group again. For a cooperative member they
        are those that move to other members.
        """

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Called with partitions that are lost and may be owned by another member: a commit would be rejected."""
