"""`penstock aggregator --workers N`: N worker processes in one group, and this supervisor process.

A Python process uses one core. N workers share the partitions as instances on N machines would, and more machines can
join the same group. A worker's number is in its log lines and a label of its metrics. A worker that ends is restarted
after a pause that doubles. If a worker ends because of an invalid setting, the supervisor and all workers end, since a
restart would not help. The workers end whenever the supervisor ends, even by SIGKILL
(`penstock.shared.common.child_process`).

The supervisor's address serves all workers. `/health` fails while that of any worker fails, and `/metrics` has the
samples of all workers that answer. Requests for `/v1/streams` and `/v1/compactions` go to one worker. Unless
`queries.all_instances` is false, that worker queries the others. Other machines reach a worker by `/workers/NUMBER/`.
The supervisor reaches workers by Unix sockets in a folder that only this user can access.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.api.http.app import create_app
from penstock.api.http.health import Check, CheckResult, health_router
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.reverse_proxy import STREAMS_PATHS, Upstream, UpstreamResponse, forward_router
from penstock.api.http.server import HttpServer
from penstock.api.http.status_codes import SERVICE_UNAVAILABLE
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.exit_status import ExitStatus
from penstock.services.supervision import keep_running
from penstock.shared.common import metrics
from penstock.shared.common.child_process import ChildProcess, describe_exit_status
from penstock.shared.common.errors import FatalError
from penstock.shared.common.json_decoding import decode_json
from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import HttpSettings
from penstock.shared.streams.topology_loading import load_topology

log = get_logger(__name__)

WORKER_SHARE = 0.85
"""A worker's own `shutdown_timeout_ms`, as a share of the supervisor's."""
STOP_SHARE = 0.95
"""The share of `shutdown_timeout_ms` after which a worker is killed."""
REQUEST_SHARE = 0.04
"""The share of `shutdown_timeout_ms` for requests that still run after all workers have ended."""
SHOWN_FACTS = ("pid", "partitions_running", "partitions", "changelog_records", "snapshot_at_ms")
"""The facts of a worker's checks of tasks and compaction that its check here has."""
CHECK_MS = 1_500
"""The time limit of a worker's health and metrics. A check as a whole has 2 s."""
FORWARD_RESERVE_MS = 5_000
"""A request forwarded to a worker has this time in addition to the longest time limit of a query at the worker."""
NO_WORKER = ErrorKind(SERVICE_UNAVAILABLE, "NO_WORKER", "No worker answers", 1)


def worker_settings(settings: AggregatorSettings, number: int, url: str) -> AggregatorSettings:
    """Return the settings of one worker, which others reach at `url`."""
    streams = settings.streams
    kafka = settings.kafka
    queries = settings.queries
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


class WorkerSlot:
    """A worker's slot: its number and socket stay, its processes change. Implements `Upstream`.

    A forwarded request may take `forward_ms`.
    """

    def __init__(self, number: int, folder: Path, tokens: dict[Any, str], forward_ms: int) -> None:
        self.number = number
        self.name = f"worker-{number}"
        self.starts = 0
        self.unix_socket = folder / f"{number}.sock"
        self.process: ChildProcess | None = None
        self._stop_timeout_ms = 0
        self._forward_s = forward_ms / 1000
        transport = httpx.AsyncHTTPTransport(uds=str(self.unix_socket))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost", trust_env=False)
        self._tokens = tokens

    async def start(self, command: Sequence[str], stop_timeout_ms: int) -> None:
        """Start a process in this slot. Raises ConfigError if that is not possible."""
        self._stop_timeout_ms = stop_timeout_ms
        self.process = await ChildProcess.start(command, name=self.name, orphan_limit_ms=stop_timeout_ms)
        self.starts += 1

    async def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        assert self.process is not None, "start() comes first"
        return await self.process.wait()

    async def stop(self) -> int:
        """End the process. Returns its exit status, or 0 if no process runs."""
        if self.process is None or self.process.returncode is not None:
            return ExitStatus.OK
        return await self.process.terminate(self._stop_timeout_ms)

    async def close(self) -> None:
        """Close the connections to the process. No request may follow."""
        await self._client.aclose()

    async def check(self) -> CheckResult:
        """Return the worker's own health as one check."""
        if self.process is None:
            return CheckResult(False, "starting", {"restarts": 0})
        facts: dict[str, Any] = {"restarts": self.starts - 1}
        if self.process.returncode is not None:
            return CheckResult(False, "has ended; it is restarted after a pause", facts)
        try:
            body = decode_json((await self._client.get("/health", timeout=CHECK_MS / 1000)).content)
            failing = [f"{name}: {one['detail']}" for name, one in body["checks"].items() if one["status"] != "ok"]
            tasks = body["checks"]["tasks"]
            shown = tasks | body["checks"].get("compaction", {})
            facts |= {name: shown[name] for name in SHOWN_FACTS if name in shown}
            return CheckResult(body["status"] == "ok", "; ".join(failing) or tasks["detail"], facts)
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as e:
            return CheckResult(False, f"does not answer: {type(e).__name__}: {e}".rstrip(": "), facts)

    async def metrics(self) -> str | None:
        """Return the worker's metrics as text; None if it does not answer with status 200."""
        try:
            response = await self._client.get("/metrics", timeout=CHECK_MS / 1000)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == httpx.codes.OK else None

    async def forward(self, method: str, path: str, query: str, body: bytes, media_type: str) -> UpstreamResponse:
        """Forward a request to the worker process. Raises Problem if the worker does not answer."""
        path = path.removeprefix(f"/workers/{self.number}")
        headers = {"Content-Type": media_type} if media_type else {}
        if token := self._tokens.get("read" if method == "GET" else "admin"):
            headers["Authorization"] = f"Bearer {token}"
        url = f"{path}?{query}" if query else path
        try:
            response = await self._client.request(method, url, content=body, headers=headers, timeout=self._forward_s)
        except httpx.HTTPError as e:
            raise Problem(NO_WORKER, f"{self.name}: {type(e).__name__}: {e}".rstrip(": ")) from e
        kind, retry_after = (response.headers.get(name, "") for name in ("content-type", "retry-after"))
        return UpstreamResponse(response.status_code, kind, response.content, retry_after)


class AnyWorker:
    """Forwards requests to one worker process as long as it answers, and then to the next one.

    A GET that a worker does not answer is sent to the next worker. Any other request is sent again only if no
    connection to the worker could be opened.
    """

    name = "workers"

    def __init__(self, workers: Sequence[WorkerSlot]) -> None:
        self._workers = list(workers)

    async def forward(self, method: str, path: str, query: str, body: bytes, media_type: str) -> UpstreamResponse:
        """Forward a request as the class describes. Raises Problem if no worker answers it."""
        details = []
        for worker in list(self._workers):
            try:
                return await worker.forward(method, path, query, body, media_type)
            except Problem as e:
                if method != "GET" and not isinstance(e.__cause__, httpx.ConnectError):
                    raise
                details.append(e.detail)
                self._workers.sort(key=lambda one, last=worker: one is last)  # type: ignore[misc]
        raise Problem(NO_WORKER, "; ".join(details))


class WorkerSupervisor:
    """The service; see `penstock.services.service_lifecycle`."""

    def __init__(self, settings: AggregatorSettings, arguments: Sequence[str]) -> None:
        # Errors of the topology are reported here once, and not by each worker.
        load_topology(settings.topology, settings.topology_options)
        self._settings = settings
        self._arguments = list(arguments)
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        tokens: dict[Any, str] = {**settings.tokens_by_scope()}
        queries = settings.queries
        forward_ms = max(queries.changelog_timeout_ms, queries.timeout_ms) + FORWARD_RESERVE_MS
        numbers = range(1, settings.workers + 1)
        self.workers = [WorkerSlot(number, self._folder, tokens, forward_ms) for number in numbers]
        self._registry = CollectorRegistry()
        name = "aggregator_worker_restarts"
        text = "Worker processes that ended unexpectedly and were started again."
        self._restarts = metrics.counter(self._registry, name, text, "worker")
        checks: dict[str, Check] = {worker.name: worker.check for worker in self.workers}
        any_one: Upstream = AnyWorker(self.workers)
        upstreams: dict[str, Upstream | None] = dict.fromkeys(STREAMS_PATHS, any_one)
        upstreams |= {f"/workers/{worker.number}": worker for worker in self.workers}
        app = create_app(
            more=[forward_router(upstreams)],
            health=health_router("aggregator", checks, self._registry, self._merge_worker_metrics),
            auth_token=settings.auth_token,
            credentials=settings.credentials,
            cors_origins=settings.cors_origins,
            local_hosts_only=settings.local_hosts_only,
            title="Penstock aggregator",
        )
        self.server = HttpServer(app, settings.http)

    async def startup(self) -> None:
        """Listen. Raises what `HttpServer.start` raises."""
        await self.server.start()

    async def main_loop(self) -> None:
        """Start all workers, and restart each one that ends.

        Raises an ExceptionGroup with a ConfigError once a worker ends because of an invalid setting, or if the first
        start of a worker fails.
        """
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(self._keep_worker_running(worker), name=worker.name)

    async def shutdown(self) -> None:
        """Stop all workers concurrently, each within the limit; then the server.

        Raises FatalError if a worker had to be killed, or if its own shutdown failed.
        """
        try:
            statuses = await asyncio.gather(*(worker.stop() for worker in self.workers))
            await self.server.stop(int(self._settings.shutdown_timeout_ms * REQUEST_SHARE))
            # Last, because the server forwards requests until it has stopped.
            await asyncio.gather(*(worker.close() for worker in self.workers))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        # SIGTERM kills a worker that has not begun to work.
        expected = (ExitStatus.OK, -signal.SIGTERM)
        ended = [(worker.name, status) for worker, status in zip(self.workers, statuses, strict=True)]
        if failed := [f"{name}: {describe_exit_status(status)}" for name, status in ended if status not in expected]:
            raise FatalError(
                f"workers failed as they stopped, their last log lines have the reasons: {', '.join(failed)}"
            )

    async def _keep_worker_running(self, worker: WorkerSlot) -> None:
        limit_ms = int(self._settings.shutdown_timeout_ms * STOP_SHARE)
        command = self._worker_command(worker)

        def count_restart(status: int, pause_ms: int) -> None:
            log.error(
                "worker ended: restarting", worker=worker.number, ended=describe_exit_status(status), in_ms=pause_ms
            )
            self._restarts.labels(worker=str(worker.number)).inc()

        await worker.start(command, limit_ms)
        await keep_running(
            worker.name,
            worker.wait,
            partial(worker.start, command, limit_ms),
            on_end=count_restart,
            reason=lambda: "its last log line has the reason",
        )

    def _worker_command(self, worker: WorkerSlot) -> list[str]:
        url = self._settings.queries.application_server or self.server.advertised_url
        own = [str(worker.number), str(worker.unix_socket), f"{url}/workers/{worker.number}"]
        return [sys.executable, "-m", "penstock.services.aggregator.worker_process", *own, "--", *self._arguments]

    async def _merge_worker_metrics(self) -> bytes:
        texts = await asyncio.gather(*(worker.metrics() for worker in self.workers))
        pages = {worker.number: text for worker, text in zip(self.workers, texts, strict=True) if text is not None}
        return await asyncio.to_thread(partial(merged_metrics, pages)) + metrics.render(self._registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged_metrics(texts: Mapping[int, str]) -> bytes:
    """Merge the workers' metrics by number. Each sample gets the label `worker`, each family appears once.

    Raises ValueError for a text that is not in Prometheus' format.

    >>> page = "# HELP penstock_x_total X.\\n# TYPE penstock_x_total counter\\npenstock_x_total{topic=\\"t\\"} 2.0\\n"
    >>> print(merged_metrics({1: page, 2: page}).decode().rstrip())
    # HELP penstock_x_total X.
    # TYPE penstock_x_total counter
    penstock_x_total{topic="t",worker="1"} 2.0
    penstock_x_total{topic="t",worker="2"} 2.0
    """
    families: dict[str, Metric] = {}
    for number, text in texts.items():
        for family in text_string_to_metric_families(text):
            one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                one.add_sample(sample.name, {**sample.labels, "worker": str(number)}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return metrics.render(registry)
