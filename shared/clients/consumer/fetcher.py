"""The positions and buffers of a consumer. Decides what to fetch next, and from which broker.

A partition has two offsets. The position is the next record to hand out. The fetch offset is the end of the buffered
records. So the next fetch is in flight while the records of the last one are processed. Each broker has at most one
fetch in flight, with all its partitions that need one. A partition needs a fetch until it has buffered two
completed fetches, or twice `max_partition_fetch_bytes`. All buffers together stay within `fetch_buffer_bytes`, unless a
batch is larger than the bytes that its request reserved (KIP-74). A paused partition keeps its buffer until partitions
with an empty buffer need the memory. Its records are then dropped, and fetched again later.

Each partition has at most one open request. After a seek or a new assignment the response to that request is ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from penstock.shared.clients.consumer.settings import ReadingSettings
from penstock.shared.clients.consumer.subscription_state import EARLIEST, LATEST, Move, ResetPolicy
from penstock.shared.clients.protocol.completed_fetch import CompletedFetch
from penstock.shared.clients.protocol.errors import error_for_code
from penstock.shared.clients.protocol.fetch import NO_EPOCH, NO_OFFSET, FetchedPartition, FetchResponse
from penstock.shared.common.backoff import RETRY_BACKOFF_MAX_MS, ExponentialBackoff
from penstock.shared.common.errors import (
    CorruptRecord,
    IllegalState,
    LogTruncation,
    NoOffsetForPartition,
    OffsetOutOfRange,
    PenstockError,
    RetriableError,
)
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition

LEFT_OUT_WAIT_MS = 20
"""The wait for data of a request while another partition of its broker is left out, because enough of that partition is
buffered. It can be requested only after this request is answered. The wait doubles with each such request, up to
`fetch_max_wait_ms`, until the application takes records: an application that takes none causes few requests."""
FETCHES_AHEAD = 2
"""A partition is not fetched while it has buffered this many completed fetches, or this many times
`max_partition_fetch_bytes`. One completed fetch is processed while the next one is ready. More of them would be small,
and a slow application would never catch up: each poll takes one of each partition."""
TAKEN_BYTES = 1024 * 1024
"""A poll adds no further partition's records after this many bytes: data that fits into a processor's cache is
processed faster."""
UNKNOWN_SERVER_ERROR = -1

Leader = Callable[[TopicPartition], int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A fetch request to send: the partitions in order of preference, with their fetch offsets, and the leader epochs
    of the batches before those offsets (-1 if unknown). It is sent at `sent_ms` of the monotonic clock."""

    node: int
    wanted: dict[TopicPartition, int]
    max_bytes: int
    max_wait_ms: int
    epochs: dict[TopicPartition, int]
    sent_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class OffsetLookup:
    """Positions to look up: by policy, or (None) by the group's committed offsets."""

    wanted: dict[TopicPartition, ResetPolicy | None]
    by_commit: bool


@dataclass(frozen=True, slots=True)
class NextRequests:
    """The requests to send now, whether metadata is stale, and the ms at which to check again (None: on an event)."""

    fetches: list[Fetch]
    lookups: list[OffsetLookup]
    stale_metadata: bool
    next_ms: float | None


class FetcherPartition:
    """One partition that the fetcher reads: its position, its buffer, and its open request."""

    __slots__ = (
        "answered_ms",
        "buffered_bytes",
        "completed_fetches",
        "error",
        "failures",
        "fetch_epoch",
        "fetch_offset",
        "high_watermark",
        "last_stable_offset",
        "position",
        "position_epoch",
        "replaced",
        "request_out",
        "reset",
        "reset_reason",
        "retry_ms",
    )

    def __init__(self) -> None:
        self.high_watermark: int | None = None
        self.last_stable_offset: int | None = None
        # When the last fetch that succeeded was sent.
        self.answered_ms = 0.0
        self.completed_fetches: deque[CompletedFetch] = deque()
        self.go_to(None, None)

    def __repr__(self) -> str:
        at = f"at {self.position}" if self.position is not None else f"to be placed by {self.reset or 'commit'}"
        fetched = f"{len(self.completed_fetches)} completed fetches, {self.buffered_bytes} bytes"
        return f"<{at}, {fetched} to {self.fetch_offset}>"

    def go_to(self, position: int | None, reset: ResetPolicy | None, epoch: int = NO_EPOCH) -> None:
        """Set the position that the fetcher reads from, with the leader epoch of the batch before it.

        If `position` is None, the fetcher looks it up by the policy `reset`. If `reset` is None too, it takes the
        group's committed offset. Without a committed offset, the consumer's own policy decides.
        """
        self.position = position
        self.reset = reset
        self.position_epoch = epoch
        # The position that a due reset replaces.
        self.replaced: int | None = None
        self.reset_reason = ""
        self.error: PenstockError | None = None
        self.retry_ms = 0.0
        self.failures = 0
        self.drop_fetched()

    def reset_position(self, policy: ResetPolicy, reason: str) -> None:
        """Drop a position that the log does not contain. The fetcher then looks up another one by `policy`."""
        replaced = self.position
        self.go_to(None, policy)
        self.replaced = replaced
        self.reset_reason = reason

    def drop_fetched(self) -> None:
        """Drop the fetched records in the buffer, and forget the open request, so that its response is ignored."""
        self.request_out: Fetch | OffsetLookup | None = None
        self.completed_fetches.clear()
        self.buffered_bytes = 0
        self.fetch_offset = self.position or 0
        self.fetch_epoch = self.position_epoch

    def back_off(self, now_ms: float, backoff: ExponentialBackoff) -> None:
        """Wait before the next fetch or lookup, since one failed."""
        self.failures += 1
        self.retry_ms = now_ms + backoff.wait_ms(self.failures)


class Fetcher:
    """The partitions of one consumer."""

    def __init__(self, settings: ReadingSettings, retry_backoff_ms: int, *, has_group: bool) -> None:
        self.settings = settings
        self._backoff = ExponentialBackoff(retry_backoff_ms, RETRY_BACKOFF_MAX_MS)
        self._policy = ResetPolicy.parse(settings.auto_offset_reset)
        self.read_committed = settings.isolation_level == "read_committed"
        self._has_group = has_group
        # Requests name the partitions in this order.
        self._partitions: dict[TopicPartition, FetcherPartition] = {}
        self.assignment: frozenset[TopicPartition] = frozenset()
        self.paused: set[TopicPartition] = set()
        # The partitions with completed fetches or an error, in the order in which `take` reads them.
        self._ready: dict[TopicPartition, None] = {}
        # The bytes that each node with a request in flight may send.
        self._in_flight: dict[int, int] = {}
        self._stale = False
        self._left_out_wait_ms = LEFT_OUT_WAIT_MS
        self._moves: dict[TopicPartition, Move] = {}

    def __repr__(self) -> str:
        return f"<Fetcher {self._partitions}, in flight {self._in_flight}>"

    # --- assignment and positions ---

    def assign(self, partitions: Iterable[TopicPartition], kept: Iterable[TopicPartition] = ()) -> None:
        """Read these partitions. Those in `kept` that are already read keep their position, buffer and pause."""
        stay = set(kept)
        old = self._partitions
        self._partitions = {}
        for tp in partitions:
            self._partitions[tp] = old[tp] if tp in stay and tp in old else FetcherPartition()
        self._ready = {tp: None for tp in self._ready if self._partitions.get(tp) is old[tp]}
        self.assignment = frozenset(self._partitions)
        self.paused &= self.assignment & stay

    def seek(self, tp: TopicPartition, to: int | ResetPolicy) -> None:
        """Continue from an offset, or from the offset that a policy finds: until then the position is None."""
        self._assigned_state(tp).go_to(*((None, to) if isinstance(to, ResetPolicy) else (to, None)))
        self._ready.pop(tp, None)

    def pause(self, tp: TopicPartition) -> None:
        """Hand out no records of the partition."""
        self._assigned_state(tp)
        self.paused.add(tp)

    def resume(self, tp: TopicPartition) -> None:
        self._assigned_state(tp)
        self.paused.discard(tp)

    def position(self, tp: TopicPartition) -> int | None:
        """Return the offset of the next record to hand out. Returns None while it is being looked up."""
        return self._assigned_state(tp).position

    def lag(self, tp: TopicPartition, position: int) -> int | None:
        """Return the number of offsets between `position` and the last known end, under read_committed the last stable
        offset. Returns None if it is unknown."""
        state = self._assigned_state(tp)
        end = state.last_stable_offset if self.read_committed else state.high_watermark
        return None if end is None else max(0, end - position)

    def high_watermark(self, tp: TopicPartition) -> int | None:
        """Return the high watermark. Returns None if it is unknown, as after a fetch that failed."""
        state = self._assigned_state(tp)
        return None if state.failures else state.high_watermark

    def answered_ms(self, tp: TopicPartition) -> float:
        """Return the monotonic time at which the last fetch that succeeded was sent; 0 if there was none."""
        return self._assigned_state(tp).answered_ms

    @property
    def buffered_bytes(self) -> int:
        """The buffered bytes, as fetched."""
        return sum(state.buffered_bytes for state in self._partitions.values())

    # --- the next requests ---

    def next_requests(self, leader: Leader, now_ms: float) -> NextRequests:
        """Return the requests to send now. The caller must report the outcome of each to `committed`, `placed`,
        `received` or `failed`."""
        lookups = self._offset_lookups(leader, now_ms)
        idle, left_out, nodes = self._partitions_to_fetch(leader, now_ms)
        fetches = []
        # Each request reserves its share before it is sent. So the responses in flight and the buffer together stay
        # within `fetch_buffer_bytes`.
        if idle and (share := self._bytes_per_node(len(idle), nodes)):
            longest_ms = self.settings.fetch_max_wait_ms
            for node, tps in idle.items():
                wait_ms = min(self._left_out_wait_ms, longest_ms) if node in left_out else longest_ms
                wanted = {tp: self._partitions[tp].fetch_offset for tp in tps}
                epochs = {tp: self._partitions[tp].fetch_epoch for tp in tps}
                fetch = Fetch(node, wanted, share, wait_ms, epochs, now_ms)
                self._in_flight[node] = share
                for tp in tps:
                    self._partitions[tp].request_out = fetch
                fetches.append(fetch)
            if left_out:
                self._left_out_wait_ms = min(2 * self._left_out_wait_ms, longest_ms)
        stale = self._stale
        self._stale = False
        # A paused partition is not fetched. Its position is looked up all the same.
        waiting = [s for tp, s in self._partitions.items() if s.position is None or tp not in self.paused]
        later = [state.retry_ms for state in waiting if state.retry_ms > now_ms]
        return NextRequests(fetches, lookups, stale, min(later, default=None))

    def _partitions_to_fetch(
        self, leader: Leader, now_ms: float
    ) -> tuple[dict[int, list[TopicPartition]], set[int], int]:
        """Return the partitions to fetch, for each node without a request in flight.

        Also returns the nodes with a partition that has buffered enough, and the number of nodes that lead a partition.
        All three results leave out partitions that are paused, have an error or lack a position.
        """
        idle: dict[int, list[TopicPartition]] = {}
        left_out: set[int] = set()
        nodes: set[int] = set()
        enough = FETCHES_AHEAD * self.settings.max_partition_fetch_bytes
        for tp, state in self._partitions.items():
            if state.position is None or tp in self.paused or state.error is not None:
                continue
            # No leader is known, for example during an election: new metadata will name it.
            if (node := leader(tp)) is None:
                self._stale = True
                continue
            nodes.add(node)
            if state.buffered_bytes >= enough or len(state.completed_fetches) >= FETCHES_AHEAD:
                left_out.add(node)
            elif state.request_out is None and state.retry_ms <= now_ms and node not in self._in_flight:
                idle.setdefault(node, []).append(tp)
        return idle, left_out, len(nodes)

    def _bytes_per_node(self, idle_nodes: int, nodes: int) -> int:
        """Return the bytes that a response of each of `idle_nodes` nodes may have; 0 if too few for a request.

        A node gets at most one of `nodes` + 1 equal parts of the buffer. If the bytes are too few and `take` has
        no records to return, drops the buffers of paused partitions.
        """
        settings = self.settings
        # The request to a broker that hangs reserves that broker's part until it times out. The additional part lets
        # the other brokers send ahead meanwhile.
        most = max(1, min(settings.fetch_max_bytes, settings.fetch_buffer_bytes // (nodes + 1)))
        worth = min(settings.max_partition_fetch_bytes, most)
        free = settings.fetch_buffer_bytes - self.buffered_bytes - sum(self._in_flight.values())
        # Drop the buffers of paused partitions only if no records can be returned. Otherwise the next poll frees
        # memory, and no record needs to be fetched twice. A poll that raises an error frees no memory.
        if free // idle_nodes < worth and not any(
            state.completed_fetches and tp not in self.paused for tp, state in self._partitions.items()
        ):
            for tp, state in self._partitions.items():
                if state.completed_fetches and tp in self.paused:
                    free += state.buffered_bytes
                    state.drop_fetched()
                    # The next fetch finds the error again, after the records that are dropped here.
                    state.error = None
                    self._ready.pop(tp, None)
        share = min(free // idle_nodes, most)
        return share if share >= worth else 0

    def _offset_lookups(self, leader: Leader, now_ms: float) -> list[OffsetLookup]:
        by_commit: dict[TopicPartition, ResetPolicy | None] = {}
        by_leader: dict[tuple[str, int], dict[TopicPartition, ResetPolicy | None]] = {}
        for tp, state in self._partitions.items():
            if state.position is not None or state.request_out or state.error is not None or state.retry_ms > now_ms:
                continue
            if state.reset is None and not self._has_group:
                self._handle_missing_commit(tp, state)
            if state.error is not None:
                continue
            if state.reset is None:
                by_commit[tp] = None
            elif (node := leader(tp)) is None:
                self._stale = True
            else:
                # One lookup for each topic and leader: an error of one of them must not fail the others.
                by_leader.setdefault((tp.topic, node), {})[tp] = state.reset
        lookups = [OffsetLookup(by_commit, True)] if by_commit else []
        lookups += [OffsetLookup(wanted, False) for wanted in by_leader.values()]
        for lookup in lookups:
            for tp in lookup.wanted:
                self._partitions[tp].request_out = lookup
        return lookups

    # --- responses ---

    def committed(self, lookup: OffsetLookup, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Apply the group's committed offsets. A partition that is missing has no committed offset.

        If an offset has a leader epoch, the first fetch checks whether the log was truncated (KIP-320).
        """
        for tp, state in self._close_request(lookup):
            if (found := offsets.get(tp)) is not None:
                state.go_to(found.offset, None, found.leader_epoch)
            else:
                self._handle_missing_commit(tp, state)

    def placed(self, lookup: OffsetLookup, offsets: Mapping[TopicPartition, int]) -> None:
        """Apply the offsets that were looked up by reset policies. -1 means that all records are earlier than the time,
        and leads to the end of the log."""
        for tp, state in self._close_request(lookup):
            replaced = state.replaced
            reason = state.reset_reason
            if (offset := offsets.get(tp, NO_OFFSET)) >= 0:
                state.go_to(offset, None)
                drifts = lookup.wanted[tp] != EARLIEST
                self._moves[tp] = Move(offset, replaced=replaced, reason=reason, drifts=drifts)
            else:
                # No record is as late as the time. The end of the log needs a lookup of its own.
                state.go_to(None, LATEST)
                state.replaced = replaced
                state.reset_reason = reason

    def failed(self, request: Fetch | OffsetLookup, error: PenstockError, now_ms: float) -> None:
        """Handle a request that failed. New metadata is requested, since the broker may be gone and its partitions
        moved.

        A retriable error is retried. Any other error is raised by `take`, after the partition's buffered records.
        """
        self._stale = True
        for tp, state in self._close_request(request):
            state.back_off(now_ms, self._backoff)
            if not isinstance(error, RetriableError):
                self._fail_partition(tp, state, error)

    def received(
        self, fetch: Fetch, response: FetchResponse, now_ms: float
    ) -> dict[TopicPartition, PenstockError | None]:
        """Apply the response to a fetch. Returns the errors that are retried, and None for each fetched partition.

        Leaves out partitions with any other error or a truncated log, and those for which the response is ignored.
        """
        outcomes: dict[TopicPartition, PenstockError | None] = {}
        for tp, state in self._close_request(fetch):
            fetched = response.partitions.get(tp)
            # A broker may leave a partition out of its response. That is retried, like an unknown error.
            code = response.error_code or (UNKNOWN_SERVER_ERROR if fetched is None else fetched.error_code)
            if fetched is None or code:
                if (error := self._handle_fetch_error(tp, state, code, now_ms)) is not None:
                    outcomes[tp] = error
                continue
            if fetched.diverged_at is not None:
                self._handle_diverging_epoch(tp, state, fetched.diverged_at, fetched.high_watermark)
            else:
                state.answered_ms = fetch.sent_ms
                self._add_completed_fetch(tp, state, fetched)
                outcomes[tp] = None
        return outcomes

    def _handle_diverging_epoch(
        self, tp: TopicPartition, state: FetcherPartition, end_offset: int, high_watermark: int
    ) -> None:
        """Handle a log that differs from the fetched records from `end_offset` on (KIP-320, KIP-595).

        If no handed-out record is gone, drops only the buffer. Otherwise `take` raises LogTruncation if the reset
        policy is `none`. Under another policy, fetching continues at `end_offset`. But if `high_watermark` is below
        the position, a policy other than `latest` finds a new position.
        """
        position = state.position
        assert position is not None
        # 1. No record that was handed out is gone. Drop the buffer and fetch again.
        if position <= end_offset:
            state.go_to(position, None)
            self._ready.pop(tp, None)
        # 2. Records that were handed out are gone, and the user wants an error. The epoch is kept, so that each fetch
        #    detects the truncation again until a seek.
        elif self._policy.is_none:
            state.drop_fetched()
            reason = f"records from offset {end_offset} on were read that are not in the log any more"
            self._fail_partition(tp, state, LogTruncation(f"{tp} at offset {position}: {reason}"))
        # 3. Records that were handed out are gone. Continue where the logs diverge, or by the reset policy if the log
        #    ends before the position: it may be that of another topic with the same name. `latest` would skip the
        #    records from `end_offset` to the end of the log.
        else:
            if high_watermark < position and self._policy != LATEST:
                state.reset_position(self._policy, "the log ends before it")
            else:
                state.go_to(end_offset, None)
                self._moves[tp] = Move(end_offset, replaced=position, reason="the log was truncated")
            self._ready.pop(tp, None)

    def _add_completed_fetch(self, tp: TopicPartition, state: FetcherPartition, fetched: FetchedPartition) -> None:
        state.failures = 0
        state.high_watermark = fetched.high_watermark
        state.last_stable_offset = fetched.last_stable_offset
        if not fetched.records:
            return
        completed = CompletedFetch(
            *tp, state.fetch_offset, fetched.records, fetched.aborted if self.read_committed else None
        )
        state.completed_fetches.append(completed)
        state.buffered_bytes += completed.size
        state.fetch_offset = completed.end_offset
        state.fetch_epoch = completed.end_epoch
        self._ready[tp] = None
        # Move the partition to the end. A broker fills a response in the order of the request, so the others come
        # first next time.
        self._partitions[tp] = self._partitions.pop(tp)

    def _handle_fetch_error(
        self, tp: TopicPartition, state: FetcherPartition, code: int, now_ms: float
    ) -> PenstockError | None:
        """Handle a partition's error in a response. Returns it if it is retriable or unknown, and so is retried."""
        state.back_off(now_ms, self._backoff)
        offset = state.fetch_offset
        error = error_for_code(code, str(tp), f"offset {offset}")
        if isinstance(error, RetriableError) or code == UNKNOWN_SERVER_ERROR:
            self._stale = True
            return error
        if isinstance(error, OffsetOutOfRange):
            # The buffered records are valid: hand them out first. Then the same request is rejected again.
            if state.completed_fetches:
                return None
            if self._policy.is_none:
                self._fail_partition(tp, state, error)
            else:
                state.reset_position(self._policy, "out of range")
        elif isinstance(error, CorruptRecord):
            self._fail_partition(tp, state, CorruptRecord(f"{tp} at offset {offset}: the broker cannot read a batch"))
        else:
            self._fail_partition(tp, state, error)
        return None

    # --- handing out ---

    @property
    def has_data(self) -> bool:
        """Whether `take` may return records or raise."""
        return not self._ready.keys() <= self.paused

    def error_of(self, tp: TopicPartition) -> PenstockError | None:
        """Return the error of the partition's fetch, lookup or batch, until `take` has raised it.

        CorruptRecord is returned until a seek.
        """
        return self._assigned_state(tp).error

    def take(self, max_records: int | None) -> dict[TopicPartition, Columns]:
        """Return at most `max_records` records of partitions that are not paused, the longest waiting partition first.

        The positions advance past the records. Raises the error of a partition's fetch, lookup or batch when it is the
        partition's turn and all records before the error were returned. If this call already has records of other
        partitions, it returns them, and a later call raises. Then the other partitions have their turns. CorruptRecord
        is raised again at each turn of the partition until a seek.
        """
        self._left_out_wait_ms = LEFT_OUT_WAIT_MS
        fetched: dict[TopicPartition, Columns] = {}
        records_left = max_records
        bytes_left = TAKEN_BYTES
        for tp in list(self._ready):
            if tp in self.paused:
                continue
            state = self._partitions[tp]
            # The next call raises the error.
            if fetched and state.error is not None and not state.completed_fetches:
                break
            bytes_left -= state.buffered_bytes
            before = state.position
            columns = self._take_records_of(state, records_left)
            del self._ready[tp]
            bytes_left += state.buffered_bytes
            # Back to the end of the order, so that a partition with a large buffer does not keep the others waiting.
            if state.completed_fetches or state.error is not None:
                self._ready[tp] = None
            if columns is not None:
                fetched[tp] = columns
                records_left = None if records_left is None else records_left - len(columns)
                if records_left == 0 or bytes_left <= 0:
                    break
            elif state.position is not None and state.position != before:
                # The completed fetch held only transaction markers or aborted records.
                self._moves[tp] = Move(state.position, state.position_epoch)
            if state.error is not None and not fetched:
                self._raise_error(tp, state)
        return fetched

    def moves(self) -> dict[TopicPartition, Move]:
        """Return the positions that changed without a record handed out, each once."""
        moves = self._moves
        self._moves = {}
        return moves

    def _take_records_of(self, state: FetcherPartition, limit: int | None) -> Columns | None:
        while state.completed_fetches:
            completed = state.completed_fetches[0]
            try:
                columns = completed.read(limit)
            except PenstockError as e:
                state.drop_fetched()
                state.error = e
                return None
            state.position = completed.position
            state.position_epoch = max(state.position_epoch, completed.epoch)
            if completed.is_done:
                state.completed_fetches.popleft()
                state.buffered_bytes -= completed.size
            if columns is not None:
                return columns
        return None

    def _raise_error(self, tp: TopicPartition, state: FetcherPartition) -> NoReturn:
        error = state.error
        assert error is not None
        del self._ready[tp]
        # The error stays until a seek. Raise a copy, because each raise extends the traceback of the object.
        if isinstance(error, CorruptRecord):
            self._ready[tp] = None
            raise CorruptRecord(str(error)) from error.__cause__
        state.error = None
        raise error

    # --- helpers ---

    def _assigned_state(self, tp: TopicPartition) -> FetcherPartition:
        if (state := self._partitions.get(tp)) is None:
            raise IllegalState(f"{tp}: not assigned")
        return state

    def _close_request(self, request: Fetch | OffsetLookup) -> list[tuple[TopicPartition, FetcherPartition]]:
        """Return the partitions for which the request is still the open one, and close it."""
        if isinstance(request, Fetch):
            self._in_flight.pop(request.node, None)
        wanted = [(tp, self._partitions[tp]) for tp in request.wanted if tp in self._partitions]
        # After a seek or a new assignment the response is for an outdated position.
        awaiting = [(tp, state) for tp, state in wanted if state.request_out is request]
        for _, state in awaiting:
            state.request_out = None
        return awaiting

    def _handle_missing_commit(self, tp: TopicPartition, state: FetcherPartition) -> None:
        if self._policy.is_none:
            self._fail_partition(tp, state, NoOffsetForPartition(f"{tp}: no committed offset"))
        else:
            state.reset = self._policy
            state.reset_reason = "no committed offset"

    def _fail_partition(self, tp: TopicPartition, state: FetcherPartition, error: PenstockError) -> None:
        state.error = error
        self._ready[tp] = None
