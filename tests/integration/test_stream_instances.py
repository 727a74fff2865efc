"""Several instances of one application on a real broker: each answers queries for all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from penstock.services.local.stack import Service, ServiceSpec, Stack
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.http_client import http_client
from tests.integration.promtool import assert_clean
from tests.shared_broker import Broker

WAIT_S = 45
TOKEN = "0123456789abcdef"
PARTITIONS = 2
HOURS_3_MS = 3 * 3_600_000  # more than gap and grace: earlier sessions are closed


def settings_of(kafka: Broker, topic: str) -> dict[str, str]:
    """Settings of an aggregator whose group detects a dead member soon."""
    return {
        "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "TOPOLOGY": "penstock.services.local.topologies:sessions",
        "TOPOLOGY_OPTIONS": f'{{"topic": "{topic}", "results": "{topic}-out"}}',
        "STREAMS__APPLICATION_ID": topic,
        "STREAMS__SESSION_TIMEOUT_MS": "2000",
        "STREAMS__HEARTBEAT_INTERVAL_MS": "300",
        "STREAMS__REPLICATION_FACTOR": "1",
        "AUTH_TOKEN": TOKEN,
        "COMPACTION__ENABLED": "false",
    }


async def send(kafka: Broker, topic: str, first_ms: int = 0) -> None:
    """Send three events of key k<p> to each partition p of a topic, which is created if missing."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with Admin(settings) as admin:
        await admin.create_topics([event_time_topic(topic, PARTITIONS)], exist_ok=True)
    coordinates = [(i % PARTITIONS, first_ms + i) for i in range(3 * PARTITIONS)]
    records = [ProducerRecord(topic, b"{}", b"k%d" % p, (), p, at) for p, at in coordinates]
    async with Producer(settings) as producer:
        assert await (await producer.send_many(records)).first_error() is None


async def until(done: Callable[[], Awaitable[Any]]) -> Any:
    """Wait until `done` returns something true, and return it."""
    deadline = time.monotonic() + WAIT_S
    while not (got := await done()):
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.1)
    return got


def client() -> httpx.AsyncClient:
    return http_client(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=10)


async def test_any_instance_answers_for_all_and_reports_missing_partitions(
    kafka: Broker, topic_name: str, stack: Stack
) -> None:
    """Each instance answers for the other's keys.

    Partitions of a killed instance are reported as missing until they have a new owner.
    """
    await send(kafka, topic_name)
    settings = settings_of(kafka, topic_name)
    specs = [ServiceSpec(name, settings, arguments=["aggregator"]) for name in ("a", "b")]
    a, b = [await stack.start(spec) for spec in specs]
    async with client() as http:

        async def get(service: Service, path: str) -> httpx.Response:
            try:
                return await http.get(f"{service.url}{path}")
            except httpx.ConnectError:
                return httpx.Response(599)

        async def are_shared() -> bool:
            responses = [await get(each, "/v1/streams?local=true") for each in (a, b)]
            by_instance = [response.json()["tasks"] if response.status_code == 200 else [] for response in responses]
            return [[task["state"] for task in tasks] for tasks in by_instance] == [["running"], ["running"]]

        async def have_all() -> bool:
            responses = [await get(each, "/v1/streams/stores/sessions") for each in (a, b)]
            positions = {"0": {topic_name: 3}, "1": {topic_name: 3}}
            return all(
                response.status_code == 200 and response.json()["position"] == positions for response in responses
            )

        await until(are_shared)
        await until(have_all)
        for service in (a, b):
            for p in range(PARTITIONS):
                response = (await get(service, f"/v1/streams/stores/sessions?key=k{p}")).json()
                assert [(row["partition"], row["key"], row["events"]) for row in response["rows"]] == [(p, f"k{p}", 3)]
                assert (response["position"], response["missing"]) == ({"0": {topic_name: 3}, "1": {topic_name: 3}}, [])
            state = (await get(service, "/v1/streams")).json()
            assert [task["partition"] for task in state["tasks"]] == [0, 1]
            assert len({task["instance"] for task in state["tasks"]}) == len(state["instances"]) == 2
            assert len((await get(service, "/v1/streams/windows")).json()["windows"]) == 2
        for path, rows in (
            ("stores/sessions?rows_max=1", "rows"),
            ("stores/sessions/windows?status=open&rows_max=1", "windows"),
            ("windows?limit=1", "windows"),
        ):
            await check_pages_of_both(http, f"/v1/streams/{path}", rows, a, b)
        rejected = await get(a, "/v1/streams/stores/sessions/windows")
        assert (rejected.status_code, rejected.json()["error_code"]) == (409, "NO_LAKE")
        (lost,) = [task["partition"] for task in (await get(b, "/v1/streams?local=true")).json()["tasks"]]

        await b.kill()
        rejected = await get(a, f"/v1/streams/stores/sessions?key=k{lost}")
        assert (rejected.status_code, rejected.headers["Retry-After"]) == (503, "1")
        assert f"partition {lost}: {b.url}" in rejected.json()["detail"]
        part = (await get(a, "/v1/streams/stores/sessions?partial=true")).json()
        assert [row["partition"] for row in part["rows"]] == [1 - lost]
        assert [row["partition"] for row in part["missing"]] == [lost]

        async def is_whole() -> Any:
            response = await get(a, "/v1/streams/stores/sessions")
            assert response.status_code in (200, 503)
            return response.status_code == 200 and response.json()

        whole = await until(is_whole)
        assert sorted((row["key"], row["events"]) for row in whole["rows"]) == [("k0", 3), ("k1", 3)]


async def check_pages_of_both(http: httpx.AsyncClient, path: str, rows: str, a: Service, b: Service) -> None:
    """Assert that each instance continues a page of the other, and that another query's continuation is rejected."""
    seen, continuation = [], ""
    for service in (a, b, a):
        page = (await http.get(f"{service.url}{path}{continuation}")).json()
        seen += [row["key"] for row in page[rows]]
        assert (len(page[rows]), page["is_cut"]) == (1, page["continuation"] is not None)
        if not page["is_cut"]:
            break
        continuation = f"&continuation={page['continuation']}"
    assert sorted(seen) == ["k0", "k1"]
    rejected = await http.get(f"{b.url}{path}{continuation}&key=k0")
    assert (rejected.status_code, rejected.json()["error_code"]) == (400, "INVALID_CONTINUATION")
    assert continuation.partition("=")[2] in rejected.json()["detail"]


async def test_two_workers_share_the_partitions_and_one_is_killed(
    kafka: Broker, topic_name: str, stack: Stack, tmp_path: Path
) -> None:
    """Two workers serve one address; a killed worker is replaced, results are complete, and no worker outlives its
    parent.
    """
    await send(kafka, topic_name)
    more = {"WORKERS": "2", "STREAMS__LAKE": str(tmp_path), "COMPACTION__ENABLED": "false"}
    service = await stack.start(ServiceSpec("aggregator", settings_of(kafka, topic_name) | more))
    async with client() as http:

        async def checks() -> dict[str, Any]:
            try:
                response = await http.get(f"{service.url}/health")
            except httpx.ConnectError:
                return {}
            return dict(response.json()["checks"]) if response.status_code == 200 else {}

        async def positions(wanted: int) -> Any:
            response = await http.get(f"{service.url}/v1/streams/stores/sessions")
            at = {str(p): {topic_name: wanted} for p in range(PARTITIONS)}
            return response.status_code == 200 and response.json()["position"] == at and response.json()

        async def are_shared() -> bool:
            state = (await http.get(f"{service.url}/v1/streams")).json()
            return len({task["instance"] for task in state.get("tasks", ()) if task["state"] == "running"}) == 2

        first = await until(checks)
        await until(are_shared)
        await until(lambda: positions(3))
        pids = [first[f"worker-{number}"]["pid"] for number in (1, 2)]
        os.kill(pids[0], signal.SIGKILL)
        await send(kafka, topic_name, HOURS_3_MS)
        whole = await until(lambda: positions(6))
        assert sorted((row["key"], row["events"]) for row in whole["rows"]) == [("k0", 3), ("k1", 3)]

        async def is_replaced() -> bool:
            found = await checks()
            return bool(found) and found["worker-1"]["restarts"] == 1 and found["worker-1"]["pid"] not in pids

        await until(is_replaced)
        text = (await http.get(f"{service.url}/metrics")).text
        assert 'penstock_aggregator_worker_restarts_total{worker="1"} 1.0' in text
        assert all(re.search(rf'^penstock_streams_\w+{{.*worker="{n}"}} ', text, re.MULTILINE) for n in (1, 2))
        assert_clean(text)
        results = await read_results(kafka, f"{topic_name}-out")
        assert sorted((one["key"], one["events"]) for one in results) == [("k0", 3), ("k1", 3)]

        async def page(path: str) -> dict[str, Any] | None:
            response = await http.get(f"{service.url}{path}")
            return response.json() if response.status_code == httpx.codes.OK else None

        found = await until(partial(page, "/v1/streams/stores/sessions/windows?key=k0"))
        windows = [(one["status"], one["results"]["events"]) for one in found["windows"]]
        assert windows == [("closed", 3), ("open", 3)]
        assert found["position"] == {str(p): {topic_name: 6} for p in range(PARTITIONS)}
        last = [one["pid"] for one in (await checks()).values()]
    lines = [msgspec.json.decode(line) for line in service.log_file.read_bytes().splitlines()]
    assert {line.get("worker") for line in lines} == {None, 1, 2}
    await service.kill()
    await until(lambda: are_gone(last))


async def are_gone(pids: list[int]) -> bool:
    """Whether none of these processes runs any more."""
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        return False
    return True


async def read_results(kafka: Broker, topic: str) -> list[dict[str, Any]]:
    """All committed records of a topic."""
    settings = ConsumerSettings(isolation_level="read_committed", auto_offset_reset="earliest")
    at = [TopicPartition(topic, p) for p in range(PARTITIONS)]
    found: list[dict[str, Any]] = []
    async with Consumer(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), settings) as consumer:
        consumer.assign(at)
        ends = await consumer.end_offsets(at)
        while any([await consumer.position(tp) < end for tp, end in ends.items()]):
            for columns in (await consumer.poll(200)).values():
                found += [msgspec.json.decode(value or b"") for value in columns.values]
    return found
