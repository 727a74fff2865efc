"""Brokers to stop, and the environments of the integration tests.

Most tests share the broker `kafka` of tests/conftest.py. The tests of a module share `stoppable_kafka`, which they may
pause, kill and restart. `own_kafka` is a broker for one test, which may also stop or damage it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.services.local import broker_config as config
from penstock.services.local.broker_config import KAFKA_JARS
from penstock.services.local.embedded_kafka import EmbeddedKafka, format_storage_command, new_cluster_id
from penstock.services.local.stack import Stack
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import fetch_jars
from penstock.shared.common.java.properties_file import render_properties
from tests.integration.environments import Environments
from tests.integration.s3_server import s3_server
from tests.shared_broker import SETTINGS


@pytest.fixture(scope="session")
def common_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A temporary folder of all processes of this run."""
    own = tmp_path_factory.getbasetemp()  # with several processes, each has a folder in a common one
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="session")
def environments(common_folder: Path) -> Environments:
    """Makes virtual environments with Penstock's wheel."""
    return Environments(common_folder / "environments")


@pytest.fixture(scope="session")
def formatted(common_folder: Path) -> Path:
    """A data folder that Kafka's tool has formatted, for brokers to copy.

    Formatting takes a JVM a second, so it is done once for all processes of this run.
    """
    folder = common_folder / "formatted"
    with (common_folder / "formatted.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _format(common_folder / f"formatting-{os.getpid()}").rename(folder)
    return folder


def _format(folder: Path) -> Path:
    """Format a new data folder, and return it."""
    folder.mkdir()
    # placeholders: each start writes its own ports over them
    taken = {config.CLIENT_LISTENER: 1, config.CONTROLLER_LISTENER: 2}
    properties = render_properties(config.broker_properties(SETTINGS, taken))
    (folder / config.PROPERTIES_FILE).write_text(properties, encoding="ascii")
    (folder / config.LOG4J_FILE).write_text(config.log4j_config(), encoding="ascii")
    java = find_java()
    command = format_storage_command(java, asyncio.run(fetch_jars(KAFKA_JARS)), new_cluster_id())
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
async def kafka_of_module(tmp_path_factory: pytest.TempPathFactory, formatted: Path) -> AsyncIterator[EmbeddedKafka]:
    """The broker of `stoppable_kafka`."""
    folder = tmp_path_factory.mktemp("stoppable") / "kafka"
    shutil.copytree(formatted, folder)
    async with EmbeddedKafka(folder, SETTINGS) as broker:
        yield broker


@pytest.fixture
async def stoppable_kafka(kafka_of_module: EmbeddedKafka) -> AsyncIterator[EmbeddedKafka]:
    """The module's broker, which a test may pause, kill and restart. It runs again for the next test."""
    broker = kafka_of_module
    yield broker
    try:
        broker.resume()
    except IllegalState:  # it was killed
        await broker.start()


@pytest.fixture
async def own_kafka(tmp_path: Path, formatted: Path) -> AsyncIterator[EmbeddedKafka]:
    """A broker for one test, which may do anything with it. It costs about two seconds."""
    shutil.copytree(formatted, tmp_path / "kafka")
    async with EmbeddedKafka(tmp_path / "kafka", SETTINGS) as broker:
        yield broker


@pytest.fixture
def topic_name(request: pytest.FixtureRequest) -> str:
    """A topic name that is unique and contains the test's name."""
    return f"{re.sub(r'[^a-zA-Z0-9._-]', '-', request.node.name)[:80]}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """The services of one machine, which a test starts."""
    stack = Stack(tmp_path, hermetic=True)
    yield stack
    await stack.stop()


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """The address of a new S3 server with a bucket `lake`."""
    with s3_server(tmp_path, "lake") as url:
        yield url
