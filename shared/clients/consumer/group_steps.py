"""A consumer's steps in a group, in addition to those of every member (`penstock.shared.clients.group.steps`)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.shared.clients.group.steps import Join, Sync, Wait
from penstock.shared.common.records import TopicPartition


@dataclass(frozen=True, slots=True)
class Revoke:
    """Have the listener revoke partitions that the member still owns; then call `on_revoked`."""

    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Lose:
    """Tell the listener that partitions are lost; then call `on_revoked`."""

    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Gather:
    """Look up the partition counts of these topics for the leader; then call `on_gathered` or `on_failure`."""

    topics: frozenset[str]


@dataclass(frozen=True, slots=True)
class Complete:
    """Put the assignment in force (`adopt`), call the listener, then `on_completed`."""

    assigned: frozenset[TopicPartition]
    added: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Leave:
    """Polls are missing: send LeaveGroup with this member id; it is empty for a static member, which sends none."""

    member_id: str


Step = Wait | Revoke | Lose | Join | Gather | Sync | Complete | Leave
