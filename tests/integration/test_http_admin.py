"""The admin service on a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx

from penstock.services.admin.daemon import AdminDaemon
from penstock.services.admin.settings import AdminServiceSettings
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter import DeadLetter, dead_letter_record
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import ConsumerRecord, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.task.late_records import late_record
from tests.api.rest_proxy.test_metadata import OPERATIONS, misfits
from tests.http_client import http_client
from tests.integration.test_http_ingest import read_all
from tests.shared_broker import Broker


@contextlib.asynccontextmanager
async def serving(bootstrap_servers: str, **services: str) -> AsyncIterator[httpx.AsyncClient]:
    """Run an admin service in this process, and yield a client for it."""
    settings = {"kafka": {"bootstrap_servers": bootstrap_servers}, "services": services, "http": {"port": 0}}
    daemon = AdminDaemon(AdminServiceSettings.model_validate(settings))
    await daemon.startup()
    working = asyncio.create_task(daemon.main_loop())
    try:
        async with http_client(base_url=daemon.server.url, timeout=30) as client:
            async with asyncio.timeout(30):
                while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 - polled as a client would
                    await asyncio.sleep(0.1)
            yield client
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await daemon.shutdown()


async def test_a_groups_offsets_are_read_reset_and_deleted(kafka: Broker, topic_name: str) -> None:
    """Resetting a group with members returns 409 with the member's id; later resets apply to the next consumer."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    group, tp = f"group-{topic_name}", TopicPartition(topic_name, 0)
    async with Admin(settings) as admin:
        await admin.create_topics([event_time_topic(topic_name, 1)])
    async with Producer(settings) as producer:
        await (await producer.send_many(ProducerRecord(topic_name, b"%d" % i, timestamp=i) for i in range(10)))
    async with serving(kafka.bootstrap_servers) as client:
        url = f"/v1/groups/{group}/offsets"
        own = ConsumerSettings(group_id=group, auto_offset_reset="earliest", commit_strategy="none")
        async with Consumer(settings, own) as consumer:
            consumer.subscribe([topic_name])
            async with asyncio.timeout(60):
                while not await consumer.poll(500):
                    pass
            await consumer.commit()
            described = (await client.get(f"/v1/groups/{group}")).json()
            assert (described["state"], described["lag"]) == ("Stable", 0)
            member = described["members"][0]
            assert member["partitions"] == [{"topic": topic_name, "partition": 0}]
            rejected = await client.post(url, json={"to": "earliest"})
            assert rejected.status_code == 409
            assert member["member_id"] in rejected.json()["detail"]
        dry = await client.post(url, json={"to": {"timestamp_ms": 4}, "dry_run": True})
        assert dry.json()["partitions"] == [{"topic": topic_name, "partition": 0, "before": 10, "after": 4}]
        assert (await client.get(f"/v1/groups/{group}")).json()["lag"] == 0
        for to, after in (("earliest", 0), ({"timestamp_ms": 4}, 4), ({"shift_by": 2}, 6), ({"offset": 3}, 3)):
            changed = await client.post(url, json={"to": to})
            assert changed.json()["partitions"][0]["after"] == after
        async with Consumer(settings, own) as consumer:
            consumer.subscribe([topic_name])
            async with asyncio.timeout(60):
                while not (polled := await consumer.poll(500)):
                    pass
            assert polled[tp].offsets[0] == 3
        assert (await client.delete(f"/v1/groups/{group}")).status_code == 204
        assert (await client.get(f"/v1/groups/{group}")).status_code == 404


async def test_rest_proxys_operations_are_answered_from_kafka(kafka: Broker, topic_name: str) -> None:
    """Every read operation of the Go client `kafkarestv3` returns the members and types of its models."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    group = f"group-{topic_name}"
    async with Admin(settings) as admin:
        await admin.create_topics([event_time_topic(topic_name, 2, cleanup_policy="compact")])
    async with Producer(settings) as producer:
        await (await producer.send_many(ProducerRecord(topic_name, b"x", b"k", partition=p % 2) for p in range(10)))
    own = ConsumerSettings(group_id=group, auto_offset_reset="earliest", commit_strategy="none")
    async with serving(kafka.bootstrap_servers) as client, Consumer(settings, own) as consumer:
        consumer.subscribe([topic_name])
        async with asyncio.timeout(60):
            while not await consumer.poll(500):
                pass
        await consumer.commit()
        (cluster,) = (await client.get("/v3/clusters")).json()["data"]
        (broker,) = (await client.get(cluster["brokers"]["related"])).json()["data"]
        groups = f"/v3/clusters/{cluster['cluster_id']}/consumer-groups/{group}"
        (member,) = (await client.get(f"{groups}/consumers")).json()["data"]
        names = {"c-1": cluster["cluster_id"], "flights": topic_name, "banks": group, "m-1": member["consumer_id"]}
        names["brokers/1"] = f"brokers/{broker['broker_id']}"
        found = {}
        for operation, (path, model) in OPERATIONS.items():
            for name, real in names.items():
                path = path.replace(name, real)
            response = await client.get(f"/v3/clusters{path}")
            assert (response.status_code, misfits(response.json(), model, operation)) == (200, []), path
            found[operation] = response.json()
    config = found["GetKafkaTopicConfig"]
    assert (config["value"], config["source"], config["is_default"]) == ("compact", "DYNAMIC_TOPIC_CONFIG", False)
    assert (found["PartitionWithOffsets"]["earliest_offset"], found["PartitionWithOffsets"]["latest_offset"]) == (0, 5)
    assert found["GetKafkaConsumerAssignment"]["topic_name"] == topic_name


async def test_topics_and_the_cluster_are_described(kafka: Broker, topic_name: str) -> None:
    """Topics and the cluster are described from the broker's responses."""
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([event_time_topic(topic_name, 3)])
    async with serving(kafka.bootstrap_servers) as client:
        assert topic_name in (await client.get("/v1/topics")).json()["topics"]
        topic = (await client.get(f"/v1/topics/{topic_name}")).json()
        cluster = (await client.get("/v1/cluster")).json()
    assert [p["latest_offset"] for p in topic["partitions"]] == [0, 0, 0]
    assert topic["configs"]["retention.ms"] == "-1"
    assert len(cluster["brokers"]) == 1


async def test_the_overview_shows_kafka_and_the_services(kafka: Broker) -> None:
    """The overview shows Kafka, a service that answers and one that is unreachable."""
    async with serving(kafka.bootstrap_servers) as other:
        services = {"other": str(other.base_url), "gone": "http://127.0.0.1:1"}
        async with serving(kafka.bootstrap_servers, **services) as client:
            page = await client.get("/")
            overview = (await client.get("/v1/overview")).json()
    assert "<title>Penstock</title>" in page.text
    assert {s["name"]: s["status"] for s in overview["services"]} == {"other": "ok", "gone": "unreachable"}
    assert overview["kafka"]["brokers"] == 1
    assert overview["kafka"]["error"] == ""


async def test_dead_letters_are_found_by_stage_and_late_records_sent_elsewhere(kafka: Broker, topic_name: str) -> None:
    """Dead letters are found by stage behind many newer ones, and late records are replayed once to a named topic or to
    their source.
    """
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    dead, late, other = f"{topic_name}-dlq", f"{topic_name}-late", f"{topic_name}-other"
    async with Admin(settings) as admin:
        await admin.create_topics([event_time_topic(name, 2) for name in (topic_name, dead, late, other)])
    sources = [ConsumerRecord(topic_name, 1, i, 1_000 + i, b"k%d" % i, b"%d" % i, (("h", b"1"),)) for i in range(60)]
    dead_letters = [
        dead_letter_record(dead, DeadLetter(s, "produce" if i < 2 else "process", "ValueError", "no", 1, "g"))
        for i, s in enumerate(sources)
    ]
    lates = [late_record(source, late, source.timestamp, 1_500, 2_000, "visits", "shop") for source in sources[:3]]
    nobodys = ProducerRecord(late, b"{}", b"x", (), 0, 5)
    async with Producer(settings) as producer:
        await (await producer.send_many([*dead_letters, *lates, nobodys]))
    async with serving(kafka.bootstrap_servers) as client:
        listed = {row["topic"]: row for row in (await client.get("/v1/dead-letters")).json()["topics"]}
        assert (listed[dead]["kind"], listed[dead]["records"]) == ("dead_letters", 60)
        assert (listed[late]["kind"], listed[late]["source"], listed[late]["records"]) == ("late", topic_name, 4)
        found = (await client.get(f"/v1/dead-letters/{dead}", params={"stage": "produce", "limit": 5})).json()
        assert sorted(row["source"]["offset"] for row in found["records"]) == [0, 1]
        assert found["scanned"] == 60
        assert len((await client.get(f"/v1/dead-letters/{dead}", params={"limit": 5})).json()["records"]) == 5
        seen = (await client.get(f"/v1/dead-letters/{late}")).json()["records"]
        assert {row.get("message") for row in seen} == {None, *(f"{500 - i} ms too late for visits" for i in range(3))}
        assert {row["source"]["partition"] for row in seen if "source" in row} == {1}
        url = f"/v1/dead-letters/{late}/replay"
        assert (await client.post(url, json={"to": other, "dry_run": True})).json()["would_send"] == 3
        sent = (await client.post(url, json={"to": other})).json()
        assert (sent["sent"], sent["failed"], sent["faults"]) == (3, 0, 1)
        assert (await client.post(url, json={"to": other})).json()["sent"] == 0
        assert (await client.post(url, json={"include_replayed": True})).json()["sent"] == 3
        for wrong, status in (({"to": f"{topic_name}-none"}, 404), ({"to": late}, 400), ({"stage": "process"}, 400)):
            assert (await client.post(url, json=wrong)).status_code == status
        assert (await client.get(f"/v1/dead-letters/{topic_name}")).status_code == 400
        assert (await client.get(f"/v1/dead-letters/{topic_name}-none-dlq")).status_code == 404
    for topic, partitions in ((other, {0, 1}), (topic_name, {1})):
        back = await read_all(kafka.bootstrap_servers, topic, 2)
        assert sorted((r.key, r.value, r.timestamp, r.headers) for r in back) == [
            (s.key, s.value, s.timestamp, s.headers) for s in sources[:3]
        ]
        assert {r.partition for r in back} <= partitions
