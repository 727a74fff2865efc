"""Stores on disk behave exactly as stores in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, Sum
from penstock.shared.streams.aggregations.collect import CollectSet
from penstock.shared.streams.dsl.builder import GroupedStream, StreamsBuilder, WindowedGroup
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples

KINDS = ("session", "tumbling", "hopping", "sliding")
ROOMY, NONE = 64 * 1024 * 1024, 0


def windows_of(kind: str, grouped: GroupedStream) -> WindowedGroup:
    match kind:
        case "session":
            return grouped.session_window(10, 5)
        case "tumbling":
            return grouped.tumbling_window(10, 5)
        case "hopping":
            return grouped.hopping_window(10, 4, 5)
    return grouped.sliding_window(10, 5)


def windowed(kind: str, emit: str) -> Topology:
    builder = StreamsBuilder()
    windows = windows_of(kind, builder.stream("in").group_by_key())
    table = windows.aggregate("s", n=Count(), sum=Sum("id"), ids=CollectSet("id", limit=50))
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return builder.build()


def joined() -> Topology:
    builder = StreamsBuilder()
    left, right = builder.stream("in"), builder.stream("other")
    left.left_join(right, lambda a, b: [a["id"], b and b["id"]], JoinWindows.of(timedelta(milliseconds=6), 3)).to("out")
    return builder.build()


class Tally(Processor):
    """Counts by key in its own store, deletes every fifth row, and sometimes forwards the sum of all rows."""

    def init(self, context: Any) -> None:
        super().init(context)
        self.rows = context.store("rows")

    def process(self, record: Record) -> None:
        if record.key is None:
            return
        n = (self.rows.get(record.key) or {"n": 0})["n"] + 1
        self.rows.put(record.key, {"n": n} if n % 5 else None)
        total = sum(value["n"] for _, value in self.rows.items())
        self.context.forward(record._replace(value={"id": record.value["id"], "total": total, "rows": len(self.rows)}))


def tallied() -> Topology:
    builder = StreamsBuilder()
    builder.add_store("rows")
    builder.stream("in").process(Tally, "rows").to("out")
    return builder.build()


def aggregated() -> Topology:
    builder = StreamsBuilder()
    own = Aggregate(list, lambda state, value: [*state, value["id"]][-3:], lambda a, b: a + b)
    table = builder.stream("in").group_by_key().aggregate("s", n=Count(), ids=CollectSet("id", limit=50), own=own)
    table.to_stream().to("out")
    builder.stream("other").left_join(table, lambda value, row: [value["id"], row]).to("joined")
    return builder.build()


@contextmanager
def directory(cache_bytes_max: int = NONE) -> Iterator[StateDirectory]:
    with tempfile.TemporaryDirectory() as folder:
        yield StateDirectory(folder, "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=cache_bytes_max)
        # A driver that a test leaves behind has its files open; they go with the folder.


turns = st.lists(
    st.tuples(
        st.lists(
            st.tuples(
                st.sampled_from(["in", "in", "other"]), st.sampled_from([b"a", b"b", b"c", None]), st.integers(0, 20)
            ),
            max_size=6,
        ),
        st.sampled_from(["commit", "commit", "nothing", "crash", "torn"]),
        st.integers(0, 40),
    ),
    max_size=12,
)


def held(driver: TopologyTestDriver) -> dict[str, Any]:
    """All rows of all stores, and the number of rows that each reports."""
    task = driver.task
    found = {}
    for name, store in task.stores.items():
        results = [a.to_columns for a in task.topology.stores[name].aggregations]
        rows = [
            (r.key, r.start, r.end, [c(s) for c, s in zip(results, r.states, strict=True)], getattr(r, "closed", None))
            for r in store.rows()
        ]
        found[name] = len(store), sorted(rows, key=lambda row: row[:2])
    return found


def run(driver: TopologyTestDriver, plan: list[tuple[list[Any], str, int]]) -> Iterator[Any]:
    """The driver's outputs after each turn, in order for each key. The order between keys is not defined."""
    now = number = 0
    for records, then, step in plan:
        for topic, key, at in records:
            if topic in driver.source_log:
                driver.pipe(topic, key=key, value=b'{"id":%d}' % number, timestamp=now + at)
            number += 1
        now += step
        if then == "commit":
            driver.commit()
        elif then in ("crash", "torn"):
            driver.crash(torn_entries=2 if then == "torn" else 0)
            driver.restore()
        sent = {
            topic: sorted(((r.key, r.value, r.timestamp) for r in records), key=lambda output: output[0] or b"")
            for topic, records in driver.outputs.items()
        }
        yield held(driver), sent, driver.task.metrics.late_total, driver.task.metrics.skipped_total


def compare(topology: Topology, plan: list[tuple[list[Any], str, int]], cache_bytes_max: int) -> None:
    with directory(cache_bytes_max) as state:
        in_memory = TopologyTestDriver(topology, commit_each=False)
        on_disk = TopologyTestDriver(topology, commit_each=False, state=state)
        for expected, got in zip(run(in_memory, plan), run(on_disk, plan), strict=True):
            assert got == expected
        on_disk.close()


@pytest.mark.parametrize("emit", ["on_close", "on_update"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(12))
@given(plan=turns, cache_bytes_max=st.sampled_from([NONE, 2_000, ROOMY]))
def test_windows_are_the_same_on_disk(
    kind: str, emit: str, plan: list[tuple[list[Any], str, int]], cache_bytes_max: int
) -> None:
    """Rows, their number, results, late records: as in memory, with crashes, torn commits and next to no memory."""
    compare(windowed(kind, emit), plan, cache_bytes_max)


@pytest.mark.parametrize("build", [joined, tallied, aggregated])
@settings(max_examples=examples(12))
@given(plan=turns, cache_bytes_max=st.sampled_from([NONE, 2_000, ROOMY]))
def test_joins_and_tables_are_the_same_on_disk(
    build: Any, plan: list[tuple[list[Any], str, int]], cache_bytes_max: int
) -> None:
    """The rows of joins, of a processor's store with all its operations, and of aggregates are those of stores in
    memory."""
    compare(build(), plan, cache_bytes_max)


class Number(msgspec.Struct):
    """A value that can be too large to be added up."""

    n: int


ONE, LARGEST = b'{"n":1}', b'{"n":9223372036854775807}'
MOVES_NO_TIME = {
    "null key": [(None, ONE, 115)],
    "undecodable": [*[(b"q", ONE, 100)] * 39, (b"z", b"{", 115)],
    "overflow": [(b"z", LARGEST, 108)],
}


@pytest.mark.parametrize("moves", MOVES_NO_TIME)
@pytest.mark.parametrize("kind", KINDS)
def test_prefetched_windows_close_after_a_rejected_record(kind: str, moves: str) -> None:
    """If the record with a batch's highest time is left out, the prefetched windows for that time still close later."""
    builder = StreamsBuilder()
    grouped = builder.stream("in", value=Number).group_by_key()
    windows_of(kind, grouped).aggregate("s", n=Count(), sum=Sum("n")).on_close().to("out")
    topology = builder.build()
    batches = [[(b"a", ONE, 100), (b"z", ONE, 100)], MOVES_NO_TIME[moves]]
    batches += [[(b"b", ONE, at)] for at in (120, 150, 10_000)]
    with directory() as state:
        drivers = [
            TopologyTestDriver(topology, commit_each=False, errors=ErrorHandlers(), columns_min=1, state=where)
            for where in (None, state)
        ]
        for batch in batches:
            for driver in drivers:
                driver.pipe_columns("in", batch)
                driver.commit()
        in_memory, on_disk = ([(r.key, r.value) for r in driver.read("out")] for driver in drivers)
        assert in_memory == on_disk
        assert {key for key, _ in in_memory} >= {b"a", b"z", b"b"}
        drivers[1].close()


@pytest.mark.parametrize("key", [None, 7, [1]])
def test_a_key_of_another_type_is_an_error_on_disk_too(key: Any) -> None:
    """A table's store on disk raises the same error as one in memory."""
    with directory() as state:
        rows: Any = TopologyTestDriver(tallied(), state=state).task.stores["rows"]
        for call in (rows.get, rows.delete, lambda key: rows.put(key, None)):
            with pytest.raises(DataError, match=r"store 'rows'.*key"):
                call(key)
