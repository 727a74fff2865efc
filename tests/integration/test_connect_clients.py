"""A Kafka Connect client that nobody here wrote, unchanged, against our worker: org.sourcelab's, of Java."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.local.kafka import EmbeddedKafka
from shared.clients.admin import Admin, NewTopic
from shared.common.ivy import JarSet, fetch_jars
from shared.common.java import find_java
from shared.common.settings import KafkaSettings
from tests.integration.connect_worker import properties, running

SOURCE = Path(__file__).parent / "connect" / "TryConnectClient.java"
STEPS, LIMIT_S = 26, 180
CLIENT_JARS = JarSet(
    title="kafka-connect-client 4.0.4",
    folder="kafka-connect-client-4.0.4",
    artifacts=(("org.sourcelab", "kafka-connect-client", "4.0.4"), ("org.slf4j", "slf4j-nop", "1.7.36")),
    needed_bytes=20 * 1024 * 1024,
)


@pytest.mark.soak
async def test_every_method_of_the_java_client_works(kafka: EmbeddedKafka, tmp_path: Path, topic_name: str) -> None:
    """What it asks is answered, what it must be refused is refused as it expects, with basic auth throughout."""
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    (tmp_path / "in.txt").write_text("a\n")
    java = find_java()
    jars = await asyncio.to_thread(fetch_jars, java.executable, CLIENT_JARS)
    props = properties(kafka.bootstrap_servers, rest_auth_users="ann:0123456789abcdef")
    async with running(tmp_path, props) as client, asyncio.timeout(LIMIT_S):
        url = str(client.base_url).rstrip("/")
        child = await asyncio.create_subprocess_exec(
            str(java.executable), "-cp", f"{jars}/*", str(SOURCE),
            url, str(tmp_path / "in.txt"), "ann", "0123456789abcdef", topic_name,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        said, errors = await child.communicate()
    lines = said.decode().splitlines()
    assert child.returncode == 0, errors.decode()[-3_000:]
    assert [line for line in lines if "FAILED" in line] == []
    assert len(lines) == STEPS, said.decode()
