"""The responses of real aggregators about their tasks match the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import msgspec

from penstock.api.http.app import create_app
from penstock.api.http.openapi import operations_of
from penstock.api.streams.routes import streams_router
from penstock.api.streams.stores import stores_router
from penstock.services.aggregator.main import Aggregator
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition
from penstock.shared.streams.runtime.restore_progress import RestoreProgress
from penstock.shared.streams.runtime.worker_tasks import OwnedTask
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.testing.fake_broker import FakeCluster
from tests.api.http.test_openapi import closed, errors_of

# The first run after a change of the kernels compiles them.
WAIT_S = 120
TOPOLOGY = "--topology=penstock.services.local.topologies:sessions"
QUERIES = {"/v1/streams/stores/{store}/windows": {"key": "1", "status": "open"}}
"""Parameters that a route requires here, where there is no lake."""


@asynccontextmanager
async def running(cluster: FakeCluster) -> AsyncIterator[Aggregator]:
    """An aggregator that runs and may have standbys."""
    kafka = f"--kafka.bootstrap-servers={cluster.bootstrap_servers}"
    given = [TOPOLOGY, kafka, "--http.port=0", "--streams.num-standby-replicas=1"]
    aggregator = Aggregator(AggregatorSettings.load(given, environ={}))

    async def run() -> None:
        await aggregator.startup()
        await aggregator.main_loop()

    turns = asyncio.create_task(run())
    try:
        yield aggregator
    finally:
        turns.cancel()
        await asyncio.wait([turns])
        await aggregator.shutdown()


async def send(cluster: FakeCluster, records: int) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
        sent = [ProducerRecord("events", b"{}", b"%d" % i, timestamp=0) for i in range(records)]
        assert await (await producer.send_many(sent)).first_error() is None


async def wait_until_shared(aggregator: Aggregator) -> None:
    """Wait until the aggregator knows the owners of two running tasks with open windows, and their standbys."""
    async with asyncio.timeout(WAIT_S):
        while True:
            state = await aggregator._application_view.describe()
            counts = len(state["tasks"]), len(state["standbys"]), len(state.get("instances", ()))
            is_known = counts == (2, 2, 2) and not state.get("missing")
            if is_known and all(task.get("state_rows") for task in state["tasks"]):
                return
            await asyncio.sleep(0)


async def test_responses_of_two_instances_match_their_schemas() -> None:
    """No response about running tasks, standbys, instances and stores has a member that its schema lacks."""
    requests = 0
    async with FakeCluster() as cluster:
        for topic in ("events", "sessions"):
            cluster.create_topic(topic, partitions=2)
        await send(cluster, 9)
        async with running(cluster) as aggregator, running(cluster), httpx.AsyncClient(trust_env=False) as client:
            await wait_until_shared(aggregator)
            url = aggregator.server.url
            document = closed((await client.get(f"{url}/openapi.json")).json())
            for path, method, operation in operations_of(document):
                if method != "get" or not path.startswith(("/v1/streams", "/v1/compactions")):
                    continue
                schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
                has_local = any(parameter["name"] == "local" for parameter in operation.get("parameters", ()))
                for local in ("false", "true")[: 1 + has_local]:
                    params = QUERIES.get(path, {}) | ({"local": local} if has_local else {})
                    response = await client.get(f"{url}{path.format(store='sessions')}", params=params)
                    assert response.status_code == 200, (path, response.text)
                    assert list(errors_of(response.json(), schema, document)) == [], (path, local)
                    requests += 1
    assert requests == 14


async def test_a_store_that_has_no_windows_is_not_found() -> None:
    """A misspelled store, or a table, is an error. An empty list would mean that it has no open windows."""
    aggregator = Aggregator(AggregatorSettings.load([TOPOLOGY], environ={}))
    sessions = aggregator.worker.topology.stores["sessions"]
    table = SimpleNamespace(schema=msgspec.structs.replace(sessions.schema, kind="table"))
    aggregator.worker.topology.stores["profiles"] = table  # type: ignore[assignment]
    app = create_app(streams=streams_router(aggregator, stores_router(aggregator)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert (await client.get("/v1/streams/windows?store=sessions")).json()["windows"] == []
        for store in ("sesions", "profiles"):
            for path in (f"/v1/streams/windows?store={store}", f"/v1/streams/stores/{store}/windows?key=a"):
                response = await client.get(path)
                assert (response.status_code, response.json()["error_code"]) == (404, "STORE_NOT_READABLE")


async def test_the_response_during_a_restore_matches_its_schema() -> None:
    """No response about a task that is being restored has a member that its schema lacks."""
    aggregator = Aggregator(AggregatorSettings.load([TOPOLOGY], environ={}))
    changelog = ChangelogPartition(KafkaSettings(), StreamsSettings(), 0, "here", SYSTEM_CLOCK)
    changelog.progress = RestoreProgress(0)
    changelog.progress.moved(1, 3, now_ms=0)
    aggregator.worker._tasks.owned[0] = OwnedTask(changelog)
    app = create_app(streams=streams_router(aggregator))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        state = (await client.get("/v1/streams")).json()
    assert [(task["state"], task["remaining_records"]) for task in state["tasks"]] == [("restoring", 2)]
    assert list(errors_of(state, {"$ref": "#/components/schemas/StreamsState"}, closed(app.openapi()))) == []
