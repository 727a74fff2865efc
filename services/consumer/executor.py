"""One execution: decodes records, calls the handler, and decides whether each record is finished.

Deserializer and handler are user code. An Exception in either fails the record and does not end the daemon. If a record
cannot be decoded, or the policy allows no further attempt, the record is sent to the DLQ. It is finished once the
broker acknowledges the dead letter. If writing the dead letter fails, the write is repeated later without another call
of the handler.

Writing the records that a handler returns is part of the attempt: the handled record is finished once all of them are
acknowledged. A failed write is a failed attempt at the stage `produce`. Without a writer (exactly-once) the executor
writes nothing: returned records and dead letters are in the outcome, and the caller commits them together with the
offsets.

A failed batch does not show which record caused the failure. Its records are handled again one by one, and only these
failures count as attempts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.services.consumer.handler_timeouts import CallLimits
from penstock.services.consumer.handlers import Handler, Records
from penstock.services.consumer.retry_policy import RetryPolicy
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.shared.clients.dead_letters.dead_letter import (
    STAGE_DESERIALIZE,
    STAGE_PROCESS,
    STAGE_PRODUCE,
    DeadLetter,
    dead_letter_record,
    shortened,
)
from penstock.shared.clients.parallel_consumer.key_scheduler import Execution
from penstock.shared.clients.parallel_consumer.partition_progress import Work
from penstock.shared.clients.producer.record_validation import check_partition, check_timestamp, checked_headers
from penstock.shared.common.errors import DataError, HandlerTimeout, RecordTooLarge, error_text
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord, ProducerRecord, TopicPartition
from penstock.shared.common.serialization import Deserializer, bytes_deserializer, bytes_serializer
from penstock.shared.common.topic_names import check_topic_name, dead_letter_topic

log = get_logger(__name__)

UNWRITTEN_TRIES = 5
"""Failed writes of a dead letter after which the health check reports it."""


RecordWriter = Callable[[Sequence[ProducerRecord]], Awaitable[Sequence[Exception | None]]]
"""Writes records with acks=all.

Returns one entry for each record, in order: None if it is acknowledged, else its error. Errors of records are returned,
never raised.
"""


@dataclass(slots=True)
class Outcome:
    """The outcome of an execution. Records in `retry` are executed again, at the earliest `after_ms` from now.

    `outputs` must still be written, in one transaction with the offsets of the finished records. The first `returned`
    of them are the handler's; dead letters follow.
    """

    finished: list[Work] = field(default_factory=list)
    retry: list[Work] = field(default_factory=list)
    after_ms: int = 0
    outputs: list[ProducerRecord] = field(default_factory=list)
    returned: int = 0

    def put_back(self, work: Work, after_ms: int) -> None:
        self.retry.append(work)
        self.after_ms = max(self.after_ms, after_ms)


@dataclass(frozen=True, slots=True)
class _UnwrittenDeadLetter:
    """The state of a record whose dead letter could not be written `failures` times."""

    dead_letter: DeadLetter
    failures: int


class Executor:
    """Runs executions of the handler (see the module).

    `dead_letter_topic_of` maps the topic of records to that of their dead letters. Without `write` the caller writes
    `Outcome.outputs`.
    """

    def __init__(
        self,
        handler: Handler,
        policy: RetryPolicy,
        write: RecordWriter | None,
        metrics: RunnerMetrics,
        *,
        group: str,
        dead_letter_topic_of: Callable[[str], str] = dead_letter_topic,
        decode: Deserializer = bytes_deserializer,
    ) -> None:
        self._handler = handler
        self._policy = policy
        self._write = write
        self._metrics = metrics
        self._group = group
        self._dead_letter_topic_of = dead_letter_topic_of
        self._decode = decode
        self._limits = CallLimits(policy.handler_timeout_ms)
        self.unwritten: dict[TopicPartition, str] = {}
        """The error by partition, for partitions with a dead letter that repeatedly could not be written.

        The handler loop removes the entries of partitions that are revoked or lost.
        """

    async def run(self, execution: Execution) -> Outcome:
        """Run one execution in the current task. A cancellation is raised to the caller."""
        if len(execution.works) == 1 and self._decode is bytes_deserializer and execution.works[0].memo is None:
            return await self._run_plain(execution.works[0])
        outcome = Outcome()
        dead_letters: list[tuple[Work, DeadLetter]] = []
        works: list[Work] = []
        records: list[ConsumerRecord] = []
        for work in execution.works:
            # The handler has failed already. Only the write of the dead letter is repeated.
            if isinstance(work.memo, _UnwrittenDeadLetter):
                dead_letters.append((work, work.memo.dead_letter))
                continue
            record = work.record
            if self._decode is not bytes_deserializer:
                try:
                    record = replace(record, value=self._decode(record.topic, record.value))
                except Exception as e:
                    # The `__post_init__` of the user's type may raise any exception.
                    dead_letters.append((work, DeadLetter.of(work.record, STAGE_DESERIALIZE, e, 1, self._group)))
                    continue
            works.append(work)
            records.append(record)
        if works:
            await self._call_handler(execution.topic_partition.topic, works, records, outcome, dead_letters)
        if dead_letters:
            await self._send_dead_letters(execution.topic_partition.topic, dead_letters, outcome)
        return outcome

    async def _run_plain(self, work: Work) -> Outcome:
        """Run the usual case: one record without a decoder and without an unwritten dead letter."""
        topic = work.columns.topic
        started = time.perf_counter()
        returned = await self._handler.call([work.record], self._limits)
        self._metrics.latency(topic).observe(time.perf_counter() - started)
        if returned == ():
            self._metrics.handled(topic).inc()
            return Outcome([work])
        outcome = Outcome()
        dead_letters = list[tuple[Work, DeadLetter]]()
        await self._take_handler_output(topic, [work], returned, outcome, dead_letters)
        if dead_letters:
            await self._send_dead_letters(topic, dead_letters, outcome)
        return outcome

    async def _call_handler(
        self,
        topic: str,
        works: list[Work],
        records: list[ConsumerRecord],
        outcome: Outcome,
        dead_letters: list[tuple[Work, DeadLetter]],
    ) -> None:
        started = time.perf_counter()
        returned = await self._handler.call(records, self._limits)
        self._metrics.latency(topic).observe(time.perf_counter() - started)
        await self._take_handler_output(topic, works, returned, outcome, dead_letters)

    async def _take_handler_output(
        self,
        topic: str,
        works: list[Work],
        returned: Records | Exception,
        outcome: Outcome,
        dead_letters: list[tuple[Work, DeadLetter]],
    ) -> None:
        """Write the records that a handler returned, and sort the call's works.

        Finished works and works to repeat are added to `outcome`, those that failed for good to `dead_letters`. Under
        exactly-once the records are not written, but added to `outcome`.
        """
        stage = STAGE_PROCESS
        if isinstance(returned, Exception):
            error: Exception | None = returned
            self._metrics.failures(topic).inc()
            if isinstance(error, HandlerTimeout):
                self._metrics.timeouts(topic).inc()
        else:
            stage = STAGE_PRODUCE
            error = await self._produce_output(topic, returned, outcome)
        if error is None:
            self._metrics.handled(topic).inc(len(works))
            outcome.finished += works
        else:
            self._handle_failed_records(topic, works, stage, error, outcome, dead_letters)

    async def _produce_output(self, topic: str, records: Records, outcome: Outcome) -> Exception | None:
        """Validate and write the records that the handler returned. Returns the first error, or None.

        Without `write`, the records are added to `outcome.outputs` instead.
        """
        try:
            check_execution_output(records)
        except DataError as e:
            self._metrics.produce_failures(topic).inc()
            return e
        if self._write is None:
            outcome.outputs += records
            outcome.returned += len(records)
        elif records:
            errors = [error for error in await self._write(records) if error is not None]
            self._metrics.produced(topic).inc(len(records) - len(errors))
            if errors:
                self._metrics.produce_failures(topic).inc(len(errors))
                return errors[0]
        return None

    def _handle_failed_records(
        self,
        topic: str,
        works: list[Work],
        stage: str,
        error: Exception,
        outcome: Outcome,
        dead_letters: list[tuple[Work, DeadLetter]],
    ) -> None:
        # A batch does not show which record failed. One by one, the others are not counted as failed.
        if len(works) > 1:
            log.warning(
                "batch failed, its records run one by one",
                **_coordinates_of_work(works[0]),
                records=len(works),
                **_error_fields(error),
            )
            for work in works:
                work.alone = True
            outcome.retry += works
            self._metrics.retries(topic).inc(len(works))
            return
        (work,) = works
        work.attempts += 1
        after_ms = self._policy.decide(error, work.attempts, random.random())  # noqa: S311 - jitter, no secret
        if after_ms is not None:
            log.warning(
                "handler failed",
                **_coordinates_of_work(work),
                stage=stage,
                attempt=work.attempts,
                again_in_ms=after_ms,
                **_error_fields(error),
            )
            self._metrics.retries(topic).inc()
            outcome.put_back(work, after_ms)
        else:
            dead_letters.append((work, DeadLetter.of(work.record, stage, error, work.attempts, self._group)))

    def dead_letters_of_rejected(self, works: Iterable[Work], error: Exception) -> list[ProducerRecord]:
        """Return the dead letters of finished records whose output Kafka has rejected."""
        dead_letters = []
        for work in works:
            dead_letter = DeadLetter.of(work.record, STAGE_PRODUCE, error, work.attempts + 1, self._group)
            dead_letters.append(dead_letter_record(self._dead_letter_topic_of(work.columns.topic), dead_letter))
            self._metrics.dead_letters(work.columns.topic).inc()
            log.warning("dead letter", **_coordinates_of_work(work), stage=dead_letter.stage, **_error_fields(error))
        return dead_letters

    async def _send_dead_letters(
        self, topic: str, dead_letters: list[tuple[Work, DeadLetter]], outcome: Outcome
    ) -> None:
        target = self._dead_letter_topic_of(topic)
        records = [dead_letter_record(target, dead_letter) for _, dead_letter in dead_letters]
        # Under exactly-once the transaction writes them with the offsets, so the records are finished here.
        if self._write is None:
            outcome.outputs += records
            errors: Sequence[Exception | None] = [None] * len(records)
        else:
            errors = await self._write_dead_letters(records)
        for (work, dead_letter), error in zip(dead_letters, errors, strict=True):
            reason = {
                "stage": dead_letter.stage,
                "exception": dead_letter.exception,
                "message": dead_letter.message[:500],
            }
            partition = work.columns.topic_partition
            failures = work.memo.failures if isinstance(work.memo, _UnwrittenDeadLetter) else 0
            if error is None:
                # After fewer failures, an entry is of another record, whose dead letter is still unwritten.
                if failures >= UNWRITTEN_TRIES:
                    self.unwritten.pop(partition, None)
                outcome.finished.append(work)
                self._metrics.dead_letters(topic).inc()
                log.warning(
                    "dead letter", **_coordinates_of_work(work), to=target, attempts=dead_letter.attempts, **reason
                )
            else:
                # The record stays unfinished: its offset must not be committed without a stored dead letter.
                failures += 1
                work.memo = _UnwrittenDeadLetter(dead_letter, failures)
                if failures >= UNWRITTEN_TRIES:
                    self.unwritten[partition] = f"{work}: dead letter not written to {target}: {error_text(error)}"
                outcome.put_back(work, self._policy.backoff_after_ms(failures, random.random()))  # noqa: S311
                self._metrics.dead_letter_failures(topic).inc()
                log.error(
                    "dead letter not written, the record stays unfinished",
                    **_coordinates_of_work(work),
                    to=target,
                    **_error_fields(error),
                )

    async def _write_dead_letters(self, records: list[ProducerRecord]) -> Sequence[Exception | None]:
        """Write dead letters. Returns for each the error of its write, or None.

        A dead letter that is too large for the topic is shortened, marked and written again, if it can be shortened.
        """
        assert self._write is not None
        errors = list(await self._write(records))
        # Again while something can be shortened: the topic's limit is unknown here.
        while short := {
            i: cut
            for i, error in enumerate(errors)
            if isinstance(error, RecordTooLarge) and (cut := shortened(records[i])) is not None
        }:
            for i, error in zip(short, await self._write(list(short.values())), strict=True):
                records[i] = short[i]
                errors[i] = error
        return errors


def _coordinates_of_work(work: Work) -> dict[str, object]:
    return {"topic": work.columns.topic, "partition": work.columns.partition, "offset": work.offset}


def _error_fields(error: BaseException) -> dict[str, str]:
    return {"error": type(error).__name__, "reason": error_text(error)[:500]}


def check_execution_output(records: Iterable[ProducerRecord]) -> None:
    """Raise DataError for the first record of a handler's output that no topic can accept.

    Checks the topic's name, the key, value, headers, partition and timestamp. The check runs when the handler returns,
    so that an invalid record fails that attempt.

    >>> check_execution_output([ProducerRecord("out", b"5")])
    >>> check_execution_output([ProducerRecord("out", 5)])
    Traceback (most recent call last):
    ...
    penstock.errors.SerializationError: out: expected bytes, got int; set a serializer for other types
    """
    # Under exactly-once, output waits for a transaction that contains the output of other executions too. An invalid
    # record would fail that transaction.
    for record in records:
        topic = record.topic
        check_topic_name(topic)
        check_timestamp(topic, record.timestamp)
        check_partition(topic, record.partition)
        bytes_serializer(topic, record.key)
        bytes_serializer(topic, record.value)
        checked_headers(topic, record.headers)
