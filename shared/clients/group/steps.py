"""What a member of any group has to do next, and the coordinator's answers: the values between decision and deed."""

from __future__ import annotations

from dataclasses import dataclass

NO_GENERATION = -1


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing, for so long (None: until something changes)."""

    ms: float | None


@dataclass(frozen=True, slots=True)
class Join:
    """Send JoinGroup with these protocols, (name, what the member says of itself); then `on_join` or `on_failure`."""

    member_id: str
    protocols: tuple[tuple[str, bytes], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Send SyncGroup, with what the leader assigned; then `on_sync` or `on_failure`."""

    generation: int
    member_id: str
    assignments: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """Of JoinGroup; `members` are (member id, instance id, what it says of itself), for the leader alone."""

    code: int
    generation: int = NO_GENERATION
    protocol: str = ""
    leader: str = ""
    member_id: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """Of SyncGroup."""

    code: int
    assignment: bytes = b""
