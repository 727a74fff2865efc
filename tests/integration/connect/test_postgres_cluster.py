"""Three distributed workers write into a real Postgres exactly once, while one is killed, one is stopped and one is
added.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.settings import KafkaSettings
from tests.http_client import http_client
from tests.integration.connect.postgres import is_installed, server
from tests.integration.connect_processes import WorkerProcess, workers
from tests.integration.connect_worker import JSON_CONVERTER, properties
from tests.integration.test_connect_cluster import (
    ANSWER_P99_MAX_S,
    CONNECTORS,
    REBALANCES_MAX,
    Load,
    balanced,
    p99_s,
    rebalances_of,
    settled,
    take_leader,
    until,
)
from tests.shared_broker import Broker

asyncpg = pytest.importorskip("asyncpg")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not is_installed(), reason="no Postgres: initdb, pg_ctl and postgres must be on the PATH"),
]


@pytest.fixture
def url() -> Iterator[str]:
    with server() as found_url:
        yield found_url


def sink(url: str, topic: str, number: int) -> dict[str, str]:
    """A sink with a table of its own; the table has no constraint that would hide a duplicate."""
    return {
        "connector.class": "PostgresSink",
        "tasks.max": "1",
        "topics": topic,
        "connection.url": url,
        "insert.mode": "insert",
        "auto.create": "true",
        "exactly.once": "true",
        "table.name.format": f"sink_{number}",
        "value.converter": JSON_CONVERTER,
        "value.converter.schemas.enable": "false",
    }


class Numbered(Load):
    """Sends JSON objects that contain the record's number."""

    def value(self, number: int) -> bytes:
        return json.dumps({"n": number}).encode()


async def tables(db: Any) -> dict[int, tuple[int, int, int]]:
    """By connector: the number of rows, the number of distinct values, and the sum of the values."""
    rows = {}
    for number in range(CONNECTORS):
        try:
            row = await db.fetchrow(
                f"SELECT count(*), count(DISTINCT n), coalesce(sum(n), 0)::bigint FROM sink_{number}"
            )
        except asyncpg.UndefinedTableError:
            continue
        rows[number] = (row[0], row[1], row[2])
    return rows


async def test_each_record_is_in_each_table_once(kafka: Broker, tmp_path: Path, topic_name: str, url: str) -> None:
    """With 20 connectors, and workers killed, stopped and added, every table has each record once.

    REST answers throughout, and rebalances are bounded.
    """
    props = properties(kafka.bootstrap_servers, session_timeout_ms="6000", heartbeat_interval_ms="1000")
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 4)])
    with workers(tmp_path, props, 3) as cluster:
        await asyncio.gather(*(worker.ready() for worker in cluster))
        load = Numbered(kafka.bootstrap_servers, topic_name, [worker.url for worker in cluster])
        async with http_client(timeout=100) as client:
            for number in range(CONNECTORS):
                connector = f"{cluster[number % 3].url}/connectors/sink-{number}/config"
                response = await client.put(connector, json=sink(url, topic_name, number))
                assert response.status_code == 201, response.text
            await until("all run", lambda: settled(client, cluster, 1))
            load.start()
            killed = await take_leader(client, cluster)
            before = await rebalances_of(client, cluster[0])
            load.urls.remove(killed.url)
            killed.kill()
            await until("the killed one's work runs elsewhere", lambda: settled(client, cluster, 1))
            stopped = cluster.pop(1)
            load.urls.remove(stopped.url)
            assert await stopped.stop() == 0, stopped.log[-3_000:]
            await until("the stopped one's work runs elsewhere", lambda: settled(client, cluster, 1))
            added = WorkerProcess(tmp_path, props)
            cluster.append(added)
            await added.ready()
            load.urls.append(added.url)
            await until("the work is spread again", lambda: balanced(client, cluster, 1))
            await load.stop()
            db = await asyncpg.connect(url)
            wanted = (load.sent, load.sent, load.sent * (load.sent - 1) // 2)

            async def complete() -> bool:
                rows = await tables(db)
                assert all(row[0] <= load.sent for row in rows.values()), f"a record is there twice: {rows}"
                return len(rows) == CONNECTORS and all(row == wanted for row in rows.values())

            await until("every record is in every table", complete)
            await db.close()
            rebalances = await rebalances_of(client, cluster[0]) - before
    assert not load.unanswered, load.unanswered[:5]
    assert rebalances <= REBALANCES_MAX
    assert p99_s(load.responses) < ANSWER_P99_MAX_S
    slowest_ms = p99_s(load.responses) * 1000
    print(f"{load.sent} records, {len(load.responses)} responses, p99 {slowest_ms:.0f} ms, {rebalances:.0f} rebalances")
