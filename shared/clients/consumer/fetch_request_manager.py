"""The fetcher's I/O (Java: `FetchRequestManager`): sends its requests and passes the responses to it.

There is no loop. `pump` gets the next requests from the fetcher, and starts one task for each. It is called after every
event that may change them: a response, records taken, a seek, an assignment, the end of a backoff.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

from penstock.shared.clients.connection import Connection, list_offsets
from penstock.shared.clients.consumer.fetcher import Fetch, Fetcher, OffsetLookup
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.clients.consumer.subscription_state import Move, ResetPolicy
from penstock.shared.clients.protocol.fetch import FetchRequest
from penstock.shared.common.backoff import RETRY_BACKOFF_MAX_MS, ExponentialBackoff
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import IllegalState, NotLeaderOrFollower, PenstockError, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition
from penstock.shared.common.repeated_failure import RepeatedFailure

log = get_logger(__name__)

NO_LEADER = "partitions without a leader"
"""What fails in the log if a partition has no leader, or does not exist: no request is sent for it."""
LOGGED_PARTITIONS = 10
"""The maximum number of partitions that this line names."""

FetchCommitted = Callable[[Sequence[TopicPartition]], Awaitable[dict[TopicPartition, OffsetAndMetadata]]]


class FetchRequestManager:
    """Sends one consumer's fetches, and the offset lookups for its positions, over the consumer's connection.

    Group and commit requests of the consumer use the same connection. `assign` sets the partitions that the group or
    the user has assigned.
    """

    def __init__(
        self,
        connection: Connection,
        fetcher: Fetcher,
        clock: Clock,
        metrics: ConsumerMetrics,
        *,
        fetch_committed: FetchCommitted,
        on_move: Callable[[TopicPartition, Move], None],
    ) -> None:
        """`fetch_committed` looks up the group's offsets. `on_move` is called when a position moves past offsets
        without records, or is reset (`Move`). A seek to an offset is no move."""
        self._connection = connection
        self.fetcher = fetcher
        self._clock = clock
        self._metrics = metrics
        self._fetch_committed = fetch_committed
        self._on_move = on_move
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._refreshing = False
        # The number of refreshes in a row. The backoff depends on it.
        self._refreshes = 0
        self._refreshed_ms = 0.0
        # The repeated failures by what could not be fetched, to log them.
        self._failing: dict[str, RepeatedFailure] = {}
        # The partitions whose last fetch failed.
        self._failed: set[TopicPartition] = set()
        self._broken: BaseException | None = None
        self._is_open = False
        self._wake = asyncio.Event()
        """Set when a poll that waits must look again."""

    def __repr__(self) -> str:
        return f"<FetchRequestManager {self.fetcher}, {len(self._tasks)} tasks>"

    def open(self) -> None:
        """Begin to fetch, over an open connection."""
        self._is_open = True
        self.pump()

    async def close(self) -> None:
        """Stop fetching, and wake callers that wait for data."""
        self._is_open = False
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._metrics.no_lag(self.fetcher.assignment)
        self._metrics.buffered(0)
        self.wake_pollers()

    def assign(self, partitions: Iterable[TopicPartition], kept: Iterable[TopicPartition] = ()) -> None:
        """Read these partitions from now on. Those in `kept` keep their position, buffer and pause."""
        partitions = list(partitions)
        self._metrics.no_lag(self.fetcher.assignment.difference(partitions))
        self.fetcher.assign(partitions, kept)
        gone = self._failed - self.fetcher.assignment
        self._failed -= gone
        for topic in {tp.topic for tp in gone} - {tp.topic for tp in self._failed}:
            self._failing.pop(f"records of {topic}", None)
        if NO_LEADER in self._failing and not self._leaderless():
            del self._failing[NO_LEADER]
        for topic in dict.fromkeys(tp.topic for tp in partitions):
            self._connection.watch(topic)
        self.pump()

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Continue from `offset`."""
        self._check_assigned([tp])
        self.fetcher.seek(tp, offset)
        self._report_lag(tp)
        self.pump()

    def reset(self, partitions: Iterable[TopicPartition], policy: ResetPolicy) -> None:
        """Continue from the offset that the policy finds; the positions are None until then."""
        for tp in self._check_assigned(partitions):
            self.fetcher.seek(tp, policy)
        self.pump()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no records of the partitions."""
        for tp in self._check_assigned(partitions):
            self.fetcher.pause(tp)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out records of paused partitions again."""
        for tp in self._check_assigned(partitions):
            self.fetcher.resume(tp)
        self.wake_pollers()
        self.pump()

    def position(self, tp: TopicPartition) -> int | None:
        """Return the offset of the next record to hand out. Returns None while it is being looked up."""
        self._check_assigned([tp])
        return self.fetcher.position(tp)

    def _check_assigned(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        wanted = list(partitions)
        for tp in wanted:
            if tp not in self.fetcher.assignment:
                raise IllegalState(f"{tp}: not assigned to client {self._connection.client_id}")
        return wanted

    def take(self, max_records: int | None) -> dict[TopicPartition, Columns]:
        """Take records; see `Fetcher.take`."""
        if self._broken is not None:
            raise self._broken
        try:
            taken = self.fetcher.take(max_records)
            for tp in taken:
                self._report_lag(tp)
            return taken
        finally:
            self._report_moves()
            self.pump()

    async def wait_for_data(self, timeout_ms: float) -> None:
        """Wait until there may be records to take, or until `timeout_ms` has passed.

        Also returns after `wake_pollers`, after the failure of a request's task, which `take` raises, and if fetching
        is not open.
        """
        if self.fetcher.has_data or not self._is_open:
            return
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                await self._wake.wait()

    def pump(self) -> None:
        """Start the requests that the fetcher wants now."""
        if not self._is_open:
            return
        if NO_LEADER in self._failing and not self._leaderless():
            self._log_outcome(NO_LEADER, None)
        now_ms = self._clock.monotonic_ms()
        requests = self.fetcher.next_requests(self._connection.leader, now_ms)
        self._metrics.buffered(self.fetcher.buffered_bytes)
        for fetch in requests.fetches:
            self._start_request_task(self._send_fetch(fetch))
        for lookup in requests.lookups:
            self._start_request_task(self._look_up_offsets(lookup))
        if requests.stale_metadata and not self._refreshing:
            self._refreshing = True
            self._start_request_task(self._refresh_metadata())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if requests.next_ms is not None:
            self._timer = asyncio.get_running_loop().call_later((requests.next_ms - now_ms) / 1000, self.pump)
        if self.fetcher.has_data:
            self.wake_pollers()

    async def _send_fetch(self, fetch: Fetch) -> None:
        topics: dict[str, list[tuple[int, int, int, int]]] = {}
        settings = self.fetcher.settings
        for tp, offset in fetch.wanted.items():
            row = tp.partition, offset, fetch.epochs[tp], settings.max_partition_fetch_bytes
            topics.setdefault(tp.topic, []).append(row)
        # The broker must answer before the request times out here. Otherwise it could never send what there is, if that
        # is less than `fetch_min_bytes`.
        wait_ms = min(fetch.max_wait_ms, self._connection.settings.request_timeout_ms // 2)
        request = FetchRequest(
            wait_ms,
            settings.fetch_min_bytes,
            fetch.max_bytes,
            self.fetcher.read_committed,
            list(topics.items()),
        )
        started_ms = self._clock.monotonic_ms()
        try:
            response = await self._connection.fetch(fetch.node, request, f"fetch from node {fetch.node}")
        except PenstockError as e:
            self.fetcher.failed(fetch, e, self._clock.monotonic_ms())
            self._metrics.fetch_failed()
            # `take` raises any other error.
            if isinstance(e, RetriableError):
                self._log_partitions({tp: e for tp in fetch.wanted if tp in self.fetcher.assignment})
        else:
            now_ms = self._clock.monotonic_ms()
            self._log_partitions(self.fetcher.received(fetch, response, now_ms))
            self._report_moves()
            size = sum(len(fetched.records) for fetched in response.partitions.values())
            self._metrics.fetched(now_ms - started_ms, size)
        self.pump()

    async def _look_up_offsets(self, lookup: OffsetLookup) -> None:
        what = "committed offsets" if lookup.by_commit else f"offsets of {next(iter(lookup.wanted)).topic}"
        try:
            if lookup.by_commit:
                found = await self._fetch_committed(list(lookup.wanted))
                self.fetcher.committed(lookup, found)
            else:
                now_ms = self._clock.now_ms()
                specs = {tp: policy.spec(now_ms) for tp, policy in lookup.wanted.items() if policy is not None}
                level = "read_committed" if self.fetcher.read_committed else "read_uncommitted"
                limit_ms = self._connection.settings.request_timeout_ms
                self.fetcher.placed(lookup, await list_offsets(self._connection, specs, level, limit_ms))
                self._report_moves()
            self._log_outcome(what, None)
        except PenstockError as e:
            self.fetcher.failed(lookup, e, self._clock.monotonic_ms())
            # `take` raises any other error.
            if isinstance(e, RetriableError):
                self._log_outcome(what, e)
        self.pump()

    def _log_partitions(self, outcomes: Mapping[TopicPartition, PenstockError | None]) -> None:
        """Log the failures of partitions by topic. A topic's failure ends when none of its partitions fails."""
        if not self._failed and not any(outcomes.values()):
            return
        repeated: dict[str, PenstockError] = {}
        for tp, error in outcomes.items():
            if error is None:
                self._failed.discard(tp)
            # The first failure is not logged: a leader that moved is usual. It usually answers once, because new
            # metadata names the new leader.
            elif tp not in self._failed:
                self._failed.add(tp)
            else:
                repeated.setdefault(tp.topic, error)
        for topic in {tp.topic for tp in outcomes} - {tp.topic for tp in self._failed} | repeated.keys():
            self._log_outcome(f"records of {topic}", repeated.get(topic))

    def _leaderless(self) -> list[TopicPartition]:
        return sorted(tp for tp in self.fetcher.assignment if self._connection.leader(tp) is None)

    def _log_outcome(self, what: str, error: PenstockError | None) -> None:
        """Log a failure that is retried, at growing intervals, and its end."""
        if error is None and what not in self._failing:
            return
        failure = self._failing.setdefault(what, RepeatedFailure())
        fields = {"client_id": self._connection.client_id, "what": what}
        now_ms = self._clock.monotonic_ms()
        if error is None:
            del self._failing[what]
            log.info("fetching works again", **fields, **(failure.succeeded(now_ms) or {}))
        elif (times := failure.failed(now_ms)) is not None:
            log.warning("fetching fails, retrying", **fields, reason=str(error), **times)

    def _report_moves(self) -> None:
        for tp, move in self.fetcher.moves().items():
            if move.reason:
                self._log_reset(tp, move)
            self._on_move(tp, move)
            self._report_lag(tp)

    def _report_lag(self, tp: TopicPartition) -> None:
        position = self.fetcher.position(tp)
        if position is not None and (lag := self.fetcher.lag(tp, position)) is not None:
            self._metrics.lag(tp, lag)

    def _log_reset(self, tp: TopicPartition, move: Move) -> None:
        fields = {"client_id": self._connection.client_id, "partition": str(tp), "reason": move.reason}
        if move.replaced is None:
            log.info("position found", **fields, to=move.position)
            return
        log.warning("position reset", **fields, left=move.replaced, to=move.position)
        self._metrics.position_reset(tp.topic, move.position - move.replaced)

    async def _refresh_metadata(self) -> None:
        """Refresh the metadata; the wait until the next refresh grows with each refresh in a row."""
        if self._clock.monotonic_ms() - self._refreshed_ms > RETRY_BACKOFF_MAX_MS:
            self._refreshes = 0
        is_new = await self._connection.refresh_metadata()
        self._refreshes += 1
        # During an election there is no leader for a moment. It has usually ended by the second refresh in a row.
        if is_new and self._refreshes > 1 and (waiting := self._leaderless()):
            names = ", ".join(map(str, waiting[:LOGGED_PARTITIONS]))
            more = f" and {n} more" if (n := len(waiting) - LOGGED_PARTITIONS) > 0 else ""
            self._log_outcome(NO_LEADER, NotLeaderOrFollower(f"no leader, or no such partition: {names}{more}"))
        self.pump()
        backoff = ExponentialBackoff(self._connection.settings.retry_backoff_ms, RETRY_BACKOFF_MAX_MS)
        await asyncio.sleep(backoff.wait_ms(self._refreshes) / 1000)
        self._refreshing = False
        self._refreshed_ms = self._clock.monotonic_ms()
        self.pump()

    def _start_request_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_request_task_ended)

    def _on_request_task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = error
            self.wake_pollers()

    def wake_pollers(self) -> None:
        """Wake a poll that waits."""
        self._wake.set()
