"""Stores on disk behave as stores in memory, and their rows in RocksDB come back unchanged."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.shared.common.errors import DataError, StateStoreFailed
from penstock.shared.common.key_range import raw_key
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, Sum
from penstock.shared.streams.aggregations.collect import CollectSet
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.dsl.builder import GroupedStream, StreamsBuilder, WindowedGroup
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.checkpoint import Checkpoint
from penstock.shared.streams.state.persistent_stores import CACHED_ROW_BYTES
from penstock.shared.streams.state.rocksdb import META, Meta, RocksDb, RocksMemory, RowId, StoredRow
from penstock.shared.streams.state.row_codec import RowCodec, row_layout
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.window_table import WindowTable
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


@pytest.mark.parametrize("kind", KINDS)
def test_windows_that_changed_after_the_state_on_disk_was_written_are_closed(kind: str, tmp_path: Path) -> None:
    """A restore that continues an older state on disk, such as a standby's, closes all windows, even grown sessions."""
    topology, folder, older = windowed(kind, "on_close"), tmp_path / "app" / "0", tmp_path / "older"
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=NONE)
    drivers = in_memory, on_disk = TopologyTestDriver(topology), TopologyTestDriver(topology, state=state)
    for driver in drivers:
        driver.pipe("in", key=b"a", value=b'{"id":0}', timestamp=0)
    on_disk.crash()
    shutil.copytree(folder, older)
    on_disk.restore()
    for driver in drivers:
        for at in (8, 16, 24, 32):
            driver.pipe("in", key=b"a", value=b'{"id":1}', timestamp=at)
        driver.crash()
    shutil.rmtree(folder)
    shutil.copytree(older, folder)
    for driver in drivers:
        driver.restore()
        for at in (1_000, 2_000):
            driver.pipe("in", key=b"b", value=b'{"id":2}', timestamp=at)
    assert held(on_disk) == held(in_memory)
    assert [r.value for r in on_disk.read("out")] == [r.value for r in in_memory.read("out")]
    on_disk.close()


@pytest.mark.parametrize("is_windowed", [False, True])
def test_the_least_recently_used_key_is_evicted(is_windowed: bool) -> None:
    """If the memory is exceeded, the key that is unused for the longest time goes, and not the one loaded first."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    if is_windowed:
        grouped.session_window(10).aggregate("s", n=Count()).on_close().to("out")
    else:
        grouped.aggregate("s", n=Count()).to_stream().to("out")
    room_for_two_keys = 5 * CACHED_ROW_BYTES
    with directory(room_for_two_keys) as state:
        driver = TopologyTestDriver(builder.build(), state=state)
        for at, key in enumerate((b"a", b"b", b"a", b"c")):
            driver.pipe("in", key=key, value=b"{}", timestamp=at)
        store: Any = driver.task.stores["s"]
        assert store.keys_in_memory() == {"a", "c"}
        driver.close()


def test_rows_of_keys_in_memory_are_not_decoded_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The iteration of a store decodes only the rows on disk whose keys are not in memory."""
    decoded = 0
    unpack = RowCodec.unpack

    def count(codec: RowCodec, data: bytes) -> list[Any]:
        nonlocal decoded
        decoded += 1
        return unpack(codec, data)

    builder = StreamsBuilder()
    builder.table("in", name="s")
    room_for_two_keys = 5 * CACHED_ROW_BYTES
    with directory(room_for_two_keys) as state:
        driver = TopologyTestDriver(builder.build(), state=state)
        for key in (b"a", b"b", b"c"):
            driver.pipe("in", key=key, value=b"{}")
        store: Any = driver.task.stores["s"]
        assert store.keys_in_memory() == {"b", "c"}
        monkeypatch.setattr(RowCodec, "unpack", count)
        assert sorted(row.key for row in store.rows()) == ["a", "b", "c"]
        driver.close()
    assert decoded == 1


@pytest.mark.parametrize("cache_bytes_max", [ROOMY, NONE])
def test_a_keys_windows_are_walked_a_fixed_number_of_times(
    cache_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walks of a key's windows, in a commit and when they are fetched, do not grow with the number of its
    windows."""
    walk = WindowTable.rows_of

    def count(table: WindowTable, code: int) -> list[int]:
        nonlocal walks
        walks += 1
        return walk(table, code)

    monkeypatch.setattr(WindowTable, "rows_of", count)
    walks_by_windows = {}
    for windows in (2, 50):
        builder = StreamsBuilder()
        grouped = builder.stream("in").group_by_key().hopping_window(windows, 1)
        grouped.aggregate("s", n=Count()).on_close().to("out")
        with directory(cache_bytes_max) as state:
            driver, walks = TopologyTestDriver(builder.build(), state=state), 0
            for _ in range(2):
                driver.pipe("in", key=b"a", value=b"{}", timestamp=1_000)
            assert len(driver.task.stores["s"]) == windows
            walks_by_windows[windows] = walks
            driver.close()
    assert walks_by_windows[2] == walks_by_windows[50]


@pytest.mark.parametrize("key", [None, 7, [1]])
def test_a_key_of_another_type_is_an_error_on_disk_too(key: Any) -> None:
    """A table's store on disk raises the same error as one in memory."""
    with directory() as state:
        rows: Any = TopologyTestDriver(tallied(), state=state).task.stores["rows"]
        for call in (rows.get, rows.delete, lambda key: rows.put(key, None)):
            with pytest.raises(DataError, match=r"store 'rows'.*key"):
                call(key)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_keys_are_those_of_the_call(is_on_disk: bool) -> None:
    """A processor may read the keys of its store, also those that are only on disk, and delete the rows meanwhile."""
    with directory() as state:
        driver = TopologyTestDriver(tallied(), state=state if is_on_disk else None)
        for key in (b"a", b"b", b"c"):
            driver.pipe("in", key=key, value=b'{"id":1}', timestamp=1)
        rows: Any = driver.task.stores["rows"]
        found = []
        keys = rows.keys()
        for key in keys:
            found.append(key)
            rows.delete(key)
        assert (sorted(found), list(rows.keys())) == (["a", "b", "c"], [])
        driver.close()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_rows_may_be_changed_while_they_are_iterated(is_on_disk: bool) -> None:
    """A processor that iterates over its store may delete and add rows. It reads the rows of the call."""
    with directory() as state:
        driver = TopologyTestDriver(tallied(), state=state if is_on_disk else None)
        for key in (b"a", b"b", b"c"):
            driver.pipe("in", key=key, value=b'{"id":1}', timestamp=1)
        rows: Any = driver.task.stores["rows"]
        for read in (rows.items, lambda: ((row.key, row.states[0]) for row in rows.rows())):
            found = {}
            for key, value in read():
                found[key] = value
                rows.delete(key)
                rows.put(key + "'", value)
            assert (len(found), dict(rows.items())) == (3, {key + "'": value for key, value in found.items()})
        before = dict(rows.items())
        read_rows = rows.items()
        for key in before:
            rows.put(key, {"id": 9})
        assert dict(read_rows) == before
        driver.close()


MEMORY = RocksMemory(8 * 1024 * 1024)
AT = Checkpoint("id", 3, 17, None)


def test_rows_are_found_by_key_in_order_of_start(tmp_path: Path) -> None:
    """The rows of a key are sorted by start. Rows of other stores, and of keys with the same prefix, are left out."""
    db = RocksDb(tmp_path / "0", MEMORY)
    rows = {(0, b"a", 9): 10, (0, b"a", -1): 2, (0, b"ab", 1): 2, (1, b"a", 5): 6, (0, b"", 0): 1}
    assert db.write({id_: StoredRow(end, b"%d" % end) for id_, end in rows.items()}, AT, indexed={0}) == {0: 4, 1: 1}
    assert db.rows_of(0, b"a") == [(-1, StoredRow(2, b"2")), (9, StoredRow(10, b"10"))]
    assert (db.rows_of(0, b"b"), db.rows_of(0, b"")) == ([], [(0, StoredRow(1, b"1"))])
    many = dict(db.rows_of_many(0, [b"", b"b", b"a", b"ab"]))
    assert many == {key: db.rows_of(0, key) for key in (b"", b"a", b"ab", b"b")}
    assert (len(many[b"ab"]), len(many[b"a"])) == (1, 2)
    assert (db.row(1, b"a", 5), db.row(1, b"a", 6)) == (StoredRow(6, b"6"), None)
    assert sorted(db.rows(0)) == sorted((key, start, StoredRow(end, b"%d" % end))
        for (store, key, start), end in rows.items() if store == 0)  # fmt: skip
    assert (db.count(0), db.count(1)) == (4, 1)
    db.close()


def test_rows_and_checkpoint_outlive_the_process(tmp_path: Path) -> None:
    """Rows, counts and the checkpoint are there when the folder is opened again."""
    db = RocksDb(tmp_path / "0", MEMORY)
    assert (db.is_new, db.checkpoint) == (True, None)
    db.write({(0, b"a", 1): StoredRow(2, b"x"), (0, b"b", 1): StoredRow(2, b"y")}, AT)
    db.write({(0, b"b", 1): None, (0, b"c", 1): None}, AT)
    db.close()
    again = RocksDb(tmp_path / "0", MEMORY)
    assert (again.is_new, again.checkpoint, again.count(0)) == (False, AT, 1)
    assert list(again.rows(0)) == [(b"a", 1, StoredRow(2, b"x"))]
    again.clear()
    assert (again.is_new, again.checkpoint, again.count(0), list(again.rows(0))) == (True, None, 0, [])
    again.close()


def test_rows_of_an_unknown_format_are_not_used(tmp_path: Path) -> None:
    """Rows in an unknown format have no valid checkpoint, so they are not used."""
    db = RocksDb(tmp_path / "0", MEMORY)
    db.write({}, AT)
    db._db[META] = msgspec.msgpack.encode(Meta(format=99, checkpoint=AT))
    db.close()
    again = RocksDb(tmp_path / "0", MEMORY)
    assert (again.checkpoint, again.is_new) == (None, False)
    again._db[META] = b"\xc1"
    again.close()
    assert RocksDb(tmp_path / "0", MEMORY).checkpoint is None


def test_damaged_files_are_thrown_away(tmp_path: Path) -> None:
    """If RocksDB reports corrupt files, the state is deleted and restored."""
    db = RocksDb(tmp_path / "0", MEMORY)
    db.write({(0, b"a", 1): StoredRow(2, b"x")}, AT)
    db.close()
    (tmp_path / "0" / "CURRENT").write_text("nothing of this kind\n")
    with capture_logs() as logged:
        again = RocksDb(tmp_path / "0", MEMORY)
    assert [(line["log_level"], line["folder"]) for line in logged] == [("error", str(tmp_path / "0"))]
    assert (again.is_new, again.checkpoint, list(again.rows(0))) == (True, None, [])
    again.close()


def test_errors_of_the_disk_name_the_folder(tmp_path: Path) -> None:
    """A folder that is already open and one that is closed raise errors that name it."""
    db = RocksDb(tmp_path / "0", MEMORY)
    with pytest.raises(StateStoreFailed, match=rf"{tmp_path}/0.*lock"):
        RocksDb(tmp_path / "0", MEMORY)
    db.close()
    db.close()
    with pytest.raises(StateStoreFailed, match="closed"):
        db.row(0, b"a", 0)


def test_rows_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    """If a file of the database is damaged while it is open, every read of its rows fails. No row seems to be gone."""
    db = RocksDb(tmp_path / "0", MEMORY)
    rows = {(0, b"%d" % i, i): StoredRow(i, b"%d" % i * 50) for i in range(1_000)}
    db.write(rows, AT, indexed={0})
    db._db.flush()
    db.close()
    again = RocksDb(tmp_path / "0", MEMORY)
    for file in (tmp_path / "0").glob("*.sst"):
        with file.open("r+b") as opened:
            opened.write(bytes(file.stat().st_size // 2))
    reads: list[Callable[[], object]] = [
        lambda: dict(again.rows_of_many(0, [key for _, key, _ in rows])),
        lambda: list(again.rows(0)),
        lambda: again.take_due(0, 0, 2_000),
    ]
    for read in reads:
        with pytest.raises(StateStoreFailed, match="Corruption"):
            read()
    again.close()


def test_the_index_moves_on_what_has_grown(tmp_path: Path) -> None:
    """If a row's end grows, its index entry is moved when it is due, and the row is due at its new end."""
    db = RocksDb(tmp_path / "0", MEMORY)
    for end in (10, 20, 30):
        db.write({(0, b"a", 5): StoredRow(end, b"")}, AT, indexed={0})
    db.write({(0, b"b", 5): StoredRow(12, b"")}, AT, indexed={0})
    assert db.take_due(0, -100, 11) == (set(), 12)
    assert db.take_due(0, 11, 30) == ({b"b"}, 30)
    assert db.take_due(0, 30, 31)[0] == {b"a"}
    db.write({(0, b"a", 5): None, (0, b"b", 5): None}, AT, indexed={0})
    assert db.take_due(0, -100, 1_000) == (set(), 1 << 63)
    db.close()


ids = st.tuples(st.just(0), st.sampled_from([b"a", b"b"]), st.integers(0, 4))
writes = st.lists(st.dictionaries(ids, st.one_of(st.none(), st.integers(0, 30)), max_size=4), max_size=8)


@settings(max_examples=examples(20), deadline=None)
@given(plan=st.lists(st.tuples(writes, st.integers(0, 35)), max_size=4))
def test_due_is_what_ends_before_the_limit(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[list[dict[RowId, int | None]], int]]
) -> None:
    """`take_due` finds exactly the rows that end between two limits, after any writes and earlier calls."""
    db = RocksDb(tmp_path_factory.mktemp("db"), MEMORY)
    rows: dict[RowId, int] = {}
    since = -1
    for changes, limit in plan:
        for change in changes:
            # Ends do not shrink, and nothing comes that ends before what was looked through.
            change = {id_: end if end is None else max(end, since, rows.get(id_, 0)) for id_, end in change.items()}
            written = {id_: None if end is None else StoredRow(end, b"") for id_, end in change.items()}
            db.write(written, AT, indexed={0}, due={0: since})
            for id_, end in change.items():
                if end is None:
                    rows.pop(id_, None)
                else:
                    rows[id_] = end
        assert db.count(0) == len(rows)
        if limit > since:
            keys, upcoming = db.take_due(0, since, limit)
            assert keys == {key for (_, key, _), end in rows.items() if since <= end < limit}
            assert all(end >= upcoming for end in rows.values() if end >= limit)
            rows = {id_: end for id_, end in rows.items() if end >= limit}
            db.write({(0, key, s): None for key, s, row in db.rows(0) if row.end < limit}, AT, indexed={0})
            since = limit
    db.close()


def codec(key: str = "string") -> RowCodec:
    builder = StreamsBuilder()
    windows = builder.stream("in", key=key).group_by_key().session_window(10)  # type: ignore[arg-type]
    windows.aggregate("s", n=Count(), ids=CollectSet("id", limit=9), sum=Sum("id")).on_close().to("out")
    (store,) = builder.build().stores.values()
    return RowCodec(store.schema, store.aggregations)


def test_states_come_back_as_they_were() -> None:
    """Numbers and bytes are decoded unchanged, as new objects."""
    own = codec()
    states = [a.initial() for a in own._aggregations]
    states = [a.add_at(s, {"id": 7}, 1) for a, s in zip(own._aggregations, states, strict=True)]
    again = own.unpack(own.pack(states))
    assert [a.result(s) for a, s in zip(own._aggregations, again, strict=True)] == [1, [7], 7.0]
    assert again[1] is not states[1]


def test_bytes_that_are_no_states_end_the_task() -> None:
    """A row that cannot be read is an error of the store's, never a record's."""
    with pytest.raises(StateStoreFailed, match=r"store 's'.*row"):
        codec().unpack(b"short")
    own = codec()
    columns = [value for a in own._aggregations for value in a.to_columns(a.initial())]
    columns[columns.index(b"[]")] = b"[" * 100_000
    with pytest.raises(StateStoreFailed, match=r"store 's'.*row"):
        own.unpack(own._codec.pack(columns))


def test_keys_by_the_stores_type() -> None:
    """Text keys are stored in UTF-8."""
    text, raw = codec(), codec("bytes")
    assert (raw_key("é"), text.key_of(b"\xc3\xa9"), raw.key_of(b"\xff")) == (b"\xc3\xa9", "é", b"\xff")


def schemas(gap: int = 10, name: str = "s", **more: Sum) -> tuple[StoreSchema, ...]:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(gap).aggregate(name, n=Count(), **more).on_close().to("out")
    return builder.build().schemas()


def test_the_layout_is_what_the_bytes_depend_on() -> None:
    """The layout changes with a store's name or aggregations, but not with its gap."""
    assert row_layout(schemas()) == row_layout(schemas(gap=99))
    assert len({row_layout(schemas()), row_layout(schemas(name="t")), row_layout(schemas(sum=Sum("id")))}) == 3
