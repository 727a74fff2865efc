"""The fetcher's values: its limits, its requests, and its state of one partition."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.shared.clients.connection import NO_EPOCH, CompletedFetch
from penstock.shared.clients.consumer.reset_policy import ResetPolicy
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.records import TopicPartition


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """The fetch settings under Kafka's names, and the bytes (as fetched) that may be buffered."""

    fetch_min_bytes: int = 1
    fetch_max_bytes: int = 50 * 1024 * 1024
    fetch_max_wait_ms: int = 500
    max_partition_fetch_bytes: int = 1024 * 1024
    fetch_buffer_bytes: int = 64 * 1024 * 1024
    retry_backoff_ms: int = 100


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A fetch request to send: the partitions in order of preference, with their fetch offsets, and the leader epochs
    of the batches before those offsets (-1 if unknown)."""

    node: int
    wanted: dict[TopicPartition, int]
    max_bytes: int
    max_wait_ms: int
    epochs: dict[TopicPartition, int]


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Positions to look up: by policy, or (None) by the group's committed offsets."""

    wanted: dict[TopicPartition, ResetPolicy | None]
    by_commit: bool


@dataclass(frozen=True, slots=True)
class Move:
    """A position that changed without a record handed out: it passed offsets without records, or the reset policy found
    it.

    A reset has a `reason`, and `left` is the position that it replaces (None: there was none). If it `drifts`, a later
    lookup would find an offset further on.
    """

    position: int
    epoch: int = NO_EPOCH
    left: int | None = None
    reason: str = ""
    drifts: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """The requests to send now, whether metadata is stale, and the ms at which to check again (None: on an event)."""

    fetches: list[Fetch]
    lookups: list[Lookup]
    stale_metadata: bool
    next_ms: float | None


class PartitionState:
    """One partition that is read."""

    __slots__ = (
        "buffered_bytes",
        "completed_fetches",
        "error",
        "failures",
        "fetch_epoch",
        "fetch_offset",
        "high_watermark",
        "is_paused",
        "last_stable_offset",
        "left",
        "position",
        "position_epoch",
        "request_out",
        "reset",
        "retry_ms",
    )

    def __init__(self) -> None:
        self.is_paused = False
        self.high_watermark: int | None = None
        self.last_stable_offset: int | None = None
        self.completed_fetches: deque[CompletedFetch] = deque()
        self.go_to(None, None)

    def __repr__(self) -> str:
        at = f"at {self.position}" if self.position is not None else f"to be placed by {self.reset or 'commit'}"
        fetched = f"{len(self.completed_fetches)} completed fetches, {self.buffered_bytes} bytes"
        return f"<{at}, {fetched} to {self.fetch_offset}>"

    def go_to(self, position: int | None, reset: ResetPolicy | None, epoch: int = NO_EPOCH) -> None:
        """Set another position, with the leader epoch of the batch before it.

        If `position` is None, `reset` is the policy that finds it, or None for the group's committed offset.
        """
        self.position, self.reset, self.position_epoch = position, reset, epoch
        self.left: tuple[int | None, str] = None, ""  # the position that a reset replaces, and its reason
        self.error: PenstockError | None = None
        self.retry_ms, self.failures = 0.0, 0
        self.forget_fetched()

    def give_up(self, policy: ResetPolicy, reason: str) -> None:
        """Drop a position that is not in the log, and look up another one by the policy."""
        left = self.position
        self.go_to(None, policy)
        self.left = left, reason

    def forget_fetched(self) -> None:
        """Drop the buffered records and the open request."""
        self.request_out: Fetch | Lookup | None = None
        self.completed_fetches.clear()
        self.buffered_bytes = 0
        self.fetch_offset = self.position or 0
        self.fetch_epoch = self.position_epoch

    def back_off(self, now_ms: float, backoff: ExponentialBackoff) -> None:
        self.failures += 1
        self.retry_ms = now_ms + backoff.wait_ms(self.failures)
