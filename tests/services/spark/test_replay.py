"""History through a task, batch by batch, without Spark."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from penstock.services.spark.replay import (
    COUNTED,
    EPOCH,
    FAILED,
    FIRST_OFFSET,
    OUT,
    ReplayJob,
    cut,
    nothing,
    partitioned,
    replay,
)
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.streams.changelog.format import FINAL, PROGRESS, TAKEOVER, decode, decode_progress
from penstock.shared.streams.changelog.reader import Change, ChangelogReader, one_by_one
from penstock.shared.streams.error_handlers import ErrorHandlers, ExceptionHandler
from penstock.shared.streams.task_metrics import Totals
from penstock.shared.streams.topology_loading import load_topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

MODULE = """
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.dsl import StreamsBuilder


def build():
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(100, 50)
    windows.aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def updating():
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(100, 50)
    windows.aggregate("s", n=Count()).on_update().to("out")
    return builder.build()


def failing():
    builder = StreamsBuilder()
    builder.stream("in").map_values(lambda value: 1 // 0).to("out")
    return builder.build()
"""
RECORDS = pa.schema(
    [
        *(("partition", pa.int32()), ("topic", pa.string()), ("offset", pa.int64()), ("timestamp_ms", pa.int64())),
        *(("key", pa.binary()), ("value", pa.binary()), ("headers", OUT.field("headers").type)),
    ]
)
NOW_MS, MAX_FUTURE_MS = 77, 1_000_000
Row = tuple[int, int, bytes, int]
"""Partition, offset, key, timestamp."""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplayJob]:
    """A job for two partitions of `in` that hands over at offsets 90 and 91."""
    (tmp_path / "replayed.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    ends = {"in": {0: 90, 1: 91}}
    where = ("replayed:build", {}, str(tmp_path), "app", "exactly_once", ErrorHandlers())
    yield ReplayJob(*where, MAX_FUTURE_MS, 1024, None, 4, ends, {"in": "the id"}, "of this life", NOW_MS)  # type: ignore[arg-type]
    sys.modules.pop("replayed", None)


def batch(given: list[Row], offsets: bool = True) -> pa.RecordBatch:
    rows = [(p, "in", offset if offsets else None, at, key, b'{"a":1}', None) for p, offset, key, at in given]
    columns = zip(*rows, strict=True)
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, RECORDS, strict=True)], schema=RECORDS)


def given(partition: int, number: int) -> list[Row]:
    return [(partition, i, b"ab"[i % 2 : i % 2 + 1], i * 70 - 300 * (i % 5 == 4)) for i in range(number)]


def run(job: ReplayJob, *batches: pa.RecordBatch) -> list[dict[str, Any]]:
    return [row for out in replay(job)(iter(batches)) for row in out.to_pylist()]


def dead_letters(found: list[dict[str, Any]]) -> list[dict[str, bytes]]:
    return [{h["key"]: h["value"] for h in row["headers"]} for row in found if row["topic"] == "in-dlq"]


def test_the_changelog_is_what_the_aggregator_would_have_written(job: ReplayJob) -> None:
    """Each partition's entries, however the batches are cut, restore to the windows of a run of the test driver."""
    rows = given(0, 30) + given(1, 21)
    found = run(job, batch(rows[:13]), batch(rows[13:37]), batch(rows[37:]))
    for partition, number, end in ((0, 30, 90), (1, 21, 91)):
        driver = TopologyTestDriver(
            load_topology(job.topology, {}, job.folder), partition=partition, errors=ErrorHandlers()
        )
        for _, _, key, at in given(partition, number):
            driver.pipe("in", key=key, value=b'{"a":1}', timestamp=max(at, -1))
        changes: list[Change] = []
        reader = ChangelogReader(one_by_one(changes.append))
        own = [row for row in found if row["topic"] is None and row["partition"] == partition]
        assert [row["offset"] for row in own] == list(range(FIRST_OFFSET, FIRST_OFFSET + len(own)))
        for row in own:
            reader.feed_record(row["offset"], row["key"], row["value"])
        finals = [row["value"] for row in own if decode(row["value"]).operation == FINAL]
        published = [r for r in driver.read("out") if r.value]
        assert len(finals) == len(published) > 2
        assert reader.epoch == EPOCH
        assert reader.progress is not None
        assert (reader.progress.sources, reader.progress.source_ids) == ({"in": end}, {"in": "the id"})
        live = {(c.key, c.start): c.end for c in changes if c.operation == b"L"}
        for change in changes:
            if change.operation != b"L":
                live.pop((change.key, change.start), None)
        assert {(str(w.key).encode(), w.start) for w in driver.task.stores["s"].rows()} <= live.keys()


def test_an_update_comes_with_its_source_key(job: ReplayJob) -> None:
    """It chooses the partition when the row is written; entries of the changelog and other rows have none."""
    found = run(job._replace(topology="replayed:updating"), batch(given(0, 9)))
    updates = [row for row in found if row["topic"] == "out"]
    assert {row["source_key"] for row in updates} == {b"a", b"b"}
    assert [row["key"] for row in updates if msgspec.json.decode(row["key"])["key"] != row["source_key"].decode()] == []
    assert {row["source_key"] for row in found if row["topic"] != "out"} == {None}


def test_what_the_tasks_counted_comes_out_last(job: ReplayJob) -> None:
    """Of each partition: what was read, and of that what had no key, came too late or is a dead letter."""
    rows: list[Any] = [(0, 0, b"a", 2_000), (0, 1, None, 2_000), (0, 2, b"a", -1), (0, 3, b"a", 10), (1, 0, b"b", 5)]
    rows[4:4] = [(0, 4, b"a", 2**60)]
    found = [row for row in run(job, batch(rows)) if row["topic"] == COUNTED]
    assert [row["partition"] for row in found] == [0, 1]
    totals = [msgspec.json.decode(row["value"], type=Totals) for row in found]
    assert totals == [Totals(records=5, closed=0, late=1, dead_letters=2, skipped=1), Totals(1, 0, 0, 0, 0)]


def test_idle_time_is_not_moved_on(job: ReplayJob) -> None:
    """History closes what streaming it in one go closes, whatever `idle_timeout_ms` is; a topic that was quiet between
    its records closed other windows, and the progress that is handed over says of no advance."""
    rows = given(0, 30)
    found = run(job, batch(rows))

    def streamed(quiet_ms: int) -> list[bytes | None]:
        topology = load_topology(job.topology, {}, job.folder)
        driver = TopologyTestDriver(topology, idle_timeout_ms=1_000, errors=ErrorHandlers())
        for _, _, key, at in rows:
            driver.pipe("in", key=key, value=b'{"a":1}', timestamp=max(at, -1))
            driver.advance_wall_clock(quiet_ms)
        return sorted(record.value or b"" for record in driver.read("out"))

    closed = sorted(row["value"] for row in found if row["topic"] == "out")
    assert closed == streamed(0)
    assert closed != streamed(1_000)
    progress = [decode(row["value"]) for row in found if row["topic"] is None]
    assert all(b'"idle"' not in one.body for one in progress if one.operation == PROGRESS)


def test_outputs_carry_their_topics(job: ReplayJob) -> None:
    """Late records and results come out with topic, timestamp and headers, and no changelog offset."""
    found = [row for row in run(job, batch(given(0, 30))) if row["topic"]]
    assert {row["topic"] for row in found} == {"out", "in-late", "in-dlq"}
    late = next(row for row in found if row["topic"] == "in-late")
    assert {"key": "penstock.late.offset", "value": b"9"} in late["headers"]
    assert all(row["offset"] is None for row in found)


def test_rows_without_an_offset_are_counted(job: ReplayJob) -> None:
    """A file's rows go by their place in the partition, over batches."""
    rows = given(0, 30)
    counted = run(job, batch(rows[:7], offsets=False), batch(rows[7:], offsets=False))
    assert counted == run(job, batch(rows))


def test_a_partition_without_records_is_handed_over(job: ReplayJob) -> None:
    """Its changelog is a takeover and the progress that says where the aggregator begins."""
    values = [row[4] for row in nothing(job, 1)]
    assert [decode(value).operation for value in values] == [TAKEOVER, PROGRESS]
    assert decode_progress(decode(values[-1]).body).sources == {"in": 91}
    assert run(job) == []


def test_a_failing_node_names_the_record(job: ReplayJob) -> None:
    """What stops the task stops the job, with a mark by which the driver knows the message."""
    stopped = job._replace(topology="replayed:failing", handlers=ErrorHandlers(process="fail"))
    with pytest.raises(ValueError, match=rf"{FAILED}: ProcessingFailed: .*in-0@0"):
        run(stopped, batch(given(0, 2)))


@pytest.mark.parametrize("max_future_ms", [MAX_FUTURE_MS, None])
def test_a_record_from_the_far_future_is_what_it_is_in_streaming(job: ReplayJob, max_future_ms: int | None) -> None:
    """With `max_future_ms` it is a dead letter and closes nothing; without, all that comes after it is late."""
    times = [10, NOW_MS + MAX_FUTURE_MS + 1, 20, 30, NOW_MS + MAX_FUTURE_MS, 40]
    found = run(job._replace(max_future_ms=max_future_ms), batch([(0, i, b"a", at) for i, at in enumerate(times)]))
    topology = load_topology(job.topology, {}, job.folder)
    driver = TopologyTestDriver(topology, max_future_ms=max_future_ms, now_ms=NOW_MS, errors=ErrorHandlers())
    for at in times:
        driver.pipe("in", key=b"a", value=b'{"a":1}', timestamp=at)
    topics = ("out", "in-late", "in-dlq")
    numbers = [sum(row["topic"] == topic for row in found) for topic in topics]
    assert numbers == [len(driver.read(topic)) for topic in topics]
    assert numbers == ([1, 1, 1] if max_future_ms else [1, 3, 0])
    places = [letter["penstock.dlq.offset"] for letter in dead_letters(found)]
    assert places == ([b"1"] if max_future_ms else [])


def test_what_cannot_be_decoded_is_as_its_handler_says(job: ReplayJob) -> None:
    """A record without a time is a dead letter with its place, or left out, or stops the job, which names it."""
    rows = batch([(0, 0, b"a", 10), (0, 1, b"a", -1), (0, 2, b"a", 20)])

    def letters(handler: ExceptionHandler) -> list[dict[str, bytes]]:
        return dead_letters(run(job._replace(handlers=ErrorHandlers(deserialize=handler)), rows))

    assert [letter["penstock.dlq.offset"] for letter in letters("dead_letter")] == [b"1"]
    assert letters("continue") == []
    with pytest.raises(ValueError, match=r"in-0@1.*without a timestamp"):
        letters("fail")


def test_batches_are_cut_where_the_partition_changes() -> None:
    """A slice holds one partition; an empty batch has none."""
    rows = given(0, 3) + given(1, 2) + given(0, 1)
    assert [part.num_rows for part in cut(batch(rows))] == [3, 2, 1]
    assert list(cut(batch(rows).slice(0, 0))) == []


def test_rows_go_where_a_producer_would_have_sent_them() -> None:
    """The partition is the producer's own choice for the key, and 0 without one."""
    keys = [b"a", None, b"b", b"a", "ü".encode()]
    rows = pa.record_batch({"partition": pa.array([9] * 5, pa.int32()), "key": pa.array(keys, pa.binary())})
    (out,) = partitioned(7)(iter([rows]))
    assert out.column("partition").to_pylist() == [0 if key is None else for_key(key, 7) for key in keys]
    (out,) = partitioned(7)(iter([rows.slice(1, 1)]))
    assert out.column("partition").to_pylist() == [0]
