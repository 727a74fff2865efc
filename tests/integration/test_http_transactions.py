"""`?atomic=true` and Idempotency-Key on a real broker: requests are stored completely or not at all, and only once."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

from penstock.shared.clients.admin import NewTopic, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.integration.test_http_ingest import NDJSON, create, serving
from tests.shared_broker import Broker


async def committed(bootstrap_servers: str, topic: str, partitions: int) -> list[Any]:
    """The values of all committed records, decoded."""
    tps = [TopicPartition(topic, p) for p in range(partitions)]
    settings = ConsumerSettings(
        auto_offset_reset="earliest", commit_strategy="none", isolation_level="read_committed", max_poll_records=None
    )
    values = []
    async with Consumer(KafkaSettings(bootstrap_servers=bootstrap_servers), settings) as consumer:
        consumer.assign(tps)
        async with asyncio.timeout(60):
            ends = await consumer.end_offsets(tps)
            while [tp for tp in tps if await consumer.position(tp) < ends[tp]]:
                for columns in (await consumer.poll(500)).values():
                    values += [json.loads(value or b"") for value in columns.values]
    return values


async def test_atomic_is_all_or_nothing(kafka: Broker, topic_name: str) -> None:
    """With `?atomic=true` a valid body is one transaction; an invalid line or a rejected record leaves no record of its
    body.
    """
    await create(kafka.bootstrap_servers, NewTopic(topic_name, 2, configs={"max.message.bytes": "2000"}))
    async with serving(kafka.bootstrap_servers) as (_, client):
        url = f"/v1/topics/{topic_name}/events?atomic=true&offsets=true"
        good = await client.post(url, content=b"1\n2\n3\n", headers=NDJSON)
        bad = await client.post(url, content=b"4\noops\n5\n", headers=NDJSON)
        rejected = await client.post(url, content=b"6\n" + b'"' + b"x" * 4_000 + b'"\n', headers=NDJSON)
        after = await client.post(url, content=b"7\n", headers=NDJSON)
    assert (good.status_code, good.json()["stored"], len(good.json()["offsets"])) == (200, 3, 3)
    assert (bad.status_code, bad.json()["stored"], bad.json()["errors"][0]["line"]) == (400, 0, 2)
    assert (rejected.status_code, rejected.json()["error_code"]) == (413, "MESSAGE_TOO_LARGE")
    assert rejected.json()["outcome"] == "not_stored"
    assert after.status_code == 200
    assert sorted(await committed(kafka.bootstrap_servers, topic_name, 2)) == [1, 2, 3, 7]


async def test_a_request_with_a_key_is_stored_once_by_any_service(kafka: Broker, topic_name: str) -> None:
    """A repeated request with an Idempotency-Key gets the same response from the same service and from another one, and
    is stored once.
    """
    await create(kafka.bootstrap_servers, event_time_topic(topic_name, 1))
    await create(kafka.bootstrap_servers, event_time_topic(f"{topic_name}-many", 3))
    ingest = {"idempotency_topic": f"keys-{uuid.uuid4().hex[:8]}", "idempotency_partitions": 1}
    headers = NDJSON | {"Idempotency-Key": "order-7"}
    url = f"/v1/topics/{topic_name}/events"
    async with serving(kafka.bootstrap_servers, ingest=ingest) as (_, one):
        first = await one.post(url, content=b"1\noops\n2\n", headers=headers)
        again = await one.post(url, content=b"1\noops\n2\n", headers=headers)
        other = await one.post(url, content=b"3\n", headers=headers)
        many = f"/v1/topics/{topic_name}-many/events?offsets=true"
        produced = await one.post(many, content=b"1\n" * 30_000, headers=headers)
        async with serving(kafka.bootstrap_servers, ingest=ingest) as (_, two):
            elsewhere = await two.post(url, content=b"1\noops\n2\n", headers=headers)
            taken = await two.post(url, content=b"4\n", headers=NDJSON | {"Idempotency-Key": "order-8"})
            # The first service takes the partition back, and finds the request that the other one stored.
            back = await one.post(url, content=b"5\n", headers=NDJSON | {"Idempotency-Key": "order-9"})
            known = await one.post(url, content=b"4\n", headers=NDJSON | {"Idempotency-Key": "order-8"})
            produced_again = await one.post(many, content=b"1\n" * 30_000, headers=headers)
    assert (first.status_code, first.json()["stored"]) == (207, 2)
    assert (produced.status_code, len(produced.json()["offsets"])) == (200, 30_000)
    assert len(produced.content) > 1_048_576  # more than fits in one record
    assert (produced_again.headers.get("idempotency-replayed"), produced_again.content) == ("true", produced.content)
    assert "idempotency-replayed" not in first.headers
    for response in (again, elsewhere):
        assert (response.status_code, response.json()) == (207, first.json())
        assert response.headers["idempotency-replayed"] == "true"
    assert (other.status_code, other.json()["error_code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
    assert (taken.status_code, back.status_code) == (200, 200)
    assert known.headers["idempotency-replayed"] == "true"
    assert sorted(await committed(kafka.bootstrap_servers, topic_name, 1)) == [1, 2, 4, 5]
