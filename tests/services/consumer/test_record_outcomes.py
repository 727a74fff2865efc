"""Outcomes of handler calls: finished records, validated output, retries and dead letters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.services.consumer.executor import UNWRITTEN_TRIES, Executor, Outcome, check_execution_output
from penstock.services.consumer.handlers import Handler
from penstock.services.consumer.retry_policy import RetryPolicy
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.clients.parallel_consumer.key_scheduler import Execution, KeyScheduler
from penstock.shared.common.errors import DataError, KafkaTimeout, RecordTooLarge, SerializationError
from penstock.shared.common.records import Columns, ConsumerRecord, ProducerRecord, TopicPartition
from penstock.shared.common.serialization import Deserializer, bytes_deserializer, json_deserializer
from tests.consumed import as_consumed

TP = TopicPartition("clicks", 2)


class Bench:
    """An executor over a scheduler, with a dead-letter topic in memory that can reject records."""

    def __init__(
        self,
        handle: Callable[[object], Awaitable[object]],
        values: Sequence[bytes],
        *,
        batch: bool = False,
        decode: Deserializer = bytes_deserializer,
        **policy: object,
    ) -> None:
        self.registry = CollectorRegistry()
        self.dead_letters: list[ProducerRecord] = []
        self.failure: Exception | None = None
        self.bytes_max = 2**31
        self.executor = Executor(
            Handler("app:handle", handle, batch),
            RetryPolicy(jitter=0, **policy),  # type: ignore[arg-type]
            self.write,
            RunnerMetrics(self.registry, "alerts"),
            group="alerts",
            decode=decode,
        )
        self.scheduler = KeyScheduler(batch_records_max=10 if batch else 1)
        self.scheduler.assign(TP, None)
        records = [ConsumerRecord(*TP, o, 1_000 + o, b"ann", v, (("h", b"1"),)) for o, v in enumerate(values)]
        self.scheduler.deliver(Columns.of(records))
        self.now_ms = 0

    async def write(self, records: Sequence[ProducerRecord]) -> Sequence[Exception | None]:
        if self.failure is not None:
            return [self.failure] * len(records)
        errors = [RecordTooLarge("no") if len(r.value or b"") > self.bytes_max else None for r in records]
        self.dead_letters += [record for record, error in zip(records, errors, strict=True) if error is None]
        return errors

    async def turn(self) -> tuple[Execution, Outcome]:
        execution = self.scheduler.take(self.now_ms)
        assert execution is not None
        outcome = await self.executor.run(execution)
        self.now_ms += outcome.after_ms
        assert self.scheduler.settle(execution, outcome.finished, outcome.retry, self.now_ms)
        return execution, outcome

    def count(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"penstock_consumer_{name}_total", {"group": "alerts", "topic": "clicks"})

    @property
    def position(self) -> int:
        return self.scheduler.committable()[TP].offset


async def succeed(_: object) -> None: ...


async def fail(_: object) -> None:
    raise ConnectionError("refused")


async def test_a_handled_record_is_finished() -> None:
    """Success finishes the record and counts it."""
    bench = Bench(succeed, [b"a"])
    await bench.turn()
    assert (bench.position, bench.count("handled_records")) == (1, 1)


async def test_a_failure_is_retried_and_becomes_a_dead_letter() -> None:
    """After `max_attempts` with growing waits the record is finished as a dead letter with
    coordinates, reason and attempts.
    """
    bench = Bench(fail, [b"a"], max_attempts=3)
    waits = [(await bench.turn())[1].after_ms for _ in range(3)]
    assert waits == [100, 200, 0]
    dead_letter = parse_dead_letter(as_consumed(bench.dead_letters[0]))
    assert (bench.dead_letters[0].topic, dead_letter.record) == (
        "clicks-dlq",
        ConsumerRecord(*TP, 0, 1_000, b"ann", b"a", (("h", b"1"),)),
    )
    assert (dead_letter.stage, dead_letter.exception, dead_letter.message) == ("process", "ConnectionError", "refused")
    assert (dead_letter.attempts, dead_letter.group) == (3, "alerts")
    assert bench.position == 1
    assert (bench.count("retries"), bench.count("dead_letters"), bench.count("handler_failures")) == (2, 1, 3)


async def test_an_exception_that_is_not_retriable_becomes_a_dead_letter_at_once() -> None:
    """A failure that is not retriable becomes a dead letter without a retry."""

    async def handle(_: object) -> None:
        raise DataError("no such user")

    bench = Bench(handle, [b"a"])
    await bench.turn()
    assert [parse_dead_letter(as_consumed(record)).attempts for record in bench.dead_letters] == [1]


async def test_the_log_of_a_dead_letter_has_the_start_of_its_message() -> None:
    """The log has the first 500 characters of the error's message, and the dead letter has all of it."""
    message = "".join(chr(ord("a") + number % 26) for number in range(600))

    async def handle(_: object) -> None:
        raise DataError(message)

    bench = Bench(handle, [b"a"])
    with capture_logs() as logged:
        await bench.turn()
    assert parse_dead_letter(as_consumed(bench.dead_letters[0])).message == message
    assert [one["message"] for one in logged if one["event"] == "dead letter"] == [message[:500]]


async def test_a_dead_letter_that_cannot_be_written_leaves_its_record_unfinished() -> None:
    """The write of a dead letter is repeated without another handler call, and only the
    acknowledgement finishes the record.
    """
    calls = []

    async def handle(record: object) -> None:
        calls.append(record)
        raise DataError("no")

    bench = Bench(handle, [b"a"])
    bench.failure = KafkaTimeout("no response")
    assert [(await bench.turn())[1].after_ms for _ in range(3)] == [100, 200, 400]
    assert bench.position == 0
    bench.failure = None
    await bench.turn()
    assert bench.position == 1
    assert len(bench.dead_letters) == len(calls) == 1
    assert (bench.count("dead_letter_failures"), bench.count("dead_letters")) == (3, 1)


async def test_an_undecodable_record_becomes_a_dead_letter() -> None:
    """The dead letter has the original bytes and the stage `deserialize`, and the handler is not called."""
    seen = []

    async def handle(record: object) -> None:
        seen.append(record.value)  # type: ignore[attr-defined]

    bench = Bench(handle, [b"{", b'{"a":1}'], decode=json_deserializer)
    await bench.turn()
    await bench.turn()
    dead_letter = parse_dead_letter(as_consumed(bench.dead_letters[0]))
    assert (dead_letter.record.value, dead_letter.stage) == (b"{", "deserialize")
    assert dead_letter.exception == "penstock.errors.SerializationError"
    assert seen == [{"a": 1}]
    assert bench.position == 2


class Unprintable(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize(
    ("error", "exception"),
    [(KeyError("user"), "KeyError"), (RecursionError(), "RecursionError"), (Unprintable(), f"{__name__}.Unprintable")],
    ids=["KeyError", "RecursionError", "mute"],
)
async def test_any_exception_of_a_decoder_is_a_dead_letter(error: Exception, exception: str) -> None:
    """Any exception of a decoder makes its record a dead letter, and the next record is handled."""

    def decode(topic: str, data: bytes | None) -> object:
        if data == b"poison":
            raise error
        return data

    bench = Bench(succeed, [b"poison", b"good"], decode=decode)
    await bench.turn()
    await bench.turn()
    dead_letter = parse_dead_letter(as_consumed(bench.dead_letters[0]))
    assert (dead_letter.record.value, dead_letter.stage, dead_letter.exception) == (b"poison", "deserialize", exception)
    assert (len(bench.dead_letters), bench.position) == (1, 2)


@pytest.mark.parametrize("error", [Unprintable(), SystemExit(3), BaseExceptionGroup("g", [GeneratorExit()])], ids=repr)
async def test_any_exception_of_a_handler_is_retried(error: BaseException) -> None:
    """Any exception, also SystemExit and one without a text, is retried and then becomes a dead letter."""

    async def handle(_: object) -> None:
        raise error

    bench = Bench(handle, [b"1"], max_attempts=2)
    await bench.turn()
    assert not bench.dead_letters
    await bench.turn()
    dead_letter = parse_dead_letter(as_consumed(bench.dead_letters[0]))
    assert (dead_letter.stage, dead_letter.attempts, bench.position) == ("process", 2, 1)


async def test_an_undecodable_record_does_not_fail_its_batch() -> None:
    """A record that cannot be decoded becomes a dead letter, and the rest of its batch is handled."""
    seen = []

    async def handle(records: object) -> None:
        seen.extend(record.value for record in records)  # type: ignore[attr-defined]

    bench = Bench(handle, [b"1", b"{", b"3"], batch=True, decode=json_deserializer)
    await bench.turn()
    assert (seen, len(bench.dead_letters), bench.position) == ([1, 3], 1, 3)


async def test_a_failed_batch_runs_again_one_by_one() -> None:
    """After a failed batch its records are handled one by one, and only the failing one becomes a dead letter; the
    batch's failure is no attempt.
    """
    calls = []

    async def handle(records: object) -> None:
        values = [record.value for record in records]  # type: ignore[attr-defined]
        calls.append(values)
        if b"bad" in values:
            raise ValueError("bad")

    bench = Bench(handle, [b"bad", b"c"], batch=True, max_attempts=2)
    while bench.scheduler.committable()[TP].offset < 2:
        await bench.turn()
    assert calls == [[b"bad", b"c"], [b"bad"], [b"bad"], [b"c"]]
    assert [record.value for record in bench.dead_letters] == [b"bad"]
    assert parse_dead_letter(as_consumed(bench.dead_letters[0])).attempts == 2


async def test_a_hanging_handler_is_counted_as_failed() -> None:
    """The time limit ends the call, which is retried like any failure, and the dead letter names the limit."""

    async def handle(_: object) -> None:
        await asyncio.Event().wait()

    bench = Bench(handle, [b"a"], handler_timeout_ms=5, max_attempts=2)
    await bench.turn()
    await bench.turn()
    assert bench.count("handler_timeouts") == 2
    assert parse_dead_letter(as_consumed(bench.dead_letters[0])).exception == "penstock.errors.HandlerTimeout"


async def test_a_cancelled_execution_has_no_outcome() -> None:
    """If ownership is lost during an execution, there is no dead letter and no outcome."""
    started = asyncio.Event()

    async def handle(_: object) -> None:
        started.set()
        await asyncio.Event().wait()

    bench = Bench(handle, [b"a"], max_attempts=1)
    execution = bench.scheduler.take(0)
    assert execution is not None
    task = asyncio.create_task(bench.executor.run(execution))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.dead_letters == []


async def test_output_is_written_before_its_record_is_finished() -> None:
    """A record is finished once its output is written. A rejected write is a failed attempt of the stage `produce`."""
    out = [ProducerRecord("out", b"1"), ProducerRecord("out", b"2")]

    async def handle(_: object) -> list[ProducerRecord]:
        return out

    bench = Bench(handle, [b"a"], max_attempts=2)
    bench.failure = KafkaTimeout("no response")
    await bench.turn()
    assert (bench.position, bench.dead_letters) == (0, [])
    bench.failure = None
    await bench.turn()
    assert (bench.position, bench.dead_letters) == (1, out)
    assert (bench.count("produced_records"), bench.count("produce_failures")) == (2, 2)

    bench = Bench(handle, [b"a"], max_attempts=1)
    bench.failure = KafkaTimeout("no response")
    await bench.turn()
    bench.failure = None
    await bench.turn()
    assert [parse_dead_letter(as_consumed(record)).stage for record in bench.dead_letters] == ["produce"]


async def test_without_a_writer_output_is_in_the_outcome() -> None:
    """Without a writer, output and dead letters are in the outcome with the finished records."""

    async def handle(record: ConsumerRecord) -> ProducerRecord:
        if record.value == b"bad":
            raise DataError("no")
        return ProducerRecord("out", record.value)

    executor = Executor(
        Handler("app:handle", handle), RetryPolicy(), None, RunnerMetrics(CollectorRegistry(), "g"), group="g"
    )
    scheduler = KeyScheduler()
    scheduler.assign(TP, None)
    scheduler.deliver(Columns.of([ConsumerRecord(*TP, o, 0, None, v) for o, v in enumerate([b"a", b"bad"])]))
    outcomes = []
    while execution := scheduler.take(0):
        outcomes.append(await executor.run(execution))
    assert [record.topic for outcome in outcomes for record in outcome.outputs] == ["out", "clicks-dlq"]
    assert [len(outcome.finished) for outcome in outcomes] == [1, 1]


async def test_a_dead_letter_that_is_too_large_is_shortened() -> None:
    """A dead letter is shortened until its topic accepts it, and the record is finished."""
    bench = Bench(fail, [b"x" * 1_000_000], max_attempts=1)
    bench.bytes_max = 20_000
    await bench.turn()
    dead_letter = parse_dead_letter(as_consumed(bench.dead_letters[0]))
    assert (dead_letter.cut, bench.position, bench.executor.unwritten) == ("value=1000000", 1, {})


async def test_an_unwritten_dead_letter_is_reported() -> None:
    """A dead letter is reported after some failed writes, until it is written."""
    bench = Bench(fail, [b"1"], max_attempts=1)
    bench.failure = OSError("away")
    for _ in range(UNWRITTEN_TRIES):
        assert bench.executor.unwritten == {}
        await bench.turn()
    assert "away" in bench.executor.unwritten[TP]
    bench.failure = OSError("refused")
    await bench.turn()
    assert "refused" in bench.executor.unwritten[TP]
    bench.failure = None
    await bench.turn()
    assert bench.executor.unwritten == {}


async def test_another_dead_letter_does_not_hide_an_unwritten_one() -> None:
    """A dead letter is still reported after another one of the same partition was written."""
    bench = Bench(fail, [b"1"], max_attempts=1)
    bench.bytes_max = 0
    for _ in range(UNWRITTEN_TRIES):
        await bench.turn()
    bench.scheduler.deliver(Columns.of([ConsumerRecord(*TP, 1, 0, b"bob", b"")]))
    bench.now_ms = 0  # the unwritten dead letter still waits for its backoff
    await bench.turn()
    assert [parse_dead_letter(as_consumed(record)).record.offset for record in bench.dead_letters] == [1]
    assert "@0" in bench.executor.unwritten[TP]


async def test_only_written_outputs_are_counted() -> None:
    """The first rejected output fails the attempt, and only written outputs are counted; an
    invalid record fails it before any is written.
    """
    out = [ProducerRecord("out", value) for value in (b"1", b"x" * 100, b"2")]

    async def handle(record: ConsumerRecord) -> list[ProducerRecord]:
        return [ProducerRecord("out", 5)] if record.value == b"bad" else out  # type: ignore[arg-type]

    bench = Bench(handle, [b"a", b"bad"])  # type: ignore[arg-type]
    bench.bytes_max = 90
    await bench.turn()
    assert (bench.count("produced_records"), bench.count("produce_failures"), bench.position) == (2, 1, 1)
    await bench.turn()
    assert (bench.count("produced_records"), bench.count("produce_failures"), bench.position) == (2, 2, 2)
    rejected = [parse_dead_letter(as_consumed(record)) for record in bench.dead_letters if record.topic == "clicks-dlq"]
    assert [(dead_letter.stage, dead_letter.record.value) for dead_letter in rejected] == [
        ("produce", b"a"),
        ("produce", b"bad"),
    ]
    assert bench.count("handler_failures") is None


@pytest.mark.parametrize("several", [False, True])
async def test_a_returned_record_may_have_its_headers_in_a_dict(several: bool) -> None:
    """A handler returns records as `Producer.send_many` accepts them, and the headers are written as pairs."""
    out = ProducerRecord("out", b"v", headers={"trace": b"1"})

    async def handle(_: object) -> object:
        return [out] if several else out

    bench = Bench(handle, [b"a"])
    await bench.turn()
    assert [(record.topic, record.headers) for record in bench.dead_letters] == [("out", (("trace", b"1"),))]


async def test_a_handler_that_returns_no_record_writes_nothing() -> None:
    """An empty list of records writes nothing, and the record is finished."""

    async def handle(_: object) -> list[ProducerRecord]:
        return []

    bench = Bench(handle, [b"a"])
    bench.failure = KafkaTimeout("no response")
    await bench.turn()
    assert (bench.position, bench.count("handled_records"), bench.count("produced_records")) == (1, 1, None)


async def test_a_batch_is_counted_by_its_records() -> None:
    """A batch's retries are counted by record, and the outcome has the longest of the waits."""
    failures = [ConnectionError("1"), None]

    async def handle(_: object) -> None:
        if (error := failures.pop(0)) is not None:
            raise error

    bench = Bench(handle, [b"a", b"b", b"c"], batch=True)
    _, outcome = await bench.turn()
    assert (len(outcome.retry), outcome.after_ms) == (3, 0)
    assert (bench.count("retries"), bench.count("handler_failures"), bench.count("handled_records")) == (3, 1, None)
    execution, outcome = await bench.turn()
    assert (len(execution.works), len(outcome.finished), bench.count("handled_records")) == (1, 1, 1)
    outcome = Outcome()
    for work, after_ms in ((execution.works[0], 200), (execution.works[0], 100)):
        outcome.put_back(work, after_ms)
    assert (len(outcome.retry), outcome.after_ms) == (2, 200)


async def test_a_dead_letter_of_a_batch_waits_without_its_batch() -> None:
    """If the dead letter of a record in a batch cannot be written, only that record is
    retried; the others are finished.
    """
    handled = []

    async def handle(records: object) -> None:
        handled.extend(record.value for record in records)  # type: ignore[attr-defined]

    bench = Bench(handle, [b"{", b"2", b"3"], batch=True, decode=json_deserializer)
    bench.failure = KafkaTimeout("no response")
    _, outcome = await bench.turn()
    assert ([work.offset for work in outcome.retry], outcome.after_ms) == ([0], 100)
    assert ([work.offset for work in outcome.finished], bench.position) == ([1, 2], 0)
    bench.failure = None
    bench.scheduler.deliver(Columns.of([ConsumerRecord(*TP, 3, 0, b"ann", b"4")]))
    execution, _ = await bench.turn()
    assert [work.offset for work in execution.works] == [0, 3]
    assert (handled, bench.position) == ([2, 3, 4], 4)
    assert parse_dead_letter(as_consumed(bench.dead_letters[0])).attempts == 1


async def test_the_latency_of_every_call_is_measured() -> None:
    """Each call is measured, and a call of a batch counts once."""
    for batch, decode in ((False, bytes_deserializer), (False, json_deserializer), (True, bytes_deserializer)):
        bench = Bench(succeed, [b"1", b"2"], batch=batch, decode=decode)
        started = time.perf_counter()
        for calls in (1,) if batch else (1, 2):
            await bench.turn()
            labels = {"group": "alerts", "topic": "clicks"}
            name = "penstock_consumer_handler_latency_seconds"
            assert bench.registry.get_sample_value(f"{name}_count", labels) == calls
            measured = bench.registry.get_sample_value(f"{name}_sum", labels)
            assert measured is not None
            assert 0 < measured <= time.perf_counter() - started


async def test_records_whose_output_kafka_rejects_are_dead_letters() -> None:
    """Records whose output Kafka rejects become dead letters, and the last attempt is counted."""
    bench = Bench(succeed, [b"a", b"b"])
    (execution, _), (other, _) = await bench.turn(), await bench.turn()
    (first, second) = execution.works[0], other.works[0]
    second.attempts = 3
    rejected = bench.executor.dead_letters_of_rejected([first, second], RecordTooLarge("no"))
    assert [dead_letter.topic for dead_letter in rejected] == ["clicks-dlq", "clicks-dlq"]
    found = [parse_dead_letter(as_consumed(dead_letter)) for dead_letter in rejected]
    assert [(dead_letter.stage, dead_letter.attempts, dead_letter.record.value) for dead_letter in found] == [
        ("produce", 1, b"a"),
        ("produce", 4, b"b"),
    ]
    assert bench.count("dead_letters") == 2


def test_valid_output_records_are_accepted() -> None:
    """Records are valid with and without key, value, headers, partition and timestamp."""
    check_execution_output(
        [ProducerRecord("out", None), ProducerRecord("out", b"v", bytearray(b"k"), (("h", b"1"),), 3, 17)]
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"value": 5},
        {"value": "text"},
        {"key": {"a": 1}},
        {"topic": None},
        {"topic": "no good"},
        {"headers": {"a": "b"}},
        {"headers": (("a", 5),)},
        {"headers": 7},
        {"partition": -1},
        {"partition": "x"},
        {"timestamp": 1.5},
        {"timestamp": True},
    ],
)
def test_an_invalid_output_record_is_an_error(fields: dict[str, Any]) -> None:
    """An invalid record is a DataError, which is not retried."""
    with pytest.raises(DataError):
        check_execution_output(
            [ProducerRecord("out", b"good"), ProducerRecord(**{"topic": "out", "value": b"v", **fields})]
        )


def test_waits_double_up_to_the_limit() -> None:
    """Without jitter the waits grow by the multiplier up to the limit."""
    policy = RetryPolicy(backoff_ms=100, backoff_max_ms=1_000, jitter=0)
    assert [policy.backoff_after_ms(n, 0.5) for n in (1, 2, 3, 4, 5, 5_000)] == [100, 200, 400, 800, 1_000, 1_000]


@given(st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 0.99), st.integers(0, 5_000), st.floats(1, 50))
def test_jitter_stays_within_its_share(
    attempts: int, random: float, jitter: float, start: int, multiplier: float
) -> None:
    """For any random number the wait stays within the jitter's share and never exceeds the limit."""
    policy = RetryPolicy(backoff_ms=start, backoff_max_ms=30_000, jitter=jitter, multiplier=multiplier)
    plain = RetryPolicy(backoff_ms=start, backoff_max_ms=30_000, jitter=0, multiplier=multiplier)
    wait_ms, plain_ms = policy.backoff_after_ms(attempts, random), plain.backoff_after_ms(attempts, random)
    assert plain_ms * (1 - jitter) - 1 <= wait_ms <= min(plain_ms * (1 + jitter) + 1, 30_000)


def test_a_constant_backoff_has_jitter() -> None:
    """Records that failed together are not retried together, also if `backoff_max_ms` is `backoff_ms`."""
    policy = RetryPolicy(backoff_ms=1_000, backoff_max_ms=1_000)
    assert [policy.backoff_after_ms(3, random) for random in (0, 0.25, 0.5, 1)] == [800, 900, 1_000, 1_000]


def test_max_attempts_counts_the_first_call() -> None:
    """`max_attempts` counts handler calls, including the first."""
    policy = RetryPolicy(max_attempts=2, jitter=0)
    assert [policy.decide(OSError(), attempts, 0.5) for attempts in (1, 2)] == [100, None]


@pytest.mark.parametrize(
    ("retriable", "not_retriable", "error", "expected"),
    [
        ((Exception,), (DataError,), SerializationError, False),
        ((Exception,), (DataError,), KafkaTimeout, True),
        (("ConnectionError",), (), ConnectionResetError, True),
        (("builtins.ConnectionError",), (), ValueError, False),
        (("penstock.errors.KafkaTimeout",), (), KafkaTimeout, True),
        ((ConnectionResetError,), (OSError,), ConnectionResetError, True),
        ((OSError,), (ConnectionResetError,), ConnectionResetError, False),
        ((OSError,), (OSError,), OSError, False),
    ],
)
def test_the_nearest_named_class_decides(
    retriable: tuple[type | str, ...], not_retriable: tuple[type | str, ...], error: type[Exception], expected: bool
) -> None:
    """The nearest matching base of an exception decides whether it is retried, and a tie is not retried."""
    assert RetryPolicy(retriable=retriable, not_retriable=not_retriable).is_retriable(error) is expected
