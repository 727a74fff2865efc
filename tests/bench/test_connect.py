"""The Connect bench on a small scale: how it counts records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.connect import (
    OURS,
    POSTGRES,
    POSTGRES_ROWS_MIN,
    TOPIC,
    Progress,
    fill,
    lines_in,
    ours,
    postgres_of,
    too_slow,
    value_of,
)
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster


def test_records_are_all_of_one_size(tmp_path: Path) -> None:
    """All records have one size, so that a file's size gives their number. They are JSON for Postgres."""
    assert json.loads(value_of(7))["id"] == 1_000_007
    size = len(value_of(0)) + 1
    assert {len(value_of(i)) + 1 for i in (1, 999, 1_999_999)} == {size}
    file = tmp_path / "out"
    assert lines_in(file, size) == 0
    file.write_bytes((value_of(0) + b"\n") * 3 + b"half")
    assert lines_in(file, size) == 3


def test_a_rate_begins_with_the_first_record_seen() -> None:
    """There is no rate until all records have been seen."""
    progress = Progress(10)
    assert progress.seen(0) is None
    assert progress.seen(4) is None
    rate = progress.seen(10)
    assert rate is not None
    assert rate > 0


def test_too_few_rows_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Postgres fails below its minimum rate. Without Postgres, the bench reports that it was left out."""
    assert not too_slow({OURS: {"records_per_second": 1.0}})
    assert "left out" in capsys.readouterr().out
    assert too_slow({POSTGRES: {"records_per_second": POSTGRES_ROWS_MIN - 1.0}})
    assert not too_slow({POSTGRES: {"records_per_second": float(POSTGRES_ROWS_MIN)}})
    with postgres_of("postgresql://there/db") as url:
        assert url == "postgresql://there/db"


async def test_our_file_sink_is_measured(tmp_path: Path) -> None:
    """The file sink of Penstock has a rate."""
    async with FakeCluster() as cluster:
        await fill(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), 3_000)
        assert len(cluster.records(TOPIC)) == 3_000
        figures = await ours(cluster.bootstrap_servers, "penstock file", 3_000, "", tmp_path)
        assert figures["records_per_second"] > 0
