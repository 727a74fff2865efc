"""Sends the commits that the commit sequence chooses, one at a time (Java: `CommitRequestManager`).

A request has the member's generation, member id and instance id. The response has an error code for each partition: 0
means that the offset is committed. There are four kinds of errors:

1. An error of one partition (the metadata is too long): its offset is given up, with an error that names the partition.
   A partition that the coordinator does not know is retried for REJECTED_RETRY_MS first.
2. A retriable error of the whole request: the request is retried, without a limit.
3. The loss of the membership, or a rebalance: the offsets of the partitions that are kept are committed in the next
   generation.
4. Any other error of the whole request: its offsets are given up.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.consumer.commit_sequence import Commit, CommitSequence
from penstock.shared.clients.consumer.consumer_coordinator import ConsumerCoordinator
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.clients.group.member_identity import describe_member, log_fields
from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.errors import codes_of, error_for_code
from penstock.shared.common.backoff import RETRY_BACKOFF_MAX_MS, ExponentialBackoff
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    CommitFailed,
    CoordinatorNotAvailable,
    IllegalGeneration,
    KafkaTimeout,
    PenstockError,
    RebalanceInProgress,
    RetriableError,
    UnknownMember,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.repeated_failure import RepeatedFailure

log = get_logger(__name__)

OnCommit = Callable[[Mapping[TopicPartition, OffsetAndMetadata], Exception | None], object]

WAITING_MAX = 10_000
"""The maximum number of callbacks that wait for a response. They add up while the coordinator is away."""
REJECTED_RETRY_MS = 5_000
"""How long a partition that the coordinator does not know is retried: it may just have been created. After it was
given up, its next commit is tried once."""
OF_ONE_PARTITION = codes_of(
    "UNKNOWN_TOPIC_OR_PARTITION",
    "OFFSET_METADATA_TOO_LARGE",
    "INVALID_COMMIT_OFFSET_SIZE",
    "TOPIC_AUTHORIZATION_FAILED",
)
"""Codes that concern one partition and not the others."""
NEEDS_NEW_GENERATION = (RebalanceInProgress, CommitFailed)
"""Errors after which the offsets of partitions that the member keeps can be committed in its next generation."""


class WaitingCommit(NamedTuple):
    """A commit whose callback waits for the response, with the numbers of its offsets in the commit sequence."""

    offsets: dict[TopicPartition, OffsetAndMetadata]
    numbers: dict[TopicPartition, int]
    callback: OnCommit


class CommitRequestManager:
    """Commits a group's offsets for one member."""

    def __init__(
        self,
        connection: Connection,
        member: ConsumerCoordinator,
        metrics: ConsumerMetrics,
        clock: Clock,
        *,
        on_committed: Callable[[Mapping[TopicPartition, OffsetAndMetadata]], None] = lambda offsets: None,
    ) -> None:
        """`on_committed` is called with the offsets that the coordinator has stored."""
        self._connection = connection
        self._member = member
        self._metrics = metrics
        self._clock = clock
        self._on_committed = on_committed
        self.sequence = CommitSequence()
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[WaitingCommit] = []
        self._changed = asyncio.Event()
        self._last_error: PenstockError | None = None
        self._stopped_by: PenstockError | None = None
        """The error after which nothing is sent before the next generation or the next commit."""
        self._rejected_since: dict[TopicPartition, float] = {}
        self._rejections: defaultdict[TopicPartition, defaultdict[type[PenstockError], RepeatedFailure]]
        self._rejections = defaultdict(lambda: defaultdict(RepeatedFailure))
        """The rejections of each partition since its last successful commit, by class of error, to log them: a line for
        one error does not report another."""
        self._failing = RepeatedFailure()
        """The requests in a row that failed as a whole and are retried."""
        self._given_up: dict[TopicPartition, tuple[int, PenstockError]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    def commit_async(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], callback: OnCommit | None = None
    ) -> None:
        """Commit offsets without waiting. `callback(offsets, error)` is called once: with None when all offsets are
        committed, or with the first error of one of them that is not retried in this generation.

        If WAITING_MAX callbacks already wait, the oldest one gets CoordinatorNotAvailable, although its commit may
        still succeed.
        """
        numbers = self.sequence.register(offsets)
        if callback is not None:
            self._waiting.append(WaitingCommit(dict(offsets), numbers, callback))
            if len(self._waiting) > WAITING_MAX:
                where = self._describe_member()
                error = CoordinatorNotAvailable(f"{where}: no response yet, and {WAITING_MAX} later commits wait")
                # The event loop calls it, because the user's code must not run inside `commit_async`.
                asyncio.get_running_loop().call_soon(self._call_commit_callback, self._waiting.pop(0), error)
        self._start_sending_commits()

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], timeout_ms: float) -> None:
        """Commit offsets and wait; if `offsets` is empty, wait for the pending commits. A member that owns partitions
        also waits for the end of a rebalance.

        Raises any error that is not retried, but that of a single partition only after the other partitions are
        committed. If an earlier commit is given up, only its callback gets the error. Raises CommitFailed if a
        partition is taken away during the wait. Raises KafkaTimeout after `timeout_ms`; the offsets may still be
        committed later.
        """
        where = self._describe_member()
        numbers = self.sequence.register(offsets)
        # Errors of earlier commits concern earlier offsets.
        self._last_error = None
        self._stopped_by = None
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while not self._are_commits_done(numbers):
                    # A rebalance took a partition away during the wait, so its number will never be done.
                    if self.sequence.is_dropped(numbers):
                        raise self._partitions_lost()
                    if self._stopped_by is not None:
                        raise self._stopped_by
                    self._start_sending_commits()
                    # Nothing awaits between the checks above and `clear`, so no change is missed.
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            last = f": {self._last_error}" if self._last_error else ""
            raise KafkaTimeout(
                f"OffsetCommit of {where}: not committed within {timeout_ms:.0f} ms{last}"
            ) from self._last_error
        for error in self._given_up_of(numbers).values():
            raise error

    def _are_commits_done(self, numbers: Mapping[TopicPartition, int]) -> bool:
        if not numbers:
            return self.sequence.is_drained
        given_up = self._given_up_of(numbers)
        return self.sequence.is_done({tp: number for tp, number in numbers.items() if tp not in given_up})

    def _given_up_of(self, numbers: Mapping[TopicPartition, int]) -> dict[TopicPartition, PenstockError]:
        """Return the errors of the given offsets that were given up."""
        return {tp: e for tp, (until, e) in self._given_up.items() if tp in numbers and numbers[tp] <= until}

    async def drain(self, timeout_ms: float) -> None:
        """Wait until no commit is pending, or until the pending ones have to wait for a new generation.

        After `timeout_ms` logs a warning and returns. The offsets left remain pending until `retain`, which drops those
        of partitions that the member gives up.
        """
        self._start_sending_commits()
        try:
            async with asyncio.timeout(max(0.0, timeout_ms) / 1000):
                # The task ends early if the offsets have to wait for a new generation. Waiting for longer would only
                # delay the rebalance.
                while not self.sequence.is_drained and self._task is not None and not self._task.done():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("commits are pending", **self._log_fields(), waited_ms=round(timeout_ms))

    def retain(self, partitions: Collection[TopicPartition]) -> None:
        """Keep the pending offsets of these partitions for the new generation; drop all others."""
        dropped = self.sequence.retain(partitions)
        if dropped:
            log.warning(
                "pending offsets dropped with their partitions",
                **self._log_fields(),
                partitions=sorted(map(str, dropped)),
            )
        # The next owner commits these partitions. A late commit of this member would set them back.
        for entry in [each for each in self._waiting if not set(each.numbers) <= set(partitions)]:
            self._waiting.remove(entry)
            self._call_commit_callback(entry, self._partitions_lost())
        self._changed.set()
        self._start_sending_commits()

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the last offsets of these partitions that this member has committed, without those from before a
        `retain` that dropped the partition: a revocation, a loss, or `forget_commits`."""
        return self.sequence.committed(partitions)

    def _partitions_lost(self) -> CommitFailed:
        reason = self._member.gone_because or "the partitions were taken away"
        return CommitFailed(f"{self._describe_member()}: not committed: {reason}")

    async def close(self) -> None:
        """Stop sending. Callbacks that still wait are called with CommitFailed, and a `commit` that waits for its own
        offsets raises it. A `commit` without offsets returns, since no offset is pending any more.
        """
        self.sequence.retain(())
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._task, self._looking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        waiting = self._waiting
        self._waiting = []
        for entry in waiting:
            self._call_commit_callback(
                entry, CommitFailed(f"{self._describe_member()}: closed before the commit succeeded")
            )

    async def fetch(
        self, partitions: Sequence[TopicPartition], timeout_ms: float
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the group's committed offsets of partitions; partitions without a commit are missing."""
        group_id = self._member.group_metadata().group_id
        topics: dict[str, list[int]] = defaultdict(list)
        for tp in partitions:
            topics[tp.topic].append(tp.partition)
        # The coordinator rejects the request while a transaction that commits these offsets is open (`require_stable`,
        # KIP-447), and the request is repeated. Otherwise the consumer could start before records that the previous
        # owner's transaction covers, and process them again. This does not depend on the isolation level.
        request = requests.OFFSET_FETCH(group_id, [(t, ps, {}) for t, ps in topics.items()], True)
        where = f"offsets of {self._describe_member()}"

        async def fetch_committed_offsets() -> dict[TopicPartition, OffsetAndMetadata]:
            response = await self._connection.request_coordinator("group", group_id, request, where)
            if response.error_code:
                raise self._commit_error(response.error_code, where, group_id)
            found = {}
            for topic in response.topics:
                for row in topic.partitions:
                    tp = TopicPartition(topic.name, row.partition)
                    if row.error_code:
                        raise self._commit_error(row.error_code, f"{where}, {tp}", group_id)
                    # -1 stands for no commit.
                    if row.offset >= 0:
                        found[tp] = OffsetAndMetadata(row.offset, row.metadata or "", row.leader_epoch)
            return found

        return await self._connection.retrying(fetch_committed_offsets, where, timeout_ms)

    def _start_sending_commits(self) -> None:
        if (self._task is None or self._task.done()) and not self.sequence.is_drained:
            self._task = asyncio.ensure_future(self._send_commits())
            self._task.add_done_callback(lambda _: self._changed.set())

    async def _send_commits(self) -> None:
        """Send commits one after another until no offset is left to commit. Returns early if the offsets have to wait
        for a new generation."""
        backoff = ExponentialBackoff(self._connection.settings.retry_backoff_ms, RETRY_BACKOFF_MAX_MS)
        failures = 0
        # One commit at a time: two in flight may be applied in the other order, and the lower offset would win.
        while (commit := self.sequence.next_commit(self._member.group_metadata().generation_id)) is not None:
            error = await self._attempt_commit(commit)
            if error is None:
                failures = 0
            elif self._is_of_before(commit):
                # The partitions that are still owned are committed under the new generation, without backoff.
                continue
            elif self._needs_new_generation(error):
                return
            elif self._is_passing_error(error):
                failures += 1
                await asyncio.sleep(backoff.wait_ms(failures) / 1000)

    async def _attempt_commit(self, commit: Commit) -> PenstockError | None:
        started_ms = self._clock.monotonic_ms()
        error: PenstockError | None = None
        lost = KafkaTimeout | BrokerNotAvailable
        unsure: frozenset[TopicPartition] = frozenset()
        try:
            rejected, error = await self._send_offset_commit(commit)
        # 1. It failed. Without a response, the coordinator may still apply it later, after a newer one.
        except PenstockError as e:
            error = e
            now_ms = self._clock.monotonic_ms()
            self.sequence.on_failure(commit, unknown_at_ms=now_ms if isinstance(e, lost) else None)
            self._handle_failed_commit(commit, e)
        # 2. It was cancelled, perhaps after the request was sent.
        except BaseException:
            self.sequence.on_failure(commit, unknown_at_ms=self._clock.monotonic_ms())
            raise
        # 3. The coordinator answered for each partition: it is committed or rejected.
        else:
            unsure = self.sequence.on_success(commit, rejected)
            committed = commit.of(commit.numbers.keys() - rejected.keys()).offsets
            for tp in committed:
                self._rejected_since.pop(tp, None)
                self._rejections.pop(tp, None)
                self._given_up.pop(tp, None)
            if committed:
                self._on_committed(committed)
            now_ms = self._clock.monotonic_ms()
            if error is not None:
                self._handle_failed_commit(commit.of(rejected), error)
            else:
                if (times := self._failing.succeeded(now_ms)) is not None:
                    log.info("commits are answered again", **self._log_fields(), **times)
                if rejected:
                    error = self._handle_rejected_offsets(commit, rejected)
                else:
                    self._metrics.committed(now_ms - started_ms)
        self._last_error = None if self._is_of_before(commit) else error
        self._stopped_by = self._last_error if self._needs_new_generation(error) else None
        if unsure:
            await self._read_back(unsure)
        self._schedule_late_read_back()
        # A newer committed offset covers an older one, so its callback succeeds too.
        for entry in [each for each in self._waiting if self.sequence.is_done(each.numbers)]:
            self._waiting.remove(entry)
            self._call_commit_callback(entry, None)
        self._changed.set()
        return error

    async def _read_back(self, partitions: frozenset[TopicPartition]) -> None:
        requested_ms = self._clock.monotonic_ms()
        try:
            found = await self.fetch(sorted(partitions), self._connection.settings.request_timeout_ms)
        except PenstockError as e:
            # No retry here: the partitions stay unsure, and the timer reads them back again.
            log.warning("offsets could not be read back", **self._log_fields(), reason=str(e))
        else:
            self.sequence.on_read_back(found, partitions, requested_ms)

    def _schedule_late_read_back(self) -> None:
        """Read back once more when a commit without a response can no longer be applied."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at_ms := self.sequence.read_back_at_ms()) is not None:
            # At least one backoff, so that a failing coordinator does not get requests in a loop.
            wait_ms = max(float(self._connection.settings.retry_backoff_ms), at_ms - self._clock.monotonic_ms())
            self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._start_late_read_back)

    def _start_late_read_back(self) -> None:
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._read_back_late())

    async def _read_back_late(self) -> None:
        if partitions := self.sequence.to_read_back(self._clock.monotonic_ms()):
            await self._read_back(partitions)
        self._start_sending_commits()
        self._schedule_late_read_back()

    def _handle_rejected_offsets(
        self, commit: Commit, rejected: Mapping[TopicPartition, PenstockError]
    ) -> PenstockError | None:
        """Give up the rejected offsets that are not retried. Returns an error of those that are retried, or None."""
        self._metrics.commit_failed()
        now_ms = self._clock.monotonic_ms()
        again = None
        for tp, error in rejected.items():
            if (times := self._rejections[tp][type(error)].failed(now_ms)) is not None:
                fields = {**self._log_fields(), "error": type(error).__name__, "reason": str(error)}
                log.warning("commit rejected", **fields, **times)
            # The coordinator may not know a new topic yet. The time counts from the first rejection, so that later
            # commits do not extend it.
            since_ms = self._rejected_since.setdefault(tp, now_ms)
            if self._is_passing_error(error) and now_ms - since_ms < REJECTED_RETRY_MS:
                again = error
            else:
                self._give_up(commit.of([tp]), error)
        return again

    def _handle_failed_commit(self, commit: Commit, error: PenstockError) -> None:
        self._metrics.commit_failed()
        is_passing = self._is_passing_error(error)
        # A passing error is retried about once a second, for as long as an outage lasts.
        times = self._failing.failed(self._clock.monotonic_ms()) if is_passing else {}
        if times is not None:
            fields = {**self._log_fields(), "error": type(error).__name__, "reason": str(error)}
            log.warning("commit failed", **fields, **times)
        if is_passing:
            return
        # After a rebalance the offsets of kept partitions are committed under the new generation, so they stay
        # wanted. Any other lasting error would be repeated.
        if not self._needs_new_generation(error):
            self._give_up(commit, error)
        # The offsets may still be committed later; the callback reports this attempt. The task stops sending, so the
        # callbacks of newer offsets of these partitions are called too.
        elif not self._is_of_before(commit):
            self._fail_callbacks(dict.fromkeys(commit.numbers, math.inf), error)

    def _give_up(self, commit: Commit, error: PenstockError) -> None:
        self.sequence.give_up(commit)
        self._given_up.update({tp: (number, error) for tp, number in commit.numbers.items()})
        self._fail_callbacks(commit.numbers, error)

    def _fail_callbacks(self, failed: Mapping[TopicPartition, float], error: PenstockError) -> None:
        """Call the callback of each waiting commit with a failed offset.

        An offset has failed if it is not committed and its number is at most that of its partition in `failed`.
        """
        for entry in [each for each in self._waiting if self._has_failed(each, failed)]:
            self._waiting.remove(entry)
            self._call_commit_callback(entry, error)

    def _has_failed(self, waiting: WaitingCommit, failed: Mapping[TopicPartition, float]) -> bool:
        return any(
            tp in failed and number <= failed[tp] and not self.sequence.is_done({tp: number})
            for tp, number in waiting.numbers.items()
        )

    async def _send_offset_commit(
        self, commit: Commit
    ) -> tuple[dict[TopicPartition, PenstockError], PenstockError | None]:
        """Return each rejected partition's error, and the first error that concerns the whole group."""
        member = self._member.group_metadata()
        if member.generation_id < 0 and self._member.is_managed:
            # The broker would accept it as a commit from outside the group, as long as the group is empty.
            raise UnknownMember(f"{self._describe_member()}: not assigned anything by the group yet")
        topics: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        for tp, (offset, metadata, epoch) in commit.offsets.items():
            topics[tp.topic].append((tp.partition, offset, epoch, metadata))
        # Without a member id it is a commit from outside the group, which has no instance id.
        instance_id = member.group_instance_id if member.member_id else None
        request = requests.OFFSET_COMMIT(
            member.group_id, member.generation_id, member.member_id, instance_id, list(topics.items())
        )
        where = f"OffsetCommit of {self._describe_member()}"
        response = await self._connection.request_coordinator("group", member.group_id, request, where)
        rejected: dict[TopicPartition, PenstockError] = {}
        of_group: PenstockError | None = None
        for topic, rows in response.topics:
            for partition, code in rows:
                if code:
                    tp = TopicPartition(topic, partition)
                    error = self._commit_error(code, f"{where}, {tp}", member.group_id)
                    rejected[tp] = error
                    # The group has removed the member or has a newer generation. Report it now: the next heartbeat
                    # would be later.
                    if isinstance(error, CommitFailed):
                        self._member.on_commit_rejected((member.generation_id, member.member_id), code)
                    of_group = of_group or (None if code in OF_ONE_PARTITION else error)
        return rejected, of_group

    def _commit_error(self, code: int, where: str, group_id: str) -> PenstockError:
        error = error_for_code(code, where)
        if isinstance(error, CommitFailed) and (reason := self._member.gone_because):
            error = type(error)(f"{error}: {reason}")
        # The coordinator may have moved: look it up before the next attempt.
        if isinstance(error, CoordinatorNotAvailable):
            self._connection.forget_coordinator("group", group_id)
        return error

    def _is_of_before(self, commit: Commit) -> bool:
        """Whether a newer generation was assigned after the commit was sent: its error is then outdated."""
        return commit.generation != self._member.group_metadata().generation_id

    def _is_passing_error(self, error: PenstockError) -> bool:
        # A member that owns partitions gets a new generation when the rebalance ends, and can then commit. Without
        # partitions there is nothing to wait for.
        if isinstance(error, RebalanceInProgress | IllegalGeneration):
            return self._member.is_owner
        return isinstance(error, RetriableError)

    def _needs_new_generation(self, error: PenstockError | None) -> bool:
        return isinstance(error, NEEDS_NEW_GENERATION) and not self._is_passing_error(error)

    def _call_commit_callback(self, waiting: WaitingCommit, error: Exception | None) -> None:
        try:
            waiting.callback(waiting.offsets, error)
        except Exception:
            log.exception("commit callback failed", **self._log_fields())

    def _log_fields(self) -> dict[str, object]:
        return log_fields(self._connection.client_id, self._member.group_metadata())

    def _describe_member(self) -> str:
        return describe_member(self._connection.client_id, self._member.group_metadata())
