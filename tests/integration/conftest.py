"""A real broker for the integration tests.

`kafka` is one broker for the whole run, for synchronous and asynchronous tests alike: it lives on an event loop of
its own in another thread, so it belongs to no test's loop. Do not pause, kill or restart it; `own_kafka` is a broker
for one test, on that test's loop, which may be treated badly.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from penstock.services.local import broker_config as config
from penstock.services.local.broker_config import QUICK_START, EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka, new_cluster_id
from penstock.services.local.kafka_jars import KAFKA_JARS
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import fetch_jars
from tests.integration.environments import Environments

TEST_PROPERTIES = {
    "group.min.session.timeout.ms": "100",
    "log.cleaner.backoff.ms": "200",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}


@pytest.fixture(scope="session")
def kafka_settings() -> EmbeddedKafkaSettings:
    """Settings that let tests of time-outs be quick; the quick compiler alone makes a start cost half the CPU time."""
    return EmbeddedKafkaSettings(properties=TEST_PROPERTIES, jvm_options=QUICK_START)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory, kafka_settings: EmbeddedKafkaSettings) -> Iterator[EmbeddedKafka]:
    """One running broker for the whole run; use its `bootstrap_servers`."""
    broker = EmbeddedKafka(tmp_path_factory.mktemp("kafka"), kafka_settings)
    with start_blocking_portal("asyncio") as portal, portal.wrap_async_context_manager(broker):
        yield broker


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Environments:
    """Makes environments with Penstock's wheel."""
    own = tmp_path_factory.getbasetemp()  # with several processes, each has a folder in a common one
    return Environments((own.parent if hasattr(request.config, "workerinput") else own) / "environments")


@pytest.fixture(scope="session")
def formatted(tmp_path_factory: pytest.TempPathFactory, kafka_settings: EmbeddedKafkaSettings) -> Path:
    """A data folder as Kafka's own formatting leaves it, which no broker runs in: a second of a JVM, spent once."""
    folder = tmp_path_factory.mktemp("formatted")
    taken = {config.CLIENT_LISTENER: 1, config.CONTROLLER_LISTENER: 2}  # each start writes its own over them
    properties = config.render_properties(config.broker_properties(kafka_settings, taken))
    (folder / config.PROPERTIES_FILE).write_text(properties, encoding="ascii")
    (folder / config.LOG4J_FILE).write_text(config.log4j_config(), encoding="ascii")
    java = find_java()
    command = config.format_command(java, asyncio.run(fetch_jars(KAFKA_JARS)), new_cluster_id())
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
async def own_kafka(
    tmp_path: Path, formatted: Path, kafka_settings: EmbeddedKafkaSettings
) -> AsyncIterator[EmbeddedKafka]:
    """A broker for one test, to pause, kill and restart; costs about two seconds."""
    shutil.copytree(formatted, tmp_path / "kafka")
    async with EmbeddedKafka(tmp_path / "kafka", kafka_settings) as broker:
        yield broker


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test has, with the test's name in it."""
    return f"{re.sub(r'[^a-zA-Z0-9._-]', '-', request.node.name)[:80]}-{uuid.uuid4().hex[:8]}"
