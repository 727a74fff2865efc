"""`penstock aggregator`: a stream worker, its compactions, and an HTTP address for health, metrics and state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Unpack

from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_app
from penstock.api.http.health import Check, CheckResult, health_router
from penstock.api.http.kafka_liveness import KafkaLiveness
from penstock.api.http.problem import Problem
from penstock.api.http.server import HttpServer
from penstock.api.streams.query_params import StoreQueryParams
from penstock.api.streams.routes import streams_router
from penstock.api.streams.stores import FoundWindows, Status, stores_router
from penstock.api.streams.task_views import OpenWindows, StreamsState
from penstock.services import service_lifecycle
from penstock.services.aggregator.application_view import COMPACTION_PARTITION, INCOMPLETE, ApplicationView
from penstock.services.aggregator.compaction_lag import CompactionLagWatch
from penstock.services.aggregator.compaction_supervisor import SCHEDULE_NAME, CompactionSupervisor
from penstock.services.aggregator.continuations import open_window_pages, page_with_continuation, row_pages
from penstock.services.aggregator.key_filter import KeyFilter
from penstock.services.aggregator.live_state import describe_live_stores, open_windows
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.window_search import WindowSearch
from penstock.services.aggregator.workers import WorkerSupervisor
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.changelog.store_schema import WINDOWED, StoreSchema
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.runtime.instances import InstanceRegistry, Registration
from penstock.shared.streams.runtime.queries import StoreQuery, read_in_slices
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology_loading import load_topology

PROGRAM = "penstock aggregator"
# The instance is unhealthy if one turn of its loop takes longer. A turn usually takes a fraction of a second.
STUCK_MS = 60_000
# Shares of `shutdown_timeout_ms`. A compaction is stopped meanwhile.
WORKER_SHARE = 0.7
REQUEST_SHARE = 0.1
# A store is read in slices of this time. In between, a busy worker processes ten times as long.
WALK_MS = 10


class Aggregator:
    """The service; see `penstock.services.service_lifecycle`."""

    def __init__(self, settings: AggregatorSettings, unix_socket: Path | None = None) -> None:
        """With `unix_socket` the service listens there, as one of several workers (see `workers`)."""
        self._settings = settings
        self._registry = CollectorRegistry()
        self._lag_watch = CompactionLagWatch(
            settings, self._registry, self._owns_compaction, request=lambda: self.compaction.request()
        )
        self.compaction = CompactionSupervisor(settings, self._registry, lag_watch=self._lag_watch)
        topology = load_topology(settings.topology, settings.topology_options)
        self.worker = StreamWorker(
            settings.kafka, settings.streams, topology, on_task=self._schedule_compaction, registry=self._registry
        )
        self._kafka_liveness = KafkaLiveness(lambda: self.worker.consumer, settings.kafka_silence_max_ms)
        checks: dict[str, Check] = {
            "tasks": self._check_tasks,
            "kafka": self._kafka_liveness,
            "compaction": self.compaction.health,
        }
        queries = settings.queries
        streams = settings.streams
        replicas = streams.replication_factor
        self._instances = InstanceRegistry(settings.kafka, streams.instances_topic, replicas, self.registration)
        known = self._instances.instances
        tokens = settings.tokens_by_scope()
        self._application_view = ApplicationView(
            self, known, queries, tokens, self._registry, lambda: self._instances.failed
        )
        view = self._application_view if queries.all_instances else None
        app = create_app(
            streams=streams_router(self, stores_router(self, view), instances=view),
            health=health_router("aggregator", checks, self._registry),
            auth_token=settings.auth_token,
            credentials=settings.credentials,
            cors_origins=settings.cors_origins,
            local_hosts_only=settings.local_hosts_only,
            title="Penstock aggregator",
        )
        self.server = HttpServer(app, settings.http, unix_socket=unix_socket)
        self._search = WindowSearch(settings, self._read_store_of_all_partitions)
        self._beside: list[asyncio.Task[None]] = []
        self._turned_ms: int | None = None

    async def startup(self) -> None:
        await self.server.start()
        self.compaction.warn()
        if self._settings.queries.all_instances:
            self._application_view.url = self._settings.queries.application_server or self.server.advertised_url
            self.run_beside({"instances": self._instances.run(self._application_view.url)})
        await self.worker.startup()
        self.run_beside(
            {
                "compaction": self.compaction.run(),
                "compaction lag": self._lag_watch.run(),
                "contact": self._kafka_liveness.run(),
            }
        )

    def run_beside(self, work: Mapping[str, Coroutine[Any, Any, None]]) -> None:
        """Run coroutines, by name, concurrently with the worker. If one of them ends, `main_loop` raises an error."""
        self._beside += [asyncio.create_task(one, name=name) for name, one in work.items()]

    async def main_loop(self) -> None:
        while True:
            self._turned_ms = SYSTEM_CLOCK.monotonic_ms()
            service_lifecycle.require_running(self._beside)
            await self.worker.run_once()

    async def shutdown(self) -> None:
        for task in self._beside:
            task.cancel()
        limit_ms = self._settings.shutdown_timeout_ms
        try:
            await self.worker.shutdown(limit_ms * WORKER_SHARE)
        finally:
            await asyncio.gather(*self._beside, return_exceptions=True)
            await self.server.stop(int(limit_ms * REQUEST_SHARE))
            await self._application_view.close()

    async def describe(self) -> StreamsState:
        """Return the response of `GET /v1/streams`."""
        worker = self.worker.describe()
        instance = worker["instance"]
        return {
            "application_id": worker["application_id"],
            "instance": instance,
            "processing_guarantee": worker["processing_guarantee"],
            "topology": worker["topology"],
            "tasks": [{**task, "instance": instance} for task in worker["tasks"]],
            "standbys": [{**standby, "instance": instance} for standby in worker["standbys"]],
            "compactions": self.compaction.describe(),
        }

    @property
    def application(self) -> str:
        """The application id of this instance."""
        return self._settings.streams.application_id

    async def read_store(self, store: str, **params: Unpack[StoreQueryParams]) -> dict[str, Any]:
        """Return the response of `GET /v1/streams/stores/{store}` for this instance.

        The store is read in slices, between which the tasks continue.
        """
        pages = row_pages(self.application, store, params)
        wanted: dict[str, Any] = {**params, "after": pages.decode(params["continuation"])}
        del wanted["continuation"]
        running = {partition: owned.task for partition, owned in self.worker.tasks().items() if owned.task is not None}
        topology = self.worker.topology
        tables = self.worker.global_tables
        reading = read_in_slices(running, store, StoreQuery(**wanted), topology, tables)
        while True:
            until_ms = SYSTEM_CLOCK.monotonic_ms() + WALK_MS
            try:
                while SYSTEM_CLOCK.monotonic_ms() < until_ms:
                    next(reading)
            except StopIteration as done:
                return page_with_continuation(done.value, pages)
            await asyncio.sleep(0)
            now = {partition: owned.task for partition, owned in self.worker.tasks().items()}
            for partition in [p for p, task in running.items() if now.get(p) is not task]:
                del running[partition]

    async def find_windows(self, store: str, *, status: Status, **params: Unpack[StoreQueryParams]) -> FoundWindows:
        """Return a page of windows for `GET /v1/streams/stores/{store}/windows`."""
        return await self._search.find(self._schema_of_windows(store), status, params)

    async def _read_store_of_all_partitions(self, store: str, params: StoreQueryParams) -> Any:
        """Return a store's rows of all partitions. Raises Problem if a partition is missing."""
        if self._settings.queries.all_instances:
            return await self._application_view.read_store(store, partial=False, **params)
        if not self.worker.source_partitions:
            raise Problem(INCOMPLETE, "the source topics are not known yet")
        here = {p for p, owned in self.worker.tasks().items() if owned.task is not None}
        if gone := sorted(set(range(self.worker.source_partitions)) - here):
            raise Problem(INCOMPLETE, f"partitions {gone} do not run here, and queries.all_instances is false")
        return await self.read_store(store, **params)

    def registration(self) -> Registration:
        """Return the registration by which the other instances know this one."""
        tasks = {partition: owned.task for partition, owned in sorted(self.worker.tasks().items())}
        running = {partition: task.epoch for partition, task in tasks.items() if task is not None}
        restoring = [partition for partition, task in tasks.items() if task is None]
        return Registration(self.worker.instance, running, self.worker.source_partitions, restoring)

    def _owns_compaction(self) -> bool:
        return self.worker.holds(COMPACTION_PARTITION)

    def stores(self) -> list[dict[str, Any]]:
        """Return the response of `GET /v1/streams/stores`."""
        return describe_live_stores(self.worker.tasks())

    def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> OpenWindows:
        """Return the response of `GET /v1/streams/windows`."""
        if store is not None:
            self._schema_of_windows(store)
        pages = open_window_pages(self.application, store, key)
        found = open_windows(self.worker.tasks(), store, KeyFilter(key), limit, pages.decode(continuation))
        return {"windows": found.windows, "continuation": pages.encode(found.last), "unseen": found.unseen}

    def _schema_of_windows(self, store: str) -> StoreSchema:
        """Return the schema of a store. Raises ConfigError if the topology has no such store with windows."""
        builder = self.worker.topology.stores.get(store)
        if builder is None or builder.schema.kind not in WINDOWED:
            raise ConfigError(f"no store with windows {store!r}")
        return builder.schema

    def compact(self) -> str:
        """Request a compaction. Returns "" if it will start, else the reason why it does not."""
        reason = self.compaction.why_not_now()
        if not reason:
            self.compaction.request()
        return reason

    def _schedule_compaction(self, task: StreamTask) -> None:
        if task.partition == COMPACTION_PARTITION and self.compaction.enabled:
            interval = self._settings.compaction.interval_ms
            task.schedule(
                interval, PunctuationType.WALL_CLOCK_TIME, lambda now_ms: self.compaction.request(), name=SCHEDULE_NAME
            )

    def _check_tasks(self) -> CheckResult:
        """Check that the worker has started and that its loop makes turns.

        Once the topology is known to fit the state, the check does not fail during a restore: if an orchestrator
        restarted the service, no restore would finish. It fails while Kafka's metadata lacks a source topic. Kafka
        Streams stops then (MissingSourceTopicException). An error of a broker can have the same effect until the
        metadata is requested again, after about a second.
        """
        facts = {"pid": os.getpid()}
        if self._turned_ms is None:
            return CheckResult(False, f"starting: waiting for {self.worker.waits_for}", facts)
        stood_ms = SYSTEM_CLOCK.monotonic_ms() - self._turned_ms
        if stood_ms > STUCK_MS:
            return CheckResult(False, f"one turn of the loop has taken {stood_ms} ms", facts)
        tasks = self.worker.tasks()
        known = self.worker.source_partitions
        restoring = [p for p, owned in tasks.items() if owned.task is None]
        facts |= {"partitions_running": len(tasks) - len(restoring), "partitions": known}
        if waits_for := self.worker.waits_for:
            return CheckResult(False, f"starting: waiting for {waits_for}", facts)
        if missing := self.worker.missing_source_topics():
            return CheckResult(False, f"source topics are not in Kafka's metadata: {', '.join(missing)}", facts)
        return CheckResult(
            True, f"restoring partitions {restoring}" if restoring else _describe_no_tasks(len(tasks)), facts
        )


def _describe_no_tasks(tasks: int) -> str:
    """Return why a healthy instance may have no tasks, for `/health`; "" if it has some."""
    return "" if tasks else "owns no partition: others have them, or the group waits for an owner's session to end"


def main(arguments: list[str]) -> int:
    """Run `penstock aggregator` until SIGTERM or SIGINT.

    The exit status is 2 if a setting or the topology is invalid.
    """

    def make_daemon(settings: AggregatorSettings) -> service_lifecycle.Daemon:
        return Aggregator(settings) if settings.workers == 1 else WorkerSupervisor(settings, arguments)

    return service_lifecycle.serve(PROGRAM, AggregatorSettings, make_daemon, arguments)
