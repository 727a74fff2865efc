"""The Delta sink on a real table: each record once, whatever the group has committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from shared.clients.producer import Producer
from shared.common.lake_append import WriterFenced, append_once, table_versions
from shared.common.settings import KafkaSettings
from shared.connect.connectors.delta import DeltaSinkConnector
from tests.shared.connect.harness import Running, running

JSON = {
    "value_converter": "org.apache.kafka.connect.json.JsonConverter",
    "value_converter_schemas_enable": "false",
    "topics": "t",
}


async def produce(run: Running, *values: Any) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
        for value in values:
            await producer.send("t", json.dumps(value).encode())


def rows(uri: Path) -> list[int]:
    if not (uri / "_delta_log").exists():
        return []
    return sorted(pa.table(DeltaTable(uri).to_pyarrow_table()).column("n").to_pylist())


async def test_each_record_is_appended_once(tmp_path: Path) -> None:
    """A task without the group's offsets reads on where the table is; new columns are added."""
    uri = tmp_path / "table"
    async with running() as run:
        await produce(run, *[{"n": n} for n in range(50)])
        id = await run.run(DeltaSinkConnector, table_uri=str(uri), **JSON)
        await run.until(lambda: rows(uri) == list(range(50)))
        await run.worker.stop_tasks([id])
        await produce(run, {"n": 50, "more": "x"})
        await run.run(DeltaSinkConnector, table_uri=str(uri), consumer_override_group_id="another", **JSON)
        await run.until(lambda: len(rows(uri)) >= 51)
        assert rows(uri) == list(range(51))
        assert table_versions(str(uri), ["c/t/0"], {}) == {"c/t/0": 51}


def test_a_writer_that_lost_its_place_appends_nothing(tmp_path: Path) -> None:
    """Another version than the one it left means that another writer has gone on."""
    uri, data = str(tmp_path / "table"), pa.table({"n": [1]})
    assert table_versions(uri, ["a"], {}) == {}
    append_once(uri, data, {"a": (None, 1)}, {})
    for stale in (None, 7):
        with pytest.raises(WriterFenced, match="a is at 1"):
            append_once(uri, data, {"a": (stale, 2)}, {})
    append_once(uri, data, {"a": (1, 2), "b": (None, 5)}, {})
    assert table_versions(uri, ["a", "b", "c"], {}) == {"a": 2, "b": 5}
    assert len(DeltaTable(uri).to_pyarrow_table()) == 2
