"""The producer service on a real broker: a record is in the topic if and only if the response reports it as stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx

from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.services.producer.daemon import ProducerDaemon
from penstock.services.producer.settings import ProducerServiceSettings
from penstock.shared.clients.admin import Admin, NewTopic, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.records import ConsumerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.http_client import http_client
from tests.integration.promtool import assert_clean
from tests.shared_broker import Broker

NDJSON = {"Content-Type": "application/x-ndjson"}
ENTRY = "import sys; from penstock.services.producer.main import main; sys.exit(main(sys.argv[1:]))"


@contextlib.asynccontextmanager
async def serving(bootstrap_servers: str, **settings: Any) -> AsyncIterator[tuple[ProducerDaemon, httpx.AsyncClient]]:
    """Run a producer service in this process, and yield it with a client for it."""
    kafka = {"bootstrap_servers": bootstrap_servers, "request_timeout_ms": 2_000}
    producer = {"delivery_timeout_ms": 3_000, "max_block_ms": 2_000}
    given = {"kafka": kafka, "producer": producer, "http": {"port": 0}}
    daemon = ProducerDaemon(ProducerServiceSettings.model_validate(given | settings))
    await daemon.startup()
    working = asyncio.create_task(daemon.main_loop())
    try:
        async with http_client(base_url=daemon.server.url, timeout=60) as client:
            await healthy(client, 200)
            yield daemon, client
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await daemon.shutdown()


async def healthy(client: httpx.AsyncClient, status: int, seconds: float = 30) -> None:
    """Wait until /health answers with the status."""
    async with asyncio.timeout(seconds):
        while (await client.get("/health")).status_code != status:  # noqa: ASYNC110 - another process is polled
            await asyncio.sleep(0.1)


async def create(bootstrap_servers: str, topic: NewTopic) -> None:
    async with Admin(KafkaSettings(bootstrap_servers=bootstrap_servers)) as admin:
        await admin.create_topics([topic])


async def read_all(bootstrap_servers: str, topic: str, partitions: int) -> list[ConsumerRecord]:
    """Read all records of a topic, partition by partition."""
    tps = [TopicPartition(topic, p) for p in range(partitions)]
    kafka = KafkaSettings(bootstrap_servers=bootstrap_servers)
    settings = ConsumerSettings(group_id=f"read-{topic}", auto_offset_reset="earliest", commit_strategy="none")
    async with Consumer(kafka, settings) as consumer:
        consumer.assign(tps)
        ends = await consumer.end_offsets(tps)
        records: list[ConsumerRecord] = []
        async with asyncio.timeout(60):
            while [tp for tp in tps if await consumer.position(tp) < ends[tp]]:
                for columns in (await consumer.poll(1_000)).values():
                    records += columns.records()
    return records


async def test_ten_thousand_lines_are_read_back(kafka: Broker, topic_name: str) -> None:
    """Records have the lines' bytes as values, their keys and event times, and the offsets of the response."""
    await create(kafka.bootstrap_servers, event_time_topic(topic_name, 4))
    topics = {topic_name: {"key": ["/carrier", "/origin"], "time": "/at"}}
    lines = [
        b'{"id": %d, "carrier":"C%d", "origin":"EWR", "at":%d}' % (i, i % 16, 1_357_000_000_000 + i)
        for i in range(10_000)
    ]
    async with serving(kafka.bootstrap_servers, ingest={"topics": topics}) as (_, client):
        response = await client.post(
            f"/v1/topics/{topic_name}/events?offsets=true", content=b"\n".join(lines), headers=NDJSON
        )
        exposed = (await client.get("/metrics")).text
    assert response.status_code == 200
    assert response.json()["stored"] == 10_000
    line_by_offset = {(row["partition"], row["offset"]): row["line"] for row in response.json()["offsets"]}
    records = await read_all(kafka.bootstrap_servers, topic_name, 4)
    assert len(records) == len(line_by_offset) == 10_000
    for record in records:
        line = line_by_offset[record.partition, record.offset]
        i = line - 1
        assert record.value == lines[i]
        assert record.key == b"C%d-EWR" % (i % 16)
        assert record.timestamp == 1_357_000_000_000 + i
    assert f'penstock_ingest_stored_records_total{{topic="{topic_name}"}} 10000.0' in exposed
    assert_clean(exposed)


async def test_bad_lines_fail_alone(kafka: Broker, topic_name: str) -> None:
    """Valid lines are stored in order, and invalid lines are reported and not stored."""
    await create(kafka.bootstrap_servers, event_time_topic(topic_name, 1))
    async with serving(kafka.bootstrap_servers, ingest={"max_line_bytes": 100}) as (_, client):
        url = f"/v1/topics/{topic_name}/events"
        response = await client.post(url, content=b"1\noops\n" + b"x" * 200 + b"\n2\n", headers=NDJSON)
        nothing = await client.post(url, content=b"oops", headers=NDJSON)
        missing = await client.post("/v1/topics/no-such-topic/events", content=b"1", headers=NDJSON)
    assert response.status_code == 207
    assert (response.json()["stored"], [e["line"] for e in response.json()["errors"]]) == (2, [2, 3])
    assert (nothing.status_code, missing.status_code) == (400, 404)
    assert [r.value for r in await read_all(kafka.bootstrap_servers, topic_name, 1)] == [b"1", b"2"]


async def test_a_record_over_the_topics_limit_is_reported(kafka: Broker, topic_name: str) -> None:
    """A record over the topic's max.message.bytes is reported as that record's error with status 413."""
    await create(kafka.bootstrap_servers, NewTopic(topic_name, 1, configs={"max.message.bytes": "1000"}))
    async with serving(kafka.bootstrap_servers) as (_, client):
        response = await client.post(
            f"/v1/topics/{topic_name}/events", content=b'"' + b"x" * 5_000 + b'"', headers=NDJSON
        )
    assert (response.status_code, response.json()["errors"][0]["error_code"]) == (413, "MESSAGE_TOO_LARGE")


async def test_requests_without_kafka_fail_within_a_limit(stoppable_kafka: EmbeddedKafka) -> None:
    """Without Kafka, requests fail with 503 or 504 within a time limit, and at once when the outage is known. 503 means
    that the records are not stored. Afterwards requests succeed again.
    """
    await create(stoppable_kafka.bootstrap_servers, event_time_topic("killed", 1))
    async with serving(stoppable_kafka.bootstrap_servers) as (_, client):

        async def post(value: bytes) -> httpx.Response:
            return await client.post("/v1/topics/killed/events", content=value, headers=NDJSON)

        assert (await post(b"1")).status_code == 200
        await stoppable_kafka.kill()
        async with asyncio.timeout(20):
            first = await post(b"2")
        assert first.status_code in (503, 504)
        assert int(first.headers["retry-after"]) > 0
        assert first.json().get("stored", 0) == 0
        await healthy(client, 503)
        async with asyncio.timeout(1):
            assert (await post(b"3")).status_code == 503
        await stoppable_kafka.restart()
        await healthy(client, 200)
        assert (await post(b"4")).status_code == 200
    values = [r.value for r in await read_all(stoppable_kafka.bootstrap_servers, "killed", 1)]
    assert [v for v in values if v != b"2"] == [b"1", b"4"]
    assert first.status_code == 504 or b"2" not in values
    assert first.json()["unknown"] == (first.status_code == 504)


async def test_a_batch_in_flight_when_kafka_hangs_has_unknown_outcomes(stoppable_kafka: EmbeddedKafka) -> None:
    """If Kafka hangs while a batch is in flight, the response is 504 with all outcomes unknown, and the records are
    stored later. Further requests fail at once with 503 and store nothing.
    """
    await create(stoppable_kafka.bootstrap_servers, event_time_topic("paused", 1))
    body = b"".join(b'{"id":%d}\n' % i for i in range(200))
    async with serving(stoppable_kafka.bootstrap_servers) as (_, client):
        url = "/v1/topics/paused/events"
        assert (await client.post(url, content=b"1\n", headers=NDJSON)).status_code == 200
        stoppable_kafka.pause()
        try:
            async with asyncio.timeout(20):
                response = await client.post(url, content=body, headers=NDJSON)
            await healthy(client, 503)
            async with asyncio.timeout(1):
                assert (await client.post(url, content=b"3\n", headers=NDJSON)).status_code == 503
        finally:
            stoppable_kafka.resume()
        await healthy(client, 200)
        assert (await client.post(url, content=b"2\n", headers=NDJSON)).status_code == 200
    response_body = response.json()
    assert (response.status_code, response_body["title"]) == (504, "Events may or may not be stored")
    assert int(response.headers["retry-after"]) > 0
    assert (response_body["stored"], response_body["not_stored"], response_body["unknown"]) == (0, 0, 200)
    assert {e["outcome"] for e in response_body["errors"]} == {"unknown"}
    values = [r.value for r in await read_all(stoppable_kafka.bootstrap_servers, "paused", 1)]
    assert values == [b"1", *body.splitlines(), b"2"]


async def test_a_service_that_starts_before_kafka_waits_for_it() -> None:
    """A service without Kafka answers 503, and its health names the failing check."""
    kafka = {"bootstrap_servers": "127.0.0.1:1", "request_timeout_ms": 1_000}
    settings = {"kafka": kafka, "http": {"port": 0}}
    daemon = ProducerDaemon(ProducerServiceSettings.model_validate(settings))
    await daemon.startup()
    working = asyncio.create_task(daemon.main_loop())
    try:
        async with http_client(base_url=daemon.server.url) as client:
            health = await client.get("/health")
            response = await client.post("/v1/topics/t/events", content=b"1", headers=NDJSON)
        assert health.status_code == 503
        assert health.json()["checks"]["kafka"]["status"] == "failing"
        assert response.status_code == 503
        assert not working.done()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await daemon.shutdown()


async def test_sigterm_under_load_loses_no_acknowledged_record(kafka: Broker, topic_name: str) -> None:
    """After a SIGTERM under load, all acknowledged records are in the topic, and the process exits with status 0 in
    time.
    """
    await create(kafka.bootstrap_servers, event_time_topic(topic_name, 2))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        ENTRY,
        env=os.environ
        | {
            "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "PENSTOCK_HTTP__PORT": "0",
            "PENSTOCK_LOG__FORMAT": "json",
            "PENSTOCK_SHUTDOWN_TIMEOUT_MS": "15000",
        },
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        url = await address(process)
        acknowledged, statuses = await load_until_gone(process, url, topic_name)
        async with asyncio.timeout(20):
            await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert statuses[200] >= 10
    assert set(statuses) <= {200, 207, 503}
    found = {json.loads(r.value or b"")["id"] for r in await read_all(kafka.bootstrap_servers, topic_name, 2)}
    assert acknowledged <= found
    assert len(acknowledged) > 1_000


async def address(process: asyncio.subprocess.Process) -> str:
    """The address that the service logs."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while line := await process.stderr.readline():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if event["event"] == "listening":
                    return str(event["url"])
    raise AssertionError("the service ended without listening")


async def load_until_gone(process: asyncio.subprocess.Process, url: str, topic: str) -> tuple[set[int], dict[int, int]]:
    """Post from several clients until the service has stopped; SIGTERM is sent after twenty responses."""
    acknowledged: set[int] = set()
    statuses: dict[int, int] = {}
    responses = 0

    async def one_client(number: int) -> None:
        nonlocal responses
        async with http_client(base_url=url, timeout=30) as client:
            await healthy(client, 200)
            for request in range(100_000):
                ids = range((number * 100_000 + request) * 500, (number * 100_000 + request) * 500 + 500)
                body = b"".join(b'{"id":%d}\n' % i for i in ids)
                try:
                    response = await client.post(f"/v1/topics/{topic}/events", content=body, headers=NDJSON)
                except httpx.TransportError:
                    return
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                if response.status_code in (200, 207):
                    failed = {e["line"] for e in response.json().get("errors", [])}
                    end = response.json().get("stopped_at_line", 501)
                    acknowledged.update(i for line, i in enumerate(ids, 1) if line < end and line not in failed)
                responses += 1
                if responses == 20:
                    process.send_signal(signal.SIGTERM)

    async with asyncio.timeout(60):
        await asyncio.gather(*(one_client(n) for n in range(4)))
    return acknowledged, statuses


async def test_bulk_requests_are_served_first_come_first_served(kafka: Broker, topic_name: str) -> None:
    """64 concurrent requests of 5,000 records are answered about in their order: a quarter is answered when less than
    half of all records is in the log. Small requests are answered meanwhile.
    """
    await create(kafka.bootstrap_servers, event_time_topic(topic_name, 2))
    lines = b"".join(b'{"user":"u%05d","path":"/item/%d","status":200}\n' % (i % 997, i) for i in range(5_000))
    bulk, small, url = 64, 5, f"/v1/topics/{topic_name}/events"
    completed: list[int] = []
    in_log: list[int] = []
    async with serving(kafka.bootstrap_servers) as (daemon, client):

        async def post(number: int) -> None:
            async with http_client(base_url=daemon.server.url, timeout=120) as own:
                response = await own.post(url, content=lines, headers=NDJSON)
            assert response.json()["stored"] == 5_000
            completed.append(number)
            in_log.append(sum(offset + 1 for offset in response.json()["last_offsets"].values()))

        async with asyncio.TaskGroup() as tasks:
            for number in range(bulk):
                tasks.create_task(post(number))
            for _ in range(small):
                assert (await client.post(url, content=b"1\n", headers=NDJSON)).status_code == 200
            completed_before = len(completed)
    assert in_log[bulk // 4] < bulk * 5_000 / 2
    assert sum(abs(index - number) for index, number in enumerate(completed)) / bulk < bulk / 8
    assert completed_before < bulk / 2
