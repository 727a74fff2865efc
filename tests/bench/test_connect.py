"""The Connect bench on a small scale: how it counts records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import connect
from bench._side_by_side import Figures
from bench.connect import (
    OURS,
    POSTGRES,
    THEIRS,
    TOPIC,
    Progress,
    fill,
    lines_in,
    ours,
    postgres_of,
    value_of,
)
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

FIGURES: Figures = {"records_per_second": 30_000.0, "cpu_us_per_record": 1.0}


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


def test_a_given_postgres_is_used() -> None:
    """If the bench gets a URL, it starts no Postgres."""
    with postgres_of("postgresql://there/db") as url:
        assert url == "postgresql://there/db"


def test_json_is_the_last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json` the last line is JSON. Too few rows a second in Postgres are a failure."""
    figures = {OURS: FIGURES, THEIRS: FIGURES, POSTGRES: FIGURES | {"records_per_second": 29_999.0}}

    async def measure(records: int, rounds: int, postgres: str) -> dict[str, Figures]:
        return figures

    monkeypatch.setattr(connect, "measure", measure)
    monkeypatch.setattr("sys.argv", ["bench", "--json", "--postgres", "postgresql://there/db"])
    assert connect.main() == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["figures"] == figures
    figures[POSTGRES] = FIGURES
    assert connect.main() == 0
    del figures[POSTGRES]  # no Postgres on this machine
    assert connect.main() == 0


async def test_our_file_sink_is_measured(tmp_path: Path) -> None:
    """The file sink of Penstock has a rate."""
    async with FakeCluster() as cluster:
        await fill(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), 3_000)
        assert len(cluster.records(TOPIC)) == 3_000
        figures = await ours(cluster.bootstrap_servers, "penstock file", 3_000, "", tmp_path)
        assert figures["records_per_second"] > 0
