"""Tasks in processes of their own, with a worker here and the fake broker as their Kafka."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.shared.connect.connectors.file import FileStreamSinkConnector, FileStreamSourceConnector
from penstock.shared.connect.errors import ConfigError
from penstock.shared.connect.isolation.process import Processes
from penstock.shared.connect.isolation.process_task import IsolatedTasks, ProcessTask
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.worker_config import ISOLATION, WorkerConfig
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.connect.storage.offset_store import MemoryOffsetStore
from tests.shared.connect.harness import STRING, Remembering, Running, running
from tests.shared.connect.isolation.blocking import BlockingSource

ID = ConnectorTaskId("c", 0)


@asynccontextmanager
async def isolated(**settings: str) -> AsyncIterator[Running]:
    """A worker whose tasks have processes of their own."""
    async with running(**settings) as run:
        worker = run.worker
        config = WorkerConfig({**worker.config.props, ISOLATION: "process"}, resolve=worker.plugins.any_kind)
        here = TaskFactory(config, worker.plugins, worker.offsets)
        worker._make_task = IsolatedTasks(here, config, worker.plugins, worker.offsets, worker._processes)
        yield run


def task_of(run: Running) -> ProcessTask:
    task = run.worker._tasks[ID]
    assert isinstance(task, ProcessTask)
    return task


async def test_a_tasks_whole_life_in_its_process(tmp_path: Path) -> None:
    """Records reach Kafka, offsets the worker's store and metrics the worker; it pauses, goes on, and stops in order;
    the next one goes on where it stopped."""
    (tmp_path / "in").write_text("a\nb\n")
    async with isolated() as run:
        settings = {"file": str(tmp_path / "in"), "topic": "t"}
        await run.run(FileStreamSourceConnector, **settings)
        await run.until(lambda: list(run.store.data.values()) == [b'{"position":4}'])
        await run.until(lambda: run.worker.task_metrics()[0][2]["source_record_write_total"] == 2)
        assert run.listener.topics == {"t"}
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.until(lambda: run.worker.state(ID) is State.PAUSED)
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.until(lambda: run.worker.state(ID) is State.RUNNING)
        pid = task_of(run).pid
        await run.worker.stop_tasks([ID])
        assert run.listener.of(ID) == ["startup", "paused", "running", "shutdown"]
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)
        (tmp_path / "in").write_text("a\nb\nc\n")
        await run.run(FileStreamSourceConnector, **settings)
        await run.until(lambda: [record.value for record in run.cluster.records("t")] == [b"a", b"b", b"c"])


async def test_a_task_that_blocks_holds_up_itself_alone(tmp_path: Path) -> None:
    """The worker goes on and sees how long the call has taken; another task works meanwhile; what does not end in time
    is killed."""
    async with isolated(task_shutdown_graceful_timeout_ms="300") as run:
        await run.run(BlockingSource, file=str(tmp_path / "block"))
        await run.until(lambda: run.store.data)
        (tmp_path / "block").touch()
        await run.until(lambda: run.worker.stalled_ms(ID) > 1_500)
        pid = task_of(run).pid
        await run.worker.stop_tasks([ID])
        await run.until(lambda: not Path(f"/proc/{pid}").exists())
        assert run.listener.of(ID) == ["startup"]


async def test_a_process_that_is_killed_is_a_failed_task(tmp_path: Path) -> None:
    """Its end is the trace; after the back-off the task has another process and goes on."""
    async with isolated(task_restart_enable="true", task_restart_backoff_ms="10") as run:
        await run.run(FileStreamSinkConnector, file=str(tmp_path / "out"), topics="t")
        await run.until(lambda: run.worker.state(ID) is State.RUNNING)
        first = task_of(run).pid
        os.kill(first or 0, signal.SIGKILL)
        await run.until(lambda: run.listener.of(ID) == ["startup", "failure", "restart", "startup"])
        assert f"the process of task c-0 (pid {first}) was killed by SIGKILL" in run.listener.traces[0]
        assert task_of(run).pid != first


async def test_log_lines_and_levels_are_the_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What a process logs stands among the worker's lines; a level that is set holds in the next one too."""
    async with isolated() as run:
        said = ""

        def heard(text: str) -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return text in said

        await run.run(BlockingSource, file=str(tmp_path / "none"))
        await run.until(lambda: heard("the task's own line"))
        run.worker._processes.set_level("tests.shared.connect", "ERROR")
        await run.until(lambda: run.worker.state(ID) is State.RUNNING)
        await run.worker.stop_tasks([ID])
        said = ""
        await run.run(BlockingSource, file=str(tmp_path / "none"))
        await run.until(lambda: run.worker.state(ID) is State.RUNNING)
        assert not heard("the task's own line")


async def test_a_failure_has_the_trace_of_its_process(tmp_path: Path) -> None:
    """What the connector raised there, with where; also before its task could be made."""
    async with isolated() as run:
        await run.run(BlockingSource, file=str(tmp_path / "none"), fails="as it was told")
        await run.until(lambda: "failure" in run.listener.of(ID))
        assert "ValueError: as it was told" in run.listener.traces[0]
        assert "blocking.py" in run.listener.traces[0]


def test_where_tasks_run_is_the_connectors_word_before_the_workers() -> None:
    """Either of two; anything else is refused with the setting's name."""
    plugins, store = Plugins.installed(), MemoryOffsetStore()
    config = WorkerConfig({"key.converter": STRING, "value.converter": STRING}, resolve=plugins.any_kind)
    tasks = IsolatedTasks(TaskFactory(config, plugins, store), config, plugins, store, Processes(config))
    props = {"name": "c", "connector.class": "FileStreamSink", "topics": "t"}
    for where, kind in ((None, False), ("process", True), ("asyncio", False)):
        given = props if where is None else {**props, ISOLATION: where}
        made = tasks(TaskSpec(ID, given, given), Remembering())
        assert isinstance(made, ProcessTask) is kind
    with pytest.raises(ConfigError, match=ISOLATION):
        tasks(TaskSpec(ID, {**props, ISOLATION: "thread"}, props), Remembering())
