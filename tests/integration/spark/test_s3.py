"""Jobs into and from S3, against a server that speaks its protocol (moto's), and a restore's reads from there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.lake import delta_tables, state_snapshot, window_queries
from penstock.shared.common.lake.location import table_uri
from penstock.shared.common.settings import KafkaSettings
from tests.integration.s3_server import MOTO
from tests.shared_broker import Broker

pytestmark = [
    pytest.mark.soak,  # the connector is a download of half a gigabyte
    pytest.mark.skipif(MOTO is None, reason="needs moto_server on the PATH: pip install 'moto[server]'"),
]

TOPOLOGY = """
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder


def build(topic):
    builder = StreamsBuilder()
    builder.stream(topic).group_by_key().session_window(100, 50).aggregate("s", n=Count()).on_close().to(f"{topic}-out")
    return builder.build()
"""


@pytest.fixture
def penstock(kafka: Broker, endpoint: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a job over Kafka and the server, with AWS's own variables."""
    environ = os.environ | {**aws(endpoint), "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}

    def run(job: str, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "penstock.services.cli",
            job,
            "--kafka.bootstrap-servers",
            kafka.bootstrap_servers,
        ]
        command += ["--spark.master", "local[2]", *flags]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)

    return run


def put(url: str, body: bytes) -> None:
    """Write an object."""
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PUT"), timeout=10).close()


def aws(endpoint: str) -> dict[str, str]:
    """The settings for AWS's own tools."""
    keys = {"AWS_ACCESS_KEY_ID": "ann", "AWS_SECRET_ACCESS_KEY": "secret"}
    return {**keys, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}


def test_a_lake_on_s3(
    simulate: Any, topics: Any, endpoint: str, penstock: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """After two compactions into `s3://`, a restore reads the live windows, and an audit finds no difference."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    there = ("--application", simulation.name, "--lake", "s3://lake/penstock")
    for seed in (1, 2):
        simulation.feed(60, seed)
        topics.write(simulation)
        done = penstock("compact", *there, "--optimize-files-max", "1", "--retention-hours", "24")
        assert done.returncode == 0, done.stderr
    options = aws(endpoint)
    where = ("s3://lake/penstock", simulation.name)
    snapshot = state_snapshot.read_snapshot(*where, [0], options)
    assert snapshot is not None
    columns = [c.name for c in task.store.state_columns()]
    found = dict[Any, int]()
    for batch in state_snapshot.read_window_changes(*where, 0, "banks", snapshot.version, columns, options):
        for row in batch.to_pylist():
            found.pop((row["key"], row["start_ms"]), None)
            if row["live"]:
                found[row["key"], row["start_ms"]] = row["end_ms"]
    assert found == {window: end for window, (end, _) in task.written.items()}
    assert window_queries.count_windows(*where, options).closed == {"banks": len(task.closed)}
    audit = penstock("audit", *there)
    assert audit.returncode == 0, audit.stdout + audit.stderr


async def test_files_on_s3(
    kafka: Broker,
    topic_name: str,
    endpoint: str,
    penstock: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    """A batch reads `s3://` by either name, into a lake on a disk or on S3. The next batch continues from that lake."""
    (tmp_path / "from_s3.py").write_text(TOPOLOGY)
    rows = "".join(f'{{"who": "ann", "ms": {ms}}}\n' for ms in (1_000, 1_050, 2_000))
    for carrier in ("UA", "AA"):
        await asyncio.to_thread(put, f"{endpoint}/lake/files/carrier={carrier}/a.json", rows.encode())
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1, 1)])
    topology = ["--topology", "from_s3:build", "--topology-options", json.dumps({"topic": topic_name})]
    given = [
        *topology,
        "--format",
        "json",
        "--key-column",
        "carrier",
        "--timestamp-column",
        "ms",
        "--live-from",
        "latest",
    ]
    for scheme, lake_ in (("s3", str(tmp_path / "lake")), ("s3a", "s3://lake/penstock")):
        application = f"{topic_name}-{scheme}"
        there = ["--application", application, "--lake", lake_]
        done = await asyncio.to_thread(penstock, "batch", *there, *given, "--files", f"{scheme}://lake/files")
        assert done.returncode == 0, done.stderr
        options = aws(endpoint) if lake_.startswith("s3") else None
        assert window_queries.count_windows(lake_, application, options) == (2, {"s": 2})

    async with Producer(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as producer:
        await producer.send(topic_name, b'{"who": "ann"}', key=b"UA", timestamp=2_040)
    done = await asyncio.to_thread(penstock, "batch", *there, *topology)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["read"] == 1
    live = [row["end_ms"] for row in delta_tables.rows(state_table(lake_, application, options), LIVE)]
    assert sorted(live) == [2_000, 2_000, 2_040]


LIVE = "SELECT end_ms FROM t WHERE row = 'window' AND live"


def state_table(lake: str, application: str, options: dict[str, str] | None) -> DeltaTable:
    table = delta_tables.open_table(table_uri(lake, application, "state"), options)
    assert table is not None
    return table
