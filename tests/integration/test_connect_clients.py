"""Two unmodified Kafka Connect clients, one in Java and one in Python, against the Connect worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import fetch_jars, read_jar_set
from penstock.shared.common.settings import KafkaSettings
from tests.integration.connect_worker import properties, running
from tests.shared_broker import Broker

SOURCE = Path(__file__).parent / "connect" / "TryConnectClient.java"
STEPS, LIMIT_S = 26, 180
CLIENT_JARS = read_jar_set(Path(__file__).parent / "connect" / "client_jars.json")


@pytest.mark.soak
async def test_every_method_of_the_java_client_works(kafka: Broker, tmp_path: Path, topic_name: str) -> None:
    """Every method of the Java client succeeds or fails as it should, with basic auth throughout."""
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    (tmp_path / "in.txt").write_text("a\n")
    java = find_java()
    jars = await fetch_jars(CLIENT_JARS)
    props = properties(kafka.bootstrap_servers, rest_auth_users="ann:0123456789abcdef")
    async with running(tmp_path, props) as client, asyncio.timeout(LIMIT_S):
        url = str(client.base_url).rstrip("/")
        child = await asyncio.create_subprocess_exec(
            str(java.executable), "-cp", f"{jars}/*", str(SOURCE),
            url, str(tmp_path / "in.txt"), "ann", "0123456789abcdef", topic_name,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, errors = await child.communicate()
    lines = output.decode().splitlines()
    assert child.returncode == 0, errors.decode()[-3_000:]
    assert [line for line in lines if "FAILED" in line] == []
    assert len(lines) == STEPS, output.decode()


def every_method(url: str, file: str, topic: str) -> None:
    """Call every method of kafka-connect-py, in an order in which each must succeed; a failure raises."""
    client = pytest.importorskip("kafka_connect", reason="needs kafka-connect-py").KafkaConnect(
        url, auth="ann:0123456789abcdef"
    )
    config = {"connector.class": "FileStreamSource", "tasks.max": "1", "file": file, "topic": topic}
    assert client.get_cluster_info()["version"]
    assert any(plugin["class"].endswith("FileStreamSourceConnector") for plugin in client.list_connector_plugins())
    assert client.validate_connector_config("FileStreamSource", {"name": "src", **config})["error_count"] == 0
    assert client.create_connector({"name": "src", "config": config})["name"] == "src"
    assert client.update_connector("src", {**config, "batch.size": "10"})["config"]["batch.size"] == "10"
    assert client.get_connector("src")["type"] == "source"
    assert client.get_connector_config("src")["topic"] == topic
    for wanted, change in (("RUNNING", None), ("PAUSED", client.pause_connector), ("RUNNING", client.resume_connector)):
        if change is not None:
            change("src")
        until(lambda wanted=wanted: client.get_connector_status("src")["connector"]["state"] == wanted)  # type: ignore[misc]
    until(lambda: client.list_connector_tasks("src"))
    until(lambda: client.get_connector_task_status("src", 0)["state"] == "RUNNING")
    client.restart_connector_task("src", 0)
    client.restart_connector("src")
    client.restart_connector("src", include_tasks=True)
    until(lambda: topic in str(client.list_connector_topics("src")))
    client.reset_connector_topics("src")
    until(lambda: "src" in client.list_connectors(expand="status", state="RUNNING"))
    assert list(client.list_connectors(pattern="nothing.*")) == []
    for change in (client.pause_all_connectors, client.resume_all_connectors, client.restart_all_connectors):
        change()
    client.stop_connector("src")
    until(lambda: client.get_connector_status("src")["connector"]["state"] == "STOPPED")
    client.delete_connector("src")
    assert list(client.list_connectors()) == []


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.soak
async def test_every_method_of_the_python_client_works(kafka: Broker, tmp_path: Path, topic_name: str) -> None:
    """Every method of kafka-connect-py works, with basic auth throughout."""
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    (tmp_path / "in.txt").write_text("a\n")
    props = properties(kafka.bootstrap_servers, rest_auth_users="ann:0123456789abcdef")
    async with running(tmp_path, props) as client, asyncio.timeout(LIMIT_S):
        url = str(client.base_url).rstrip("/")
        await asyncio.to_thread(every_method, url, str(tmp_path / "in.txt"), topic_name)
