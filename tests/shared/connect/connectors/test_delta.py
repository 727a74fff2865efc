"""The Delta sink on a real table: it appends each record once, whatever offsets the group has committed."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from penstock.shared.common.errors import RetriableError, WriterFenced
from penstock.shared.common.lake.append_once import append_once, table_versions
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.connect.connectors import delta
from penstock.shared.connect.connectors.delta import APPEND_RETRIES_MAX, DeltaSinkConnector, DeltaSinkTask
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.schema import (
    INT32,
    INT64,
    OPTIONAL_INT32,
    OPTIONAL_STRING,
    STRING,
    Field,
    Schema,
    decimal_schema,
    time_schema,
)
from tests.shared.connect.connectors.sink_context import JSON, A, B, Context, Reporter, produce, record, records
from tests.shared.connect.harness import running


def rows(uri: Path) -> list[int]:
    if not (uri / "_delta_log").exists():
        return []
    return sorted(pa.table(DeltaTable(uri).to_pyarrow_table()).column("n").to_pylist())


async def test_each_record_is_appended_once(tmp_path: Path) -> None:
    """A task without the group's offsets continues from the table's offsets, and new columns are added."""
    uri = tmp_path / "table"
    async with running() as run:
        await produce(run, *[{"n": n} for n in range(50)])
        id = await run.run(DeltaSinkConnector, topics="t", table_uri=str(uri), **JSON)
        await run.until(lambda: rows(uri) == list(range(50)))
        await run.worker.stop_tasks([id])
        await produce(run, {"n": 50, "more": "x"})
        await run.run(DeltaSinkConnector, topics="t", table_uri=str(uri), consumer_override_group_id="another", **JSON)
        await run.until(lambda: len(rows(uri)) >= 51)
        assert rows(uri) == list(range(51))
        assert table_versions(str(uri), ["c/t/0"], {}) == {"c/t/0": 51}


def test_a_stale_writer_is_fenced(tmp_path: Path) -> None:
    """A writer whose last version differs from the table's is fenced, since another writer has appended."""
    uri, data = str(tmp_path / "table"), pa.table({"n": [1]})
    assert table_versions(uri, ["a"], {}) == {}
    append_once(uri, data, {"a": (None, 1)}, {})
    for stale in (None, 7):
        with pytest.raises(WriterFenced, match="a is at 1"):
            append_once(uri, data, {"a": (stale, 2)}, {})
    append_once(uri, data, {"a": (1, 2), "b": (None, 5)}, {})
    assert table_versions(uri, ["a", "b", "c"], {}) == {"a": 2, "b": 5}
    assert len(DeltaTable(uri).to_pyarrow_table()) == 2


def test_an_existing_table_keeps_its_partition_columns(tmp_path: Path) -> None:
    """Rows are appended to a table whose partition columns are others than those for a new table."""
    uri, data = str(tmp_path / "table"), pa.table({"n": [1], "m": [2]})
    for at, partition_by in enumerate((["n"], ["m"], None)):
        append_once(uri, data, {"a": (at or None, at + 1)}, {}, partition_by)
    assert DeltaTable(uri).metadata().partition_columns == ["n"]
    assert len(DeltaTable(uri).to_pyarrow_table()) == 3


async def started(uri: Path, context: Context, *partitions: TopicPartition) -> DeltaSinkTask:
    task = DeltaSinkTask()
    task.initialize(context)
    await task.start({"table.uri": str(uri), "name": "c"})
    await task.open(frozenset(partitions))
    return task


def at(**offsets: int) -> dict[TopicPartition, OffsetAndMetadata]:
    return {{"a": A, "b": B}[name]: OffsetAndMetadata(offset) for name, offset in offsets.items()}


async def test_a_revoked_partition_commits_only_its_own_rows(tmp_path: Path) -> None:
    """When a partition is revoked only its rows and offset are appended; after a crash no row is there twice."""
    task = await started(tmp_path, Context(), A, B)
    await task.put([*records(A, 0, 3), *records(B, 0, 3)])
    await task.pre_commit(at(a=3))
    await task.close(frozenset({A}))
    again = await started(tmp_path, context := Context(), A, B)  # the first one has crashed
    assert context.rewinds == {A: 3}
    await again.put(records(B, 0, 3))
    await again.pre_commit(at(b=3))
    assert rows(tmp_path) == [0, 0, 1, 1, 2, 2]


async def test_invalid_rows_are_reported_or_fail_the_task(tmp_path: Path) -> None:
    """A value of another type than its column is reported and the others are appended; without
    a reporter the task fails.
    """
    batch = [*records(A, 0, 3), record(A, 3, {"n": "x"}), record(A, 4), record(A, 5, {"n": 1.5}), record(A, 6, None)]
    task = await started(tmp_path / "t", Context(reporter := Reporter()), A)
    await task.put(batch[:3])
    await task.pre_commit(at(a=3))
    await task.put(batch[3:])
    await task.pre_commit(at(a=7))
    assert rows(tmp_path / "t") == [0, 1, 2, 4]
    assert sorted(offset for _, offset in reporter.reported) == [3, 5, 6]
    assert table_versions(str(tmp_path / "t"), ["c/t/0"], {})["c/t/0"] >= 5
    await task.put([record(A, 7, {}), record(A, 8)])
    await task.pre_commit(at(a=9))
    assert rows(tmp_path / "t") == [0, 1, 2, 4, 8]
    assert (A, 7) in reporter.reported
    task = await started(tmp_path / "u", Context(), A)
    await task.put(batch[:6])
    with pytest.raises(ConnectError):
        await task.pre_commit(at(a=6))
    with pytest.raises(ConnectError, match="cannot be a row"):
        await task.put([])


async def test_nulls_and_empty_values_have_the_type_of_their_column(tmp_path: Path) -> None:
    """A null, an empty list and an empty object have the table's type. They determine no type of a new column."""
    values = [
        {"n": 0, "user": {"email": None}, "tags": [], "empty": {}},
        {"n": 1, "user": {"email": "x", "age": None}, "tags": [{"name": "a"}], "empty": {"x": 1}},
        {"n": 2, "user": {"email": None}, "tags": [{"name": None}, {}], "empty": {}},
        {"n": 3, "user": {}, "tags": [], "empty": {"y": []}},
        {"n": None},
    ]
    task = await started(tmp_path, Context(reporter := Reporter()), A)
    for offset, value in enumerate(values):
        await task.put([record(A, offset, value)])
        await task.pre_commit(at(a=offset + 1))
    assert reporter.errors == []
    assert pa.table(DeltaTable(tmp_path).to_pyarrow_table()).sort_by("n").to_pylist() == [
        {"n": 0, "user": None, "tags": None, "empty": None},
        {"n": 1, "user": {"email": "x"}, "tags": [{"name": "a"}], "empty": {"x": 1}},
        {"n": 2, "user": {"email": None}, "tags": [{"name": None}, {"name": None}], "empty": {"x": None}},
        {"n": 3, "user": {"email": None}, "tags": [], "empty": {"x": None}},
        {"n": None, "user": None, "tags": None, "empty": None},
    ]
    await task.put([record(A, 5, {"n": []}), record(A, 6, {"new": [None]})])
    await task.pre_commit(at(a=7))
    assert sorted(reporter.reported) == [(A, 5), (A, 6)]


async def test_records_of_two_schemas_keep_the_types_of_their_fields(tmp_path: Path) -> None:
    """Records of several schemas of a struct are appended together. A column has the type in the schemas."""
    nested = (Field("k", INT32), Field("m", Schema.map(STRING, INT32)), Field("l", Schema.array(INT32)))
    old = Schema.struct("S", Field("n", INT32), Field("s", Schema.struct("T", *nested)))
    more = Field("s", Schema.struct("T", *nested, Field("x", OPTIONAL_STRING)))
    new = Schema.struct("S", Field("n", INT64), more, Field("new", OPTIONAL_INT32))
    value = {"k": 1, "m": {"a": 1}, "l": [1]}
    batch = [
        SinkRecord("t", 0, None, None, old, {"n": 0, "s": value}, kafka_offset=0),
        SinkRecord("t", 0, None, None, new, {"n": 1, "s": {**value, "x": "y"}, "new": 1}, kafka_offset=1),
    ]
    task = await started(tmp_path / "new", Context(), A)
    await task.put(batch)
    await task.pre_commit(at(a=2))
    expected = [{"n": 0, "s": {**value, "x": None}, "new": None}, {"n": 1, "s": {**value, "x": "y"}, "new": 1}]
    table = pa.table(DeltaTable(tmp_path / "new").to_pyarrow_table()).sort_by("n")
    assert table.to_pylist(maps_as_pydicts="strict") == expected
    assert (table.schema.field("n").type, table.schema.field("new").type) == (pa.int64(), pa.int32())
    task = await started(tmp_path / "old", Context(), A)
    await task.put(batch[:1])
    await task.pre_commit(at(a=1))
    task = await started(tmp_path / "old", Context(), A)
    again = SinkRecord("t", 0, None, None, old, {"n": 2, "s": value}, kafka_offset=2)
    await task.put([batch[1], again])
    await task.pre_commit(at(a=3))
    table = pa.table(DeltaTable(tmp_path / "old").to_pyarrow_table()).sort_by("n")
    assert table.to_pylist(maps_as_pydicts="strict") == [*expected, {**expected[0], "n": 2}]


class _ReadingThreads(dict[str, int]):
    """A record's value that records the threads which read its fields."""

    def __init__(self, **fields: int) -> None:
        super().__init__(fields)
        self.threads: set[int] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.threads.add(threading.get_ident())
        return super().get(name, default)


async def test_rows_are_not_built_on_the_event_loop(tmp_path: Path) -> None:
    """Another thread converts the records to a table. Meanwhile other tasks and heartbeats go on."""
    task = await started(tmp_path, Context(), A)
    await task.put([record(A, 0, value := _ReadingThreads(n=0))])
    await task.pre_commit(at(a=1))
    assert rows(tmp_path) == [0]
    assert value.threads
    assert threading.get_ident() not in value.threads


async def test_a_time_is_a_string(tmp_path: Path) -> None:
    """Delta has no type for a time of day, so the column of a Time is a string."""
    time = time_schema(optional=True)
    schema = Schema.struct("S", Field("t", time), Field("s", Schema.struct("T", Field("l", Schema.array(time)))))
    values = [{"t": dt.time(1, 2, 3), "s": {"l": [dt.time(4)]}}, {"t": None, "s": {"l": [None]}}]
    task = await started(tmp_path, Context(), A)
    await task.put(
        [SinkRecord("t", 0, None, None, schema, value, kafka_offset=offset) for offset, value in enumerate(values)]
    )
    await task.pre_commit(at(a=2))
    assert pa.table(DeltaTable(tmp_path).to_pyarrow_table()).sort_by("t").to_pylist() == [
        {"t": "01:02:03.000000", "s": {"l": ["04:00:00.000000"]}},
        {"t": None, "s": {"l": [None]}},
    ]


async def test_a_record_that_delta_cannot_represent_is_reported(tmp_path: Path) -> None:
    """A name that differs from a column's only in its case is an error of its record alone."""
    task = await started(tmp_path, Context(reporter := Reporter()), A)
    await task.put([record(A, 0), record(A, 1, {"N": 1}), record(A, 2)])
    await task.pre_commit(at(a=3))
    assert rows(tmp_path) == [0, 2]
    assert reporter.reported == [(A, 1)]


async def test_decimals_of_two_scales_are_appended_together(tmp_path: Path) -> None:
    """Records whose schemas differ in the scale of a decimal, also of a nested one, get the larger scale."""

    def decimals(offset: int, number: str) -> SinkRecord:
        kind = decimal_schema(-int(Decimal(number).as_tuple().exponent))
        nested = Schema.struct("T", Field("l", Schema.array(kind)), Field("m", Schema.map(STRING, kind)))
        schema = Schema.struct("S", Field("d", kind), Field("s", nested))
        value = {"d": Decimal(number), "s": {"l": [Decimal(number)], "m": {"a": Decimal(number)}}}
        return SinkRecord("t", 0, None, None, schema, value, kafka_offset=offset)

    task = await started(tmp_path, Context(), A)
    await task.put([decimals(0, "1.23"), decimals(1, "2.3456")])
    await task.pre_commit(at(a=2))
    table = pa.table(DeltaTable(tmp_path).to_pyarrow_table()).sort_by("d")
    assert table.schema.field("d").type == pa.decimal128(38, 4)
    found = table.to_pylist(maps_as_pydicts="strict")
    numbers = [Decimal("1.2300"), Decimal("2.3456")]
    assert found == [{"d": number, "s": {"l": [number], "m": {"a": number}}} for number in numbers]
    task = await started(tmp_path, Context(reporter := Reporter()), A)
    await task.put([decimals(2, "1" * 36 + ".23"), decimals(3, "3.4567")])
    await task.pre_commit(at(a=4))
    assert reporter.reported == [(A, 2)]


class FailingOnce(Reporter):
    """A reporter whose first dead letter cannot be stored for now."""

    def report(self, record: SinkRecord, error: Exception) -> asyncio.Future[None]:
        if self.errors:
            return super().report(record, error)
        self.errors.append("failed")
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failed.set_exception(RetriableError("no broker"))
        return failed


async def test_records_are_delivered_again_after_a_failed_report(tmp_path: Path) -> None:
    """If a dead letter cannot be stored for now, the same records are delivered again, and each is appended once."""
    task = await started(tmp_path, Context(reporter := FailingOnce()), A)
    batch = [*records(A, 0, 3), record(A, 3, None), record(A, 4)]
    with pytest.raises(RetriableError, match="no broker"):
        await task.put(batch)
    await task.put(batch)
    await task.pre_commit(at(a=5))
    assert rows(tmp_path) == [0, 1, 2, 4]
    assert reporter.reported == [(A, 3)]


async def test_a_fenced_task_fails(tmp_path: Path) -> None:
    """After another writer has appended, the next `put` fails the task."""
    task = await started(tmp_path, Context(), A)
    await task.put(records(A, 0, 3))
    append_once(str(tmp_path), pa.table({"n": [9]}), {"c/t/0": (None, 10)}, {})
    with pytest.raises(WriterFenced):
        await task.pre_commit(at(a=3))
    with pytest.raises(WriterFenced):
        await task.put([])


async def test_records_may_be_read_again_after_a_failed_commit(tmp_path: Path) -> None:
    """After a retriable failure of a commit earlier records are accepted again; otherwise a
    record below the offset is an error.
    """
    task = await started(tmp_path, Context(), A)
    await task.put(records(A, 0, 3))
    await task.pre_commit(at(a=3))
    await task.put(records(A, 3, 6))
    hidden = tmp_path / "_delta_log"
    hidden.rename(tmp_path / "away")
    hidden.write_text("in the way")
    with pytest.raises(RetriableError):
        await task.pre_commit(at(a=6))
    hidden.unlink()
    (tmp_path / "away").rename(hidden)
    await task.put(records(A, 0, 6))
    await task.pre_commit(at(a=6))
    assert rows(tmp_path) == list(range(6))
    with pytest.raises(ConnectError, match=r"t-0.*offset 0.*6"):
        await task.put(records(A, 0, 1))


async def test_records_of_kept_partitions_are_read_again_after_a_failed_revocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the commit of a revoked partition fails, those of the kept ones are delivered again, and are there once."""

    def unavailable(*args: Any) -> None:
        raise RetriableError("down")

    task = await started(tmp_path, Context(), A, B)
    await task.put([*records(A, 0, 3), *records(B, 0, 2)])
    with monkeypatch.context() as patch:
        patch.setattr(delta, "append_once", unavailable)
        with pytest.raises(RetriableError):
            await task.pre_commit(at(a=3))
    await task.close(frozenset({A}))
    await task.put(records(B, 0, 2))
    await task.pre_commit(at(b=2))
    assert rows(tmp_path) == [0, 1]


@pytest.mark.parametrize("other_writer", [False, True])
async def test_an_append_that_failed_may_be_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_writer: bool
) -> None:
    """If the table has the rows of a failed append, they are not appended again. Another writer still fences."""

    def committed_without_response(*args: Any) -> None:
        append_once(*args)
        raise RetriableError("no response")

    task = await started(tmp_path, Context(), A, B)
    await task.put([*records(A, 0, 3), *records(B, 0, 2)])
    with monkeypatch.context() as patch:
        patch.setattr(delta, "append_once", committed_without_response)
        with pytest.raises(RetriableError):
            await task.pre_commit(at(a=3, b=2))
    if other_writer:
        append_once(str(tmp_path), pa.table({"n": [3]}), {"c/t/0": (3, 4)}, {})
    await task.put([*records(A, 0, 5), *records(B, 0, 2)])
    if other_writer:
        with pytest.raises(WriterFenced):
            await task.pre_commit(at(a=5, b=2))
        return
    await task.pre_commit(at(a=5, b=2))
    assert rows(tmp_path) == [0, 0, 1, 1, 2, 3, 4]
    assert table_versions(str(tmp_path), ["c/t/0", "c/t/1"], {}) == {"c/t/0": 5, "c/t/1": 2}


async def test_a_task_fails_if_its_appends_keep_failing(tmp_path: Path) -> None:
    """An append that still fails after the retries fails the task, here because a partition column does not exist."""
    task = DeltaSinkTask()
    task.initialize(Context())
    await task.start({"table.uri": str(tmp_path), "name": "c", "partition.by": "nope"})
    await task.open(frozenset({A}))
    for _ in range(APPEND_RETRIES_MAX):
        await task.put(records(A, 0, 3))
        with pytest.raises(RetriableError, match="nope"):
            await task.pre_commit(at(a=3))
        assert await task.pre_commit(at(a=0)) == at(a=0)  # a commit without records is no success
    await task.put(records(A, 0, 3))
    with pytest.raises(ConnectError, match="nope"):
        await task.pre_commit(at(a=3))
    with pytest.raises(ConnectError, match="nope"):
        await task.put([])


async def test_a_recreated_topic_is_an_error_until_offsets_are_reset(tmp_path: Path) -> None:
    """Records below the table's offset are an error; after the offsets are reset they are appended."""
    task = await started(tmp_path, Context(), A)
    await task.put(records(A, 0, 3))
    await task.pre_commit(at(a=3))
    task = await started(tmp_path, Context(), A)
    with pytest.raises(ConnectError, match=r"t-0.*offset 0.*3"):
        await task.put(records(A, 0, 2))
    await DeltaSinkConnector().alter_offsets({"table.uri": str(tmp_path), "name": "c"}, {A: None, B: 7})
    task = await started(tmp_path, context := Context(), A, B)
    assert context.rewinds == {B: 7}
    await task.put(records(A, 0, 2))
    await task.pre_commit(at(a=2))
    assert rows(tmp_path) == [0, 0, 1, 1, 2]
    assert await DeltaSinkConnector().alter_offsets({"table.uri": str(tmp_path / "none"), "name": "c"}, {A: 1})


async def test_a_reset_without_offsets_of_the_group_is_rejected(tmp_path: Path) -> None:
    """If the group has no offsets, a reset does not know which offsets of the table to remove, and is an error."""
    props = {"table.uri": str(tmp_path), "name": "c"}
    assert await DeltaSinkConnector().alter_offsets(props, {})  # there is no table yet
    task = await started(tmp_path, Context(), A)
    await task.put(records(A, 0, 3))
    await task.pre_commit(at(a=3))
    with pytest.raises(ConnectError, match="null"):
        await DeltaSinkConnector().alter_offsets(props, {})
