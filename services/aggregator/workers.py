"""`penstock aggregator --workers N`: N worker processes in one group, and this one, which looks after them.

A Python process has one core; N of them share the partitions as instances on N machines would, and more machines join
the same group. Each worker has a number, which stands in its log lines and as a label in its metrics. One that ends is
started again after a pause that doubles; one that ends because of a setting ends all of them, since no restart mends
it. Workers end with this process, however that ends: a keeper stands between (see `job`).

There is one address for all: `/health` fails while any worker does, `/metrics` has the samples of all, and what is
asked of the streams is asked of a worker, which knows the others. What other machines ask a worker of comes by way of
`/workers/NUMBER/`. Workers are reached by Unix sockets in a folder that only this user may enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_app
from penstock.api.http.health import Check, CheckResult, health_router
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.reverse_proxy import STREAMS_PATHS, Answer, Upstream, forward_router
from penstock.api.http.server import HttpServer
from penstock.services.aggregator.job import start_kept
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.whole import advertised, tokens_of
from penstock.services.aggregator.worker_metrics import merged
from penstock.shared.common import daemon, metrics
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import HttpSettings
from penstock.shared.streams.topology_loading import load_topology

log = get_logger(__name__)

RESTART_MS, RESTART_MS_MAX = 1_000, 60_000
"""The pause before a worker that ended is started again: the first one, and the longest."""
STEADY_MS = 60_000
"""A worker that ran for so long starts with the short pause again."""
WORKER_SHARE, KEEPER_SHARE, REQUEST_SHARE = 0.85, 0.95, 0.04
"""Of `shutdown_timeout_ms`: what a worker is told that it has, when it is killed, and what requests have after that."""
CHECK_MS = 1_500
"""How long a worker may take to tell its health or its metrics; a check as a whole has 2 s."""
FORWARD_MS = 15_000
"""How long a worker may take for a request that is handed on to it; reading a changelog's tail has 10 s."""
NO_WORKER = ErrorKind(503, "NO_WORKER", "No worker answers", 1)


def worker_settings(settings: AggregatorSettings, number: int, url: str) -> AggregatorSettings:
    """What one worker is run with, reached by others at `url`."""
    streams, kafka, queries = settings.streams, settings.kafka, settings.queries
    streams = streams.model_copy(update={"state_dir": str(Path(streams.state_dir) / f"worker-{number}")})
    if streams.group_instance_id is not None:
        streams = streams.model_copy(update={"group_instance_id": f"{streams.group_instance_id}-{number}"})
    if kafka.client_id is not None:
        kafka = kafka.model_copy(update={"client_id": f"{kafka.client_id}-{number}"})
    own = {
        "workers": 1,
        "http": HttpSettings(max_head_bytes=settings.http.max_head_bytes),
        "streams": streams,
        "kafka": kafka,
        "queries": queries.model_copy(update={"application_server": url}),
        "shutdown_timeout_ms": max(1, int(settings.shutdown_timeout_ms * WORKER_SHARE)),
    }
    return settings.model_copy(update=own)


class WorkerProcess:
    """One worker, started by being made; ConfigError where it cannot be."""

    def __init__(self, command: Sequence[str], stop_timeout_ms: int) -> None:
        try:
            self._keeper, self._lifeline = start_kept(command, os.environ, stop_timeout_ms, output=None)
        except OSError as e:
            raise ConfigError(f"workers: cannot start a process: {e.strerror}") from None
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self.status: int | None = None
        threading.Thread(target=self._wait, daemon=True).start()

    async def end(self) -> int:
        """Wait for its end: the exit status, 128 + n for a death by signal n."""
        await self._ended.wait()
        assert self.status is not None
        return self.status

    async def stop(self) -> int:
        """SIGTERM now, SIGKILL after the limit. Safe to call twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return await self.end()

    def _wait(self) -> None:
        status = self._keeper.wait()
        with contextlib.suppress(RuntimeError):  # a loop that was closed has nobody left to tell
            self._loop.call_soon_threadsafe(self._on_end, status if status >= 0 else 128 - status)

    def _on_end(self, status: int) -> None:
        self.status = status
        self._ended.set()


class Worker:
    """A worker's place: its number and socket stay, its processes come and go. Implements `Upstream`."""

    def __init__(self, number: int, folder: Path, tokens: dict[Any, str]) -> None:
        self.number, self.name, self.starts = number, f"worker-{number}", 0
        self.unix_socket = folder / f"{number}.sock"
        self.process: WorkerProcess | None = None
        transport = httpx.AsyncHTTPTransport(uds=str(self.unix_socket))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False)
        self._tokens = tokens

    def start(self, command: Sequence[str], stop_timeout_ms: int) -> WorkerProcess:
        """Start a process in this place."""
        self.process = WorkerProcess(command, stop_timeout_ms)
        self.starts += 1
        return self.process

    async def stop(self) -> None:
        """End the process, if there is one, and close the connections to it."""
        if self.process is not None:
            await self.process.stop()
        await self._client.aclose()

    async def check(self) -> CheckResult:
        """The worker's own health as one check."""
        facts: dict[str, Any] = {"restarts": self.starts - 1}
        if self.process is None or self.process.status is not None:
            return CheckResult(False, "has ended; it is started again after a pause", facts)
        try:
            body = (await self._client.get("/health", timeout=CHECK_MS / 1000)).json()
            failing = [f"{name}: {one['detail']}" for name, one in body["checks"].items() if one["status"] != "ok"]
            tasks = body["checks"]["tasks"]
            facts |= {name: tasks[name] for name in ("pid", "partitions_running", "partitions") if name in tasks}
            return CheckResult(body["status"] == "ok", "; ".join(failing) or tasks["detail"], facts)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as e:
            return CheckResult(False, f"does not tell: {type(e).__name__}: {e}".rstrip(": "), facts)

    async def metrics(self) -> str | None:
        """Its metrics' text; None while it does not tell."""
        try:
            answer = await self._client.get("/metrics", timeout=CHECK_MS / 1000)
        except httpx.HTTPError:
            return None
        return answer.text if answer.status_code == httpx.codes.OK else None

    async def ask(self, method: str, path: str, query: str, body: bytes, media_type: str) -> Answer:
        path = path.removeprefix(f"/workers/{self.number}")
        headers = {"Content-Type": media_type} if media_type else {}
        if token := self._tokens.get("read" if method == "GET" else "admin"):
            headers["Authorization"] = f"Bearer {token}"
        url = f"{path}?{query}" if query else path
        try:
            answer = await self._client.request(method, url, content=body, headers=headers, timeout=FORWARD_MS / 1000)
        except httpx.HTTPError as e:
            raise Problem(NO_WORKER, f"{self.name}: {type(e).__name__}: {e}".rstrip(": ")) from e
        kind, retry_after = (answer.headers.get(name, "") for name in ("content-type", "retry-after"))
        return Answer(answer.status_code, kind, answer.content, retry_after)


class AnyWorker:
    """Hands a request to the worker that answered last, and where that does not, to the next one.

    What changes something goes to a second worker only where the first never had it.
    """

    name = "workers"

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)

    async def ask(self, method: str, path: str, query: str, body: bytes, media_type: str) -> Answer:
        said = []
        for worker in list(self._workers):
            try:
                return await worker.ask(method, path, query, body, media_type)
            except Problem as e:
                if method != "GET" and not isinstance(e.__cause__, httpx.ConnectError):
                    raise
                said.append(e.detail)
                self._workers.sort(key=lambda one, last=worker: one is last)  # type: ignore[misc]
        raise Problem(NO_WORKER, "; ".join(said))


class Workers:
    """The service; see `penstock.shared.common.daemon`."""

    def __init__(self, settings: AggregatorSettings, arguments: Sequence[str]) -> None:
        load_topology(settings.topology, settings.topology_options)  # what is wrong with it is said here, once
        self._settings, self._arguments = settings, list(arguments)
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        tokens: dict[Any, str] = {**tokens_of(settings)}
        self.workers = [Worker(number, self._folder, tokens) for number in range(1, settings.workers + 1)]
        self._registry = CollectorRegistry()
        name, text = "aggregator_worker_restarts", "Worker processes that ended unexpectedly and were started again."
        self._restarts = metrics.counter(self._registry, name, text, "worker")
        checks: dict[str, Check] = {worker.name: worker.check for worker in self.workers}
        any_one: Upstream = AnyWorker(self.workers)
        upstreams: dict[str, Upstream | None] = dict.fromkeys(STREAMS_PATHS, any_one)
        upstreams |= {f"/workers/{worker.number}": worker for worker in self.workers}
        app = create_app(
            more=[forward_router(upstreams)],
            health=health_router("aggregator", checks, self._registry, self._metrics),
            auth_token=settings.auth_token,
            credentials=settings.credentials,
            cors_origins=settings.cors_origins,
            local_hosts_only=settings.local_hosts_only,
            title="Penstock aggregator",
        )
        self.server = HttpServer(app, settings.http)

    async def startup(self) -> None:
        """Listen; ConfigError where the address cannot be had."""
        await self.server.start()

    async def main_loop(self) -> None:
        """Keep all workers running; ConfigError once one of them says that a setting is wrong."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(self._keep(worker), name=worker.name)

    async def shutdown(self) -> None:
        """Stop all, side by side, each within the limit; then the address."""
        try:
            await asyncio.gather(*(worker.stop() for worker in self.workers))
            await self.server.stop(int(self._settings.shutdown_timeout_ms * REQUEST_SHARE))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, worker: Worker) -> None:
        limit_ms = int(self._settings.shutdown_timeout_ms * KEEPER_SHARE)
        command, pause_ms = self._command(worker), RESTART_MS
        while True:
            started_ms = SYSTEM_CLOCK.monotonic_ms()
            status = await worker.start(command, limit_ms).end()
            if status == daemon.WRONG_SETTING:
                raise ConfigError(f"{worker.name} cannot run with these settings: its last log line says why")
            pause_ms = next_pause_ms(pause_ms, SYSTEM_CLOCK.monotonic_ms() - started_ms)
            log.error("a worker ended: starting it again", worker=worker.number, status=status, in_ms=pause_ms)
            self._restarts.labels(worker=str(worker.number)).inc()
            await asyncio.sleep(pause_ms / 1000)
            pause_ms *= 2

    def _command(self, worker: Worker) -> list[str]:
        url = self._settings.queries.application_server or advertised(self.server)
        own = [str(worker.number), str(worker.unix_socket), f"{url}/workers/{worker.number}"]
        return [sys.executable, "-m", "penstock.services.aggregator.worker", *own, "--", *self._arguments]

    async def _metrics(self) -> bytes:
        texts = await asyncio.gather(*(worker.metrics() for worker in self.workers))
        told = {worker.number: text for worker, text in zip(self.workers, texts, strict=True) if text is not None}
        return await asyncio.to_thread(partial(merged, told)) + metrics.render(self._registry)


def next_pause_ms(pause_ms: int, ran_ms: int) -> int:
    """The pause before the next start, of what it would be and how long the worker ran.

    >>> next_pause_ms(4_000, 100), next_pause_ms(512_000, 100), next_pause_ms(60_000, 3_600_000)
    (4000, 60000, 1000)
    """
    return RESTART_MS if ran_ms >= STEADY_MS else min(pause_ms, RESTART_MS_MAX)
