"""The worker starts connectors and tasks, follows their target states, and restarts failed tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import structlog

from penstock.shared.connect.config_def import ConfigDef, Importance, Type
from penstock.shared.connect.connector import Connector
from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector
from penstock.shared.connect.errors import BadRequest, ConnectError, ConnectorNotFound, TooManyTasks
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.worker_task import TaskSpec
from tests.shared.connect.harness import (
    Mute,
    RecordingSink,
    RecordingSinkTask,
    RecordingSource,
    RecordingSourceTask,
    Running,
    running,
    turns,
)
from tests.virtual_time import let_pass

SINK = {"name": "s", "connector.class": "FileStreamSink", "topics": "t", "file": "${env:HOME}/out", "tasks.max": "2"}


async def start(run: Running, kind: type[Connector]) -> dict[str, str]:
    """Starts the connector "s" of a class, and returns its config."""
    run.worker.plugins.add(kind, kind.__name__)
    config = {**SINK, "connector.class": kind.__name__}
    await run.worker.start_connector("s", config, TargetState.STARTED, run.listener)
    return config


async def test_task_configs_keep_their_variables() -> None:
    """Task configs keep the variables of the connector's config unresolved, with the task's class and topics."""
    async with running(config_providers="env") as run:
        assert await run.worker.start_connector("s", SINK, TargetState.STARTED, run.listener) is State.RUNNING
        configs = await run.worker.connector_task_configs("s", SINK)
        assert configs == [{**SINK, "task.class": "org.apache.kafka.connect.file.FileStreamSinkTask"}] * 2


async def test_task_configs_keep_a_variable_whose_value_has_changed(tmp_path: Path) -> None:
    """Task configs have the variable, not the old secret, if its file has changed since the connector started."""
    config = {**SINK, "file": f"${{dir:{tmp_path}:path}}"}
    (tmp_path / "path").write_text("old")
    async with running(config_providers="dir") as run:
        await run.worker.start_connector("s", config, TargetState.STARTED, run.listener)
        (tmp_path / "path").write_text("new")
        configs = await run.worker.connector_task_configs("s", config)
        assert [task["file"] for task in configs] == [config["file"]] * 2


async def test_values_of_task_configs_become_texts() -> None:
    """Tasks get texts, whatever the connector returns. A value without a JSON form is an error with its name."""
    made: dict[str, Any] = {"shard": 1, "is_last": True, "filter": None, "tables": ["a", "b"], "id": UUID(int=5)}

    class Sharded(FileStreamSinkConnector):
        async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
            return [made] if made else None  # type: ignore[return-value]

    async with running() as run:
        config = await start(run, Sharded)
        (task,) = await run.worker.connector_task_configs("s", config)
        expected = {"shard": "1", "is_last": "true", "tables": '["a","b"]', "id": str(UUID(int=5))}
        assert {name: task[name] for name in made if name in task} == expected
        made["filter"] = Path("x")
        with pytest.raises(BadRequest, match="filter"):
            await run.worker.connector_task_configs("s", config)
        made.clear()
        with pytest.raises(ConnectError, match="must return a list, and not NoneType"):
            await run.worker.connector_task_configs("s", config)


async def test_more_tasks_than_tasks_max_are_an_error() -> None:
    """More tasks than `tasks.max` are an error by default."""

    class Many(FileStreamSinkConnector):
        async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
            return [self.props] * (max_tasks + 1)

    async with running() as run:
        config = await start(run, Many)
        with pytest.raises(TooManyTasks, match="greater than 2"):
            await run.worker.connector_task_configs("s", config)
        id = ConnectorTaskId("s", 2)
        assert not await run.worker.start_task(TaskSpec(id, SINK, SINK, tasks=3), TargetState.STARTED, run.listener)
        assert run.listener.of(id) == ["failure"]


async def test_task_configs_of_a_replaced_connector_are_not_used() -> None:
    """Task configs that a connector returns after another instance has replaced it are not used."""
    asked, gate = asyncio.Event(), asyncio.Event()

    class Slow(FileStreamSinkConnector):
        async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
            asked.set()
            await gate.wait()
            return [self.props]

    async with running() as run:
        config = await start(run, Slow)
        asking = asyncio.create_task(run.worker.connector_task_configs("s", config))
        await asked.wait()
        await run.worker.stop_connector("s")
        await run.worker.start_connector("s", config, TargetState.STARTED, run.listener)
        gate.set()
        with pytest.raises(ConnectorNotFound):
            await asking


async def test_a_connector_is_asked_for_task_configs_once_at_a_time() -> None:
    """Calls of `async def task_configs` do not overlap, so that an older answer cannot replace a newer one."""
    calls, gate = list[int](), asyncio.Event()

    class Slow(FileStreamSinkConnector):
        async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
            calls.append(len(calls))
            await gate.wait()
            return [self.props]

    async with running() as run:
        config = await start(run, Slow)
        async with asyncio.TaskGroup() as asking:
            for _ in range(2):
                asking.create_task(run.worker.connector_task_configs("s", config))
            await turns()
            assert calls == [0]
            gate.set()
        assert calls == [0, 1]


@pytest.mark.parametrize("paused", [True, False])
async def test_a_connector_is_not_asked_for_task_configs_after_its_stop(paused: bool) -> None:
    """A request for task configs that waits for an earlier one ends if the connector is paused or stopped meanwhile."""
    calls, gate = list[int](), threading.Event()

    class Slow(FileStreamSinkConnector):
        def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
            calls.append(len(calls))
            assert gate.wait(60)
            return [self.props]

    async with running() as run:
        config = await start(run, Slow)
        asking = [asyncio.create_task(run.worker.connector_task_configs("s", config)) for _ in range(4)]
        await run.until(lambda: calls)
        ending = run.worker.set_target_state("s", TargetState.PAUSED) if paused else run.worker.stop_connector("s")
        stopping = asyncio.create_task(ending)
        await turns()
        gate.set()
        await stopping
        await run.until(lambda: all(one.done() for one in asking))
        _, *waited = [one.exception() for one in asking]
        assert (calls, {type(error) for error in waited}) == ([0], {ConnectorNotFound})


async def test_tasks_max_may_be_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tasks.max` and `tasks.max.enforce` are resolved before a task is compared with them."""
    monkeypatch.setenv("PENSTOCK_TEST_TASKS", "2")
    monkeypatch.setenv("PENSTOCK_TEST_ENFORCE", "true")
    config = {**SINK, "tasks.max": "${env:PENSTOCK_TEST_TASKS}", "tasks.max.enforce": "${env:PENSTOCK_TEST_ENFORCE}"}
    async with running(config_providers="env") as run:
        for tasks, begins in ((2, True), (3, False)):
            spec = TaskSpec(ConnectorTaskId("s", tasks), config, config, tasks=tasks)
            assert await run.worker.start_task(spec, TargetState.STARTED, run.listener) is begins
        assert "greater than 2" in run.listener.traces[0]


async def test_connectors_follow_their_target() -> None:
    """A connector follows its target state; one with an unknown class fails."""
    async with running() as run:
        await run.worker.start_connector("s", SINK, TargetState.PAUSED, run.listener)
        for target in (TargetState.STARTED, TargetState.STOPPED, TargetState.STARTED):
            await run.worker.set_target_state("s", target)
        await run.worker.stop_connector("s")
        assert run.listener.of("s") == ["paused", "running", "stopped", "running", "shutdown"]
        missing = {"connector.class": "no.Such"}
        assert await run.worker.start_connector("x", missing, TargetState.STARTED, run.listener) is State.FAILED
        assert run.listener.of("x") == ["failure"]
        assert run.worker.connector_names() == frozenset()


async def test_a_task_fails_with_an_error_without_text() -> None:
    """A task fails, and is shown as FAILED, also if the text of its error cannot be had."""
    async with running() as run:
        id = await run.run(RecordingSource)
        await run.until(lambda: RecordingSourceTask.made and RecordingSourceTask.made[0].calls)
        RecordingSourceTask.made[0].batches.put_nowait(Mute())
        await run.until(lambda: run.worker.state(id) is State.FAILED)
        assert run.listener.of(id) == ["startup", "failure"]
        assert "Mute" in run.listener.traces[0]


async def test_an_error_of_stop_does_not_replace_the_error_of_start() -> None:
    """If `stop` raises because `start` has failed, the task's trace has the error of `start`."""

    def fail(made: RecordingSinkTask) -> None:
        made.raising = {"start": [ValueError("wrong password")], "stop": [AttributeError("no connection")]}

    RecordingSinkTask.prepare = staticmethod(fail)
    try:
        async with running() as run:
            id = await run.run(RecordingSink, topics="t")
            await run.until(lambda: "failure" in run.listener.of(id))
            assert "wrong password" in run.listener.traces[0]
            assert "no connection" not in run.listener.traces[0]
    finally:
        RecordingSinkTask.prepare = staticmethod(lambda _task: None)


async def test_an_error_of_stop_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task whose `stop` raises ends in order. The error is logged without secrets."""
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "s3cret-value")

    def fail(made: RecordingSinkTask) -> None:
        made.raising = {"stop": [ValueError("cannot log out with s3cret-value")]}

    RecordingSinkTask.prepare = staticmethod(fail)
    try:
        async with running(config_providers="env") as run:
            id = await run.run(RecordingSink, topics="t", password="${env:PENSTOCK_TEST_SECRET}")
            await run.until(lambda: run.listener.of(id) == ["startup"])
            with structlog.testing.capture_logs() as logged:
                await run.worker.stop_tasks([id])
            assert run.listener.of(id) == ["startup", "shutdown"]
            (line,) = [line for line in logged if line["event"] == "task could not be stopped"]
            assert line["error"] == "ValueError: cannot log out with ${env:PENSTOCK_TEST_SECRET}"
    finally:
        RecordingSinkTask.prepare = staticmethod(lambda _task: None)


async def test_a_task_cannot_be_made_with_an_error_without_text() -> None:
    """The failure of a task that cannot be made is reported, also if the text of its error cannot be had."""

    def fail(_task: RecordingSourceTask) -> None:
        raise Mute

    RecordingSourceTask.prepare = staticmethod(fail)
    try:
        async with running() as run:
            assert run.listener.of(await run.run(RecordingSource)) == ["failure"]
    finally:
        RecordingSourceTask.prepare = staticmethod(lambda _task: None)


async def test_a_failed_task_is_restarted() -> None:
    """A failed task is restarted after its backoff with a new instance."""
    async with running(task_restart_enable="true", task_restart_backoff_ms="10") as run:
        id = await run.run(RecordingSource)
        await run.until(lambda: RecordingSourceTask.made and RecordingSourceTask.made[0].calls)
        RecordingSourceTask.made[0].batches.put_nowait(ValueError("broken"))
        await run.until(lambda: run.listener.of(id) == ["startup", "failure", "restart", "startup"])
        assert len(RecordingSourceTask.made) == 2
        assert run.worker.state(id) is State.RUNNING


async def test_failed_restarts_are_retried_with_rising_backoff() -> None:
    """A restart that fails is logged and retried after a rising backoff until it succeeds."""

    def missing(_made: RecordingSourceTask) -> None:
        if len(RecordingSourceTask.made) in (2, 3):
            raise FileNotFoundError("secret.properties")

    RecordingSourceTask.prepare = staticmethod(missing)
    try:
        with structlog.testing.capture_logs() as logged:
            async with running(task_restart_enable="true", task_restart_backoff_ms="10") as run:
                id = await run.run(RecordingSource)
                await run.until(lambda: RecordingSourceTask.made and RecordingSourceTask.made[0].calls)
                RecordingSourceTask.made[0].batches.put_nowait(ValueError("broken"))
                await run.until(lambda: run.worker.state(id) is State.RUNNING and len(RecordingSourceTask.made) == 4)
                await run.until(lambda: run.listener.of(id)[-1] == "startup")
                assert run.listener.of(id) == ["startup", *["failure", "restart"] * 3, "startup"]
        assert [line["in_ms"] for line in logged if line["event"] == "task will be restarted"] == [10, 20, 40]
    finally:
        RecordingSourceTask.prepare = staticmethod(lambda _task: None)


async def test_a_task_that_cannot_be_made_is_tried_again() -> None:
    """A task that cannot be made at its first start is on the worker as FAILED, and is made after the backoff, until it
    is stopped."""

    def missing(_made: RecordingSourceTask) -> None:
        if len(RecordingSourceTask.made) < 3:
            raise FileNotFoundError("secret.properties")

    RecordingSourceTask.prepare = staticmethod(missing)
    try:
        async with running(task_restart_enable="true", task_restart_backoff_ms="10") as run:
            id = await run.run(RecordingSource)
            assert (run.worker.task_ids(), run.worker.state(id)) == ({id}, State.FAILED)
            await run.until(lambda: run.listener.of(id) == [*["failure", "restart"] * 2, "startup"])
            assert run.worker.state(id) is State.RUNNING
        async with running(task_restart_enable="true", task_restart_backoff_ms="10") as run:
            id = await run.run(RecordingSource)
            await run.worker.stop_tasks([id])
            assert (run.worker.task_ids(), run.worker.state(id)) == (frozenset(), None)
            await let_pass(0.05)
            assert run.listener.of(id) == ["failure"]
    finally:
        RecordingSourceTask.prepare = staticmethod(lambda _task: None)


async def test_errors_contain_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and logs contain variables instead of their secret values."""
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "s3cret-value")

    class Telling(FileStreamSinkConnector):
        async def start(self, props: Mapping[str, str]) -> None:
            raise ValueError(f"cannot log in with {props['file']}")

    async with running(config_providers="env") as run:
        run.worker.plugins.add(Telling, "Telling")
        config = {**SINK, "connector.class": "Telling", "file": "${env:PENSTOCK_TEST_SECRET}"}
        with structlog.testing.capture_logs() as logs:
            await run.worker.start_connector("t", config, TargetState.STARTED, run.listener)
            props = {**config, "tasks.max": "${env:PENSTOCK_TEST_SECRET}"}
            spec = TaskSpec(ConnectorTaskId("t", 0), {**props, "connector.class": "FileStreamSink"}, props)
            assert not await run.worker.start_task(spec, TargetState.STARTED, run.listener)
        assert len(run.listener.traces) == 2
        assert "cannot log in with ${env:PENSTOCK_TEST_SECRET}" in run.listener.traces[0]
        assert "s3cret-value" not in str(run.listener.traces) + str(logs)


async def test_errors_contain_no_value_of_a_password() -> None:
    """Traces and logs contain no value of a setting of type PASSWORD, whatever its name. This holds for the errors of a
    connector, of a task that cannot be made, and of a task that fails."""

    class TellingTask(RecordingSinkTask):
        async def start(self, props: Mapping[str, str]) -> None:
            raise ValueError(f"the task cannot log in with {props['sftp.passphrase']}")

    class TellingSink(RecordingSink):
        task_class = TellingTask

        @classmethod
        def config(cls) -> ConfigDef:
            return ConfigDef().define("sftp.passphrase", Type.PASSWORD, None, Importance.HIGH, "Opens the key.")

        async def start(self, props: Mapping[str, str]) -> None:
            raise ValueError(f"the connector cannot log in with {props['sftp.passphrase']}")

    async with running() as run:
        run.worker.plugins.add(TellingSink, "TellingSink")
        config = {**SINK, "connector.class": "TellingSink", "sftp.passphrase": "0pen-sesame"}
        with structlog.testing.capture_logs() as logs:
            await run.worker.start_connector("t", config, TargetState.STARTED, run.listener)
            for number, task_config in enumerate([{**config, "tasks.max": "0pen-sesame"}, config]):
                spec = TaskSpec(ConnectorTaskId("t", number), task_config, task_config)
                await run.worker.start_task(spec, TargetState.STARTED, run.listener)
            await run.until(lambda: len(run.listener.traces) == 3)
        assert all("[hidden]" in trace for trace in run.listener.traces)
        assert "0pen-sesame" not in str(run.listener.traces) + str(logs)
