"""What a member of a group has to do next, and the coordinator's answers: the values between decision and deed."""

from __future__ import annotations

from dataclasses import dataclass

from shared.common.records import TopicPartition


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing, for so long (None: until something changes)."""

    ms: float | None


@dataclass(frozen=True, slots=True)
class Revoke:
    """Have the listener give partitions back that are still ours; then `on_revoked`."""

    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Lose:
    """Tell the listener that partitions are gone; then `on_revoked`."""

    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Join:
    """Send JoinGroup; then `on_join` or `on_failure`."""

    member_id: str
    protocol: str
    subscription: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Gather:
    """Find out how many partitions these topics have, as the leader needs to; then `on_gathered` or `on_failure`."""

    topics: frozenset[str]


@dataclass(frozen=True, slots=True)
class Sync:
    """Send SyncGroup, with what the leader assigned; then `on_sync` or `on_failure`."""

    generation: int
    member_id: str
    assignments: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Complete:
    """The assignment counts from now on (`adopt`); tell the listener; then `on_completed`."""

    assigned: frozenset[TopicPartition]
    added: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Leave:
    """Send LeaveGroup for the member that this was, since nobody polls."""

    member_id: str


Step = Wait | Revoke | Lose | Join | Gather | Sync | Complete | Leave


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """Of JoinGroup; `members` are (member id, instance id, subscription), for the leader alone."""

    code: int
    generation: int = -1
    protocol: str = ""
    leader: str = ""
    member_id: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """Of SyncGroup."""

    code: int
    assignment: bytes = b""
