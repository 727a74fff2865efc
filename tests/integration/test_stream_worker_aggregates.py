"""Aggregations without windows on a real broker: updates, joins and restarts, and their rows over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.services.local.stack import Service, ServiceSpec, Stack
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_instances import PARTITIONS, client, settings_of, until
from tests.integration.test_stream_worker import GUARANTEES, Chain, chain_of, running
from tests.shared_broker import Broker

STORES = ("in_memory", "rocksDB")


def totals(topic: str) -> Topology:
    """A row for each key with its updates, and a join that looks rows up."""
    builder = StreamsBuilder()
    table = builder.stream(topic).group_by_key().aggregate("totals", n=Count(), sum=Sum("id"))
    table.to_stream().to(f"{topic}-out")
    builder.stream(f"{topic}-requests").left_join(table, lambda value, row: row).to(f"{topic}-answers")
    return builder.build()


def expected(chain: Chain) -> dict[bytes, dict[str, Any]]:
    """The expected row of each partition and key: a key's events are in several partitions, which have their own
    rows.
    """
    rows: dict[bytes, dict[str, Any]] = {}
    for partition, key, _, number in chain.sent:
        own = rows.setdefault(b"%d-%s" % (partition, key), {"key": key.decode(), "n": 0, "sum": 0.0})
        own["n"], own["sum"] = own["n"] + 1, own["sum"] + number
    return rows


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_rows_survive_restarts(
    kafka: Broker, topic_name: str, tmp_path: Path, guarantee: str, store: str
) -> None:
    """After restarts each key's last update is its row, with the timestamp of its latest record, and joins find it."""
    given = {"processing_guarantee": guarantee, "default_dsl_store": store, "state_dir": str(tmp_path)}
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        async with Admin(chain.kafka) as admin:
            await admin.create_topics([event_time_topic(f"{topic_name}-requests", 1)])
        for turn in range(3):
            await chain.send(200)
            if turn == 2:  # only the changelog has the state
                given["state_dir"] = str(tmp_path / "elsewhere")
            worker = chain.worker(totals(topic_name), **given)
            async with running(worker):
                await chain.wait_processed(worker)
                if turn == 2:
                    trigger = ProducerRecord(f"{topic_name}-requests", b"{}", chain.sent[0][1], (), 0, 10_000_000)
                    async with Producer(chain.kafka) as producer:
                        assert await (await producer.send_many([trigger])).first_error() is None

                    async def is_joined() -> bool:
                        return bool(await chain.values("answers"))

                    await until(is_joined)
        rows = expected(chain)
        out = await chain.read(f"{topic_name}-out")
        last = {record.key: record for record in out}
        assert {b"0-%s" % key: msgspec.json.decode(r.value or b"") for key, r in last.items() if key} == rows
        latest = {key: max(at for _, k, at, _ in chain.sent if k == key) for key in last}
        assert {key: record.timestamp for key, record in last.items()} == latest
        assert [msgspec.json.decode(value) for value in await chain.values("answers")] == [
            rows[b"0-" + chain.sent[0][1]]
        ]
        counts = [msgspec.json.decode(r.value or b"")["n"] for r in out if r.key == chain.sent[0][1]]
        assert counts == sorted(set(counts)), "an update was written twice, or out of order"
        assert await chain.values("dlq") == []


async def test_rows_are_read_over_http(kafka: Broker, topic_name: str, stack: Stack) -> None:
    """Rows of all partitions are read over HTTP by key and page by page; they have key and results, and no windows."""
    async with chain_of(kafka, topic_name, PARTITIONS) as chain:
        async with Admin(chain.kafka) as admin:
            await admin.create_topics([event_time_topic(f"{topic_name}-requests", PARTITIONS)])
        await chain.send(300)
        settings = settings_of(kafka, topic_name) | {
            "TOPOLOGY": "tests.integration.test_stream_worker_aggregates:totals",
            "TOPOLOGY_OPTIONS": f'{{"topic": "{topic_name}"}}',
        }
        service: Service = await stack.start(ServiceSpec("a", settings, arguments=["aggregator"]))
        rows = {(int(key[:1]), row["key"]): row for key, row in expected(chain).items()}
        async with client() as http:

            async def get(path: str) -> httpx.Response:
                try:
                    return await http.get(f"{service.url}/v1/streams/stores/totals{path}")
                except httpx.ConnectError:
                    return httpx.Response(599)

            async def has_all() -> Any:
                response = await get("")
                if response.status_code != 200:
                    return None
                found = response.json()
                return found if sum(row["n"] for row in found["rows"]) == len(chain.sent) else None

            whole = await until(has_all)
            assert whole["kind"] == "aggregate"
            assert {(row.pop("partition"), row["key"]): row for row in whole["rows"]} == rows
            one = (await get(f"?key={chain.sent[0][1].decode()}")).json()["rows"]
            assert {(row["partition"], row["key"]) for row in one} <= rows.keys()
            seen, page = [], (await get("?rows_max=3")).json()
            while page["is_cut"]:
                seen += page["rows"]
                page = (await get(f"?rows_max=3&continuation={page['continuation']}")).json()
            assert len(seen + page["rows"]) == len(rows)
            assert (await get("/windows")).status_code == 404
