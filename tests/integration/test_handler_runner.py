"""The handler runner on a real broker: dead letters, crashes, rebalances and order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

import penstock.clients
from penstock.services.cli import app
from penstock.services.consumer.daemon import ConsumerDaemon
from penstock.services.consumer.executor import Executor
from penstock.services.consumer.handler_loop import HandlerLoop
from penstock.services.consumer.handler_runner import HandlerRunner, RecordProducer
from penstock.services.consumer.handlers import Handler
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter_log import DeadLetterLog
from penstock.shared.clients.parallel_consumer.commit_metadata import decode_finished
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import (
    ConsumerRecord,
    OffsetAndMetadata,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
)
from penstock.shared.common.settings import KafkaSettings
from tests.http_client import http_client
from tests.integration.promtool import assert_clean
from tests.shared_broker import Broker

WAIT_S = 30
ROOT = Path(__file__).parents[2]


@pytest.fixture
def connection(kafka: Broker) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)


async def until(true: Callable[[], bool], *tasks: asyncio.Task[None]) -> None:
    """Wait for a condition; a task that ends meanwhile raises its error."""
    deadline = time.monotonic() + WAIT_S
    while not true():
        for task in tasks:
            if task.done():
                task.result()
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.02)


async def fill(connection: KafkaSettings, topic: str, partitions: int, records: Iterable[ProducerRecord]) -> None:
    async with Admin(connection) as admin:
        await admin.create_topics([NewTopic(topic, partitions), NewTopic(f"{topic}-dlq", partitions)], exist_ok=True)
    await send(connection, records)


async def send(connection: KafkaSettings, records: Iterable[ProducerRecord]) -> None:
    async with Producer(connection) as producer:
        assert all(isinstance(result, RecordMetadata) for result in await (await producer.send_many(records)))


async def committed(connection: KafkaSettings, group: str) -> dict[TopicPartition, OffsetAndMetadata]:
    async with Admin(connection) as admin:
        return await admin.group_offsets(group)


@contextlib.asynccontextmanager
async def running(
    connection: KafkaSettings, topic: str, handle: Callable[[ConsumerRecord], Awaitable[None]], **changes: object
) -> AsyncIterator[tuple[HandlerLoop, asyncio.Task[None], CollectorRegistry]]:
    """Run a handler runner in this process, and stop it on exit."""
    given: dict[str, object] = {
        "kafka": connection, "topics": (topic,), "group_id": topic, "handler": "tests:handle",
        "commit_interval_ms": 100, "lag_interval_ms": 100, "retry": {"backoff_ms": 1},
        "consumer": {"session_timeout_ms": 6_000, "heartbeat_interval_ms": 200, "auto_offset_reset": "earliest"},
    }  # fmt: skip
    settings = ConsumerServiceSettings(**(given | changes))  # type: ignore[arg-type]
    registry = CollectorRegistry()
    metrics = RunnerMetrics(registry, settings.group_id)
    async with Producer(connection) as producer, Consumer(connection, settings.consumer_settings()) as consumer:
        executor = Executor(
            Handler("tests:handle", handle), settings.retry_policy(), RecordProducer(producer), metrics, group=topic
        )
        runner = HandlerLoop(
            consumer, settings.scheduler(batch=False), executor, metrics, SYSTEM_CLOCK, settings.handler_loop_options()
        )
        runner.subscribe([topic])
        task = asyncio.create_task(runner.run())
        try:
            yield runner, task, registry
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await runner.stop(5_000)


async def test_a_failing_record_becomes_a_dead_letter(connection: KafkaSettings, topic_name: str) -> None:
    """A dead letter has the record's raw bytes and headers, its coordinates and the error; the other records are
    handled, and all are committed.
    """
    headers = (("trace", b"\x00\x01"), ("none", None))
    values = [b"good", b"\xff bad", b"good"]
    await fill(
        connection, topic_name, 1,
        [ProducerRecord(topic_name, v, b"ann", headers, 0, 1_357_000_000_000 + i) for i, v in enumerate(values)],
    )  # fmt: skip
    handled = []

    async def handle(record: ConsumerRecord) -> None:
        if record.value == b"\xff bad":
            raise ConnectionError("refused by the other side")
        handled.append(record.offset)

    async with running(connection, topic_name, handle, max_attempts=3) as (runner, task, registry):
        await until(lambda: runner.finished == 3, task)
        labels = {"group": topic_name, "topic": topic_name}
        assert registry.get_sample_value("penstock_consumer_dead_letters_total", labels) == 1
        assert registry.get_sample_value("penstock_consumer_retries_total", labels) == 2
        assert registry.get_sample_value("penstock_consumer_handled_records_total", labels) == 2
    assert handled == [0, 2]
    assert await committed(connection, topic_name) == {TopicPartition(topic_name, 0): OffsetAndMetadata(3)}
    async with DeadLetterLog(connection, f"{topic_name}-dlq") as log:
        entries = [entry async for entry in log.entries()]
    (dead_letter,) = [entry.dead_letter for entry in entries]
    assert dead_letter is not None
    assert dead_letter.record == ConsumerRecord(topic_name, 0, 1, 1_357_000_000_001, b"ann", b"\xff bad", headers)
    assert (dead_letter.stage, dead_letter.exception, dead_letter.message) == (
        "process",
        "ConnectionError",
        "refused by the other side",
    )
    assert (dead_letter.attempts, dead_letter.group) == (3, topic_name)
    assert entries[0].written_ms > 1_357_000_000_001 + 86_400_000


async def test_order_per_key_under_concurrency_64(connection: KafkaSettings, topic_name: str) -> None:
    """Each record is handled once, and each key's records one at a time in the order of their offsets, even with
    retries.
    """
    rng = random.Random(5)
    keys = [b"key-%d" % rng.randrange(100) for _ in range(4_000)]
    await fill(connection, topic_name, 4, [ProducerRecord(topic_name, b"%d" % i, key) for i, key in enumerate(keys)])
    seen: dict[bytes | None, list[bytes | None]] = defaultdict(list)
    running_now: set[bytes | None] = set()
    most = 0

    async def handle(record: ConsumerRecord) -> None:
        nonlocal most
        assert record.key not in running_now
        running_now.add(record.key)
        most = max(most, len(running_now))
        try:
            await asyncio.sleep(rng.random() * 0.004)
            if rng.random() < 0.02:
                raise ConnectionError("try again")
            seen[record.key].append(record.value)
        finally:
            running_now.remove(record.key)

    async with running(connection, topic_name, handle, max_attempts=50) as (runner, task, _):
        await until(lambda: runner.finished == len(keys), task)
    expected = defaultdict(list)
    for index, key in enumerate(keys):
        expected[key].append(b"%d" % index)
    assert seen == expected
    assert most > 16
    assert sum(o.offset for o in (await committed(connection, topic_name)).values()) == len(keys)


async def test_two_runners_rebalance_without_loss(connection: KafkaSettings, topic_name: str) -> None:
    """While a member joins and leaves, every record is handled exactly once, since a revocation drains."""
    total, handled = 3_000, Counter[bytes | None]()

    async def handle(record: ConsumerRecord) -> None:
        await asyncio.sleep(0.01)
        handled[record.value] += 1

    records = [ProducerRecord(topic_name, b"%d" % i, b"key-%d" % (i % 200)) for i in range(total)]
    await fill(connection, topic_name, 6, records[: total // 3])
    async with running(connection, topic_name, handle, max_concurrency=16) as (first, one, _):
        await until(lambda: first.finished > 50, one)
        async with running(connection, topic_name, handle, max_concurrency=16) as (second, two, _):
            await until(lambda: len(second.scheduler.partitions) == len(first.scheduler.partitions) == 3, one, two)
            await send(connection, records[total // 3 : 2 * total // 3])
            await until(lambda: second.finished > 50, one, two)
        await until(lambda: len(first.scheduler.partitions) == 6, one)
        await send(connection, records[2 * total // 3 :])
        await until(lambda: len(handled) == total and first.scheduler.in_flight == 0, one)
    assert set(handled.values()) == {1}
    assert sum(o.offset for o in (await committed(connection, topic_name)).values()) == total


async def test_a_hanging_handler_does_not_block_a_rebalance(connection: KafkaSettings, topic_name: str) -> None:
    """A handler that exceeds the drain limit is cancelled and not committed, and the next owner handles the record."""
    await fill(connection, topic_name, 1, [ProducerRecord(topic_name, b"%d" % i, b"key-%d" % i) for i in range(10)])
    hang, calls = True, list[tuple[str, bytes | None]]()

    def handler(name: str) -> Callable[[ConsumerRecord], Awaitable[None]]:
        async def handle(record: ConsumerRecord) -> None:
            if hang and record.value == b"4":
                try:
                    await asyncio.Event().wait()
                finally:
                    calls.append((f"{name} cancelled", record.value))
            calls.append((name, record.value))

        return handle

    consumer = {
        "session_timeout_ms": 6_000, "heartbeat_interval_ms": 200, "auto_offset_reset": "earliest",
        "listener_timeout_ms": 6_000,
    }  # fmt: skip
    async with running(connection, topic_name, handler("first"), consumer=consumer) as (first, one, _):
        await until(lambda: first.finished == 9, one)
        async with running(connection, topic_name, handler("second"), consumer=consumer) as (second, two, _):
            await until(lambda: ("first cancelled", b"4") in calls, one, two)
            hang = False
            await until(lambda: first.finished + second.finished == 10, one, two)
    assert sorted(value or b"" for name, value in calls if "cancelled" not in name) == sorted(
        b"%d" % i for i in range(10)
    )
    assert await committed(connection, topic_name) == {TopicPartition(topic_name, 0): OffsetAndMetadata(10)}


HANDLER = """
import asyncio, os, pathlib
from penstock.shared.common.records import ConsumerRecord

log = pathlib.Path(os.environ["LOG"]).open("a", buffering=1)

async def handle(record: ConsumerRecord) -> None:
    print("start", record.value.decode(), file=log)
    if record.value.decode() == os.environ.get("STUCK"):
        await asyncio.Event().wait()
    await asyncio.sleep(float(os.environ.get("SECONDS", "0")))
    print("end", record.value.decode(), file=log)
"""


@contextlib.asynccontextmanager
async def daemon(
    connection: KafkaSettings, topic: str, folder: Path, log: str, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `penstock consumer` as a separate process."""
    (folder / "own_handler.py").write_text(HANDLER)
    value, handler = environment.pop("VALUE", "bytes"), environment.pop("HANDLER", "own_handler:handle")
    arguments = {
        "topics": topic, "group-id": topic, "handler": handler, "commit-interval-ms": "100",
        "kafka.bootstrap-servers": connection.bootstrap_servers, "consumer.session-timeout-ms": "1000",
        "consumer.heartbeat-interval-ms": "200", "consumer.auto-offset-reset": "earliest", "log.format": "json",
        "http.port": "0", "value": value,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.services.consumer.main",
        *(f"--{name}={value}" for name, value in arguments.items()),
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "LOG": str(folder / log), **environment},
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def alive(process: asyncio.subprocess.Process, true: Callable[[], bool]) -> None:
    """Wait for a condition while the process lives."""
    await until(lambda: true() or process.returncode is not None)
    assert true(), f"the process ended with {process.returncode}"


def lines(file: Path, what: str) -> list[int]:
    text = file.read_text() if file.exists() else ""
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith(what)]


async def test_a_restart_after_a_crash_repeats_only_unfinished_records(
    connection: KafkaSettings, topic_name: str, tmp_path: Path
) -> None:
    """If a process is killed with one record stuck and all others finished, the next process handles of them only that
    record. On SIGTERM it finishes and commits the started records, starts no further one, and leaves the group.
    """
    await fill(connection, topic_name, 1, [ProducerRecord(topic_name, b"%d" % i, b"key-%d" % i) for i in range(300)])
    tp = TopicPartition(topic_name, 0)
    async with daemon(connection, topic_name, tmp_path, "first", STUCK="17") as process:
        await alive(process, lambda: len(lines(tmp_path / "first", "end")) == 299)
        deadline = time.monotonic() + WAIT_S
        while (stored := (await committed(connection, topic_name)).get(tp)) is None or not (
            stored.offset == 17 and decode_finished(stored) == ((18, 299),)
        ):
            assert time.monotonic() < deadline, stored
            await asyncio.sleep(0.05)
        process.kill()
        await process.wait()
    async with daemon(connection, topic_name, tmp_path, "second", SECONDS="0.4") as process:
        await alive(process, lambda: 17 in lines(tmp_path / "second", "end"))
        await send(connection, [ProducerRecord(topic_name, b"%d" % i) for i in range(300, 1_300)])
        await alive(process, lambda: len(lines(tmp_path / "second", "end")) >= 65)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    started, ended = lines(tmp_path / "second", "start"), lines(tmp_path / "second", "end")
    assert (started[0], ended[0]) == (17, 17)
    assert sorted(started[1:]) == sorted(ended[1:]) == list(range(300, 299 + len(ended)))
    assert len(ended) < 1_001
    assert await committed(connection, topic_name) == {tp: OffsetAndMetadata(299 + len(ended))}
    async with Admin(connection) as admin:
        assert (await admin.describe_group(topic_name)).members == ()


POISON = """
import msgspec

class V(msgspec.Struct):
    id: int

    def __post_init__(self) -> None:
        {1: "one", 3: "three"}[self.id]
"""


async def test_a_poison_record_does_not_end_the_daemon(
    connection: KafkaSettings, topic_name: str, tmp_path: Path
) -> None:
    """A record whose struct raises KeyError becomes a dead letter, and the records around it are handled."""
    (tmp_path / "poison.py").write_text(POISON)
    (tmp_path / "own.py").write_text(HANDLER.replace("record.value.decode()", "str(record.value.id)"))
    await fill(connection, topic_name, 1, [ProducerRecord(topic_name, b'{"id":%d}' % i) for i in (1, 2, 3)])
    async with daemon(connection, topic_name, tmp_path, "log", VALUE="poison:V", HANDLER="own:handle") as process:
        await alive(process, lambda: lines(tmp_path / "log", "end") == [1, 3])
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert await committed(connection, topic_name) == {TopicPartition(topic_name, 0): OffsetAndMetadata(3)}
    async with DeadLetterLog(connection, f"{topic_name}-dlq") as log:
        (entry,) = [entry async for entry in log.entries()]
    assert entry.dead_letter is not None
    assert (entry.dead_letter.stage, entry.dead_letter.exception) == ("deserialize", "KeyError")
    assert entry.dead_letter.record.value == b'{"id":2}'


async def test_damaged_commit_metadata_does_not_stop_a_start(connection: KafkaSettings, topic_name: str) -> None:
    """Damaged commit metadata is ignored: handling starts at the committed offset."""
    await fill(connection, topic_name, 1, [ProducerRecord(topic_name, b"%d" % i, None) for i in range(5)])
    tp = TopicPartition(topic_name, 0)
    async with Consumer(connection, ConsumerSettings(group_id=topic_name, commit_strategy="none")) as consumer:
        consumer.assign([tp])
        await consumer.commit({tp: OffsetAndMetadata(2, "p1r:damaged")})
    handled = []

    async def handle(record: ConsumerRecord) -> None:
        handled.append(record.offset)

    async with running(connection, topic_name, handle) as (runner, task, _):
        await until(lambda: runner.finished == 3, task)
    assert sorted(handled) == [2, 3, 4]


async def test_dead_letters_are_listed_and_replayed_once(connection: KafkaSettings, topic_name: str) -> None:
    """A replay by exception sends the original records, leaves the rest for a later replay, and sends none twice."""
    headers = (("trace", b"a1"),)
    await fill(
        connection, topic_name, 3,
        [ProducerRecord(topic_name, b"%d" % i, b"key-%d" % i, headers, None, 1_000 + i) for i in range(20)],
    )  # fmt: skip
    failing, handled = True, list[ConsumerRecord]()

    async def handle(record: ConsumerRecord) -> None:
        if failing:
            raise ValueError("odd") if int(record.value or b"") % 2 else KeyError("even")
        handled.append(record)

    async def command(*arguments: str, named: str = topic_name) -> tuple[int | None, list[dict[str, object]]]:
        options = ["--bootstrap-servers", connection.bootstrap_servers, "--json"]
        invoked = ("dlq", arguments[0], named, *arguments[1:], *options)
        ran = await asyncio.to_thread(CliRunner().invoke, app, list(invoked))
        return ran.exit_code, [json.loads(line) for line in ran.stdout.splitlines()]

    async with running(connection, topic_name, handle, max_attempts=1) as (runner, task, _):
        await until(lambda: runner.finished == 20, task)
        failing = False
        status, listed = await command("list", "--exception", "ValueError")
        assert (status, len(listed)) == (0, 10)
        assert {(row["topic"], row["stage"], row["message"], row["replayed"]) for row in listed} == {
            (topic_name, "process", "odd", False)
        }
        status, by_own_name = await command("list", "--exception", "ValueError", named=f"{topic_name}-dlq")
        assert (status, sorted(map(str, by_own_name))) == (0, sorted(map(str, listed)))
        assert await command("replay", "--exception", "ValueError", "--dry-run") == (0, [{"would_send": 10}])
        assert not handled
        nothing = {"failed": 0, "faults": 0, "errors": []}
        assert await command("replay", "--exception", "ValueError") == (0, [{"sent": 10, "skipped": 10, **nothing}])
        assert await command("replay", "--exception", "ValueError") == (0, [{"sent": 0, "skipped": 10, **nothing}])
        status, pending = await command("list", "--pending")
        assert {row["exception"] for row in pending} == {"KeyError"}
        assert await command("replay") == (0, [{"sent": 10, "skipped": 0, **nothing}])
        await until(lambda: len(handled) == 20, task)
        assert await command("replay", "--include-replayed", "--dry-run") == (0, [{"would_send": 20}])
    assert sorted((r.value, r.key, r.headers, r.timestamp) for r in handled) == sorted(
        (b"%d" % i, b"key-%d" % i, headers, 1_000 + i) for i in range(20)
    )


async def test_health_reports_a_stuck_handler(
    connection: KafkaSettings, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/health` returns 503 with the lag while a handler hangs, and the metrics agree."""
    (tmp_path / "handler_of_health.py").write_text(
        "import asyncio\nasync def handle(record):\n    if record.value == b'stuck': await asyncio.Event().wait()\n"
    )
    monkeypatch.chdir(tmp_path)
    await fill(connection, topic_name, 1, [ProducerRecord(topic_name, b"fine", None)])
    settings = ConsumerServiceSettings(
        kafka=connection, topics=(topic_name,), group_id=topic_name, handler="handler_of_health:handle",
        lag_interval_ms=50, stuck_after_ms=300, consumer={"auto_offset_reset": "earliest"}, shutdown_timeout_ms=5_500,
        http={"port": 0},
    )  # fmt: skip
    service = ConsumerDaemon(settings)
    await service.startup()
    work = asyncio.create_task(service.main_loop())
    try:
        async with http_client(base_url=service.server.url) as http:
            assert (await http.get("/health")).status_code == 503
            await until(lambda: service.runner.loop is not None and service.runner.loop.finished == 1, work)
            assert (await http.get("/health")).status_code == 200
            await send(connection, [ProducerRecord(topic_name, b"stuck", None)])
            await until(lambda: not service.check().ok, work)
            response = await http.get("/health")
            assert (response.status_code, response.json()["checks"]["progress"]["lag"]) == (503, 1)
            text = (await http.get("/metrics")).text
            assert f'penstock_consumer_handlers_in_flight{{group="{topic_name}"}} 1.0' in text
            assert (
                f'penstock_consumer_unfinished_lag{{group="{topic_name}",partition="0",topic="{topic_name}"}} 1.0'
                in text
            )
            assert_clean(text)
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        await service.shutdown()
    assert await committed(connection, topic_name) == {TopicPartition(topic_name, 0): OffsetAndMetadata(1)}


async def test_handler_runner_works_in_a_users_program(
    connection: KafkaSettings, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public HandlerRunner runs without HTTP: it writes the records that a handler returns and commits."""
    (tmp_path / "handler_of_program.py").write_text(
        "from penstock import ProducerRecord\n"
        f"async def handle(record): return ProducerRecord('{topic_name}-out', record.value.upper())\n"
    )
    monkeypatch.chdir(tmp_path)
    await fill(connection, topic_name, 1, [ProducerRecord(topic_name, b"tea", None)])
    await fill(connection, f"{topic_name}-out", 1, [])
    settings = penstock.clients.ConsumerServiceSettings(
        kafka=connection, topics=(topic_name,), group_id=topic_name, handler="handler_of_program:handle",
        consumer={"auto_offset_reset": "earliest"}, shutdown_timeout_ms=5_500,
    )  # fmt: skip
    assert penstock.clients.HandlerRunner is HandlerRunner
    async with penstock.clients.HandlerRunner(settings) as runner:
        work = asyncio.create_task(runner.run())
        await until(lambda: runner.loop is not None and runner.loop.finished == 1, work)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    assert await committed(connection, topic_name) == {TopicPartition(topic_name, 0): OffsetAndMetadata(1)}
    async with Consumer(connection) as consumer:
        consumer.assign([TopicPartition(f"{topic_name}-out", 0)])
        await consumer.seek_to_beginning()
        assert [r.value for columns in (await consumer.poll(10_000)).values() for r in columns] == [b"TEA"]
