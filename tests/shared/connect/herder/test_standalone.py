"""The standalone herder over a real worker, with connectors of the tests."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.config_def import ConfigDef, ConfigValue, Importance, Type
from penstock.shared.connect.connector import Props, SourceConnector
from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector
from penstock.shared.connect.errors import BadRequest, ConnectError, ConnectorNotFound
from penstock.shared.connect.herder.base_herder import BaseHerder, Stores
from penstock.shared.connect.herder.errors import AlreadyExists
from penstock.shared.connect.herder.standalone import StandaloneHerder
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State, TargetState
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.runtime.worker_config import StandaloneConfig
from penstock.shared.connect.runtime.worker_task import TaskSpec, WorkerTask
from penstock.shared.connect.storage.config_records import RestartRequest
from penstock.shared.connect.storage.config_store import ConfigStore
from penstock.shared.connect.storage.offset_store import MemoryOffsetStore
from penstock.shared.connect.storage.status_store import StatusStore
from penstock.shared.connect.task import SourceTask
from penstock.shared.testing.manual_clock import ManualClock
from tests.virtual_time import let_pass

CONVERTER = "org.apache.kafka.connect.json.JsonConverter"
LIMIT_S = 60


class Idle(SourceTask):
    """Reads nothing."""

    async def start(self, props: Props) -> None: ...

    async def poll(self) -> None: ...

    async def stop(self) -> None: ...


validating, going = threading.Event(), threading.Event()
"""`validating` is set when a slow validation begins; it ends once `going` is set."""


class MultiTaskSource(SourceConnector):
    """A source with `tasks.max` tasks; with the setting `fails` its start fails."""

    task_class = Idle

    async def start(self, props: Props) -> None:
        self.props = dict(props)
        if "fails" in props:
            raise RuntimeError("on purpose")

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        return [{"number": str(n), "word": self.props.get("word", "")} for n in range(max_tasks)]

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef().define("phrase", Type.PASSWORD, None, Importance.LOW, "A password.")

    def validate(self, props: Props) -> list[ConfigValue]:
        if "slow" in props:
            validating.set()
            assert going.wait(60)
        if "unreachable" in props:
            raise TimeoutError("db")
        if "confused" in props:
            raise KeyError(props["confused"])
        return []

    async def alter_offsets(self, props: Props, offsets: object) -> bool:
        if "offsets" in props:
            raise TimeoutError(props["offsets"])
        return True


class NoOpWorkerTask(WorkerTask):
    """A task that runs, pauses and ends, and processes nothing."""

    def __init__(self, spec: TaskSpec, listener: StatusListener) -> None:
        super().__init__(spec.id, listener, TaskMetrics("source"), ManualClock())

    async def _start_task(self) -> None: ...

    async def _execute_task(self) -> None:
        paused = self.should_pause
        while not self.stopping:
            await self._changed.wait()
            self._changed.clear()
            if not self.stopping and paused != self.should_pause:
                paused = self.should_pause
                self.moved(Event.PAUSED if paused else Event.RUNNING)

    async def _close_task(self) -> None: ...

    def stalled_ms(self, now_ms: int) -> int:
        return 0


@contextlib.asynccontextmanager
async def running_herder(**more: str) -> AsyncIterator[tuple[StandaloneHerder, list[str]]]:
    """Run a herder, and yield it with the list of created tasks. `more` are worker settings with `_` for `.`."""
    props = {"key.converter": CONVERTER, "value.converter": CONVERTER, "offset.storage.file.filename": "unused"}
    props |= {"config.providers": "env", **{name.replace("_", "."): value for name, value in more.items()}}
    config, made = StandaloneConfig(props), list[str]()

    def make(spec: TaskSpec, listener: StatusListener) -> WorkerTask:
        made.append(f"{spec.id}:{spec.task_config['word']}")
        return NoOpWorkerTask(spec, listener)

    stores = Stores(ConfigStore(lambda _: None), StatusStore(), MemoryOffsetStore())
    worker = Worker(config, Plugins([("Divided", MultiTaskSource)]), stores.offsets, make)
    herder = StandaloneHerder(worker, Admin(KafkaSettings()), stores, "me:8083")
    await herder.startup()
    working = asyncio.ensure_future(herder.main_loop())
    try:
        yield herder, made
    finally:
        working.cancel()
        await asyncio.wait([working])
        await herder.shutdown()


async def until(holds: Callable[[], object]) -> None:
    """Run the herders until a condition holds. Tasks start in threads, so turns of the event loop are not counted."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with contextlib.suppress(ConnectorNotFound):
                if holds():
                    return
            await let_pass(0.005)


def states(herder: StandaloneHerder) -> list[str]:
    shown = herder.connector_status("c")
    return [part["state"] for part in (shown["connector"], *shown["tasks"])]


def config(**more: str) -> dict[str, str]:
    return {"name": "c", "connector.class": "Divided", "tasks.max": "2", **more}


async def test_a_connector_runs_with_its_tasks() -> None:
    """A connector runs with its tasks; creating it a second time is an error."""
    async with running_herder() as (herder, made):
        created, info = await herder.put_connector("c", config(), replace=False)
        assert (created, info["tasks"], info["type"]) == (True, [], "source")
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        with pytest.raises(AlreadyExists):
            await herder.put_connector("c", config(), replace=False)
        assert made == ["c-0:", "c-1:"]
        assert herder.startup_metrics()["task_startup_success_total"] == 2.0
        assert await herder.is_healthy()


async def test_tasks_are_replaced_only_where_they_differ() -> None:
    """More tasks are added to running ones, another config replaces all, and fewer tasks stop the rest."""
    async with running_herder() as (herder, made):
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        await herder.put_connector("c", config(**{"tasks.max": "3"}), replace=True)
        await until(lambda: states(herder) == ["RUNNING"] * 4)
        assert made == ["c-0:", "c-1:", "c-2:"]
        await herder.patch_connector("c", {"word": "x", "tasks.max": "1"})
        await until(lambda: made[-1] == "c-0:x" and states(herder) == ["RUNNING"] * 2)
        assert herder.worker.task_ids() == {ConnectorTaskId("c", 0)}


async def test_pause_stop_resume() -> None:
    """A paused connector keeps its tasks, a stopped one has none, and a resumed one has them again."""
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        await herder.set_target_state("c", TargetState.PAUSED)
        await until(lambda: states(herder) == ["PAUSED"] * 3)
        await herder.set_target_state("c", TargetState.STOPPED)
        await until(lambda: states(herder) == ["STOPPED"])
        assert herder.task_infos("c") == []
        await herder.set_target_state("c", TargetState.STARTED)
        await until(lambda: states(herder) == ["RUNNING"] * 3)


async def test_a_connector_resumed_while_it_stops_has_its_tasks_again() -> None:
    """A connector that is resumed before its `stop` has returned starts again, with its tasks."""
    may_stop = asyncio.Event()

    async def stop() -> None:
        await may_stop.wait()

    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        herder.worker._connectors["c"].connector.stop = stop  # type: ignore[method-assign]
        await herder.set_target_state("c", TargetState.STOPPED)
        await herder.set_target_state("c", TargetState.STARTED)
        assert herder.task_infos("c") == []
        may_stop.set()
        await until(lambda: states(herder) == ["RUNNING"] * 3)


async def test_a_connector_that_fails_can_be_restarted() -> None:
    """A failed connector's status has the trace. A restart that fails again is an error, as in Kafka Connect. After a
    config change the connector runs.
    """
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(fails="1"), replace=False)
        await until(lambda: states(herder) == ["FAILED"])
        assert "on purpose" in herder.connector_status("c")["connector"]["trace"]
        with pytest.raises(ConnectError, match="Failed to start connector: c"):
            await herder.restart_connector("c")
        assert states(herder) == ["FAILED"]
        await herder.patch_connector("c", {"fails": None})
        await until(lambda: states(herder) == ["RUNNING"] * 3)


async def test_a_restart_of_a_task_that_cannot_be_created_is_an_error() -> None:
    """The restart of a task that then cannot be created is an error, as in Kafka Connect."""
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)

        def fail(spec: TaskSpec, listener: StatusListener) -> WorkerTask:
            raise RuntimeError("on purpose")

        herder.worker._make_task = fail
        with pytest.raises(ConnectError, match="Failed to start task: c-1"):
            await herder.restart_task(ConnectorTaskId("c", 1))
        assert states(herder) == ["RUNNING", "RUNNING", "FAILED"]


async def test_an_error_of_task_configs_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """If `task_configs` raises an error, the connector stays RUNNING and `task_configs` is called again."""
    monkeypatch.setattr(BaseHerder, "_retry_backoff", ExponentialBackoff(0, 0))
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        errors, seen, connector = (
            [ConnectError("no tables")],
            list[list[str]](),
            herder.worker._connectors["c"].connector,
        )

        async def task_configs(max_tasks: int) -> list[dict[str, str]]:
            if errors:
                raise errors.pop()
            seen.append(states(herder))
            return [{"word": ""}]

        connector.task_configs = task_configs  # type: ignore[method-assign]
        connector.context.request_task_reconfiguration()
        await until(lambda: states(herder) == ["RUNNING"] * 2)
        assert seen == [["RUNNING"] * 3]


async def test_one_retry_of_task_configs_waits_for_each_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a connector requests new task configs while they fail, one retry waits: the earliest."""
    monkeypatch.setattr(BaseHerder, "_retry_backoff", ExponentialBackoff(600_000, 600_000))
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        calls, connector = list[int](), herder.worker._connectors["c"].connector

        async def task_configs(max_tasks: int) -> list[dict[str, str]]:
            calls.append(max_tasks)
            if len(calls) < 5:
                raise ConnectError("no tables")
            return [{"word": ""}]

        connector.task_configs = task_configs  # type: ignore[method-assign]
        for _ in range(3):
            connector.context.request_task_reconfiguration()
        await until(lambda: len(calls) == 3 and not herder._runner._beside)
        assert len(herder._commands) == 1
        monkeypatch.setattr(BaseHerder, "_retry_backoff", ExponentialBackoff(0, 0))
        connector.context.request_task_reconfiguration()
        await until(lambda: states(herder) == ["RUNNING"] * 2)
        assert len(calls) == 5


async def test_a_task_that_could_not_be_created_leaves_nothing() -> None:
    """The status of a task that could not be created is removed when the connector has fewer tasks. Its config is not
    kept."""
    async with running_herder() as (herder, _):
        make = herder.worker._make_task

        def fail_second(spec: TaskSpec, listener: StatusListener) -> WorkerTask:
            if spec.id.task == 1:
                raise RuntimeError("on purpose")
            return make(spec, listener)

        herder.worker._make_task = fail_second
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING", "RUNNING", "FAILED"])
        await herder.set_target_state("c", TargetState.STOPPED)
        await until(lambda: states(herder) == ["STOPPED"])
        assert herder._runner._specs == {}


async def test_a_task_is_outdated_until_it_can_be_created() -> None:
    """A task that cannot be created starts with the next task configs, even the same ones. Once it is created, it does
    not.
    """
    async with running_herder(task_restart_backoff_ms="10") as (herder, _):
        task, make, error = ConnectorTaskId("c", 0), herder.worker._make_task, [RuntimeError("on purpose")]

        def fail(spec: TaskSpec, listener: StatusListener) -> WorkerTask:
            if error and spec.id == task:
                raise error[0]
            return make(spec, listener)

        herder.worker._make_task = fail
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING", "FAILED", "RUNNING"])
        assert herder._runner.outdated([task], whole_sets=False) == {task}
        error.clear()
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        assert herder._runner.outdated([task], whole_sets=False) == set()


async def test_restarts_apply_to_the_named_instances() -> None:
    """One task, all tasks or failed ones are restarted; unknown names are errors with Kafka Connect's messages."""
    async with running_herder() as (herder, made):
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        await herder.restart_task(ConnectorTaskId("c", 1))
        assert made[2:] == ["c-1:"]
        shown = await herder.restart(RestartRequest("c", only_failed=True, include_tasks=True))
        assert shown["connector"]["state"] == State.RUNNING.value
        shown = await herder.restart(RestartRequest("c", only_failed=False, include_tasks=True))
        assert [task["state"] for task in shown["tasks"]] == ["RESTARTING", "RESTARTING"]
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        assert made[3:] == ["c-0:", "c-1:"]
        for missing, message in (
            (herder.restart_task(ConnectorTaskId("c", 9)), "Unknown task: c-9"),
            (herder.restart_task(ConnectorTaskId("x", 0)), "Unknown connector: x"),
            (herder.restart_connector("x"), "Unknown connector: x"),
            (herder.set_target_state("x", TargetState.PAUSED), "Unknown connector x"),
            (herder.delete_connector("x"), "Connector x not found"),
        ):
            with pytest.raises(ConnectorNotFound, match=message):
                await missing


async def test_offsets_change_only_while_the_connector_is_stopped() -> None:
    """Offsets are altered and deleted only while the connector is stopped."""
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        rows = [({"file": "a"}, {"at": 3})]
        with pytest.raises(BadRequest, match="STOPPED"):
            await herder.alter_offsets("c", rows)
        await herder.set_target_state("c", TargetState.STOPPED)
        response = await herder.alter_offsets("c", rows)
        assert response == {"message": "The offsets for this connector have been altered successfully"}
        assert (await herder.connector_offsets("c"))["offsets"] == [{"partition": {"file": "a"}, "offset": {"at": 3}}]
        await herder.alter_offsets("c", None)
        assert (await herder.connector_offsets("c"))["offsets"] == []


async def test_an_unreachable_cluster_of_a_sink_blocks_no_other_request() -> None:
    """While a change of a sink's offsets waits for the sink's cluster, the herder answers other requests."""
    sink = {"connector.class": "FileStreamSink", "topics": "t", "admin.override.bootstrap.servers": "127.0.0.1:1"}
    async with running_herder() as (herder, _):
        herder.plugins.add(FileStreamSinkConnector, "FileStreamSink")
        await herder.put_connector("c", config() | sink, TargetState.STOPPED, replace=False)
        altering = asyncio.create_task(herder.alter_offsets("c", None))
        # The second request comes after the check that the connector is stopped.
        for _ in range(2):
            assert await herder.is_healthy()
        assert not altering.done()
        altering.cancel()
        await asyncio.wait([altering])


async def test_offsets_of_a_connector_without_its_class_are_an_error() -> None:
    """The offsets of a connector whose class is not on the worker cannot be read: the class decides where they are."""
    async with running_herder() as (herder, _):
        await herder._stores.configs.put_connector("c", config() | {"connector.class": "Removed"}, TargetState.STOPPED)
        with pytest.raises(ConfigError, match="Removed"):
            await herder.connector_offsets("c")


async def test_a_deleted_connector_leaves_nothing() -> None:
    """A deleted connector has neither config nor status, nothing runs, and no task's config is kept."""
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        await until(lambda: states(herder) == ["RUNNING"] * 3)
        await herder.delete_connector("c")
        assert herder.connectors() == []
        with pytest.raises(ConnectorNotFound):
            herder.connector_status("c")
        assert (herder.worker.connector_names(), herder.worker.task_ids()) == (frozenset(), frozenset())
        assert herder._runner._specs == {}


async def test_an_invalid_config_is_rejected_before_it_is_written() -> None:
    """An invalid config is a BadRequest, and no connector is created."""
    async with running_herder() as (herder, _):
        with pytest.raises(BadRequest, match=r"tasks\.max"):
            await herder.put_connector("c", config(**{"tasks.max": "zero"}), replace=False)
        assert herder.connectors() == []


async def test_a_start_can_be_waited_for() -> None:
    """`started` returns when the connector runs, or raises its error in one line."""
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        await herder.started("c", 60_000)
        assert states(herder)[0] == "RUNNING"
        await herder.put_connector("d", {**config(fails="1"), "name": "d"}, replace=False)
        with pytest.raises(ConnectError, match=r"^RuntimeError: on purpose$"):
            await herder.started("d", 60_000)


async def test_a_validation_contains_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither validation errors nor a connector's own errors contain a secret's value."""
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "s3cret-value")
    secret = "${env:PENSTOCK_TEST_SECRET}"
    async with running_herder() as (herder, _):
        found = await herder.validate(config(**{"tasks.max": secret}))
        (row,) = [one["value"] for one in found["configs"] if one["value"]["name"] == "tasks.max"]
        assert row["value"] == secret
        assert row["errors"][0] == f"Invalid value {secret} for configuration tasks.max: Not a number of type INT"
        with pytest.raises(ConnectError, match=r"Divided.*KeyError.*env:PENSTOCK"):
            await herder.put_connector("c", config(confused=secret), replace=False)
        await herder.put_connector("o", {**config(offsets=secret), "name": "o"}, replace=False)
        await herder.set_target_state("o", TargetState.STOPPED)
        with pytest.raises(ConnectError, match=r"TimeoutError: .*env:PENSTOCK"):
            await herder.alter_offsets("o", None)
        with pytest.raises(ConnectError, match=r"KeyError: '\[hidden\]'"):
            await herder.put_connector("c", config(phrase="0pen-sesame", confused="0pen-sesame"), replace=False)
        await herder.patch_connector("o", {"phrase": "0pen-sesame", "offsets": "0pen-sesame"})
        with pytest.raises(ConnectError, match=r"TimeoutError: \[hidden\]"):
            await herder.alter_offsets("o", None)
        await herder.put_connector("c", config(password="pl41n"), replace=False)
        assert herder.connector_info("c")["config"]["password"] == "[hidden]"
        await herder.put_connector("c", herder.shown_config("c") | {"word": "x"}, replace=True)
        assert herder.connector_config("c")["password"] == "pl41n"


async def test_a_timeout_of_the_connectors_own_keeps_its_message() -> None:
    """A TimeoutError that the connector raises is not a timeout of the request."""
    async with running_herder() as (herder, _):
        with pytest.raises(ConnectError, match="TimeoutError: db"):
            await herder.put_connector("c", config(unreachable="1"), replace=False)
        await herder.put_connector("c", config(offsets="unreachable"), replace=False)
        await herder.set_target_state("c", TargetState.STOPPED)
        with pytest.raises(ConnectError, match="rejects the offsets: TimeoutError: unreachable"):
            await herder.alter_offsets("c", [({"file": "a"}, {"at": 3})])


async def test_a_blocking_validation_blocks_no_other_request() -> None:
    """While a validation blocks, other connectors are created."""
    going.clear()
    async with running_herder() as (herder, _):
        slow = asyncio.ensure_future(herder.put_connector("s", {**config(slow="1"), "name": "s"}, replace=False))
        await herder.put_connector("c", config(), replace=False)
        assert not slow.done()
        going.set()
        await slow
        assert herder.connectors() == ["c", "s"]


async def test_concurrent_patches_are_merged() -> None:
    """Concurrent patches are all merged into the config."""
    async with running_herder() as (herder, _):
        await herder.put_connector("c", config(), replace=False)
        patches = [{"a": "1"}, {"b": "2"}, {"word": "x"}]
        await asyncio.gather(*(herder.patch_connector("c", patch) for patch in patches))
        assert herder.connector_config("c") == config(a="1", b="2", word="x")
