"""The consumer's settings. Those that the Java consumer has too have its names and defaults, with two exceptions.

`commit_strategy` replaces `enable.auto.commit`: by default nothing is committed automatically.
`partition_assignment_strategy` is a single strategy, by default `range`, where Java has a list.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from penstock.shared.clients.consumer.subscription_state import ResetPolicy
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import PositiveMs, Section, require_heartbeat_within_session

INT32_MAX = 2**31 - 1
"""The largest number in a field of 32 bits, as JoinGroup and Fetch have."""
GroupMs = Annotated[int, Field(gt=0, le=INT32_MAX)]
"""A time that JoinGroup carries."""


def _is_reset_policy(text: str) -> str:
    try:
        ResetPolicy.parse(text)
    except ConfigError as e:
        raise ValueError(str(e)) from None
    return text


class ReadingSettings(Section):
    """Settings for reading and for membership: all except the group id and when to commit."""

    group_instance_id: str | None = Field(default=None, min_length=1, description="static membership")
    auto_offset_reset: Annotated[str, AfterValidator(_is_reset_policy)] = Field(
        default="latest", description="earliest, latest, none, or by_duration:<P7D, PT1H30M, 90m, ...>"
    )
    isolation_level: Literal["read_uncommitted", "read_committed"] = "read_uncommitted"
    commit_timeout_ms: PositiveMs = Field(default=60_000, description="how long a synchronous commit is retried")
    session_timeout_ms: GroupMs = 45_000
    heartbeat_interval_ms: PositiveMs = 3_000
    max_poll_interval_ms: GroupMs = Field(
        default=300_000,
        description="between two polls; the group waits so long for a member to take part in a rebalance",
    )
    listener_timeout_ms: PositiveMs = Field(
        default=60_000, description="one call of the rebalance listener; max_poll_interval_ms where that is shorter"
    )
    partition_assignment_strategy: Literal["range", "roundrobin", "sticky", "cooperative-sticky"] = "range"
    fetch_min_bytes: int = Field(default=1, ge=1, le=INT32_MAX)
    fetch_max_bytes: int = Field(default=50 * 1024 * 1024, ge=1, le=INT32_MAX)
    fetch_max_wait_ms: int = Field(
        default=500, ge=0, le=INT32_MAX, description="sent as half of kafka.request_timeout_ms if that is less"
    )
    max_partition_fetch_bytes: int = Field(default=1024 * 1024, ge=1, le=INT32_MAX)
    fetch_buffer_bytes: int = Field(
        default=64 * 1024 * 1024,
        ge=1024,
        description="the most bytes fetched and not yet polled, from all brokers together",
    )
    max_poll_records: int | None = Field(default=500, ge=1, description="None: no bound")

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> Self:
        require_heartbeat_within_session(self.heartbeat_interval_ms, self.session_timeout_ms)
        return self


class ConsumerSettings(ReadingSettings):
    """All settings of a consumer: those for reading, the group id, and when positions are committed."""

    group_id: str | None = Field(default=None, min_length=1, description="none: no commits, no shared assignment")
    commit_strategy: Literal["none", "auto", "sync", "async"] = Field(
        default="none",
        description="when the records that earlier polls returned are committed: none: only on request; auto: every "
        "auto_commit_interval_ms, in poll and `async for`; sync: by every poll, which waits; async: by every poll, "
        "without waiting",
    )
    auto_commit_interval_ms: PositiveMs = 5_000

    @model_validator(mode="after")
    def _group_is_named(self) -> Self:
        if self.group_id is None and self.commit_strategy != "none":
            raise ValueError(f"commit_strategy={self.commit_strategy} needs a group_id")
        if self.group_id is None and self.group_instance_id is not None:
            raise ValueError("group_instance_id needs a group_id")
        return self
