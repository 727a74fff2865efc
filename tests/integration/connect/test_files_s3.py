"""The files sink writes to S3; the server is moto's, which implements S3's protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest

from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import OffsetAndMetadata
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.connectors.files import FilesSinkConnector
from tests.integration.s3_server import MOTO, s3_server
from tests.shared.connect.harness import TP, running

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(MOTO is None, reason="needs moto_server on the PATH: pip install 'moto[server]'"),
]
JSON = {"value_converter": "org.apache.kafka.connect.json.JsonConverter", "value_converter_schemas_enable": "false"}


async def test_a_restarted_task_writes_the_remaining_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink writes complete Parquet objects into the bucket, and a restarted task writes the remaining records
    once.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ann")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with s3_server(tmp_path, "lake") as endpoint:
        address = f"s3://lake/files?region=us-east-1&scheme=http&endpoint_override={endpoint.removeprefix('http://')}"
        settings = {"topics": "t", "url": address, "flush_size": "10", **JSON}
        async with running(connect_files_allowed="s3://lake/files") as run:
            async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
                for n in range(25):
                    await producer.send("t", json.dumps({"n": n}).encode())
                id = await run.run(FilesSinkConnector, **settings)
                await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(20))
                await run.worker.stop_tasks([id])
                for n in range(25, 30):
                    await producer.send("t", json.dumps({"n": n}).encode())
            await run.run(FilesSinkConnector, **settings)
            await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(30))
        system, path = pa_fs.FileSystem.from_uri(address)
        found = system.get_file_info(pa_fs.FileSelector(path, recursive=True))
        names = sorted(one.path for one in found if one.is_file)
        assert names == [f"lake/files/t/partition=0/t+0+{first:020d}.parquet" for first in (0, 10, 20)]
        rows = [row["n"] for name in names for row in pq.read_table(name, filesystem=system).to_pylist()]
        assert rows == list(range(30))
