"""A compaction into S3, against a server that speaks its protocol (moto's), and a restore's reads from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.compactor.s3 import S3_JARS
from services.local.kafka import EmbeddedKafka
from shared.common import lake
from shared.common.ivy import cache_root
from tests.integration.s3_server import MOTO, s3_server

pytestmark = [
    pytest.mark.soak,  # the connector is a download of half a gigabyte
    pytest.mark.skipif(MOTO is None, reason="needs moto_server on the PATH: pip install 'moto[server]'"),
]


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """The address of a fresh S3 server with a bucket `lake`."""
    with s3_server(tmp_path, "lake") as url:
        yield url


def test_a_lake_on_s3(simulate: Any, topics: Any, kafka: EmbeddedKafka, endpoint: str, tmp_path: Path) -> None:
    """Two compactions into `s3://` leave there what a restore must load; credentials come from AWS's own variables."""
    aws = {
        "AWS_ACCESS_KEY_ID": "ann",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    simulation = simulate(1)
    (task,) = simulation.tasks
    for seed in (1, 2):
        simulation.feed(60, seed)
        topics.write(simulation)
        command = [sys.executable, "-m", "services.cli", "compact", "--application", simulation.name]
        command += ["--lake", "s3://lake/penstock", "--kafka.bootstrap-servers", kafka.bootstrap_servers]
        command += ["--spark.master", "local[2]", "--optimize-files-max", "1", "--retention-hours", "24"]
        done = subprocess.run(command, env=os.environ | aws, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["run"] == 2
    assert (cache_root() / S3_JARS.folder).is_dir()
    options = {**aws, "AWS_ALLOW_HTTP": "true"}
    where = ("s3://lake/penstock", simulation.name)
    snapshot = lake.read_snapshot(*where, [0], options)
    assert snapshot is not None
    columns = [c.name for c in task.store.state_columns()]
    batches = list(lake.read_windows(*where, 0, "banks", snapshot.version, columns, options))
    rows = [(row["key"], row["start_ms"], row["end_ms"]) for batch in batches for row in batch.to_pylist()]
    assert sorted(rows) == sorted((key, start, end) for (key, start), (end, _) in task.written.items())
    assert lake.describe(*where, options)["closed_rows"] == {"banks": len(task.closed)}
