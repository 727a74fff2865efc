"""Connectors in separate processes: a worker in this process, and the fake cluster as Kafka for both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.common import child_process
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.connectors.file_stream import FileStreamSourceConnector
from penstock.shared.connect.errors import ConnectError, ConnectorNotFound, FailedThere
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.connect.isolation.isolating_worker import IsolatingWorker
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.worker_config import ISOLATION
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.testing.fake_broker import FakeCluster
from tests.shared.common.test_child_process import KILLED_AT_ONCE
from tests.shared.connect.harness import STRING, Running, StatusRecorder, Store
from tests.shared.connect.isolation.blocking import AwkwardSource, BlockingSource, HangingSource

FIRST, SECOND = ConnectorTaskId("c", 0), ConnectorTaskId("c", 1)
RESTARTED = ["startup", "failure", "restart", "startup"]
"""The events of a part whose process has ended once."""


class Isolating(Running):
    """A worker whose connectors run in separate processes."""

    worker: IsolatingWorker

    def __init__(self, cluster: FakeCluster, worker: IsolatingWorker) -> None:
        super().__init__(cluster, worker, StatusRecorder(), Store())
        self.reconfigured: list[str] = []

    def pid(self, name: str = "c") -> int:
        pid = self.worker._isolated[name].pid
        assert pid is not None
        return pid

    async def start(self, props: dict[str, str], target: TargetState = TargetState.STARTED) -> State:
        return await self.worker.start_connector(props["name"], props, target, self.listener, self.reconfigured.append)

    async def start_task(self, props: dict[str, str], id: ConnectorTaskId = FIRST) -> None:
        await self.worker.start_task(TaskSpec(id, props, props, tasks=2), TargetState.STARTED, self.listener)

    async def is_running(self, *ids: ConnectorTaskId | str) -> None:
        await self.until(lambda: all(self.worker.state(id) is State.RUNNING for id in ids))

    def offsets(self) -> list[bytes | None]:
        """The values in the offset topic, which the first task creates."""
        with contextlib.suppress(KeyError):
            return [record.value for record in self.cluster.records("offsets")]
        return []


@asynccontextmanager
async def isolating(**settings: str) -> AsyncIterator[Isolating]:
    """Run a worker. In names of settings underscores stand for dots."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        props = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "g",
            **{f"{store}.storage.topic": f"{store}s" for store in ("config", "offset", "status")},
            "offset.storage.partitions": "2",
            "offset.storage.replication.factor": "1",
            "key.converter": STRING,
            "value.converter": STRING,
            "offset.flush.interval.ms": "50",
            "task.restart.backoff.ms": "10",
            "task.shutdown.graceful.timeout.ms": "60000",
            ISOLATION: "process",
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        plugins, store = Plugins.installed(), Store()
        config = DistributedConfig(props)
        worker = IsolatingWorker(config, plugins, store, TaskFactory(config, plugins, store))
        await worker.startup()
        try:
            yield Isolating(cluster, worker)
        finally:
            await worker.shutdown()


def config(plugin: type, file: Path | None = None, name: str = "c", **more: str) -> dict[str, str]:
    return {
        "name": name,
        "connector.class": f"{plugin.__module__}.{plugin.__name__}",
        "tasks.max": "2",
        "topic": "t",
        "file": str(file),
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_a_connector_and_its_tasks_live_in_one_process(tmp_path: Path) -> None:
    """A connector and its tasks share one process, which sends records and offsets to Kafka, and states and metrics to
    the worker. They can be paused, resumed and stopped. The process ends with the last of them, and a new process
    continues from the stored offsets.
    """
    (tmp_path / "in").write_text("a\nb\n")
    props = config(FileStreamSourceConnector, tmp_path / "in")
    async with isolating(connect_files_allowed=str(tmp_path)) as run:
        assert await run.start(props) is State.RUNNING
        made = await run.worker.connector_task_configs("c", props)
        assert [task["task.class"].rpartition(".")[2] for task in made] == ["FileStreamSourceTask"]
        await run.start_task(props)
        await run.until(lambda: run.offsets() == [b'{"position":4}'])
        await run.until(lambda: run.worker.task_metrics()[0][2].get("source_record_write_total") == 2)
        assert run.listener.topics == {"t"}
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.until(lambda: run.worker.state(FIRST) is State.PAUSED)
        assert run.worker.state("c") is State.PAUSED
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.is_running("c", FIRST)
        pid = run.pid()
        await run.worker.stop_tasks([FIRST])
        assert (run.pid(), run.worker.task_ids()) == (pid, frozenset())
        await run.worker.stop_connector("c")
        assert is_gone(pid)
        assert run.worker.connector_names() == frozenset()
        for id in ("c", FIRST):
            assert run.listener.of(id) == ["startup", "paused", "running", "shutdown"]
        (tmp_path / "in").write_text("a\nb\nc\n")
        await run.start_task(props)
        await run.until(lambda: [record.value for record in run.cluster.records("t")] == [b"a", b"b", b"c"])


async def test_a_process_that_ended_is_restarted_with_all_its_work(tmp_path: Path) -> None:
    """When a process ends, its connector and tasks fail with the reason.

    After the backoff they run in a new process, and the tasks are reconfigured.
    """
    props = config(BlockingSource, tmp_path / "none")
    async with isolating() as run:
        await run.start(props)
        await run.start_task(props)
        await run.start_task(props, SECOND)
        await run.is_running(FIRST, SECOND)
        first = run.pid()
        os.kill(first, signal.SIGKILL)
        await run.until(lambda: run.listener.traces)
        await run.is_running("c", FIRST, SECOND)
        assert run.pid() != first
        for id in ("c", FIRST, SECOND):
            assert run.listener.of(id) == RESTARTED
        assert all(f"connector c (pid {first})" in trace for trace in run.listener.traces)
        assert run.reconfigured == ["c"]


async def test_starting_a_task_restarts_its_failed_connector(tmp_path: Path) -> None:
    """Starting a task of a failed process also restarts its connector, without the backoff and
    with automatic restarts disabled. The end of the process is detected even if a forked child keeps the link open.
    """
    props = config(AwkwardSource, tmp_path / "go", start_does="fork")
    task = {**props, "file": str(tmp_path / "none")}
    async with isolating(task_restart_enable="false") as run:
        try:
            assert await run.start(props) is State.RUNNING
            await run.start_task(task)
            await run.is_running(FIRST)
            os.kill(run.pid(), signal.SIGKILL)
            await run.until(lambda: len(run.listener.traces) == 2)
            assert run.worker.state("c") is State.FAILED
            assert all("SIGKILL" in trace for trace in run.listener.traces)
            await run.worker.stop_tasks([FIRST])
            await run.start_task(task)
            await run.is_running("c", FIRST)
            assert run.worker.is_constructed(FIRST)
            assert run.listener.of("c") == RESTARTED
            assert run.listener.of(FIRST) == ["startup", "failure", "startup"]
        finally:
            (tmp_path / "go").touch()


async def test_a_process_that_does_not_stop_its_work_is_killed(tmp_path: Path) -> None:
    """A process whose task does not stop in time is killed, and the rest of its work is restarted.

    The task blocks the event loop or its own thread. The worker measures the stall, and other connectors keep running.
    """
    async with isolating(task_shutdown_graceful_timeout_ms="2000", task_stall_timeout_ms="1000") as run:
        for name, plugin in {"loop": BlockingSource, "thread": HangingSource}.items():
            props = config(plugin, tmp_path / name, name=name)
            await run.start(props)
            await run.start_task(props, ConnectorTaskId(name, 0))
        await run.is_running("loop", "thread", *run.worker.task_ids())
        for name, other in (("loop", "thread"), ("thread", "loop")):
            task, first, seen = ConnectorTaskId(name, 0), run.pid(name), run.listener.of(other)
            (tmp_path / name).touch()
            await run.until(lambda task=task: run.worker.stalled_ms(task) > 1_500)
            assert [values["stalled"] for id, _, values in run.worker.task_metrics() if id == task] == [1]
            await run.worker.stop_tasks([task])
            assert is_gone(first)
            (tmp_path / name).unlink()
            assert run.listener.of(task) == ["startup"]
            await run.until(lambda name=name: run.listener.of(name) == RESTARTED)
            assert run.listener.of(other) == seen


async def test_a_shutdown_ends_a_process_after_a_cancelled_stop(tmp_path: Path) -> None:
    """After a cancelled stop the worker's shutdown ends the process."""
    props = config(BlockingSource, tmp_path / "block")
    async with isolating() as run:
        await run.start_task(props)
        await run.is_running(FIRST)
        pid = run.pid()
        (tmp_path / "block").touch()
        await run.until(lambda: run.worker.stalled_ms(FIRST) > 1_500)
        stopping = asyncio.ensure_future(run.worker.stop_tasks([FIRST]))
        await run.until(lambda: not run.worker.task_ids())
        stopping.cancel()
        await asyncio.wait([stopping])
        assert not is_gone(pid)
        await run.worker.shutdown()
        assert is_gone(pid)


async def test_calls_that_block_end_with_a_stop(tmp_path: Path) -> None:
    """A stop kills the process of a blocked call.

    The caller of a start gets FAILED, and the callers of pending requests get ConnectorNotFound. Other connectors start
    meanwhile.
    """
    props = config(AwkwardSource, tmp_path / "never", start_does="block")
    other = config(AwkwardSource, tmp_path / "never", name="d", configs_does="block")
    async with isolating(task_shutdown_graceful_timeout_ms="300") as run:
        blocked = asyncio.ensure_future(run.start(props))
        assert await run.start(other) is State.RUNNING
        assert not blocked.done()
        pid = run.pid()
        await run.worker.stop_connector("c")
        assert is_gone(pid)
        assert await blocked is State.FAILED
        assert run.listener.of("c") == []
        waiting = asyncio.ensure_future(run.worker.connector_task_configs("d", other))
        await asyncio.sleep(0)
        await run.worker.stop_connector("d")
        with pytest.raises(ConnectorNotFound):
            await waiting
        with pytest.raises(ConnectorNotFound):
            await run.worker.connector_task_configs("d", other)


async def test_a_start_that_ends_the_process_is_retried(tmp_path: Path) -> None:
    """If a connector ends its process, the start fails with the exit status and is retried; then the tasks are
    configured.
    """
    (tmp_path / "leave").touch()
    props = config(AwkwardSource, tmp_path / "leave", start_does="leave while")
    async with isolating() as run:
        assert await run.start(props) is State.FAILED
        assert "ended, exit status 4" in run.listener.traces[0]
        (tmp_path / "leave").unlink()
        await run.is_running("c")
        assert run.listener.of("c")[-1] == "startup"
        assert run.reconfigured == ["c"]


async def test_a_start_whose_guard_is_killed_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the guard is killed before it has reported the process id, the connector fails and is restarted."""
    async with isolating(connect_files_allowed=str(tmp_path)) as run:
        with monkeypatch.context() as changed:
            changed.setattr(child_process, "_GUARD_COMMAND", KILLED_AT_ONCE)
            async with asyncio.timeout(60):
                assert await run.start(config(FileStreamSourceConnector, tmp_path / "in")) is State.FAILED
        assert "SIGKILL" in run.listener.traces[0]
        await run.is_running("c")
        assert run.reconfigured == ["c"]


async def test_requests_and_errors_of_a_connector_reach_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconfiguration requests and errors with their traces reach the worker, without secrets.

    A failed task is restarted in its process, which SystemExit in a callback does not end.
    """
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "s3cret-value")
    async with isolating(config_providers="env") as run:
        secret = "${env:PENSTOCK_TEST_SECRET}"
        assert await run.start(config(AwkwardSource, start_does="fail", secret=secret)) is State.FAILED
        trace = run.listener.traces.pop()
        assert f"ValueError: start with {secret}" in trace
        assert "blocking.py" in trace
        does = {"start_does": "leave and ask", "configs_does": "raise", "fails": "as it was configured"}
        props = config(AwkwardSource, None, "a", **does)
        await run.start(props)
        await run.until(lambda: run.reconfigured == ["a"])
        task, pid = ConnectorTaskId("a", 0), run.pid("a")
        await run.start_task(props, task)
        await run.until(lambda: run.listener.of(task)[:3] == ["failure", "restart", "failure"])
        assert "ValueError: as it was configured" in run.listener.traces[0]
        assert run.pid("a") == pid
        await run.worker.stop_tasks([task])
        await run.worker.connector_task_configs("a", props)
        await run.until(lambda: run.worker.state("a") is State.FAILED)
        assert run.listener.traces[-1] == "ValueError: by itself"


async def test_a_variable_that_cannot_be_resolved_is_a_failure(tmp_path: Path) -> None:
    """A variable that cannot be resolved fails the connector and its task, also in the isolation setting."""
    props = config(BlockingSource, penstock_task_isolation=f"${{file:{tmp_path / 'missing'}:x}}")
    async with isolating(config_providers="file") as run:
        assert await run.start(props) is State.FAILED
        await run.start_task(props)
        assert [trace.count("missing") for trace in run.listener.traces] == [1, 1]


async def test_log_lines_and_levels_are_the_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process' log lines are in the worker's log, and levels apply to current and later processes."""
    props = config(BlockingSource, tmp_path / "none")
    async with isolating() as run:
        message = ""

        def heard(text: str) -> bool:
            nonlocal message
            message += capfd.readouterr().err
            return text in message

        await run.start(props)
        await run.start_task(props)
        await run.until(lambda: heard("the task's own line"))
        run.worker.set_level("tests.shared.connect", "ERROR")
        for ids in ([FIRST], [FIRST, "c"]):  # in the same process, and in another
            await run.worker.stop_tasks([FIRST])
            if "c" in ids:
                await run.worker.stop_connector("c")
            message = ""
            await run.start_task(props)
            await run.is_running(FIRST)
            assert not heard("the task's own line")


async def test_validation_and_offset_changes_run_in_a_process() -> None:
    """Validating a config and altering offsets run in a process, whose errors and exits are
    the caller's errors alone.
    """
    async with isolating() as run:
        infos = await run.worker.validate(config(AwkwardSource))
        [own] = [row["value"] for row in infos.configs if row["value"]["name"] == "file"]
        assert own["errors"][0].startswith("seen by process ")
        assert own["errors"] != [f"seen by process {os.getpid()}"]
        rows: list[Any] = [({"a": 1}, None)]
        with pytest.raises(FailedThere, match="alter with None"):
            await run.worker.alter_offsets(config(AwkwardSource, alter_does="fail"), rows)
        with pytest.raises(ConnectError, match="ended, exit status 3"):
            await run.worker.alter_offsets(config(AwkwardSource, alter_does="exit"), rows)
        sink = {**config(AwkwardSource), "connector.class": "FileStreamSink"}
        assert await run.worker.alter_offsets(sink, {TopicPartition("t", 0): 7})
        assert run.listener.events == []


async def test_a_connectors_setting_overrides_the_workers(tmp_path: Path) -> None:
    """A connector's isolation setting overrides the worker's."""
    async with isolating() as run:
        props = config(BlockingSource, tmp_path / "none", penstock_task_isolation="asyncio")
        assert await run.start(props) is State.RUNNING
        await run.start_task(props)
        await run.is_running(FIRST)
        assert run.worker._isolated == {}
        assert (run.worker.connector_names(), run.worker.task_ids()) == ({"c"}, {FIRST})
        await run.worker.stop_tasks([FIRST])
