"""What a user hears of a rebalance."""

from __future__ import annotations

from penstock.shared.common.records import TopicPartition


class RebalanceListener:
    """Base with all methods doing nothing; override what is wanted.

    They are called inside `poll`, the next record of an `async for`, and `close`, and nowhere else, each within
    `listener_timeout_ms`; heartbeats go on meanwhile. What a method raises (or its time running out, as KafkaTimeout)
    is raised by that poll. A `commit()` in them takes everything that was handed out; in a `close` that ends an
    iteration, or that follows an exception in `async with`, not what was handed out last. They cannot poll, iterate or
    close.

    Source of the semantics: Java's ConsumerRebalanceListener.
    """

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """These are ours from now on, and were not just before; called after every rebalance. The place to seek.

        An eager member has given everything back before, so these are all; a cooperative one hears only of what is new,
        which may be nothing.
        """

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """These are still ours and will not be after this returns: finish them and commit.

        All of them for an eager member, before it joins the group anew; for a cooperative one what goes to others.
        """

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """These are not ours any more and may be another's already: a commit would be refused."""
