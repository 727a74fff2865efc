"""The next steps of a member of any group, and the coordinator's answers. All are plain values."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.shared.clients.protocol.requests import NO_GENERATION


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for `ms` (None: until something changes)."""

    ms: float | None


@dataclass(frozen=True, slots=True)
class Join:
    """Send JoinGroup with these protocols, (name, the member's metadata); then call `on_join` or `on_failure`."""

    member_id: str
    protocols: tuple[tuple[str, bytes], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Send SyncGroup with the leader's assignments; then call `on_sync` or `on_failure`."""

    generation: int
    member_id: str
    assignments: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """The answer to JoinGroup. `members` are (member id, instance id, metadata); only the leader gets them."""

    code: int
    generation: int = NO_GENERATION
    protocol: str = ""
    leader: str = ""
    member_id: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """The answer to SyncGroup."""

    code: int
    assignment: bytes = b""
