"""Connectors and tasks whose calls block.

`def` methods run in one thread for each task. A call that takes long is reported as stalled, and a task that does not
end is abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import ClassVar

import pytest
import structlog

from penstock.connect import SinkRecord, SinkTask, SinkTaskContext, SourceRecord, SourceTask
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector
from penstock.shared.connect.errors import ConnectError, ConnectorNotFound
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.task_thread import TaskThread, runs_in_thread
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.connect.task import Offsets
from penstock.shared.testing.manual_clock import ManualClock
from tests.shared.connect.harness import (
    TP,
    RecordingSink,
    RecordingSinkTask,
    RecordingSource,
    RecordingSourceTask,
    Running,
    running,
    source_record,
)

WAIT_S = 60

SINK = {"name": "s", "connector.class": "FileStreamSink", "topics": "t", "file": "${env:HOME}/out", "tasks.max": "2"}


class DefSinkTask(SinkTask):
    """Records the thread of each call. `put` blocks until the test opens the gate, and `start` while `may_start` is
    cleared.
    """

    made: ClassVar[list[DefSinkTask]] = []
    may_start: ClassVar[threading.Event] = threading.Event()

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}
        self.values: list[object] = []
        self.gate = threading.Event()
        self.blocked = threading.Event()
        DefSinkTask.made.append(self)

    def _note(self, call: str) -> None:
        assert self.threads.setdefault(call, threading.get_ident()) == threading.get_ident()

    def initialize(self, context: SinkTaskContext) -> None:
        self._note("initialize")
        super().initialize(context)

    def start(self, props: Mapping[str, str]) -> None:
        self._note("start")
        assert self.may_start.wait(WAIT_S)

    def open(self, partitions: frozenset[TopicPartition]) -> None:
        self._note("open")

    def put(self, records: list[SinkRecord]) -> None:
        self._note("put")
        if not records:
            return
        self.blocked.set()
        assert self.gate.wait(WAIT_S)
        reporter = self.context.errant_record_reporter
        assert reporter is not None
        for record in records:
            if record.value == "bad":
                self.context.wait_for(reporter.report(record, ValueError("bad")))
            else:
                self.values.append(record.value)
        self.context.pause(TP)
        self.context.resume(TP)

    def flush(self, offsets: Offsets) -> None:
        self._note("flush")

    def close(self, partitions: frozenset[TopicPartition]) -> None:
        self._note("close")

    def stop(self) -> None:
        self._note("stop")


DefSinkTask.may_start.set()


class DefSink(RecordingSink):
    """A sink whose tasks have `def` methods."""

    task_class = DefSinkTask  # type: ignore[assignment]


class DefSourceTask(SourceTask):
    """Reads its offset, then returns one record and blocks in the next `poll`."""

    made: ClassVar[list[DefSourceTask]] = []

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.stored: object = None
        DefSourceTask.made.append(self)

    def _note(self, call: str) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(call)

    def start(self, props: Mapping[str, str]) -> None:
        self._note("start")
        self.stored = self.context.wait_for(self.context.offset_storage_reader.offset({"file": "a"}))

    def poll(self) -> Sequence[SourceRecord] | None:
        self._note("poll")
        if self.calls.count("poll") > 1:
            assert self.gate.wait(WAIT_S)
            return None
        return [source_record("one", 1)]

    def commit_record(self, record: SourceRecord, metadata: object) -> None:
        self._note("commit_record")

    def stop(self) -> None:
        self._note("stop")


class DefSource(RecordingSource):
    """A source whose tasks have `def` methods."""

    task_class = DefSourceTask  # type: ignore[assignment]


async def produce(run: Running, *values: bytes) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
        for value in values:
            await producer.send("t", value)


async def start_other(run: Running) -> ConnectorTaskId:
    """Start a task of another sink, whose methods are `async def`."""
    name = f"{RecordingSink.__module__}.{RecordingSink.__name__}"
    run.worker.plugins.add(RecordingSink, name)
    props = {"name": "other", "connector.class": name, "topics": "t"}
    id = ConnectorTaskId("other", 0)
    await run.worker.start_task(TaskSpec(id, props, props), TargetState.STARTED, run.listener)
    return id


async def test_a_put_that_blocks_delays_no_other_task() -> None:
    """While one sink's `put` blocks, another task reads and commits."""
    DefSinkTask.made.clear()
    async with running() as run:
        await produce(run, b"a", b"bad")
        id = await run.run(DefSink, topics="t", errors_tolerance="all")
        await run.until(lambda: DefSinkTask.made and DefSinkTask.made[0].blocked.is_set())
        await start_other(run)
        await run.until(lambda: run.cluster.committed("connect-other").get(TP) == OffsetAndMetadata(2))
        assert RecordingSinkTask.made[-1].values == ["a", "bad"]
        # On a slow machine the task may have committed its first position already.
        committed = run.cluster.committed("connect-c").get(TP, OffsetAndMetadata(0))
        assert (DefSinkTask.made[0].values, committed.offset) == ([], 0)
        DefSinkTask.made[0].gate.set()
        await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(2))
        assert DefSinkTask.made[0].values == ["a"]
        await run.worker.stop_tasks([id])
        assert run.listener.of(id) == ["startup", "shutdown"]


async def test_a_start_that_blocks_delays_no_other_task() -> None:
    """While one sink's `start` blocks, another task starts, reads and commits. The first task is not running yet."""
    DefSinkTask.made.clear()
    DefSinkTask.may_start.clear()
    try:
        async with running() as run:
            await produce(run, b"a")
            id = await run.run(DefSink, topics="t", errors_tolerance="all")
            await run.until(lambda: DefSinkTask.made and "start" in DefSinkTask.made[0].threads)
            await start_other(run)
            await run.until(lambda: run.cluster.committed("connect-other").get(TP) == OffsetAndMetadata(1))
            assert (run.listener.of(id), set(DefSinkTask.made[0].threads)) == ([], {"initialize", "start"})
            DefSinkTask.may_start.set()
            DefSinkTask.made[0].gate.set()
            await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(1))
            assert DefSinkTask.made[0].values == ["a"]
            await run.worker.stop_tasks([id])
            assert run.listener.of(id) == ["startup", "shutdown"]
    finally:
        DefSinkTask.may_start.set()


async def test_all_calls_of_a_task_come_from_one_thread() -> None:
    """All calls of a task run in one thread, which is not the event loop's and ends with the task."""
    DefSinkTask.made.clear()
    async with running() as run:
        await produce(run, b"a")
        id = await run.run(DefSink, topics="t", errors_tolerance="all")
        await run.until(lambda: DefSinkTask.made and DefSinkTask.made[0].blocked.is_set())
        made = DefSinkTask.made[0]
        thread = next(thread for thread in threading.enumerate() if thread.ident == made.threads["start"])
        assert thread.name == f"task-{id}"
        made.gate.set()
        await run.until(lambda: TP in run.cluster.committed("connect-c"))
        await run.worker.stop_tasks([id])
        assert set(made.threads) == {"initialize", "start", "open", "put", "flush", "close", "stop"}
        assert set(made.threads.values()) == {thread.ident}
        await run.until(lambda: not thread.is_alive())


async def test_a_source_that_blocks_is_abandoned_and_stopped_later() -> None:
    """The worker abandons a blocked `poll`, and `stop` runs in the same thread when it returns."""
    DefSourceTask.made.clear()
    async with running(task_shutdown_graceful_timeout_ms="100") as run:
        id = await run.run(DefSource)
        await run.until(lambda: DefSourceTask.made and DefSourceTask.made[0].calls.count("poll") == 2)
        made = DefSourceTask.made[0]
        assert (made.stored, run.worker.state(id)) == (None, State.RUNNING)
        await run.worker.stop_tasks([id])
        assert "stop" not in made.calls
        made.gate.set()
        await run.until(lambda: made.calls[-1] == "stop")
        assert len(made.threads) == 1
        assert threading.get_ident() not in made.threads


async def test_offsets_are_stored_while_a_poll_blocks() -> None:
    """Offsets are stored while `poll` blocks the thread; calls of `commit_record` wait."""
    DefSourceTask.made.clear()
    async with running() as run:
        id = await run.run(DefSource)
        await run.until(lambda: run.store.data)
        made = DefSourceTask.made[0]
        assert made.calls.count("poll") == 2
        assert "commit_record" not in made.calls
        made.gate.set()
        await run.until(lambda: "commit_record" in made.calls)
        await run.worker.stop_tasks([id])


async def test_errors_of_calls_are_raised_in_the_caller() -> None:
    """A call's error, even StopIteration, is raised in the caller, and the thread continues."""
    thread = TaskThread()

    def fails(error: Exception) -> None:
        raise error

    try:
        with pytest.raises(ValueError, match="no"):
            await thread.call(fails, ValueError("no"))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await thread.call(fails, StopIteration())
        assert await thread.call(int, "7") == 7
    finally:
        thread.close()


async def cancelled_work(*_: object) -> None:
    """A method that awaits background work that it has cancelled itself."""
    work = asyncio.ensure_future(asyncio.Event().wait())
    work.cancel()
    await work


def cancelled_pool(*_: object) -> None:
    """A method that waits for a call that its own pool of threads has cancelled."""
    call: Future[None] = Future()
    call.cancel()
    call.result()


def exits(*_: object) -> None:
    raise SystemExit("no connection")


async def exits_on_loop(*_: object) -> None:
    raise SystemExit("no connection")


def interrupts(*_: object) -> None:
    raise KeyboardInterrupt


class Panic(BaseException):
    """An error as a panic in a Rust library raises it: pyo3_runtime.PanicException is no Exception."""


def panics(*_: object) -> None:
    raise Panic("index out of bounds")


async def panics_on_loop(*_: object) -> None:
    raise Panic("index out of bounds")


NO_EXCEPTIONS = [cancelled_work, cancelled_pool, exits, exits_on_loop, interrupts, panics, panics_on_loop]


@pytest.mark.parametrize("method", NO_EXCEPTIONS)
async def test_a_call_that_raises_a_base_exception_has_failed(method: Callable[..., Awaitable[None] | None]) -> None:
    """CancelledError of the connector's own work is an error of the call, and the caller is not cancelled.
    SystemExit, KeyboardInterrupt and the panic of a Rust library are errors too, and do not end the event loop."""
    thread = TaskThread()
    try:
        with pytest.raises(ConnectError, match=f"{method.__name__} raised (Cancelled|System|Keyboard|Panic)"):
            await thread.call(method)
    finally:
        thread.close()


@pytest.mark.parametrize("method", NO_EXCEPTIONS)
async def test_a_task_that_raises_a_base_exception_has_failed(
    method: Callable[..., Awaitable[None] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task or connector that raises CancelledError of its own work, SystemExit, KeyboardInterrupt, or a panic has
    failed."""
    async with running() as run:
        monkeypatch.setattr(RecordingSourceTask, "poll", method)
        id = await run.run(RecordingSource)
        await run.until(lambda: run.worker.state(id) is State.FAILED)
        assert run.listener.of(id) == ["startup", "failure"]
        monkeypatch.setattr(FileStreamSinkConnector, "start", method)
        assert await run.worker.start_connector("s", SINK, TargetState.STARTED, run.listener) is State.FAILED
        assert run.listener.of("s") == ["failure"]


@pytest.mark.parametrize("method", [cancelled_pool, exits, panics])
async def test_work_that_cannot_be_made_for_a_base_exception_has_failed(
    method: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds for their constructors, also at a restart, and for `initialize`."""
    async with running(task_restart_enable="true", task_restart_backoff_ms="10") as run:
        monkeypatch.setattr(RecordingSourceTask, "prepare", method)
        id = await run.run(RecordingSource)
        await run.until(lambda: run.listener.of(id)[:4] == ["failure", "restart"] * 2)
        for name in ("initialize", "__init__"):
            monkeypatch.setattr(FileStreamSinkConnector, name, method)
            assert await run.worker.start_connector("s", SINK, TargetState.STARTED, run.listener) is State.FAILED
            assert run.listener.of("s")[-1] == "failure"
            await run.worker.stop_connector("s")


async def test_wait_for_is_only_for_the_thread() -> None:
    """`wait_for` runs an awaitable from the thread; on the event loop it raises IllegalState."""
    thread = TaskThread()

    async def seven() -> int:
        await asyncio.sleep(0)
        return 7

    def waits() -> int:
        return thread.wait_for(seven())

    try:
        assert await thread.call(waits) == 7
        with pytest.raises(IllegalState):
            thread.wait_for(seven())
    finally:
        thread.close()


async def test_a_thread_of_the_connector_calls_the_worker_on_the_loop() -> None:
    """Calls of the context run on the event loop, from a thread that the connector starts as well."""
    thread = TaskThread()
    called = []

    def watch() -> None:
        called.append(thread.on_loop(asyncio.get_running_loop))

    def start() -> threading.Thread:
        watcher = threading.Thread(target=watch)
        watcher.start()
        return watcher

    try:
        watcher = await thread.call(start)
        await thread.call(watcher.join)
        watch()
        assert called == [asyncio.get_running_loop()] * 2
    finally:
        thread.close()


def test_methods_that_run_in_the_thread() -> None:
    """`def` methods run in the thread; an inherited `pre_commit` runs where `flush` runs. The default methods do not,
    also if `penstock.connect` has published their classes.
    """
    importlib.import_module("penstock.connect")

    class AsyncSinkTask(DefSinkTask):
        async def put(self, records: list[SinkRecord]) -> None: ...

        async def flush(self, offsets: Offsets) -> None: ...

    class DefaultSinkTask(SinkTask):
        def start(self, props: Mapping[str, str]) -> None: ...

        def put(self, records: list[SinkRecord]) -> None: ...

        def stop(self) -> None: ...

    sink, other, default = DefSinkTask(), AsyncSinkTask(), DefaultSinkTask()
    assert [runs_in_thread(method) for method in (sink.put, sink.flush, sink.pre_commit)] == [True] * 3
    assert [runs_in_thread(method) for method in (other.put, other.flush, other.pre_commit)] == [False] * 3
    assert [runs_in_thread(method) for method in (default.open, default.flush, default.pre_commit)] == [False] * 3


class BlockingConnector(FileStreamSinkConnector):
    """A connector with `def` methods. `start` blocks until the test lets it continue."""

    may_start = threading.Event()
    threads: ClassVar[list[str]] = []

    def start(self, props: Mapping[str, str]) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.may_start.wait(60)
        self.context.request_task_reconfiguration()

    def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        self.threads.append(threading.current_thread().name)
        self.context.request_task_reconfiguration()
        return [{"n": str(n)} for n in range(max_tasks)]

    def alter_offsets(self, props: Mapping[str, str], offsets: Mapping[TopicPartition, int | None]) -> bool:
        self.threads.append(threading.current_thread().name)
        return True


async def test_a_blocking_connector_delays_no_other() -> None:
    """A connector's `def` methods run in a thread of its own, and their calls of the context on the event loop."""
    loop_thread = threading.current_thread()
    requested = []

    def note(name: str) -> None:
        assert threading.current_thread() is loop_thread
        requested.append(name)

    async with running() as run:
        run.worker.plugins.add(BlockingConnector, "Blocking")
        config = {**SINK, "connector.class": "Blocking"}
        starting = asyncio.create_task(run.worker.start_connector("b", config, TargetState.STARTED, run.listener, note))
        assert await run.worker.start_connector("s", SINK, TargetState.STARTED, run.listener) is State.RUNNING
        assert not starting.done()
        BlockingConnector.may_start.set()
        assert await starting is State.RUNNING
        assert [one["n"] for one in await run.worker.connector_task_configs("b", config)] == ["0", "1"]
        assert await run.worker.alter_offsets(config, {})
        assert requested == ["b"]
        await run.worker.stop_connector("b")
    assert BlockingConnector.threads == ["connector-b", "connector-b", "alter-offsets"]


async def test_a_connector_that_does_not_end_is_abandoned() -> None:
    """After the graceful timeout the worker abandons a connector, and requests that wait for it return."""
    BlockingConnector.may_start.clear()
    try:
        async with running(task_shutdown_graceful_timeout_ms="50") as run:
            run.worker.plugins.add(BlockingConnector, "Blocking")
            config = {**SINK, "connector.class": "Blocking"}
            starting = asyncio.create_task(run.worker.start_connector("b", config, TargetState.STARTED, run.listener))
            await run.until(lambda: "b" in run.worker.connector_names())
            pausing = asyncio.create_task(run.worker.set_target_state("b", TargetState.PAUSED))
            await asyncio.sleep(0)
            await run.worker.stop_connector("b")
            await run.until(lambda: starting.done() and pausing.done(), 1)
            assert run.listener.of("b") == []
            BlockingConnector.may_start.set()
            await run.until(lambda: all(thread.name != "connector-b" for thread in threading.enumerate()))
    finally:
        BlockingConnector.may_start.set()


@pytest.mark.parametrize("blocked", ["start", "task_configs"])
async def test_an_abandoned_connector_is_stopped_later(blocked: str) -> None:
    """`stop` of an abandoned connector runs when the call that blocks its thread returns, and then the thread ends."""
    gate = threading.Event()
    calls = []

    class Slow(FileStreamSinkConnector):
        def _call(self, name: str) -> None:
            calls.append(name)
            assert name != blocked or gate.wait(WAIT_S)

        def start(self, props: Mapping[str, str]) -> None:
            self._call("start")

        def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
            self._call("task_configs")
            return []

        def stop(self) -> None:
            self._call("stop")

    async with running(task_shutdown_graceful_timeout_ms="50") as run:
        run.worker.plugins.add(Slow, "Slow")
        config = {**SINK, "connector.class": "Slow"}
        starting = asyncio.create_task(run.worker.start_connector("b", config, TargetState.STARTED, run.listener))
        asking: asyncio.Task[list[dict[str, str]]] | None = None
        if blocked == "task_configs":
            await starting
            asking = asyncio.create_task(run.worker.connector_task_configs("b", config))
        await run.until(lambda: calls[-1:] == [blocked])
        await run.worker.stop_connector("b")
        assert "stop" not in calls
        gate.set()
        await run.until(lambda: all(thread.name != "connector-b" for thread in threading.enumerate()))
        assert calls[-2:] == [blocked, "stop"]
        await starting
        if asking is not None:
            with pytest.raises(ConnectorNotFound):
                await asking


class StubbornConnector(FileStreamSinkConnector):
    """A connector whose `start` raises another error when it is cancelled."""

    async def start(self, props: Mapping[str, str]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("no connection") from None


async def test_an_abandoned_connector_does_not_report_a_failure() -> None:
    """If an abandoned connector raises, the error is logged and not reported, and its asyncio task ends."""
    async with running(task_shutdown_graceful_timeout_ms="50") as run:
        run.worker.plugins.add(StubbornConnector, "Stubborn")
        config = {**SINK, "connector.class": "Stubborn"}
        starting = asyncio.create_task(run.worker.start_connector("b", config, TargetState.STARTED, run.listener))
        await run.until(lambda: "b" in run.worker.connector_names())
        with structlog.testing.capture_logs() as logged:
            await run.worker.stop_connector("b")
            await starting
        assert "connector failed" in [line["event"] for line in logged]
        assert run.listener.of("b") == []
        await run.until(lambda: all(task.get_name() != "connector-b" for task in asyncio.all_tasks()), 1)


async def test_a_stopped_connector_does_not_report_a_failure() -> None:
    """The call of `raise_error` by a connector that was stopped is not reported."""
    made: list[FileStreamSinkConnector] = []

    class Kept(FileStreamSinkConnector):
        async def start(self, props: Mapping[str, str]) -> None:
            made.append(self)

    async with running() as run:
        run.worker.plugins.add(Kept, "Kept")
        config = {**SINK, "connector.class": "Kept"}
        await run.worker.start_connector("k", config, TargetState.STARTED, run.listener)
        await run.worker.stop_connector("k")
        made[0].context.raise_error(ValueError("no connection"))
        assert run.listener.of("k") == ["startup", "shutdown"]


async def test_a_task_that_does_not_end_is_abandoned() -> None:
    """After the graceful timeout the worker abandons a task and ignores its events."""

    def stuck(made: RecordingSourceTask) -> None:
        async def stop() -> None:
            await made.batches.get()

        made.stop = stop  # type: ignore[method-assign]

    RecordingSourceTask.prepare = staticmethod(stuck)
    try:
        async with running(task_shutdown_graceful_timeout_ms="50") as run:
            id = await run.run(RecordingSource)
            await run.until(lambda: RecordingSourceTask.made and RecordingSourceTask.made[0].calls)
            await run.worker.stop_tasks([id])
            assert run.worker.task_ids() == frozenset()
            assert run.listener.of(id) == ["startup"]
    finally:
        RecordingSourceTask.prepare = staticmethod(lambda _task: None)


async def test_an_abandoned_task_does_not_report_a_failure() -> None:
    """If `stop` of an abandoned task raises, the error is logged and not reported: the task may run again meanwhile."""

    def slow_to_end(made: RecordingSourceTask) -> None:
        async def poll() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await made.batches.get()
            await made.batches.get()

        async def stop() -> None:
            raise ValueError("no connection")

        made.poll = poll  # type: ignore[method-assign]
        made.stop = stop  # type: ignore[method-assign]

    RecordingSourceTask.prepare = staticmethod(slow_to_end)
    try:
        async with running(task_shutdown_graceful_timeout_ms="50") as run:
            id = await run.run(RecordingSource)
            await run.until(lambda: "startup" in run.listener.of(id))
            with structlog.testing.capture_logs() as logged:
                await run.worker.stop_tasks([id])
                await run.until(lambda: any(line["event"] == "task could not be stopped" for line in logged))
            assert run.listener.of(id) == ["startup"]
    finally:
        RecordingSourceTask.prepare = staticmethod(lambda _task: None)


async def test_a_stalled_call_is_measured() -> None:
    """The time that a task spends inside one call is measured."""
    async with running() as run:
        id = await run.run(RecordingSource)
        await run.until(lambda: run.worker.stalled_ms(id) > 20)  # its poll waits
        assert run.worker.stalled_ms(ConnectorTaskId("none", 0)) == 0


@pytest.mark.parametrize(("method", "interval_ms"), [("commit_record", "600000"), ("commit", "10")])
async def test_a_stalled_commit_is_measured(method: str, interval_ms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `commit_record` between two polls, or a `commit` beside them, that does not return is measured."""
    entered = asyncio.Event()

    async def hang(*_: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(RecordingSourceTask, method, hang)
    clock = ManualClock()
    async with running(clock, offset_flush_interval_ms=interval_ms, task_shutdown_graceful_timeout_ms="10") as run:
        id = await run.run(RecordingSource)
        await run.until(lambda: RecordingSourceTask.made)
        task = RecordingSourceTask.made[-1]
        task.batches.put_nowait([source_record("a", 1)])
        await run.until(lambda: run.worker.task_metrics()[0][2]["source_record_write_total"])
        task.batches.put_nowait(None)
        await run.until(entered.is_set)
        clock.advance(1_000)
        task.batches.put_nowait(None)
        await run.until(lambda: task.polls == (2 if method == "commit_record" else 4))
        assert run.worker._tasks[id].stalled_ms(clock.monotonic_ms()) == 1_000


async def test_a_stall_and_its_end_are_logged() -> None:
    """A call longer than `task.stall.timeout.ms` is in the metrics and the log, and so is its end."""

    def stalled() -> float:
        return run.worker.task_metrics()[0][2]["stalled"]

    with structlog.testing.capture_logs() as logged:
        async with running(task_stall_timeout_ms="100") as run:
            await run.run(RecordingSource)
            await run.until(lambda: stalled() and any("is stalled" in line["event"] for line in logged))
            RecordingSourceTask.made[-1].batches.put_nowait(None)
            await run.until(lambda: any("no longer" in line["event"] for line in logged))
    assert [line["event"] for line in logged if "stalled inside" in line["event"]] != []
