"""Several worker processes at one address."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_health_app
from penstock.api.http.health import Check, CheckResult
from penstock.api.http.problem import Problem
from penstock.api.http.server import HttpServer
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.workers import AnyWorker, WorkerSlot, WorkerSupervisor, worker_settings
from penstock.shared.common import metrics
from penstock.shared.common.errors import ConfigError, FatalError
from penstock.shared.common.settings import HttpSettings

FORWARD_MS = 15_000
ARGUMENTS = ["--topology=penstock.services.local.topologies:sessions", "--http.port=0", "--workers=2"]
FOREVER = ["sleep", "1000"]


def settings_of(*more: str) -> AggregatorSettings:
    return AggregatorSettings.load([*ARGUMENTS, *more], environ={})


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def app_of(name: str, *, is_well: bool = True) -> FastAPI:
    """A worker's app with health, metrics, and a route that returns the request's path and credentials."""
    registry = CollectorRegistry()
    metrics.counter(registry, "streams_x", "X.", "topic").labels(topic="t").inc(len(name))
    checks: dict[str, Check] = {
        "tasks": lambda: CheckResult(is_well, "restoring", {"pid": 42, "partitions_running": 1}),
        "compaction": lambda: CheckResult(True, "", {"state": "idle", "changelog_records": 7, "snapshot_at_ms": None}),
    }
    app, router = create_health_app(name, checks, registry), APIRouter()

    async def echo(request: Request) -> Response:
        message = f"{name} {request.url.path}?{request.url.query} {request.headers.get('authorization', '')}"
        return Response(message, 503, headers={"Retry-After": "3"})

    router.add_api_route("/v1/streams", echo, methods=["GET", "POST"])
    app.include_router(router)
    return app


@asynccontextmanager
async def serving(worker: WorkerSlot, app: FastAPI) -> AsyncIterator[None]:
    server = HttpServer(app, HttpSettings(), unix_socket=worker.unix_socket)
    await server.start()
    try:
        yield
    finally:
        await worker.stop()
        await server.stop(0)
        await worker.close()


def test_settings_of_a_worker() -> None:
    """A worker has numbered names and its own state folder, the parent's address, and a part of the shutdown's time;
    limits of request heads are the parent's.
    """
    given = settings_of(
        "--streams.group-instance-id=agg", "--kafka.client-id=me", "--shutdown-timeout-ms=10000",
        "--http.max-head-bytes=80000",
    )  # fmt: skip
    own = worker_settings(given, 2, "http://host:8083/workers/2")
    assert own.http == HttpSettings(max_head_bytes=80_000)
    assert (own.streams.group_instance_id, own.kafka.client_id, own.workers) == ("agg-2", "me-2", 1)
    assert own.streams.state_dir == ".penstock/state/worker-2"
    assert own.queries.application_server == "http://host:8083/workers/2"
    assert own.streams.state_dir == str(Path(given.streams.state_dir) / "worker-2")
    assert (own.shutdown_timeout_ms, own.topology, own.local_hosts_only) == (8_500, given.topology, True)
    plain = worker_settings(settings_of(), 1, "http://x")
    assert (plain.streams.group_instance_id, plain.kafka.client_id) == (None, None)


async def test_a_workers_health_is_one_check(tmp_path: Path) -> None:
    """A worker's check is ok or has its reasons, with process id, partitions and restarts; it
    fails before the worker's first start, and if the worker ended or does not respond.
    """
    for is_well, detail in ((True, "restoring"), (False, "tasks: restoring")):
        worker = WorkerSlot(1, tmp_path, {}, FORWARD_MS)
        await worker.start(FOREVER, 1_000)
        async with serving(worker, app_of("a", is_well=is_well)):
            facts = {"restarts": 0, "pid": 42, "partitions_running": 1, "changelog_records": 7, "snapshot_at_ms": None}
            assert await worker.check() == CheckResult(is_well, detail, facts)
    worker = WorkerSlot(1, tmp_path, {}, FORWARD_MS)
    assert await worker.check() == CheckResult(False, "starting", {"restarts": 0})
    await worker.start(FOREVER, 1_000)
    assert "does not answer: ConnectError" in (await worker.check()).detail
    assert await worker.metrics() is None
    for content in (b"<html>", b"[" * 100_000):
        response = httpx.Response(200, content=content)
        worker._client = httpx.AsyncClient(
            transport=httpx.MockTransport(lambda _, response=response: response), base_url="http://worker"
        )
        assert "does not answer: InvalidJson" in (await worker.check()).detail
    await worker.stop()
    await worker.close()
    assert "has ended" in (await worker.check()).detail


async def test_a_request_is_forwarded_to_a_reachable_worker(tmp_path: Path) -> None:
    """A request is forwarded with this process's token, and the response keeps Retry-After;
    without a reachable worker it is a Problem.
    """
    gone, there = (WorkerSlot(number, tmp_path, {"read": "secret"}, FORWARD_MS) for number in (1, 2))
    async with serving(there, app_of("b")):
        response = await AnyWorker([gone, there]).forward("GET", "/v1/streams", "local=true", b"", "")
        assert (response.status, response.retry_after) == (503, "3")
        assert response.body == b"b /v1/streams?local=true Bearer secret"
        own = await there.forward("POST", "/workers/2/v1/streams", "", b"", "")
        assert own.body == b"b /v1/streams? "
    with pytest.raises(Problem, match="worker-1: ConnectError"):
        await AnyWorker([gone]).forward("GET", "/v1/streams", "", b"", "")
    await gone.close()


async def test_only_reads_are_retried_at_another_worker(tmp_path: Path) -> None:
    """After a lost connection a GET is retried at another worker and a POST is not, since it may have been executed;
    that worker is tried last from then on.
    """
    broken, there = (WorkerSlot(number, tmp_path, {}, FORWARD_MS) for number in (1, 2))
    accepted = []

    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append((await reader.readline()).split()[0])
        writer.close()

    listener = await asyncio.start_unix_server(break_off, path=str(broken.unix_socket))
    async with serving(there, app_of("b")):
        any_one = AnyWorker([broken, there])
        with pytest.raises(Problem, match="worker-1: RemoteProtocolError"):
            await any_one.forward("POST", "/v1/streams", "", b"", "")
        for _ in range(2):
            assert (await any_one.forward("GET", "/v1/streams", "", b"", "")).body.startswith(b"b ")
    assert accepted == [b"POST", b"GET"]
    listener.close()
    await broken.close()


class Short(WorkerSupervisor):
    """Workers whose processes run a test's command."""

    command = FOREVER

    def _worker_command(self, worker: WorkerSlot) -> list[str]:
        return self.command


async def test_health_and_metrics_cover_all_workers() -> None:
    """Each worker has a check with its name and samples with its number, and the service fails if any worker fails."""
    workers = Short(settings_of(), ARGUMENTS)
    await workers.startup()
    one, two = workers.workers
    for worker in (one, two):
        await worker.start(FOREVER, 1_000)
    client = httpx.AsyncClient(base_url=workers.server.url, trust_env=False)
    async with serving(one, app_of("a")), serving(two, app_of("bb")), client:
        health = await client.get("/health")
        text = (await client.get("/metrics")).text
        assert (await client.get("/v1/streams")).text.startswith("a /v1/streams")
        assert (await client.get("/workers/2/v1/streams")).text.startswith("bb /v1/streams")
        await one.process.terminate(1_000)  # type: ignore[union-attr]
        failing = await client.get("/health")
    assert (health.status_code, set(health.json()["checks"])) == (200, {"worker-1", "worker-2"})
    assert 'penstock_streams_x_total{topic="t",worker="1"} 1.0' in text
    assert 'penstock_streams_x_total{topic="t",worker="2"} 2.0' in text
    assert text.count("# TYPE penstock_streams_x_total counter") == 1
    assert (failing.status_code, failing.json()["checks"]["worker-1"]["status"]) == (503, "failing")
    await workers.shutdown()


async def test_requests_are_answered_while_workers_stop() -> None:
    """If a worker has stopped and another still answers, /metrics and /v1/streams come from the one that answers.

    A request for the stopped worker is rejected with 503.
    """
    workers = Short(settings_of(), ARGUMENTS)
    await workers.startup()
    one, two = workers.workers
    await one.start(FOREVER, 1_000)
    client = httpx.AsyncClient(base_url=workers.server.url, trust_env=False)
    async with serving(two, app_of("bb")), client:
        await one.stop()
        metrics_page = await client.get("/metrics")
        anywhere = await client.get("/v1/streams")
        stopped = await client.get("/workers/1/v1/streams")
    assert metrics_page.status_code == 200
    assert 'penstock_streams_x_total{topic="t",worker="2"} 2.0' in metrics_page.text
    assert anywhere.text.startswith("bb /v1/streams")
    assert (stopped.status_code, "NO_WORKER" in stopped.text) == (503, True)
    await workers.shutdown()


async def test_an_invalid_setting_ends_all_workers() -> None:
    """If a worker exits because of an invalid setting, the service ends, and the folder of sockets is removed."""
    workers = Short(settings_of(), ARGUMENTS)
    workers.command = ["sh", "-c", "exit 2"]
    with pytest.raises(ExceptionGroup) as ended:
        await workers.main_loop()
    assert all(isinstance(e, ConfigError) for e in ended.value.exceptions)
    folder = workers.workers[0].unix_socket.parent
    assert folder.is_dir()
    await workers.shutdown()
    assert not folder.exists()


async def test_a_worker_that_fails_as_it_stops_fails_the_shutdown() -> None:
    """A worker that has to be killed has failed. A worker that SIGTERM ends has not."""
    workers = Short(settings_of("--workers=3"), ARGUMENTS)
    for worker, at_sigterm in zip(workers.workers, ("exit 1", "", "-"), strict=True):
        script = f"trap '{at_sigterm}' TERM; touch {worker.name}; while :; do sleep 0.01; done"
        await worker.start(["sh", "-c", script], 500)
        while not os.path.exists(worker.name):  # noqa: ASYNC110, ASYNC240, PTH110 - the worker is another process
            await asyncio.sleep(0)
    with pytest.raises(FatalError, match=r"worker-1: exit status 1, worker-2: killed by SIGKILL$"):
        await workers.shutdown()


async def test_a_forwarded_query_may_take_as_long_as_at_the_worker() -> None:
    """The time limit of a forwarded request is above `queries.changelog_timeout_ms`."""
    supervisor = WorkerSupervisor(settings_of("--queries.changelog-timeout-ms=60000"), ARGUMENTS)
    seen = []

    def respond(request: httpx.Request) -> httpx.Response:
        seen.append(request.extensions["timeout"]["read"])
        return httpx.Response(200)

    worker = supervisor.workers[0]
    await worker._client.aclose()
    worker._client = httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://worker")
    await worker.forward("GET", "/v1/streams/tasks", "", b"", "")
    assert seen == [65.0]
    await supervisor.shutdown()


def test_an_unknown_topology_is_an_error_before_any_worker_starts() -> None:
    """An unknown topology is reported once, not by each worker."""
    wrong: Any = settings_of("--topology=penstock.services.local.topologies:sesions")
    with pytest.raises(ConfigError, match="sesions"):
        WorkerSupervisor(wrong, ARGUMENTS)
