"""Connectors that block or end their process, on a worker with processes for them: what becomes of everything else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from penstock.services.local.kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.settings import KafkaSettings
from tests.integration.connect_processes import WorkerProcess
from tests.integration.connect_worker import properties

ANSWER_MS_MAX = 5_000
"""Of a worker that is not held up, on a machine that has much to do."""


def children(pid: int) -> set[int]:
    """The processes that a process has started and that are there."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.add(int(stat.parent.name))
    return found


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - a process gives no event
            await asyncio.sleep(0.05)


class Asking:
    """Asks a worker, and how long its longest answer to a question took."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.longest_ms = 0.0

    async def get(self, path: str) -> Any:
        begun = time.monotonic()
        answer = await self._client.get(path)
        self.longest_ms = max(self.longest_ms, (time.monotonic() - begun) * 1000)
        return answer.json()

    async def put(self, name: str, config: dict[str, str]) -> None:
        answer = await self._client.put(f"/connectors/{name}/config", json=config)
        assert answer.status_code == 201, answer.text

    async def until(self, name: str, holds: Callable[[Any], bool]) -> Any:
        status: Any = None
        try:
            async with asyncio.timeout(60):
                while True:
                    status = await self.get(f"/connectors/{name}/status")
                    with contextlib.suppress(KeyError, IndexError):
                        if holds(status):
                            return status
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{name} stayed {status}") from None


async def test_what_a_connector_does_to_its_process_is_its_own_alone(
    kafka: EmbeddedKafka, tmp_path: Path, topic_name: str
) -> None:
    """One blocks when started, one when it is to divide its work, one ends the process each time: another one runs
    meanwhile and REST answers. What blocks is deleted like any other; when the worker is killed, nothing is left."""
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
        async with httpx.AsyncClient(base_url=worker.url, trust_env=False, timeout=60) as client:
            asking = Asking(client)
            for name in ("start", "configs"):
                await asking.put(name, {**awkward, f"{name}.does": "block"})
            await asking.put("ending", {**awkward, "start.does": "exit"})
            await asking.put("good", good)
            await asking.until("good", lambda status: status["tasks"][0]["state"] == "RUNNING")
            failed = await asking.until("ending", lambda status: status["connector"]["state"] == "FAILED")
            assert "the process of connector ending" in failed["connector"]["trace"]
            assert "ended with status 3" in failed["connector"]["trace"]
            await asking.until("configs", lambda status: status["connector"]["state"] == "RUNNING")
            await asking.until("ending", lambda status: status["connector"]["state"] == "RESTARTING")
            config = {**awkward, "name": "x", "validate.does": "exit"}
            path = f"/connector-plugins/{config['connector.class']}/config/validate"
            refused = await client.put(path, json=config)
            assert (refused.status_code, "status 3" in refused.text) == (500, True), refused.text
            assert (await client.delete("/connectors/start")).status_code == 204
            assert sorted(await asking.get("/connectors")) == ["configs", "ending", "good"]
            await asking.until("good", lambda status: status["connector"]["state"] == "RUNNING")
            assert asking.longest_ms < ANSWER_MS_MAX
        left = children(worker.process.pid)
        assert left
        worker.kill()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    finally:
        if worker.process.poll() is None:
            worker.kill()
