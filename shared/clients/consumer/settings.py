"""The consumer's settings, with the Java consumer's names and defaults.

The reset policy (`auto_offset_reset`) finds the offset to read from if a partition's position is missing or not in the
log.

>>> ResetPolicy.parse("earliest").spec(now_ms=0)
'earliest'
>>> ResetPolicy.parse("by_duration:PT1H30M").spec(now_ms=10_000_000)
4600000
>>> ResetPolicy.parse("by_duration:7d").duration_ms
604800000
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import PositiveMs, Section
from penstock.shared.common.time_text import duration_ms

RESET_POLICIES = ("earliest", "latest", "none")
BY_DURATION = "by_duration:"
_ISO = re.compile(
    r"P(?:(?P<d>\d+)D)?(?:T(?=\d)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d{1,3})?)S)?)?", re.IGNORECASE
)
_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}


@dataclass(frozen=True, slots=True)
class ResetPolicy:
    """One of Kafka's policies; `duration_ms` is set under `by_duration` alone."""

    name: str
    duration_ms: int | None = None

    @classmethod
    def parse(cls, text: str) -> ResetPolicy:
        """Parse `earliest`, `latest`, `none`, or `by_duration:` with an ISO 8601 duration (`P7D`, `PT1H30M`) or one
        like `90m`.

        Raises ConfigError for anything else. `by_duration` is KIP-1106.
        """
        if text in RESET_POLICIES:
            return cls(text)
        if not text.startswith(BY_DURATION):
            raise ConfigError(f"{text!r} is none of {', '.join(RESET_POLICIES)} and {BY_DURATION}<duration>")
        return cls("by_duration", _duration_ms(text.removeprefix(BY_DURATION)))

    @property
    def is_none(self) -> bool:
        """Whether a missing position is an error."""
        return self.name == "none"

    def spec(self, now_ms: int) -> str | int:
        """Return what to look up: `earliest`, `latest`, or the time (ms since the epoch) of the first record wanted."""
        return self.name if self.duration_ms is None else max(0, now_ms - self.duration_ms)


def _duration_ms(text: str) -> int:
    match = _ISO.fullmatch(text)
    if match is None or not any(match.groupdict().values()):
        if text[:1] in ("P", "p"):
            raise ConfigError(f"{text!r} is not a duration: write one such as P7D, PT1H30M or 90m")
        return duration_ms(text)
    return sum(round(float(n) * _UNITS_MS[unit]) for unit, n in match.groupdict().items() if n)


GroupMs = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""A time that JoinGroup carries, in 32 bits."""
CommitStrategy = Literal["none", "auto", "sync", "async"]


def _is_reset_policy(text: str) -> str:
    try:
        ResetPolicy.parse(text)
    except ConfigError as e:
        raise ValueError(str(e)) from None
    return text


class ReadingSettings(Section):
    """Settings for reading and for liveness: all except those of the group and its commits."""

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
    fetch_min_bytes: int = Field(default=1, ge=1)
    fetch_max_bytes: int = Field(default=50 * 1024 * 1024, ge=1)
    fetch_max_wait_ms: int = Field(default=500, ge=0)
    max_partition_fetch_bytes: int = Field(default=1024 * 1024, ge=1)
    fetch_buffer_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024, description="fetched ahead and not yet polled, at most; the brokers share it"
    )
    max_poll_records: int | None = Field(default=500, ge=1, description="None: no bound")

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> Self:
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise ValueError(
                f"heartbeat_interval_ms={self.heartbeat_interval_ms} must be below "
                f"session_timeout_ms={self.session_timeout_ms}"
            )
        return self


class ConsumerSettings(ReadingSettings):
    """Settings for reading, for committing positions, and for the member's liveness."""

    group_id: str | None = Field(default=None, min_length=1, description="none: no commits, no shared assignment")
    commit_strategy: CommitStrategy = Field(
        default="none",
        description="what polls before the current one returned is committed: none: only on request; auto: every "
        "auto_commit_interval_ms, in poll; sync: by every poll, which waits; async: by every poll, beside it",
    )
    auto_commit_interval_ms: PositiveMs = 5_000

    @model_validator(mode="after")
    def _group_is_named(self) -> Self:
        if self.group_id is None and self.commit_strategy != "none":
            raise ValueError(f"commit_strategy={self.commit_strategy} needs a group_id")
        if self.group_id is None and self.group_instance_id is not None:
            raise ValueError("group_instance_id needs a group_id")
        return self
