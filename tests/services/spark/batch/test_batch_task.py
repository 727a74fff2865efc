"""A task's rows of files, and the row from which it continues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from penstock.services.spark.batch import batch_task
from penstock.services.spark.batch.batch_task import FileInput, first_row_to_read, record_columns
from penstock.shared.common.errors import ConfigError, OffsetOutOfRange, SourceOffsetsMissing
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import BatchInput
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.task.stream_task import StreamTask

SOURCE = FileInput("aa", "in", {"in": {0: 5}}, {"in": "id"}, ())


async def test_source_records_are_deleted_while_a_task_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails with SourceOffsetsMissing, since no record of the changelog is missing."""

    async def deleted(*_: object) -> None:
        raise OffsetOutOfRange("in-3: offset 5")

    monkeypatch.setattr(batch_task, "require_no_members", deleted)
    options: Any = SimpleNamespace(kafka=KafkaSettings(), streams=SimpleNamespace(application_id="app"))
    result = await batch_task._run_partition_batch(options, 3, deleted)
    assert result.failure is not None
    error = result.failure.to_error("partition 3: ")
    assert type(error) is SourceOffsetsMissing
    assert "in-3: offset 5" in str(error)


def task() -> StreamTask:
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    return StreamTask(builder.build(), 0, application="app")


def test_rows_are_records_by_their_numbers() -> None:
    """Nulls stay nulls. A slice of a batch begins at the given row number."""
    rows = {"timestamp_ms": [5, 6, 7], "key": [b"a", None, b""], "value": [b"x", b"yy", None]}
    kinds = {"timestamp_ms": pa.int64(), "key": pa.binary(), "value": pa.binary()}
    batch = pa.record_batch({name: pa.array(values, kinds[name]) for name, values in rows.items()})
    columns = record_columns(batch.slice(1), "in", 3, 41)
    assert [(r.offset, r.timestamp, r.key, r.value) for r in columns] == [(41, 6, None, b"yy"), (42, 7, b"", None)]
    assert str(columns.topic_partition) == "in-3"


def test_a_task_goes_on_where_its_rows_ended() -> None:
    """Without state it starts at the first row, else after the committed rows.

    It reads nothing once all rows are committed.
    """
    of = task()
    assert first_row_to_read(of, SOURCE) == 0
    of.input = BatchInput("aa", 7, is_done=False)
    assert first_row_to_read(of, SOURCE) == 7
    of.input = BatchInput("aa", 7, is_done=True)
    assert first_row_to_read(of, SOURCE) is None


def test_a_task_with_another_state_is_refused() -> None:
    """A state from other files or from the topic is rejected."""
    of = task()
    of.sources = {"in": 0}
    with pytest.raises(ConfigError, match=r"partition 0.*state already"):
        first_row_to_read(of, SOURCE)
    of.input = BatchInput("bb", 7, is_done=True)
    with pytest.raises(ConfigError, match="other files"):
        first_row_to_read(of, SOURCE)
