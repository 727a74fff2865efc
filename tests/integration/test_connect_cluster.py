"""Three distributed workers on a real broker share 20 connectors while one worker is killed, one is stopped and one is
added.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.settings import KafkaSettings
from tests.http_client import http_client
from tests.integration.connect_processes import WorkerProcess, all_running, statuses, workers
from tests.integration.connect_worker import properties
from tests.shared_broker import Broker

STRING = "org.apache.kafka.connect.storage.StringConverter"
CONNECTORS, RECORDS_PER_SECOND = 20, 200


def sink(folder: Path, number: int, topic: str) -> dict[str, str]:
    return {
        "connector.class": "FileStreamSink",
        "tasks.max": "2",
        "topics": topic,
        "file": str(folder / f"sink-{number}.txt"),
        "key.converter": STRING,
        "value.converter": STRING,
    }


async def until(what: str, check: Callable[[], Awaitable[bool]], timeout_s: float = 180) -> None:
    async with asyncio.timeout(timeout_s):
        while not await check():  # noqa: ASYNC110 - polled as a client would
            await asyncio.sleep(0.2)


REBALANCES_MAX = 12
"""The limit of rebalances while one worker dies, one leaves and one joins, with the delay for absent workers."""
ANSWER_P99_MAX_S = 2.0
"""The limit of REST's p99 latency meanwhile, on a busy machine."""


async def metric(client: httpx.AsyncClient, worker: WorkerProcess, name: str) -> str:
    """The rest of the line of a worker's metrics that begins with this name."""
    text = (await client.get(f"{worker.url}/metrics")).text
    return next(line.partition(name)[2] for line in text.splitlines() if line.startswith(name))


async def rebalances_of(client: httpx.AsyncClient, worker: WorkerProcess) -> float:
    return float(
        await metric(client, worker, "kafka_connect_connect_worker_rebalance_metrics_completed_rebalances_total")
    )


async def take_leader(client: httpx.AsyncClient, cluster: list[WorkerProcess]) -> WorkerProcess:
    """Remove the leader from the list and return it."""
    leader_metric = await metric(client, cluster[0], "kafka_connect_connect_worker_rebalance_metrics_leader_name")
    return cluster.pop(next(at for at, worker in enumerate(cluster) if worker.url in leader_metric))


def p99_s(responses: list[float]) -> float:
    return sorted(responses)[int(len(responses) * 0.99)]


def host(worker: WorkerProcess) -> str:
    return worker.url.removeprefix("http://")


class Load:
    """Sends numbered records and polls REST until it is stopped, and records sent counts, latencies and failures."""

    def __init__(self, bootstrap_servers: str, topic: str, urls: list[str]) -> None:
        self._servers, self._topic, self.urls = bootstrap_servers, topic, urls
        self.sent = 0
        self.responses: list[float] = []
        self.unanswered: list[str] = []
        self._stop = False
        self._tasks: list[asyncio.Task[None]] = []

    def value(self, number: int) -> bytes:
        return str(number).encode()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._send_requests())]

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def _write(self) -> None:
        async with Producer(KafkaSettings(bootstrap_servers=self._servers)) as producer:
            while not self._stop:
                for _ in range(RECORDS_PER_SECOND // 10):
                    await producer.send(self._topic, self.value(self.sent))
                    self.sent += 1
                await asyncio.sleep(0.1)
            await producer.flush()

    async def _send_requests(self) -> None:
        async with http_client(timeout=10) as client:
            while not self._stop:
                for url in list(self.urls):
                    began = time.monotonic()
                    try:
                        response = await client.get(f"{url}/connectors?expand=status")
                        if response.status_code != 200:
                            self.unanswered.append(f"{url}: {response.status_code} {response.text[:200]}")
                    except httpx.HTTPError as e:
                        if url in self.urls:  # otherwise the worker was stopped meanwhile
                            self.unanswered.append(f"{url}: {e!r}")
                    self.responses.append(time.monotonic() - began)
                await asyncio.sleep(0.1)


@pytest.mark.soak
async def test_no_record_is_lost_while_workers_come_and_go(kafka: Broker, tmp_path: Path, topic_name: str) -> None:
    """With 20 connectors of two tasks, and workers killed, stopped and added, no record is lost.

    The other workers' REST answers throughout, and the tasks end up balanced.
    """
    props = properties(kafka.bootstrap_servers, session_timeout_ms="6000", heartbeat_interval_ms="1000")
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 4)])
    with workers(tmp_path, props, 3) as cluster:
        await asyncio.gather(*(worker.ready() for worker in cluster))
        load = Load(kafka.bootstrap_servers, topic_name, [worker.url for worker in cluster])
        async with http_client(timeout=100) as client:
            for number in range(CONNECTORS):  # to any worker: a follower forwards to the leader
                url = cluster[number % 3].url
                response = await client.put(
                    f"{url}/connectors/sink-{number}/config", json=sink(tmp_path, number, topic_name)
                )
                assert response.status_code == 201, response.text
            await until("all run", lambda: settled(client, cluster))
            load.start()
            killed = await take_leader(client, cluster)
            before = await rebalances_of(client, cluster[0])
            load.urls.remove(killed.url)
            killed.kill()
            await until("the killed one's work runs elsewhere", lambda: settled(client, cluster))
            stopped = cluster.pop(1)
            load.urls.remove(stopped.url)
            assert await stopped.stop() == 0, stopped.log[-3_000:]
            await until("the stopped one's work runs elsewhere", lambda: settled(client, cluster))
            added = WorkerProcess(tmp_path, props)
            cluster.append(added)
            await added.ready()
            load.urls.append(added.url)
            await until("the work is spread again", lambda: balanced(client, cluster))
            await load.stop()
            await until("every record is in every file", lambda: complete(tmp_path, load.sent))
            rebalances = await rebalances_of(client, cluster[0]) - before
    assert not load.unanswered, load.unanswered[:5]
    assert rebalances <= REBALANCES_MAX
    assert p99_s(load.responses) < ANSWER_P99_MAX_S


async def settled(client: httpx.AsyncClient, cluster: list[WorkerProcess], tasks: int = 2) -> bool:
    found = await statuses(client, cluster[0].url)
    return len(found) == CONNECTORS and all_running(found, tasks, {host(worker) for worker in cluster})


async def balanced(client: httpx.AsyncClient, cluster: list[WorkerProcess], count: int = 2) -> bool:
    found = await statuses(client, cluster[0].url)
    tasks = [task["worker_id"] for status in found.values() for task in status.get("tasks", [])]
    counts = [tasks.count(host(worker)) for worker in cluster]
    return all_running(found, count) and max(counts) - min(counts) <= 1


async def complete(folder: Path, sent: int) -> bool:
    wanted = {str(number) for number in range(sent)}
    return all(wanted <= set((folder / f"sink-{number}.txt").read_text().split("\n")) for number in range(CONNECTORS))
