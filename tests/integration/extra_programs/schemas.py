"""`penstock[schemas]`: the ingest service rejects an event that violates its topic's JSON Schema."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

from penstock import Admin, NewTopic

TIMEOUT_S = 60


async def create(servers: str, topic: str) -> None:
    async with Admin(servers) as admin:
        await admin.create_topics([NewTopic(topic, 1)])


def is_answering(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


def main(servers: str, topic: str, folder: Path) -> None:
    asyncio.run(create(servers, topic))
    (folder / "orders.json").write_text(json.dumps({"type": "object", "required": ["id"]}))
    (folder / "ingest.toml").write_text(f'[ingest.topics.{topic}]\njson_schema = "orders.json"\n')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    penstock = Path(sys.executable).with_name("penstock")
    options = ("--config", "ingest.toml", "--http.port", str(port), "--kafka.bootstrap-servers", servers)
    with subprocess.Popen([penstock, "producer", *options], cwd=folder, stdout=sys.stderr) as ingest:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_answering(url):
            assert ingest.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for event in ({"id": 1}, {"no": 1}):
            response = httpx.post(f"{url}/v1/topics/{topic}/events", json=event, trust_env=False)
            print(response.status_code, response.json().get("detail"))
        ingest.terminate()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
