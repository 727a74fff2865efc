"""Connectors in processes of their own, with a worker here."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.shared.connect.errors import ConnectError, ConnectorNotFound, FailedThere
from penstock.shared.connect.isolation.process_connector import ProcessConnector
from penstock.shared.connect.runtime.states import State, TargetState
from tests.shared.connect.harness import Running, running
from tests.shared.connect.isolation.blocking import AwkwardSource


def config(file: Path | None = None, **more: str) -> dict[str, str]:
    return {
        "name": "c",
        "connector.class": f"{AwkwardSource.__module__}.AwkwardSource",
        "tasks.max": "2",
        "penstock.task.isolation": "process",
        "file": str(file),
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def pid_of(run: Running, name: str = "c") -> int:
    connector = run.worker._connectors[name].connector
    assert isinstance(connector, ProcessConnector)
    assert connector.pid is not None
    return connector.pid


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_a_connectors_whole_life_in_its_process() -> None:
    """It starts, asks for its tasks to be configured, divides its work, stops, starts again where it was, and ends."""
    wanted: list[str] = []
    async with running() as run:
        props = config(configs_does="ask")
        started = await run.worker.start_connector("c", props, TargetState.STARTED, run.listener, wanted.append)
        assert started is State.RUNNING
        pid = pid_of(run)
        assert pid != os.getpid()
        made = await run.worker.connector_task_configs("c", props)
        assert [(task["name"], task["task.class"].rpartition(".")[2]) for task in made] == [("c", "BlockingTask")] * 2
        await run.until(lambda: wanted == ["c"])
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.worker.set_target_state("c", TargetState.STARTED)
        assert pid_of(run) == pid
        await run.worker.stop_connector("c")
        assert run.listener.of("c") == ["startup", "paused", "running", "shutdown"]
        assert is_gone(pid)


async def test_a_connector_that_blocks_holds_up_nothing_else(tmp_path: Path) -> None:
    """Another starts meanwhile; one that is let go on comes up; one that is not is killed after the graceful time, and
    who waits for its tasks' configs hears that it was stopped. A process that is killed is a failed connector."""
    async with running(task_shutdown_graceful_timeout_ms="300") as run:
        props = config(tmp_path / "go", start_does="block", configs_does="block")
        worker, listener = run.worker, run.listener
        blocked = asyncio.ensure_future(worker.start_connector("c", props, TargetState.STARTED, listener))
        beside = await worker.start_connector("d", config(), TargetState.STARTED, listener)
        assert (beside, blocked.done(), worker.state("c")) == (State.RUNNING, False, State.UNASSIGNED)
        (tmp_path / "go").touch()
        assert await blocked is State.RUNNING
        (tmp_path / "go").unlink()
        dividing = asyncio.ensure_future(worker.connector_task_configs("c", props))
        assert len(await worker.connector_task_configs("d", config())) == 2
        pid = pid_of(run)
        await worker.stop_connector("c")
        assert is_gone(pid)
        with pytest.raises(ConnectorNotFound):
            await dividing
        assert listener.of("c") == ["startup"]
        # The other one, killed while nothing is asked of it: what is asked then is an error, its end is none.
        os.kill(pid := pid_of(run, "d"), signal.SIGKILL)
        await run.until(lambda: worker.state("d") is State.FAILED)
        assert f"the process of connector d (pid {pid}) was killed by SIGKILL" in listener.traces[0]
        with pytest.raises(ConnectError, match="SIGKILL"):
            await worker.connector_task_configs("d", config())
        await worker.stop_connector("d")


async def test_a_failure_has_the_trace_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it raises when started, and by itself later; without the secrets that it was given."""
    monkeypatch.setenv("PENSTOCK_TEST_SECRET", "s3cret-value")
    async with running(config_providers="env") as run:
        worker, listener = run.worker, run.listener
        props = config(start_does="fail", secret="${env:PENSTOCK_TEST_SECRET}")
        assert await worker.start_connector("c", props, TargetState.STARTED, listener) is State.FAILED
        assert "ValueError: start with ${env:PENSTOCK_TEST_SECRET}" in listener.traces[0]
        assert "blocking.py" in listener.traces[0]
        await worker.stop_connector("c")
        await worker.start_connector("c", config(start_does="raise"), TargetState.STARTED, listener)
        await run.until(lambda: worker.state("c") is State.FAILED)
        assert listener.traces[1] == "ValueError: by itself"


async def test_what_is_only_asked_is_asked_in_a_process_too() -> None:
    """A config to validate, offsets to take: what it raises, or ends with, is the asker's error alone."""
    async with running() as run, run.worker.connector_to_ask(config()) as connector:
        assert isinstance(connector, ProcessConnector)
        infos = await connector.validated(config())
        [own] = [row["value"] for row in infos.configs if row["value"]["name"] == "file"]
        assert own["errors"] == [f"seen by process {connector.pid}"]
        rows: list[tuple[dict[str, int], None]] = [({"a": 1}, None)]
        assert await connector.alter_offsets(config(), rows)
        with pytest.raises(FailedThere, match="alter with None"):
            await connector.alter_offsets(config(alter_does="fail"), rows)
        with pytest.raises(ConnectError, match="ended with status 3"):
            await connector.alter_offsets(config(alter_does="exit"), rows)
        assert run.listener.events == []
