"""Spark jobs, run as commands, on a broker that accepts only OAUTHBEARER tokens."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from anyio.from_thread import start_blocking_portal
from deltalake import DeltaTable

from penstock.services.local.broker_config import QUICK_START, EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.settings import KafkaSettings
from tests.documents import ROOT
from tests.integration.spark.conftest import INTERPRETED
from tests.shared_broker import Broker

TIMEOUT_SECONDS = 300
MODULE = '''
"""A topology, and a function that gives tokens: unsecured ones, as Kafka's own validator takes them."""

import base64
import json
import time

from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder


def sessions():
    builder = StreamsBuilder()
    builder.stream("visits").group_by_key().session_window(100, 50).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def give():
    parts = {"alg": "none"}, {"sub": "ali", "iat": time.time() - 10, "exp": time.time() + 3600}
    return ".".join(base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts) + "."
'''


@pytest.fixture
def secured(tmp_path: Path, formatted: Path) -> Iterator[EmbeddedKafka]:
    """A broker with a listener for tokens, besides the broker of the other tests."""
    properties = {
        "listener.name.tokens.sasl.enabled.mechanisms": "OAUTHBEARER",
        "listener.name.tokens.oauthbearer.sasl.jaas.config": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;"
        ),
    }
    listeners = {"TOKENS": "SASL_PLAINTEXT"}
    settings = EmbeddedKafkaSettings(listeners=listeners, properties=properties, jvm_options=QUICK_START)
    shutil.copytree(formatted, tmp_path / "kafka")
    broker = EmbeddedKafka(tmp_path / "kafka", settings)
    with start_blocking_portal("asyncio") as portal, portal.wrap_async_context_manager(broker):
        yield broker


async def send(kafka: Broker) -> None:
    """Two windows of a key, the first of which is closed."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with Admin(settings) as admin:
        await admin.create_topics([NewTopic("visits", 2), NewTopic("out", 2)])
    async with Producer(settings) as producer:
        for at in (1_000, 1_010, 9_000):
            await (await producer.send("visits", b"{}", key=b"a", timestamp=at))


def test_a_batch_and_its_compaction_log_in_with_tokens(secured: EmbeddedKafka, tmp_path: Path) -> None:
    """Driver and tasks import the token function from the folder where the command was started."""
    asyncio.run(send(secured))
    (tmp_path / "of_tokens.py").write_text(MODULE)
    flags = ["--application=app", f"--lake={tmp_path / 'lake'}", "--topology=of_tokens:sessions"]
    flags += [f"--kafka.bootstrap-servers={secured.address('TOKENS')}", "--kafka.security-protocol=SASL_PLAINTEXT"]
    flags += ["--kafka.sasl-mechanism=OAUTHBEARER", "--kafka.sasl-oauth-token-provider=of_tokens:give"]
    flags += ["--spark.master=local[2]", f"--spark.conf={json.dumps(INTERPRETED)}"]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.services.cli", "batch", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert (summary["read"], summary["closed"], summary["compaction"]["closed_rows"]) == (3, 1, 1)
    assert len(DeltaTable(str(tmp_path / "lake" / "app" / "closed" / "s")).to_pyarrow_table()) == 1
