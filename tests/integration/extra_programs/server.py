"""`penstock[server]`: an event posted to the ingest service arrives in the file that a Connect sink writes."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from penstock import Admin, NewTopic

TIMEOUT_S = 60
WORKER = """
bootstrap.servers={servers}
listeners={url}
key.converter=org.apache.kafka.connect.storage.StringConverter
value.converter=org.apache.kafka.connect.storage.StringConverter
offset.storage.file.filename={folder}/offsets.json
connect.files.allowed={folder}
"""
SINK = "name={topic}-sink\nconnector.class=FileStreamSink\ntopics={topic}\nfile={folder}/orders.txt\n"


def free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@contextlib.contextmanager
def running(url: str, *command: str) -> Iterator[None]:
    """Run a command of Penstock until it serves `url`; its output goes to standard error."""
    with subprocess.Popen([Path(sys.executable).with_name("penstock"), *command], stdout=sys.stderr) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_answering(url):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield
        process.terminate()


def is_answering(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.TransportError:
        return False


async def create(servers: str, topic: str) -> None:
    async with Admin(servers) as admin:
        await admin.create_topics([NewTopic(topic, 1)])


def main(servers: str, topic: str, folder: Path) -> None:
    asyncio.run(create(servers, topic))
    ingest, connect = free_url(), free_url()
    worker, sink = folder / "worker.properties", folder / "sink.properties"
    worker.write_text(WORKER.format(servers=servers, url=connect, folder=folder))
    sink.write_text(SINK.format(topic=topic, folder=folder))
    port = ingest.rpartition(":")[2]
    with running(ingest, "producer", "--http.port", port, "--kafka.bootstrap-servers", servers):
        response = httpx.post(f"{ingest}/v1/topics/{topic}/events", json={"id": 1}, trust_env=False)
    print(response.status_code, response.json()["stored"])
    with running(connect, "connect", "standalone", str(worker), str(sink)):
        print(httpx.get(f"{connect}/connectors", trust_env=False).json() == [f"{topic}-sink"])
        written, deadline = folder / "orders.txt", time.monotonic() + TIMEOUT_S
        while not (written.exists() and written.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    print(written.read_text(), end="")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
