"""The files sink writes complete files of `flush.size` records, named by their first offset."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.shared.common.errors import RetriableError
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.connect.connectors.files import FilesSinkConnector, FilesSinkTask
from penstock.shared.connect.errors import ConnectError
from tests.shared.connect.connectors.sink_context import JSON, A, B, Context, Reporter, produce, record, records
from tests.shared.connect.harness import TP, running


def names(folder: Path) -> list[str]:
    """The complete files, without `.new` files that are being written."""
    whole = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".new"]
    return sorted(path.relative_to(folder).as_posix() for path in whole)


async def test_only_offsets_of_complete_files_are_committed(tmp_path: Path) -> None:
    """Records in no complete file are not committed, and the next task writes them into the same files."""
    async with running() as run:
        await produce(run, *[{"n": n, "name": f"x{n}"} for n in range(25)])
        settings = {"url": str(tmp_path), "flush_size": "10", "topics": "t", **JSON}
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


async def test_json_lines_and_rotation_by_time(tmp_path: Path) -> None:
    """JSON files have a line for each record, `rotate.interval.ms` closes smaller files, and a
    file: URL is a folder without options.
    """
    async with running(offset_flush_interval_ms="600000") as run:
        await produce(run, {"n": 1}, {"n": 2})
        url = f"file://{tmp_path}/deep"
        settings = {"url": url, "format": "json", "rotate_interval_ms": "20", "topics": "t", **JSON}
        id = await run.run(FilesSinkConnector, **settings)
        await run.until(lambda: names(tmp_path))  # long before the next commit
        await run.worker.stop_tasks([id])
        assert run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(2)
        (name,) = names(tmp_path)
        assert (tmp_path / name).read_text() == '{"n":1}\n{"n":2}\n'
        with_options = {"url": url, "storage.auto_mkdir": "true"}
        found = {value.name: value.errors for value in FilesSinkConnector().validate(with_options)}
        assert "takes no options" in found["url"][0]


async def started(folder: Path, context: Context, **settings: str) -> FilesSinkTask:
    task = FilesSinkTask()
    task.initialize(context)
    await task.start({"url": str(folder), **settings})
    await task.open(frozenset({A, B}))
    return task


def numbers(folder: Path, tp: TopicPartition) -> list[int]:
    files = sorted((folder / tp.topic / f"partition={tp.partition}").iterdir())
    return [json.loads(line)["n"] for file in files for line in file.read_text().splitlines()]


async def test_redelivered_records_are_written_once(tmp_path: Path) -> None:
    """If one partition's file cannot be written, the batch is delivered again and another
    partition's records are still written once.
    """
    task = await started(tmp_path, context := Context(), format="json", **{"flush.size": "10"})
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "partition=1").write_text("in the way")
    await task.put(records(A, 0, 5))
    batch = [*records(A, 5, 10), *records(B, 0, 10)]
    with pytest.raises(RetriableError):
        await task.put(batch)
    (tmp_path / "t" / "partition=1").unlink()
    await task.put(batch)
    await task.put(records(A, 10, 25))
    assert (numbers(tmp_path, A), numbers(tmp_path, B)) == (list(range(20)), list(range(10)))
    assert context.timeouts == [3_000]
    current = {A: OffsetAndMetadata(25), B: OffsetAndMetadata(10)}
    written = {A: OffsetAndMetadata(20), B: OffsetAndMetadata(10)}
    assert await task.pre_commit(current) == await task.pre_commit(current) == written
    await task.put([record(B, 0)])  # of a recreated topic, after no failure
    assert (B, 0) in [(TopicPartition(*r.original[:2]), r.original[2]) for r in task._buffers[B]]
    await task.close(frozenset({A}))
    await task.open(frozenset({A}))  # assigned again, at the last committed offset
    await task.put(records(A, 0, 10))
    assert await task.pre_commit(current) == {A: OffsetAndMetadata(10), B: OffsetAndMetadata(10)}


async def test_invalid_records_are_reported_once(tmp_path: Path) -> None:
    """Tombstones, empty maps and values of another type are reported and left out of the file; without a
    reporter the task fails.
    """
    bad = [record(A, 2, {}), record(A, 3, {"n": "x"}), record(A, 4, {"n": None})]
    batch = [*records(A, 0, 2), *bad, record(A, 5)]
    task = await started(tmp_path, Context(reporter := Reporter()), **{"flush.size": "6"})
    await task.put(batch)
    assert reporter.reported == [(A, 2), (A, 3)]
    (name,) = names(tmp_path)
    assert pq.read_table(tmp_path / name).column("n").to_pylist() == [0, 1, None, 5]
    await task.put([record(A, 6 + at, None) for at in range(6)])
    assert reporter.reported[2:] == [(A, 6 + at) for at in range(6)]
    assert await task.pre_commit({A: OffsetAndMetadata(12)}) == {A: OffsetAndMetadata(12)}
    with pytest.raises(ConnectError, match="in a file"):
        await (await started(tmp_path, Context(), **{"flush.size": "6"})).put(batch)


async def test_each_invalid_record_is_reported_with_its_own_error(tmp_path: Path) -> None:
    """The error that is reported for a record names no other record."""
    batch = [*records(A, 0, 2), record(A, 2, {"n": "x"}), record(A, 3, {}), record(A, 4), record(A, 5, None)]
    task = await started(tmp_path, Context(reporter := Reporter()), **{"flush.size": "6"})
    await task.put(batch)
    errors = dict(zip((offset for _, offset in reporter.reported), reporter.errors, strict=True))
    assert errors.keys() == {2, 3, 5}
    assert "t-0@3: the value is empty" in errors[3]
    assert "t-0@5: the value is NoneType" in errors[5]
    assert "@" not in errors[2]
    (name,) = names(tmp_path)
    assert pq.read_table(tmp_path / name).column("n").to_pylist() == [0, 1, 4]
