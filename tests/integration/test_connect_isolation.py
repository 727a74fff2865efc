"""Connectors in separate processes that block or exit: the worker and the other connectors keep running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.settings import KafkaSettings
from tests.http_client import http_client
from tests.integration.connect_processes import WorkerProcess, workers
from tests.integration.connect_worker import properties
from tests.integration.test_connect_workers import committed, make_topic, runs, source
from tests.integration.test_connect_workers import until as read_until
from tests.shared_broker import Broker

RESPONSE_MS_MAX = 5_000
"""The limit of a worker's REST latency, on a busy machine."""
LEAVE_S_MAX = 15.0
"""The limit to stop a worker with a hanging process: twice the graceful time, and the time its clients need."""
GONE_S_MAX = 15.0
"""The limit for processes of a killed worker to end: a graceful time of at most five seconds, on a busy machine."""
STRING = "org.apache.kafka.connect.storage.StringConverter"


def connector_processes(worker: WorkerProcess) -> set[int]:
    """The live processes of a worker's connectors: the children of its guards."""
    return {pid for guard in children(worker.process.pid) for pid in children(guard)}


def children(pid: int) -> set[int]:
    """The live child processes of a process."""
    with contextlib.suppress(OSError):
        return {
            int(child) for found in Path(f"/proc/{pid}/task").glob("*/children") for child in found.read_text().split()
        }
    return set()


def any_is_alive(pids: set[int]) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in pids)


async def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - a process has no event to wait for
            await asyncio.sleep(0.05)


class TimedClient:
    """A client of a worker that records the longest latency of its GET requests."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.longest_ms = 0.0

    async def get(self, path: str) -> Any:
        begun = time.monotonic()
        response = await self._client.get(path)
        self.longest_ms = max(self.longest_ms, (time.monotonic() - begun) * 1000)
        return response.json()

    async def put(self, name: str, config: dict[str, str]) -> None:
        response = await self._client.put(f"/connectors/{name}/config", json=config)
        assert response.status_code == 201, response.text

    async def until(self, name: str, holds: Callable[[Any], bool]) -> Any:
        status: Any = None
        try:
            async with asyncio.timeout(60):
                while True:
                    status = await self.get(f"/connectors/{name}/status")
                    with contextlib.suppress(KeyError, IndexError):
                        if holds(status):
                            return status
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{name} stayed {status}") from None


async def test_a_failing_connector_process_affects_no_other_connector(
    kafka: Broker, tmp_path: Path, topic_name: str
) -> None:
    """If connectors block or exit, another connector keeps running and REST answers.

    A blocked connector can be deleted, and no process outlives a killed worker.
    """
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    awkward = {
        "connector.class": "tests.shared.connect.isolation.blocking.AwkwardSource",
        "penstock.task.isolation": "process",
        "file": str(tmp_path / "never"),
        "validate.allows": "yes",
    }
    (tmp_path / "in.txt").write_text("one\n")
    good = {"connector.class": "FileStreamSource", "file": str(tmp_path / "in.txt"), "topic": topic_name}
    props = properties(kafka.bootstrap_servers, task_shutdown_graceful_timeout_ms="500", task_restart_backoff_ms="2000")
    worker = WorkerProcess(tmp_path, props)
    try:
        await worker.ready()
        async with http_client(base_url=worker.url, timeout=60) as client:
            timed = TimedClient(client)
            for name in ("start", "configs"):
                await timed.put(name, {**awkward, f"{name}.does": "block"})
            await timed.put("ending", {**awkward, "start.does": "exit"})
            await timed.put("good", good)
            await timed.until("good", lambda status: status["tasks"][0]["state"] == "RUNNING")
            failed = await timed.until("ending", lambda status: status["connector"]["state"] == "FAILED")
            assert "the process of connector ending" in failed["connector"]["trace"]
            assert "ended, exit status 3" in failed["connector"]["trace"]
            await timed.until("configs", lambda status: status["connector"]["state"] == "RUNNING")
            await timed.until("ending", lambda status: status["connector"]["state"] == "RESTARTING")
            config = {**awkward, "name": "x", "validate.does": "exit"}
            path = f"/connector-plugins/{config['connector.class']}/config/validate"
            rejected = await client.put(path, json=config)
            assert (rejected.status_code, "status 3" in rejected.text) == (500, True), rejected.text
            assert (await client.delete("/connectors/start")).status_code == 204
            assert sorted(await timed.get("/connectors")) == ["configs", "ending", "good"]
            await timed.until("good", lambda status: status["connector"]["state"] == "RUNNING")
            assert timed.longest_ms < RESPONSE_MS_MAX
        left = connector_processes(worker)
        assert left
        worker.kill()
        await until(lambda: not any_is_alive(left), GONE_S_MAX)
    finally:
        if worker.process.poll() is None:
            worker.kill()


@pytest.mark.parametrize(
    "kill_after_ms",
    [
        pytest.param((0, 1_000, 2_000), id="3 kills"),
        pytest.param((0, 400, 900, 1_500, 2_500, 4_000), id="6 kills", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("exactly_once", ["enabled", "disabled"])
async def test_a_source_continues_after_its_process_is_killed(
    kafka: Broker, tmp_path: Path, exactly_once: str, kill_after_ms: tuple[int, ...]
) -> None:
    """A source whose process is killed repeatedly loses no line, and with exactly-once repeats none.

    Its offsets can be read, altered and deleted over REST.
    """
    topic, file = f"lines-{uuid.uuid4().hex[:6]}", tmp_path / "in.txt"
    await make_topic(kafka, topic)
    props = properties(
        kafka.bootstrap_servers, exactly_once_source_support=exactly_once, task_restart_backoff_ms="10",
        task_restart_backoff_max_ms="10", penstock_task_isolation="process",
    )  # fmt: skip
    file.write_text("")
    lines = 0

    def append(count: int) -> None:
        nonlocal lines
        with file.open("a") as more:
            more.writelines(f"{n:06}\n" for n in range(lines, lines + count))
        lines += count

    def has_read_all(found: Any) -> bool:
        return bool(found["offsets"][0]["offset"]["position"] == file.stat().st_size)

    worker = WorkerProcess(tmp_path, props)
    try:
        await worker.ready()
        async with http_client(base_url=worker.url, timeout=60) as client:
            config = source(file, topic, batch_size="20", value_converter=STRING)
            assert (await client.put("/connectors/src/config", json=config)).status_code == 201
            append(100)
            for after_ms in kill_after_ms:
                await until(lambda: bool(connector_processes(worker)))
                append(1_000)
                await asyncio.sleep(after_ms / 1000)  # when to kill, from the start of the process
                for pid in children(worker.process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await read_until(client, "/connectors/src/status", runs(1))
            append(1)
            await read_until(client, "/connectors/src/offsets", has_read_all)
            values = await committed(kafka.bootstrap_servers, topic)
            wanted = [f"{n:06}".encode() for n in range(lines)]
            assert sorted(set(values)) == wanted
            assert exactly_once == "disabled" or values == wanted
            await client.put("/connectors/src/stop")
            await read_until(client, "/connectors/src/status", lambda status: not status["tasks"])
            row = {"partition": {"filename": str(file)}, "offset": {"position": 7 * (lines - 2)}}
            altered = await client.patch("/connectors/src/offsets", json={"offsets": [row]})
            assert altered.status_code == 200, altered.text
            await client.put("/connectors/src/resume")
            await read_until(client, "/connectors/src/offsets", has_read_all)
            again = await committed(kafka.bootstrap_servers, topic)
            assert again[len(values) :] == wanted[-2:]
            await client.put("/connectors/src/stop")
            await read_until(client, "/connectors/src/status", lambda status: not status["tasks"])
            assert (await client.delete("/connectors/src/offsets")).status_code == 200
            assert (await client.get("/connectors/src/offsets")).json() == {"offsets": []}
    finally:
        worker.kill()


async def test_a_hanging_process_delays_no_rebalance(kafka: Broker, tmp_path: Path, topic_name: str) -> None:
    """A worker with a hanging process stops in time, and the other worker takes over all its work.

    Hanging tasks can be restarted, paused and deleted, and other connectors keep running.
    """
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(name, 1) for name in (topic_name, "t")], exist_ok=True)
    block = tmp_path / "block"
    (tmp_path / "in.txt").write_text("one\n")
    props = properties(
        kafka.bootstrap_servers, penstock_task_isolation="process", task_shutdown_graceful_timeout_ms="1000",
        scheduled_rebalance_max_delay_ms="0", task_stall_timeout_ms="1000", task_restart_backoff_ms="100",
    )  # fmt: skip
    configs = {
        "hangs": {
            "connector.class": "tests.shared.connect.isolation.blocking.BlockingSource",
            "file": str(block), "tasks.max": "2",
        },
        "good": source(tmp_path / "in.txt", topic_name),
    }  # fmt: skip
    with workers(tmp_path, props, 2) as (first, second):
        await asyncio.gather(first.ready(), second.ready())
        async with (
            http_client(base_url=first.url, timeout=60) as on_first,
            http_client(base_url=second.url, timeout=60) as on_second,
        ):
            for name, config in configs.items():
                await on_first.put(f"/connectors/{name}/config", json=config)
            await read_until(on_first, "/connectors/hangs/status", runs(2))
            await read_until(on_first, "/connectors/good/status", runs(1))
            block.touch()
            await asyncio.gather(*(stalled((on_first, on_second), "hangs", task) for task in (0, 1)))
            left, began = connector_processes(first), time.monotonic()
            assert await first.stop() == 0, first.log[-3_000:]
            assert time.monotonic() - began < LEAVE_S_MAX
            assert not any_is_alive(left)

            def is_here(status: Any) -> bool:
                return all(part["worker_id"] in second.url for part in [status["connector"], *status["tasks"]])

            def are_paused(status: Any) -> bool:
                return [part["state"] for part in [status["connector"], *status["tasks"]]] == ["PAUSED"] * 3

            await read_until(on_second, "/connectors/good/status", lambda status: runs(1)(status) and is_here(status))
            before = connector_processes(second)
            assert (await on_second.post("/connectors/hangs/tasks/0/restart")).status_code == 204
            assert before - connector_processes(second), "the process that hung"
            assert (await on_second.put("/connectors/hangs/pause")).status_code == 202
            block.unlink()
            await read_until(on_second, "/connectors/hangs/status", lambda s: are_paused(s) and is_here(s))
            assert (await on_second.put("/connectors/hangs/resume")).status_code == 202
            await read_until(on_second, "/connectors/hangs/status", runs(2))
            assert (await on_second.delete("/connectors/hangs")).status_code == 204
            await until(lambda: len(connector_processes(second)) == 1)
            await read_until(on_second, "/connectors/good/status", runs(1))


async def stalled(clients: tuple[httpx.AsyncClient, ...], connector: str, task: int) -> None:
    """Wait until a worker's metrics report a task as stalled."""
    line = f'kafka_connect_connector_task_metrics_stalled{{connector="{connector}",task="{task}"}} 1.0'
    async with asyncio.timeout(60):
        while not any([line in (await client.get("/metrics")).text for client in clients]):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
