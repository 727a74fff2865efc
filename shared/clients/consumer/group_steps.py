"""What a consumer in a group has to do next, beside what every member has (`penstock.shared.clients.group.steps`)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.shared.clients.group.steps import Join, Sync, Wait
from penstock.shared.common.records import TopicPartition


@dataclass(frozen=True, slots=True)
class Revoke:
    """Have the listener give partitions back that are still ours; then `on_revoked`."""

    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Lose:
    """Tell the listener that partitions are gone; then `on_revoked`."""

    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Gather:
    """Find out how many partitions these topics have, as the leader needs to; then `on_gathered` or `on_failure`."""

    topics: frozenset[str]


@dataclass(frozen=True, slots=True)
class Complete:
    """The assignment counts from now on (`adopt`); tell the listener; then `on_completed`."""

    assigned: frozenset[TopicPartition]
    added: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Leave:
    """Nobody polls: send LeaveGroup for the member that this was, none for a static one, which has no id here."""

    member_id: str


Step = Wait | Revoke | Lose | Join | Gather | Sync | Complete | Leave
