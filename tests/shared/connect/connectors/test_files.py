"""Connectors that write files.

The files sink writes complete files of `flush.size` records, named by their first offset. Its records become rows of
Arrow tables, as those of the Delta sink do. The file stream sink appends a line for each record.
"""

from __future__ import annotations

import json
import os
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.connectors.arrow_rows import NothingInIt, check_row, columns_of_file, table_of
from penstock.shared.connect.connectors.file_stream import FileStreamSinkTask, FileStreamSourceTask
from penstock.shared.connect.connectors.files import FilesSinkConnector, FilesSinkTask
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.schema import INT32, OPTIONAL_INT32, STRING, Field, Schema, decimal_schema
from tests import virtual_time
from tests.shared.connect.connectors.sink_context import JSON, A, B, Context, Reporter, produce, record, records
from tests.shared.connect.harness import TP, running

MAP = Schema.map(STRING, INT32)


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


@pytest.mark.parametrize(("decimal_format", "text"), [("BASE64", '"ew=="'), ("numeric", "1.23")])
async def test_decimals_in_json_have_the_configured_format(tmp_path: Path, decimal_format: str, text: str) -> None:
    """Decimals are base64 of their unscaled bytes, or numbers with `decimal.format=NUMERIC`."""
    settings = {"flush.size": "1", "decimal.format": decimal_format}
    task = await started(tmp_path, Context(), format="json", **settings)
    schema = Schema.struct(None, Field("n", decimal_schema(2)))
    await task.put([SinkRecord("t", 0, None, None, schema, {"n": Decimal("1.23")}, kafka_offset=0)])
    (name,) = names(tmp_path)
    assert (tmp_path / name).read_text() == f'{{"n":{text}}}\n'


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
    assert (B, 0) in [(r.original_tp, r.kafka_offset) for r in task._buffers[B]]
    await task.close(frozenset({A}))
    await task.open(frozenset({A}))  # assigned again, at the last committed offset
    await task.put(records(A, 0, 10))
    current = {A: OffsetAndMetadata(10), B: OffsetAndMetadata(1)}
    assert await task.pre_commit(current) == {A: OffsetAndMetadata(10), B: OffsetAndMetadata(0)}


async def test_offsets_of_dropped_records_are_committed(tmp_path: Path) -> None:
    """A commit passes records that a transform dropped, up to the first buffered record. A partition gets an offset
    before its first file.
    """
    task = await started(tmp_path, Context(), format="json", **{"flush.size": "2"})
    start = {A: OffsetAndMetadata(40), B: OffsetAndMetadata(0)}
    assert await task.pre_commit(start) == start
    await task.put([record(A, 45)])
    delivered = {A: OffsetAndMetadata(50), B: OffsetAndMetadata(7)}
    assert await task.pre_commit(delivered) == {A: OffsetAndMetadata(45), B: OffsetAndMetadata(7)}
    await task.put([record(A, 50)])
    delivered[A] = OffsetAndMetadata(60)
    assert await task.pre_commit(delivered) == delivered


async def test_a_failed_batch_is_not_committed_within_a_file(tmp_path: Path) -> None:
    """If a file ends with records of a batch that is delivered again, no offset within the file is committed: a
    restart there would write a second file with the same records.
    """
    task = await started(tmp_path, Context(), format="json", **{"flush.size": "10"})
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "partition=1").write_text("in the way")
    await task.put(records(A, 0, 5))
    with pytest.raises(RetriableError):
        await task.put([*records(A, 5, 10), *records(B, 3, 13)])
    delivered = {A: OffsetAndMetadata(5), B: OffsetAndMetadata(1)}
    assert await task.pre_commit(delivered) == {B: OffsetAndMetadata(1)}


class Store(MemoryFileSystem):  # type: ignore[misc]
    """A store of fsspec that fails once with each of `errors`."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    errors: ClassVar[list[Exception]] = []

    def _open(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return super()._open(path, *args, **kwargs)


class StoreContext(Context):
    """Allows the folder `failing://bucket`."""

    files = AllowedFiles(("failing://bucket",))


async def test_a_file_that_a_store_rejects_for_a_time_is_written_again() -> None:
    """The stores of fsspec have errors of their own. After `max.retries` errors in a row, the task fails. The reason
    names the class of the error."""
    register_implementation("failing", Store, clobber=True)
    settings = {"url": "failing://bucket", "format": "json", "flush.size": "2", "max.retries": "3"}
    task = FilesSinkTask()
    task.initialize(context := StoreContext())
    await task.start(settings)
    for error in (RuntimeError("Failed to upload block: ServerBusy"), LookupError("503"), TimeoutError()):
        Store.errors = [error]
        with pytest.raises(RetriableError, match=type(error).__name__):
            await task.put(records(A, 0, 2))
    Store.errors = [OSError("ACCESS_DENIED")]
    with pytest.raises(ConnectError, match=r"3 retries: .*OSError: ACCESS_DENIED"):
        await task.put(records(A, 0, 2))
    await task.put(records(A, 0, 2))
    ((name, file),) = Store.store.items()
    assert (name.rpartition("/")[2], file.getvalue().count(b"\n")) == (f"t+0+{0:020d}.jsonl", 2)
    Store.errors = [OSError("after a success")]
    with pytest.raises(RetriableError):
        await task.put(records(A, 2, 4))
    assert set(context.timeouts) == {3_000}


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


class CountedReads(dict[str, object]):
    """A value that counts how often a column is read."""

    reads = 0

    def get(self, name: str, default: object = None) -> object:
        CountedReads.reads += 1
        return super().get(name, default)


async def test_many_invalid_records_are_found_with_few_reads(tmp_path: Path) -> None:
    """The number of reads grows with the number of records, and not with its product with that of the invalid ones.

    It is the same if the first record lacks the column of the conflict.
    """
    values = [{"n": "x" if n % 5 == 4 else n} for n in range(1_000)]
    task = await started(tmp_path, Context(reporter := Reporter()), **{"flush.size": "1000"})
    CountedReads.reads = 0
    await task.put([record(A, n, CountedReads(value if n else {"m": 1})) for n, value in enumerate(values)])
    assert reporter.reported == [(A, n) for n in range(4, 1_000, 5)]
    assert CountedReads.reads < 20 * 1_000


def test_decimals_of_two_scales_fit_one_parquet_file() -> None:
    """A number that is valid in its own schema is written, also if the larger scale leaves it no room."""
    numbers = [Decimal(10**25), Decimal("0." + "1" * 18)]
    decimals = []
    for offset, number in enumerate(numbers):
        kind = decimal_schema(-int(number.as_tuple().exponent))
        schema = Schema.struct("S", Field("d", kind))
        decimals.append(SinkRecord("t", 0, None, None, schema, {"d": number}, kafka_offset=offset))
    written = pa.BufferOutputStream()
    pq.write_table(columns_of_file(table_of(decimals)), written)
    assert pq.read_table(pa.BufferReader(written.getvalue())).column("d").to_pylist() == numbers


async def test_objects_without_fields_are_left_out_of_a_parquet_file(tmp_path: Path) -> None:
    """Parquet has no struct without fields: such an object is left out, at any depth, and the record is written."""
    values = [{"n": n, "a": {}, "b": {"c": {}, "d": n}, "e": [{}], "f": [], "g": {"h": None}} for n in range(2)]
    task = await started(tmp_path, Context(reporter := Reporter()), **{"flush.size": "2"})
    await task.put([record(A, offset, value) for offset, value in enumerate(values)])
    (name,) = names(tmp_path)
    written = pq.ParquetFile(tmp_path / name).read().to_pylist()
    assert written == [{"n": n, "b": {"d": n}, "f": [], "g": {"h": None}} for n in range(2)]
    await task.put([record(A, 2, {"a": {}}), record(A, 3, {"n": 3})])
    assert pq.ParquetFile(tmp_path / names(tmp_path)[1]).read().to_pylist() == [{"n": None}, {"n": 3}]
    assert reporter.errors == []


async def test_maps_of_structs_without_fields_are_left_out_of_a_parquet_file(tmp_path: Path) -> None:
    """A map whose values have no fields is left out, and structs in a map's values keep their other fields."""
    empty = Schema.struct("Empty")
    schema = Schema.struct(
        "S",
        Field("n", INT32),
        Field("a", Schema.map(STRING, empty)),
        Field("b", Schema.map(STRING, Schema.struct("T", Field("c", empty), Field("d", INT32)))),
    )
    values = [{"n": n, "a": {"x": {}}, "b": {"x": {"c": {}, "d": n}}} for n in range(2)]
    task = await started(tmp_path, Context(reporter := Reporter()), **{"flush.size": "2"})
    await task.put(typed_records(*((schema, value) for value in values)))
    (name,) = names(tmp_path)
    written = pq.ParquetFile(tmp_path / name).read().to_pylist(maps_as_pydicts="strict")
    assert written == [{"n": n, "b": {"x": {"d": n}}} for n in range(2)]
    assert reporter.errors == []


def typed_records(*pairs: tuple[Schema | None, Any]) -> list[SinkRecord]:
    return [
        SinkRecord("t", 0, None, None, schema, value, kafka_offset=offset)
        for offset, (schema, value) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [(MAP, pa.int32()), (None, pa.int64()), (Schema.map(STRING, MAP), pa.map_(pa.string(), pa.int32()))],
)
def test_a_map_has_a_column_for_each_key(schema: Schema | None, kind: pa.DataType) -> None:
    """The columns' type is that of the map's values, or else comes from the values."""
    one, two = ({"x": 1}, {"x": 2}) if pa.types.is_map(kind) else (1, 2)
    table = table_of(typed_records((schema, {"a": one}), (schema, {"b": two})))
    assert table.schema == pa.schema([("a", kind), ("b", kind)])
    rows = table.to_pylist(maps_as_pydicts="strict")
    assert rows == [{"a": one, "b": None}, {"a": None, "b": two}]


def test_columns_of_structs_come_from_their_schema() -> None:
    """A struct's fields are columns even if they are null in all records."""
    schema = Schema.struct("S", Field("a", INT32), Field("b", OPTIONAL_INT32))
    table = table_of(typed_records((schema, {"a": 1, "b": None}), (schema, {"a": 2, "b": None})))
    assert table.schema == pa.schema([("a", pa.int32()), ("b", pa.int32())])
    assert table.column("a").to_pylist() == [1, 2]


def test_nulls_without_a_type_are_no_file() -> None:
    """Records of which no column can be made are rejected. They would be lost as a file without rows."""
    with pytest.raises(NothingInIt):
        columns_of_file(table_of(typed_records((None, {"a": None}), (None, {"b": None}))))


@pytest.mark.parametrize("value", [None, 1, [1], {1: 2}, {None: 2}, {b"x": 2}])
def test_other_values_are_no_rows(value: Any) -> None:
    """The error names the record. A map with keys that are not strings has no names of columns."""
    (record,) = typed_records((None, value))
    with pytest.raises(DataError, match="t-0@0"):
        check_row(record)


@pytest.mark.parametrize("schema", [None, MAP, Schema.struct("Empty")])
def test_an_empty_value_is_no_row(schema: Schema | None) -> None:
    """A value without columns is an error, whatever the other records are."""
    (record,) = typed_records((schema, {}))
    with pytest.raises(DataError, match="empty"):
        check_row(record)


def test_a_struct_without_values_is_a_row() -> None:
    """A struct's columns come from its schema, so its value may leave them all out."""
    (record,) = typed_records((Schema.struct("S", Field("b", OPTIONAL_INT32)), {}))
    check_row(record)
    assert table_of([record]).to_pylist() == [{"b": None}]


def line(value: object) -> SinkRecord:
    return SinkRecord("t", 0, None, None, None, value, kafka_offset=0)


async def test_put_writes_to_the_file_immediately(tmp_path: Path) -> None:
    """`put` appends records to the file immediately, without waiting for a commit."""
    (tmp_path / "out").write_text("before\n")
    task = FileStreamSinkTask()
    task.initialize(Context())
    await task.start({"file": str(tmp_path / "out")})
    await task.put([line("a"), line(True), line(None), line({"n": 1})])
    assert (tmp_path / "out").read_text() == "before\na\ntrue\nnull\n{n=1}\n"
    await task.stop()


def test_a_stopped_task_takes_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll does not wait for standard input, so a stop leaves no read behind that takes the next task's lines."""
    read_end, write_end = os.pipe()

    async def polled(times: int) -> list[Any]:
        task = FileStreamSourceTask()
        task.initialize(Context())
        await task.start({"topic": "t"})
        found = [await task.poll() for _ in range(times)]
        await task.stop()
        return [[record.value for record in records or ()] for records in found]

    with os.fdopen(read_end) as stdin, os.fdopen(write_end, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert virtual_time.run(polled(1)) == [[]]
        writer.write(b"one\ntwo\n")
        assert virtual_time.run(polled(2)) == [["one", "two"], []]


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file that cannot be opened is an error with its path and the system's message."""
    task = FileStreamSinkTask()
    task.initialize(Context())
    with pytest.raises(ConnectError, match=r"no/out.*No such file"):
        await task.start({"file": str(tmp_path / "no" / "out")})
