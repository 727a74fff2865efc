"""The files sink: whole files of so many records, named by their first offset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from shared.clients.producer import Producer
from shared.common.records import OffsetAndMetadata
from shared.common.settings import KafkaSettings
from shared.connect.connectors.files import FilesSinkConnector
from tests.shared.connect.harness import TP, Running, running

JSON = {
    "value_converter": "org.apache.kafka.connect.json.JsonConverter",
    "value_converter_schemas_enable": "false",
    "topics": "t",
}


async def produce(run: Running, *values: Any) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
        for value in values:
            await producer.send("t", json.dumps(value).encode())


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


async def test_files_are_whole_and_offsets_follow_them(tmp_path: Path) -> None:
    """What is in no file is not committed, and is read again by the next task, into the same files."""
    async with running() as run:
        await produce(run, *[{"n": n, "name": f"x{n}"} for n in range(25)])
        settings = {"url": str(tmp_path), "flush_size": "10", **JSON}
        id = await run.run(FilesSinkConnector, **settings)
        await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(20))
        await run.worker.stop_tasks([id])
        first, second = f"t/partition=0/t+0+{0:020d}.parquet", f"t/partition=0/t+0+{10:020d}.parquet"
        assert names(tmp_path) == [first, second]
        assert pq.read_table(tmp_path / second).to_pylist()[0] == {"n": 10, "name": "x10"}
        await run.run(FilesSinkConnector, **settings)
        await produce(run, *[{"n": n} for n in range(25, 30)])
        await run.until(lambda: len(names(tmp_path)) == 3)
        written = [row["n"] for name in names(tmp_path) for row in pq.read_table(tmp_path / name).to_pylist()]
        assert written == list(range(30))


async def test_lines_and_time(tmp_path: Path) -> None:
    """JSON has a line a record; a smaller file is closed when its time is over; fsspec's URLs work."""
    async with running() as run:
        await produce(run, {"n": 1}, {"n": 2})
        url = f"file://{tmp_path}/deep"
        settings = {"url": url, "format": "json", "rotate_interval_ms": "20", "storage_auto__mkdir": "true", **JSON}
        await run.run(FilesSinkConnector, **settings)
        await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(2))
        (name,) = names(tmp_path)
        assert (tmp_path / name).read_text() == '{"n":1}\n{"n":2}\n'
