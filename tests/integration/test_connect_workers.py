"""Two distributed workers of one group in this process: forwarding to the leader, signed requests, and fencing of
tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.integration.connect_worker import properties, running
from tests.shared_broker import Broker

WAIT_S = 30


@dataclass
class Pair:
    """Clients of the REST APIs of two workers, the leader and the follower."""

    leader: httpx.AsyncClient
    other: httpx.AsyncClient

    def worker_id(self, client: httpx.AsyncClient) -> str:
        return str(client.base_url).removeprefix("http://").rstrip("/")


@contextlib.asynccontextmanager
async def two_workers(folder: Path, props: dict[str, str]) -> AsyncIterator[Pair]:
    async with running(folder, props) as first, running(folder, props) as second:
        # A follower answers 409 if it may not forward.
        rejected = await first.delete("/connectors/none", params={"forward": "false"})
        yield Pair(second, first) if rejected.status_code == 409 else Pair(first, second)


async def make_topic(kafka: Broker, topic: str) -> None:
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic, 1)])


async def until(client: httpx.AsyncClient, path: str, holds: Callable[[Any], bool]) -> Any:
    body: Any = None
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                response = await client.get(path)
                body = response.json()
                with contextlib.suppress(KeyError, IndexError, TypeError):
                    if response.status_code == 200 and holds(body):
                        return body
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"{path} stayed {body}") from None


def runs(tasks: int) -> Callable[[Any], bool]:
    def holds(status: Any) -> bool:
        parts = [status["connector"], *status["tasks"]]
        return len(parts) == tasks + 1 and all(part["state"] == "RUNNING" for part in parts)

    return holds


def source(file: Path, topic: str, **more: str) -> dict[str, str]:
    return {
        "connector.class": "FileStreamSource",
        "tasks.max": "1",
        "file": str(file),
        "topic": topic,
        **{name.replace("_", "."): value for name, value in more.items()},
    }


async def test_any_worker_takes_requests_and_all_share_the_work(kafka: Broker, tmp_path: Path, topic_name: str) -> None:
    """Requests need the token, a follower forwards them to the leader, connectors run on both workers, and either
    worker can restart a connector of the other.
    """
    own_settings = {"rest_auth_token": "0123456789abcdef"}
    props = properties(kafka.bootstrap_servers, scheduled_rebalance_max_delay_ms="0", **own_settings)
    await make_topic(kafka, topic_name)
    (tmp_path / "in.txt").write_text("a\n")
    async with contextlib.AsyncExitStack() as stack:
        stopping = await stack.enter_async_context(contextlib.AsyncExitStack())
        pair = await stopping.enter_async_context(two_workers(tmp_path, props))
        assert (await pair.other.get("/connectors", headers={"Authorization": ""})).status_code == 401
        for name in ("one", "two", "three", "four"):
            config = source(tmp_path / "in.txt", topic_name)
            response = await pair.other.post("/connectors", json={"name": name, "config": config})
            assert response.status_code == 201, response.text
            assert response.headers["location"].endswith(f"/connectors/{name}")
        statuses = [
            await until(pair.other, f"/connectors/{n}/status", runs(1)) for n in ("one", "two", "three", "four")
        ]
        owners = {status["connector"]["worker_id"] for status in statuses}
        assert owners == {pair.worker_id(pair.leader), pair.worker_id(pair.other)}
        for name in ("one", "two", "three", "four"):
            assert (await pair.other.post(f"/connectors/{name}/restart")).status_code == 204
            assert (await pair.leader.post(f"/connectors/{name}/tasks/0/restart")).status_code == 204
        response = await pair.other.post("/connectors/one/restart?includeTasks=true")
        assert (response.status_code, response.json()["tasks"][0]["state"]) == (202, "RESTARTING")
        await until(pair.other, "/connectors/one/status", runs(1))
        assert (await pair.other.put("/connectors/two/stop")).status_code == 204
        await until(pair.leader, "/connectors/two/status", lambda s: s["connector"]["state"] == "STOPPED")
        assert (await pair.other.delete("/connectors/two")).status_code == 204
        assert (await pair.other.delete("/connectors/two", params={"forward": "false"})).status_code == 409
        assert (await until(pair.leader, "/connectors", lambda names: len(names) == 3)) == ["four", "one", "three"]
        levels = await pair.other.put("/admin/loggers/a.connectors.own?scope=cluster", json={"level": "DEBUG"})
        assert levels.status_code == 204


async def test_requests_between_workers_are_signed(kafka: Broker, tmp_path: Path, topic_name: str) -> None:
    """A worker rejects task configs and fencing requests that are not signed with the group's key."""
    await make_topic(kafka, topic_name)
    (tmp_path / "in.txt").write_text("a\n")
    async with running(tmp_path, properties(kafka.bootstrap_servers)) as client:
        await client.put("/connectors/src/config", json=source(tmp_path / "in.txt", topic_name))
        await until(client, "/connectors/src/status", runs(1))
        for method, path in (("POST", "/connectors/src/tasks"), ("PUT", "/connectors/src/fence")):
            unsigned = await client.request(method, path, content=b"[]")
            assert unsigned.status_code == 400
            headers = {
                "X-Connect-Authorization": "AAAA",
                "X-Connect-Request-Signature-Algorithm": "HmacSHA256",
            }
            forged = await client.request(method, path, content=b"[]", headers=headers)
            assert (forged.status_code, forged.json()["error_code"]) == (403, 403)
        await until(client, "/connectors/src/status", runs(1))


async def committed(servers: str, topic: str) -> list[bytes | None]:
    """The values of all committed records of a topic."""
    settings = ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed", max_poll_records=None)
    async with Consumer(KafkaSettings(bootstrap_servers=servers), settings) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        end = (await consumer.end_offsets([TopicPartition(topic, 0)]))[TopicPartition(topic, 0)]
        found: list[bytes | None] = []
        while (consumer.known_position(TopicPartition(topic, 0)) or 0) < end:
            for columns in (await consumer.poll(200)).values():
                found += columns.values
        return found


async def test_exactly_once_sources_are_fenced_and_repeat_nothing(kafka: Broker, tmp_path: Path) -> None:
    """Under `exactly.once.source.support=enabled` each new set of tasks fences the one before, and each line is in the
    topic once.
    """
    topic = f"lines-{uuid.uuid4().hex[:6]}"
    await make_topic(kafka, topic)
    file = tmp_path / "in.txt"
    file.write_text("".join(f"{n}\n" for n in range(100)))
    props = properties(kafka.bootstrap_servers, exactly_once_source_support="enabled")
    converter = {"value_converter": "org.apache.kafka.connect.storage.StringConverter"}
    async with two_workers(tmp_path, props) as pair:
        for batch in ("7", "3", "5"):  # another config, so another set of tasks
            where = "process" if batch == "3" else "asyncio"
            config = source(file, topic, batch_size=batch, penstock_task_isolation=where, **converter)
            response = await pair.other.put("/connectors/src/config", json=config)
            assert response.status_code in (200, 201), response.text
            await until(
                pair.other,
                "/connectors/src/tasks",
                lambda tasks, batch=batch: tasks[0]["config"]["batch.size"] == batch,
            )
            await until(pair.other, "/connectors/src/status", runs(1))
            with file.open("a") as more:
                more.write(f"after {batch}\n")
            await until(
                pair.leader,
                "/connectors/src/offsets",
                lambda found: found["offsets"][0]["offset"]["position"] == file.stat().st_size,
            )
        values = await committed(kafka.bootstrap_servers, topic)
    wanted = [str(n).encode() for n in range(100)] + [f"after {batch}".encode() for batch in ("7", "3", "5")]
    assert values == wanted


async def test_java_tools_see_the_group(kafka: Broker, tmp_path: Path) -> None:
    """The coordinator lists the workers as a stable group of protocol type `connect`."""
    props = properties(kafka.bootstrap_servers)
    async with two_workers(tmp_path, props), Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        found = {group.group_id: group for group in await admin.list_groups()}[props["group.id"]]
        assert (found.protocol_type, found.state) == ("connect", "Stable")
