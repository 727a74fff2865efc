"""The REST API of a distributed worker, compared with a recording of a real Kafka Connect: the same requests get the
same responses.

These may differ: the worker's identity and address, lists of plugins and settings, the order of sets, messages that
quote Java, and the status of malformed bodies, which is 400 here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.settings import KafkaSettings
from tests.integration.connect_worker import properties, running
from tests.shared.connect.recordings import recorded_requests
from tests.shared_broker import Broker

POLL_S, WAIT_S, SETTLE_S = 0.05, 30, 30
FREE = ("worker_id", "commit", "kafka_cluster_id", "documentation", "recommended_values")
JAVA = ("org.apache.kafka", "java.util", "Unexpected character", "Unrecognized field", "Cannot construct")


def comparable(value: Any) -> Any:
    """Remove members that may differ, and sort lists of offsets."""
    if isinstance(value, dict):
        found = {name: comparable(item) for name, item in value.items() if name not in FREE}
        if isinstance(found.get("offsets"), list):
            found["offsets"].sort(key=json.dumps)
        return found
    return [comparable(item) for item in value] if isinstance(value, list) else value


def expected(line: dict[str, Any]) -> tuple[int, Any]:
    """The status and body that the worker must return; the body is None if it may differ."""
    status, body = line["status"], comparable(line["response"])
    message = body.get("message", "") if isinstance(body, dict) and "error_code" in body else ""
    if status == 500 and not line["path"].endswith("/validate"):
        return 400, None
    if any(word in message for word in JAVA):
        return status, None
    return status, body


def matches(line: dict[str, Any], found: Any, wanted: Any) -> bool:
    """Whether a body equals the recorded one; a list of plugins must contain the recorded plugins, in the same
    shape.
    """
    if wanted is None or found == wanted:
        return True
    if not line["path"].partition("?")[0].endswith("/connector-plugins"):
        return False
    named = {(plugin["class"], plugin["type"]) for plugin in found}
    shapes = {tuple(plugin) for plugin in (*found, *wanted)}
    return len(shapes) == 1 and named >= {(plugin["class"], plugin["type"]) for plugin in wanted}


class Replay:
    """Sends the recorded requests to one worker, each after the one before, and waits where the recording waits.

    A read in the recording shows the effect of the request before it. That takes a varying time, so a read is repeated
    until it matches. In the recording, three records without a key are in partition 0; here their partition may be 1,
    and then the numbers are swapped.
    """

    def __init__(self, client: httpx.AsyncClient, scratch: Path) -> None:
        self._client, self._scratch = client, str(scratch)
        self._swapped = False
        self.differences: list[str] = []

    async def run(self) -> None:
        for number, line in enumerate(recorded_requests()):
            if "wait" in line:
                await self._wait(number, line["wait"], line["until"])
            elif line["method"] == "GET":
                await self._read(number, line)
            else:
                await self._wait_for_tasks(line)
                self._compare(number, line, await self._send(line))

    async def _wait_for_tasks(self, line: dict[str, Any]) -> None:
        """Wait until a connector has as many tasks as the recorded response to its next change shows.

        The change before may have changed their number, which takes a varying time.
        """
        body = line["response"]
        if line["status"] != 200 or not isinstance(body, dict) or "tasks" not in body:
            return

        async def as_many() -> bool:
            tasks = (await self._client.get(f"/connectors/{body['name']}/tasks")).json()
            return len(tasks) == len(body["tasks"])

        await self._until(as_many)

    async def _wait(self, number: int, path: str, predicate: str) -> None:
        """Poll until the recording's predicate is true of the body."""
        if not await self._until(lambda: self._holds(path, predicate)):
            found = (await self._client.get(path)).text
            self.differences.append(f"{number}: {path} never became {predicate}: {found}")
        elif path == "/connectors/snk/offsets":
            offsets = (await self._client.get(path)).json()["offsets"]
            first = max(offsets, key=lambda found: found["offset"]["kafka_offset"])
            self._swapped = first["partition"]["kafka_partition"] == 1

    async def _holds(self, path: str, predicate: str) -> bool:
        response = await self._client.get(path)
        try:
            if response.status_code != 200 or not eval(predicate, {"b": response.json()}):
                return False
        except (KeyError, IndexError, TypeError):
            return False
        if not path.endswith("/status"):
            return True
        # tasks change their states one by one
        tasks = (await self._client.get(path.replace("/status", "/tasks"))).json()
        return len(tasks) == len(response.json()["tasks"])

    async def _read(self, number: int, line: dict[str, Any]) -> None:
        """Repeat a read until its response matches the recorded one."""
        status, wanted = expected(line)

        async def alike() -> bool:
            response = await self._send(line)
            return response.status_code == status and matches(line, self._shown(response), wanted)

        await self._until(alike, SETTLE_S)
        self._compare(number, line, await self._send(line))

    async def _until(self, check: Callable[[], Awaitable[bool]], wait_s: float = WAIT_S) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                while not await check():  # noqa: ASYNC110 - polled as a client would
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            return False
        return True

    async def _send(self, line: dict[str, Any]) -> httpx.Response:
        body = line.get("raw_body") or (json.dumps(self._renamed(line["body"])) if "body" in line else None)
        content = None if body is None else body.replace("SCRATCH", self._scratch)
        return await self._client.request(line["method"], line["path"], content=content)

    def _shown(self, response: httpx.Response) -> Any:
        if not response.content:
            return None
        return comparable(self._renamed(json.loads(response.text.replace(self._scratch, "SCRATCH"))))

    def _renamed(self, value: Any) -> Any:
        """Swap the two partitions' numbers if they differ from the recording's."""
        if isinstance(value, list):
            return [self._renamed(item) for item in value]
        if not isinstance(value, dict):
            return value
        found = {name: self._renamed(item) for name, item in value.items()}
        if self._swapped and isinstance(found.get("kafka_partition"), int):
            found["kafka_partition"] = 1 - found["kafka_partition"]
        return found

    def _compare(self, number: int, line: dict[str, Any], response: httpx.Response) -> None:
        what, (status, wanted), found = (
            f"{number}: {line['method']} {line['path']}",
            expected(line),
            self._shown(response),
        )
        if response.status_code != status:
            self.differences.append(f"{what}: {response.status_code}, not {status}: {found}")
        elif not matches(line, found, wanted):
            self.differences.append(f"{what}: {found}, not {wanted}")
        elif status >= 400 and (found is None or set(found) != {"error_code", "message"}):
            self.differences.append(f"{what}: no error body: {found}")
        location = response.headers.get("location", "").replace(str(self._client.base_url).rstrip("/"), "")
        if location != line.get("location", ""):
            self.differences.append(f"{what}: location {location!r}, not {line.get('location')!r}")


async def test_recorded_requests_get_the_recorded_responses(kafka: Broker, tmp_path: Path) -> None:
    """All 111 requests get Kafka Connect's statuses and bodies, except for members that may differ."""
    (tmp_path / "in.txt").write_text("alpha\nbeta\ngamma\n")
    (tmp_path / "out.txt").touch()
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic("oracle-lines", 2)], exist_ok=True)
    async with running(tmp_path, properties(kafka.bootstrap_servers)) as client:
        replay = Replay(client, tmp_path)
        await replay.run()
    assert not replay.differences, "\n" + "\n".join(replay.differences)
