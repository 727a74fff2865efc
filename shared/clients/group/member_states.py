"""The states of a member of a group, as in Kafka's classic protocol, and the member's configuration.

UNJOINED --needs a group--> PREPARING --revoked--> JOINING --generation--> SYNCING --assignment--> COMPLETING
COMPLETING --listener called--> STABLE --rebalance, other topics--> UNJOINED
any --retriable error--> UNJOINED; --no poll for max_poll_interval_ms--> LEFT; --fatal--> FAILED
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class MemberState(StrEnum):
    """The states of a member."""

    UNJOINED = "unjoined"
    PREPARING = "preparing"
    JOINING = "joining"
    SYNCING = "syncing"
    COMPLETING = "completing"
    STABLE = "stable"
    LEFT = "left"
    FAILED = "failed"


_S = MemberState
TRANSITIONS: Mapping[MemberState, frozenset[MemberState]] = {
    _S.UNJOINED: frozenset({_S.PREPARING, _S.JOINING, _S.LEFT, _S.FAILED}),
    _S.PREPARING: frozenset({_S.UNJOINED, _S.LEFT}),
    _S.JOINING: frozenset({_S.SYNCING, _S.UNJOINED, _S.FAILED}),
    _S.SYNCING: frozenset({_S.COMPLETING, _S.UNJOINED, _S.FAILED}),
    _S.COMPLETING: frozenset({_S.STABLE, _S.UNJOINED, _S.LEFT}),
    _S.STABLE: frozenset({_S.UNJOINED, _S.LEFT}),
    _S.LEFT: frozenset({_S.PREPARING, _S.UNJOINED}),
    _S.FAILED: frozenset({_S.UNJOINED}),
}
BEATING = frozenset({_S.PREPARING, _S.COMPLETING, _S.STABLE})
"""The states in which the coordinator expects heartbeats. While a member joins or syncs, it waits for an answer."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The member's identity and its time limits; times in ms."""

    group_id: str
    client_id: str
    instance_id: str | None = None
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    max_poll_interval_ms: int = 300_000
    retry_backoff_ms: int = 100
