"""A restore gives back a task's state, from changelog and snapshot. Under another grace, closed windows stay closed,
which the stream time alone does not determine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.clients.dead_letters.late_record_headers import CLOSE_TIME_MS, LATENESS_MS, STREAM_TIME_MS
from penstock.shared.common.errors import ConfigError, CorruptRecord, SchemaMismatch, StateStoreFailed
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct, Max
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.first_last import Last
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.changelog_reader import Change, ChangelogReader, CorruptEntry, apply_one_by_one
from penstock.shared.streams.changelog.format import (
    DELETED,
    LIVE,
    BatchInput,
    Progress,
    decode_entry,
    decode_progress,
    require_whole_input,
)
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.state.local_state import LocalState
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.state_store import is_open
from penstock.shared.streams.task.restore import restore_change, restore_changes, restore_progress, restore_windows
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.window_store import WindowStore
from penstock.shared.streams.windows.window_table import IDLE_KEYS_MIN
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples


def new_task(local: LocalState | None = None, value: Any = dict) -> StreamTask:
    builder = StreamsBuilder()
    windows = builder.stream("in", value=value).group_by_key().session_window(10, 5)
    windows.aggregate("s", n=Count(), last=Aggregate(lambda: None, lambda s, v: v, lambda a, b: b)).on_close().to("out")
    return StreamTask(builder.build(), 0, application="app", local=local)


def pack(task: StreamTask, n: int, last: bytes) -> bytes:
    return StateCodec(task.topology.schemas()[0].state_columns()).pack([n, last])


def test_a_live_window_comes_and_goes() -> None:
    """A live entry restores a window, and a deletion removes it."""
    task = new_task()
    restore_change(task, Change(LIVE, "s", b"k", 1, 2, pack(task, 3, b'"x"'), task.topology.schemas()[0]))
    assert [(s.key, s.start, s.end, s.states) for s in task.stores["s"].rows()] == [("k", 1, 2, [3, "x"])]
    restore_change(task, Change(DELETED, "s", b"k", 1, 0, b"", task.topology.schemas()[0]))
    assert not list(task.stores["s"].rows())


@pytest.mark.parametrize(
    ("operation", "key", "last"),
    [(LIVE, b"\xff", b'"x"'), (DELETED, b"\xff", b""), (LIVE, b"k", b"{"), (LIVE, b"k", b"[" * 100_000)],
    ids=["a live window's key", "a deletion's key", "an aggregation's state", "a deeply nested state"],
)
def test_undecodable_keys_and_states_are_corrupt(operation: bytes, key: bytes, last: bytes) -> None:
    """A key that is no text, or a state that its aggregation cannot decode, is a corrupt record of a named store."""
    task = new_task()
    with pytest.raises(CorruptRecord, match="entry of store 's'"):
        restore_change(task, Change(operation, "s", key, 1, 2, pack(task, 3, last), task.topology.schemas()[0]))


@pytest.mark.parametrize("operation", [LIVE, DELETED])
def test_undecodable_keys_are_corrupt_on_disk_too(operation: bytes) -> None:
    """State on disk takes no key that its store cannot decode."""
    with TemporaryDirectory() as folder, directory_of(folder) as directory, closing(directory.state_of(0)) as local:
        task = new_task(local)
        change = Change(operation, "s", b"\xff", 1, 2, pack(task, 3, b'"x"'), task.topology.schemas()[0])
        with pytest.raises(CorruptRecord, match="entry of store 's'"):
            restore_change(task, change)
        local.write(None)
        assert not list(task.stores["s"].rows())


@pytest.mark.parametrize("value", [dict, lambda topic, data: data])
def test_states_on_disk_are_decoded_when_they_are_read(value: Any) -> None:
    """A restore to disk decodes no state, whatever the format of the source is."""
    with TemporaryDirectory() as folder, directory_of(folder) as directory, closing(directory.state_of(0)) as local:
        task = new_task(local, value)
        restore_change(task, Change(LIVE, "s", b"k", 1, 2, pack(task, 3, b"{"), task.topology.schemas()[0]))
        local.write(None)
        with pytest.raises(StateStoreFailed, match="store 's'"):
            list(task.stores["s"].rows())


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from("LLDF"), st.sampled_from(["s", "t", "u"]), st.sampled_from([b"a", b"b"]), st.integers(0, 3)
    ),
    max_size=12,
)


@given(commits=st.lists(ENTRIES, max_size=4), ends=st.lists(st.integers(0, 40), max_size=3))
@settings(max_examples=examples(100), deadline=None)
def test_columns_restore_the_same_as_single_changes(
    commits: list[list[tuple[str, str, bytes, int]]], ends: list[int]
) -> None:
    """The newest change of each key and start counts, in stores of windows and of rows, with states of numbers and of
    objects."""
    builder = StreamsBuilder()
    stream = builder.stream("in").group_by_key()
    stream.session_window(10, 5).aggregate("s", n=Count(), most=Max("x")).on_close().to("out")
    stream.tumbling_window(10, 5).aggregate("t", all=CollectList("x"), n=Count()).on_close().to("out")
    stream.aggregate("u", n=Count(), last=Last("x"))
    topology = builder.build()
    schemas = topology.schemas()
    names = [schema.name for schema in schemas]
    log: list[tuple[bytes | None, bytes]] = [(None, fmt.encode_takeover(1, fmt.Takeover("app", "i", 0)))]
    for commit, changes in enumerate(commits, 1):
        for index, (operation, name, key, at) in enumerate(changes):
            number, start = names.index(name), 0 if name == "u" else 10 * at
            own = topology.stores[name].aggregations
            states = [a.initial() for a in own]
            columns = [v for a, s in zip(own, states, strict=True) for v in a.to_columns(s)]
            columns = [index + commit if column == 0 else column for column in columns]
            state = StateCodec(schemas[number].state_columns()).pack(columns)
            if operation == "L":
                log.append((key, fmt.encode_live(number, 1, commit, start, start + index, state)))
            elif operation == "F":
                log.append((key, fmt.encode_final(number, 1, commit, start, start + index, 99, state)))
            else:
                log.append((key, fmt.encode_deleted(number, 1, commit, start)))
        progress = Progress("app", "exactly_once", {}, {}, {}, {}, schemas, 0)
        log.append((None, fmt.encode_progress(1, commit, progress)))
    restored = [StreamTask(topology, 0, application="app") for _ in range(2)]
    bounds = sorted({0, len(log), *(end for end in ends if end < len(log))})
    first, second = restored
    for apply in (partial(restore_changes, first), apply_one_by_one(partial(restore_change, second))):
        reader = ChangelogReader(apply, stores=schemas)
        for low, high in pairwise(bounds):
            part = log[low:high]
            reader.feed(np.arange(low, high), [key for key, _ in part], [value for _, value in part])
    in_columns, singly = (
        {name: sorted(tuple(row) for row in task.stores[name].rows()) for name in names} for task in restored
    )
    assert in_columns == singly


@pytest.mark.parametrize("invalid", [b"{", b"[" * 100_000], ids=["no JSON", "deeply nested"])
def test_the_entry_that_cannot_be_read_is_found_among_others(invalid: bytes) -> None:
    """Its offset is named, not that of the first one of its batch."""
    task = new_task()
    (schema,) = task.topology.schemas()
    entries = [(b"k%d" % i, pack(task, i, invalid if i == 3 else b"1")) for i in range(5)]
    values = [fmt.encode_live(0, 1, 1, 0, 5, state) for _, state in entries]
    progress = Progress("app", "exactly_once", {}, {}, {}, {}, (schema,), 0)
    reader = ChangelogReader(partial(restore_changes, task), epoch=1)
    with pytest.raises(CorruptEntry) as raised:
        reader.feed(
            np.arange(10, 16), [*(key for key, _ in entries), None], [*values, fmt.encode_progress(1, 1, progress)]
        )
    assert raised.value.offset == 13


def test_a_state_that_a_later_one_replaces_is_read_too() -> None:
    """An invalid state is rejected even if a later one in the same batch replaces it, so batch boundaries have no
    effect."""
    task = new_task()
    (schema,) = task.topology.schemas()
    values = [fmt.encode_live(0, 1, 1, 0, 5, state) for state in (b"short", pack(task, 1, b"1"))]
    values.append(fmt.encode_progress(1, 1, Progress("app", "exactly_once", {}, {}, {}, {}, (schema,), 0)))
    reader = ChangelogReader(partial(restore_changes, task), epoch=1)
    with pytest.raises(CorruptEntry) as raised:
        reader.feed(np.arange(3), [b"k", b"k", None], values)
    assert raised.value.offset == 0


class User(msgspec.Struct):
    """A row of the earlier topology."""

    name: str


class WithCity(User):
    """A type that cannot decode earlier rows."""

    city: str


class WithOptionalCity(User):
    """A type that can decode earlier rows."""

    city: str = ""


def table_of_users(value: type[User]) -> Topology:
    builder = StreamsBuilder()
    builder.table("users", value).to_stream().to("out")
    return builder.build()


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_type_of_rows_may_get_fields_with_a_default(on_disk: bool) -> None:
    """Rows that the new type cannot decode are not corrupt: the error names the store, the field and the remedy."""
    with TemporaryDirectory() as folder, directory_of(folder) as directory:
        driver = TopologyTestDriver(table_of_users(User), errors=ErrorHandlers(), state=directory if on_disk else None)
        driver.pipe("users", key=b"ann", value=b'{"name":"Ann"}')
        driver.crash()
        driver.topology = table_of_users(WithOptionalCity)
        driver.restore()
        assert driver.store("users").get("ann") == WithOptionalCity("Ann")
        driver.crash()
        driver.topology = table_of_users(WithCity)
        if on_disk:
            driver.restore()
            with pytest.raises(StateStoreFailed, match=r"'users'.*`city`.*default"):
                driver.store("users").get("ann")
        else:
            with pytest.raises(SchemaMismatch, match=r"'users'.*`city`.*default"):
                driver.restore()


def test_rows_of_a_snapshot_may_lack_fields_with_a_default() -> None:
    """A row of the lake that the new type cannot decode is not corrupt either."""
    batch = of_lake({"key": [b"ann"], "start_ms": [0], "end_ms": [0], "value_json": [b'{"name":"Ann"}']})
    (schema,) = table_of_users(User).schemas()
    task = StreamTask(table_of_users(WithOptionalCity), 0, application="app")
    restore_windows(task, schema, batch)
    assert [row.states for row in task.stores["users"].rows()] == [[WithOptionalCity("Ann")]]
    with pytest.raises(SchemaMismatch, match=r"'users'.*`city`.*default"):
        restore_windows(StreamTask(table_of_users(WithCity), 0, application="app"), schema, batch)


def of_lake(columns: dict[str, Any], live: list[bool] | None = None) -> pa.RecordBatch:
    """A batch of windows as the lake returns it; windows are live unless stated."""
    key, start_ms, end_ms, *_ = columns
    head = {name: columns[name] for name in (key, start_ms, end_ms)}
    return pa.record_batch({**head, "live": live or [True] * len(columns[key]), **columns})


def tasks(**more: Aggregate[object, object]) -> tuple[StreamTask, StreamTask]:
    """A task, and one whose store has another aggregation in front."""
    made = []
    for first in ({}, {"most": Max("x")}):
        builder = StreamsBuilder()
        windows = builder.stream("in").group_by_key().session_window(10, 5)
        windows.aggregate("s", **first, n=Count(), **more).on_close().to("out")
        made.append(StreamTask(builder.build(), 0, application="app"))
    return made[0], made[1]


@pytest.mark.parametrize("in_columns", [True, False])
def test_an_added_aggregation_begins_empty(in_columns: bool) -> None:
    """Existing states are restored, from the changelog and from a snapshot. The added aggregation has its initial
    state."""
    last = Aggregate(lambda: None, lambda s, v: v, lambda a, b: b)
    old, new = tasks() if in_columns else tasks(last=last)
    values = [3] if in_columns else [3, b'"x"']
    (written,), (grown,) = old.topology.schemas(), new.topology.schemas()
    restore_change(new, Change(LIVE, "s", b"k", 1, 2, StateCodec(written.state_columns()).pack(values), written))
    state = {c.name: pa.array([value]) for c, value in zip(written.state_columns(), values, strict=True)}
    restore_windows(new, written, of_lake({"key": [b"m"], "start_ms": [50], "end_ms": [60], **state}))
    # A row of a table that has the column by now, and was written before it had.
    empty = {c.name: state.get(c.name, pa.nulls(1, pa.int64())) for c in grown.state_columns()}
    restore_windows(new, grown, of_lake({"key": [b"z"], "start_ms": [90], "end_ms": [95], **empty}))
    states = [(0, 0), 3, *([] if in_columns else ["x"])]
    assert sorted((s.key, s.start, s.end, s.states) for s in new.stores["s"].rows()) == [
        ("k", 1, 2, states),
        ("m", 50, 60, states),
        ("z", 90, 95, states),
    ]


def test_a_restore_that_adds_an_aggregation_forgets_the_keys_of_closed_windows() -> None:
    """It applies changes one by one, and still keeps few keys without a window."""
    old, new = tasks()
    (schema,) = old.topology.schemas()
    live = fmt.encode_live(0, 1, 1, 0, 5, StateCodec(schema.state_columns()).pack([3]))
    entries = [(b"%d" % i, value) for i in range(IDLE_KEYS_MIN) for value in (live, fmt.encode_deleted(0, 1, 1, 0))]
    progress = fmt.encode_progress(1, 1, Progress("app", "exactly_once", {}, {}, {}, {}, (schema,), 0))
    keys, values = zip(*entries, (b"left", live), (None, progress), strict=True)
    ChangelogReader(partial(restore_changes, new), epoch=1).feed(np.arange(len(keys)), keys, values)
    store = new.stores["s"]
    assert isinstance(store, WindowStore)
    assert ([row.key for row in store.rows()], len(store.index)) == (["left"], 1)


def test_a_snapshot_of_the_same_store_is_taken_as_columns() -> None:
    """Rows in a batch are the rows one by one, key by key."""
    task, _ = tasks()
    (written,) = task.topology.schemas()
    batch = of_lake({"key": [b"a", b"a", b"b"], "start_ms": [0, 50, 7], "end_ms": [5, 60, 7], "n_n": [1, 2, 3]})
    restore_windows(task, written, batch)
    rows = [(s.key, s.start, s.end, s.states) for s in task.stores["s"].rows_of("a")]
    assert rows == [("a", 0, 5, [1]), ("a", 50, 60, [2])]
    assert len(task.stores["s"]) == 3


@pytest.mark.parametrize("kept", [False, True], ids=["numbers", "objects"])
@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_of_a_snapshot_are_replayed(kept: bool, on_disk: bool) -> None:
    """The last row of each key and start counts, within a batch and over batches, as a live window or as a removal."""
    last = {"last": Last("x")} if kept else {}
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10, 5).aggregate("s", n=Count(), **last).on_close().to("out")
    with ExitStack() as stack:
        local = None
        if on_disk:
            folder = stack.enter_context(TemporaryDirectory())
            local = stack.enter_context(directory_of(folder)).state_of(0)
            stack.callback(local.close)
        task = StreamTask(builder.build(), 0, application="app", local=local)
        (written,) = task.topology.schemas()
        names = [column.name for column in written.state_columns()]

        def replay(*changes: tuple[bytes, int, int | None]) -> None:
            columns: dict[str, Any] = {
                "key": [key for key, _, _ in changes],
                "start_ms": [start for _, start, _ in changes],
                "end_ms": pa.array([None if n is None else start + n for _, start, n in changes], pa.int64()),
            }
            for name in names:
                made = pa.binary() if name.endswith("json") else pa.int64()
                values_of_column = [
                    None if n is None else b'"%d"' % n if made == pa.binary() else n for _, _, n in changes
                ]
                columns[name] = pa.array(values_of_column, made)
            restore_windows(task, written, of_lake(columns, [n is not None for _, _, n in changes]))

        replay((b"a", 0, 1), (b"b", 0, 2), (b"a", 0, 3), (b"c", 0, 4), (b"c", 0, None), (b"c", 7, 5))
        replay((b"b", 0, None), (b"x", 1, None))
        replay((b"d", 2, None), (b"a", 0, 6), (b"d", 2, 7), (b"a", 9, 8), (b"c", 7, None))
        if local is not None:
            local.write(None)
        states = {(w.key, w.start, w.end): w.states for w in task.stores["s"].rows()}
        expected = {("a", 0, 6): 6, ("d", 2, 9): 7, ("a", 9, 17): 8}
        assert {window: state[0] for window, state in states.items()} == expected
        if kept:
            assert {window: state[1] for window, state in states.items()} == {
                window: (n, str(n)) for window, n in expected.items()
            }


def kept_task() -> StreamTask:
    """A task whose states are objects in columns."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10, 5)
    windows.aggregate("s", last=Last("x"), all=CollectList("x"), users=CountDistinct("x")).on_close().to("out")
    return StreamTask(builder.build(), 0, application="app")


def test_a_snapshot_of_objects_is_taken_as_columns() -> None:
    """Each row gets its own state: adding to one changes no other."""
    task = kept_task()
    assert isinstance(task.stores["s"], WindowStore)
    (written,) = task.topology.schemas()
    own = task.topology.stores["s"].aggregations
    none = own[2].initial()
    states = [[(4, "a"), (("a",), 1), own[2].add(own[2].initial(), {"x": "a"})], [(-1, None), ((), 0), none]]
    columns = zip(*([v for a, s in zip(own, row, strict=True) for v in a.to_columns(s)] for row in states), strict=True)
    named = {c.name: list(column) for c, column in zip(written.state_columns(), columns, strict=True)}
    batch = of_lake({"key": [b"a", b"b"], "start_ms": [0, 7], "end_ms": [5, 7], **named})
    restore_windows(task, written, batch)
    one, two = (next(iter(task.stores["s"].rows_of(key))).states for key in "ab")
    assert [one[:2], two[:2]] == [row[:2] for row in states]
    own[2].add(one[2], {"x": "b"})
    assert [own[2].result(row[2]) for row in (one, two)] == [2, 0]
    broken = batch.set_column(batch.schema.get_field_index("last_json"), "last_json", pa.array([b"{", b""]))
    with pytest.raises(CorruptRecord, match="row of store 's'"):
        restore_windows(kept_task(), written, broken)


def test_restored_windows_accept_further_records() -> None:
    """A record after the restore is added to the windows that the snapshot restored."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().hopping_window(20, 10, 5).aggregate("s", n=Count()).on_close().to("out")
    task = StreamTask(builder.build(), 0, application="app")
    (written,) = task.topology.schemas()
    latest, counts = (column.name for column in written.state_columns())
    columns = {"key": [b"a", b"a", b"b"], "start_ms": [0, 10, 10], "end_ms": [20, 30, 30]}
    restore_windows(task, written, of_lake({**columns, latest: [7, 17, 18], counts: [2, 1, 1]}))
    task.initialize(0)
    task.process(Columns.of([ConsumerRecord("in", 0, 0, 15, b"a", b"{}")]), 0)
    rows = [(w.key, w.start, w.end, w.states) for key in "ab" for w in task.stores["s"].rows_of(key)]
    assert rows == [("a", 0, 20, [15, 3]), ("a", 10, 30, [17, 2]), ("b", 10, 30, [18, 1])]


def test_a_row_that_cannot_be_read_names_its_store() -> None:
    """A snapshot's state that its aggregation cannot decode is corrupt, and the error names the store."""
    task = new_task()
    (written,) = task.topology.schemas()
    for state in (b"{", b"[" * 100_000):
        batch = of_lake({"key": [b"a"], "start_ms": [0], "end_ms": [5], "n_n": [1], "last_json": [state]})
        with pytest.raises(CorruptRecord, match="row of store 's'"):
            restore_windows(task, written, batch)


SIZE_MS = 10
SHORT_MS, LONG_MS = 5, 1_000


def cut(kind: str, grace_ms: int) -> Topology:
    """Counts in tumbling or hopping windows, or in sessions, with late records."""
    builder = StreamsBuilder()
    grouped = builder.stream("in", late="late").group_by_key()
    windows = {
        "tumbling": grouped.tumbling_window(SIZE_MS, grace_ms),
        "hopping": grouped.hopping_window(SIZE_MS, SIZE_MS // 2, grace_ms),
        "grace": grouped.session_window(SIZE_MS, grace_ms),
    }
    windows[kind].aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def gone_on_with(
    driver: TopologyTestDriver, topology: Topology, state: StateDirectory | None = None
) -> TopologyTestDriver:
    """A driver that continues with the state of another one under this topology."""
    driver.commit()
    driver.close()
    now_ms, idle_ms = driver.clock.now_ms(), driver.idle_timeout_ms
    other = TopologyTestDriver(
        topology,
        columns_min=driver.columns_min,
        now_ms=now_ms,
        idle_timeout_ms=idle_ms,
        max_future_ms=None,
        errors=ErrorHandlers(),
    )
    other.state = state
    other.changelog = list(driver.changelog)
    other.source_log |= {topic: list(records) for topic, records in driver.source_log.items()}
    other.restore()
    return other


@pytest.mark.parametrize("kind", ["tumbling", "grace"])
@pytest.mark.parametrize("by_column", [False, True])
def test_a_longer_grace_reopens_no_closed_window(kind: str, by_column: bool) -> None:
    """Records of closed windows stay late and records of open windows stay in time. The new grace applies once the
    stream time has advanced by it. After a change back, nothing is late that was not."""

    def late(driver: TopologyTestDriver, key: bytes, *times: int) -> list[int]:
        """Pipes records at these times and returns the late ones."""
        before = len(driver.outputs.get("late", ()))
        if by_column:
            driver.pipe_columns("in", [(key, b"{}", time) for time in times])
        else:
            for time in times:
                driver.pipe("in", key=key, value=b"{}", timestamp=time)
        driver.commit()
        return [record.timestamp or 0 for record in driver.outputs.get("late", ())[before:]]

    first = TopologyTestDriver(cut(kind, SHORT_MS), columns_min=1, errors=ErrorHandlers())
    assert late(first, b"k", 0, 100, 190) == []
    assert late(first, b"other", 0) == [0]
    driver = gone_on_with(first, cut(kind, LONG_MS))
    assert late(driver, b"other", 0, 100) == [0, 100]
    assert late(driver, b"k", 188) == []
    again = gone_on_with(driver, cut(kind, SHORT_MS))
    assert late(again, b"other", 186, 100) == [100]
    assert late(again, b"other", 210, 186) == [186]
    driver.restore()
    assert late(driver, b"k", 180 + LONG_MS, 200, 188) == []
    assert late(driver, b"other", 300 + 2 * LONG_MS, 200) == [200]
    closed = [(record.key, record.timestamp) for record in first.outputs["out"] + driver.outputs["out"]]
    assert len(closed) == len(set(closed)), "no window is closed twice"


KINDS = ("tumbling", "hopping", "grace")


def kinds_driver(kind: str, close_delay_ms: int) -> TopologyTestDriver:
    return TopologyTestDriver(
        cut(kind, close_delay_ms),
        columns_min=1,
        now_ms=1_000_000,
        idle_timeout_ms=1,
        max_future_ms=None,
        errors=ErrorHandlers(),
    )


def closed(driver: TopologyTestDriver) -> list[tuple[Any, Any, Any]]:
    """The windows that went out: key, start and end."""
    found = [msgspec.json.decode(record.value or b"") for record in driver.outputs.get("out", ())]
    return [(row["key"], row["start"], row["end"]) for row in found]


def quiet_until_closed(driver: TopologyTestDriver, key: str, step_ms: int) -> int:
    """How long it is quiet until a window of the key is closed."""
    for ms in range(step_ms, 4 * LONG_MS, step_ms):
        driver.advance_wall_clock(step_ms)
        if any(row[0] == key for row in closed(driver)):
            return ms
    raise AssertionError("nothing was closed")


@pytest.mark.parametrize("kind", KINDS)
def test_an_idle_topic_keeps_its_time_under_a_new_grace(kind: str) -> None:
    """An idle topic's time continues from its last value under any grace. New windows use the new grace. Windows that
    were open under a longer grace close with the next advance."""
    first = kinds_driver(kind, SHORT_MS)
    first.pipe("in", key=b"first", value=b"{}", timestamp=1_000)
    driver = gone_on_with(first, cut(kind, LONG_MS))
    driver.pipe("in", key=b"new", value=b"{}", timestamp=1_001)
    assert LONG_MS - SIZE_MS <= quiet_until_closed(driver, "new", 5) <= LONG_MS + 3 * SIZE_MS

    first = kinds_driver(kind, LONG_MS)
    first.pipe("in", key=b"first", value=b"{}", timestamp=1_000)
    driver = gone_on_with(first, cut(kind, SHORT_MS))
    assert quiet_until_closed(driver, "first", 5) <= SHORT_MS + 3 * SIZE_MS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by_column", [False, True])
def test_a_late_record_after_a_shorter_grace_has_the_missed_close_time(kind: str, by_column: bool) -> None:
    """A record that is late because of a shorter grace before reports the newest stream time and the close time that it
    missed. The closed window reports when it was closed."""
    first = kinds_driver(kind, SHORT_MS)
    first.pipe("in", key=b"k", value=b"{}", timestamp=5_000)
    driver = gone_on_with(first, cut(kind, LONG_MS))
    (pipe_columns if by_column else pipe_singly)(driver, (b"other", 4_900), (b"k", 5_004))
    (record,) = driver.outputs["late"]
    headers = dict(record.headers)
    waited = SHORT_MS + (SIZE_MS if kind == "grace" else 0)
    assert headers[STREAM_TIME_MS] == b"5000"
    assert headers[CLOSE_TIME_MS] == b"%d" % (5_000 - waited)
    assert headers[LATENESS_MS] == b"%d" % (5_000 - waited - 4_900)
    (pipe_columns if by_column else pipe_singly)(driver, (b"k", 9_000))
    finals = [fmt.decode_entry(value) for _, value in driver.changelog if value[1:2] == fmt.FINAL]
    assert finals
    assert {fmt.START_END_CLOSED.unpack_from(entry.body)[2] for entry in finals} == {9_000}


def pipe_columns(driver: TopologyTestDriver, *records: tuple[bytes, int]) -> None:
    driver.pipe_columns("in", [(key, b"{}", time) for key, time in records])


def pipe_singly(driver: TopologyTestDriver, *records: tuple[bytes, int]) -> None:
    for key, time in records:
        driver.pipe("in", key=key, value=b"{}", timestamp=time)


def progress_of(driver: TopologyTestDriver) -> Progress:
    """The progress record of the newest commit."""
    driver.task.needs_commit = True
    driver.commit()
    return fmt.decode_progress(fmt.decode_entry(driver.changelog[-1][1]).body)


@contextmanager
def directory_of(folder: str) -> Iterator[StateDirectory]:
    state = StateDirectory(folder, "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    state.acquire()
    yield state
    state.release()


class Incarnation(NamedTuple):
    """An incarnation of a task, with its close delay: batches of (key, time less 1,000), each processed record by
    record or in columns, then an idle time in ms."""

    close_delay_ms: int
    batches: list[tuple[list[tuple[bytes, int]], bool, int]]


TIMES = st.integers(-90, 300)
BATCHES = st.tuples(
    st.lists(st.tuples(st.sampled_from([b"a", b"b"]), TIMES), max_size=5),
    st.booleans(),
    st.sampled_from([0, 0, 40]),
)
INCARNATIONS = st.lists(
    st.builds(Incarnation, st.sampled_from([0, 5, 60, 200]), st.lists(BATCHES, min_size=1, max_size=3)),
    min_size=2,
    max_size=5,
)


@pytest.mark.parametrize("kind", KINDS)
@given(incarnations=INCARNATIONS)
@settings(max_examples=examples(25), deadline=None)
def test_a_restart_changes_nothing_whatever_the_grace_was(kind: str, incarnations: list[Incarnation]) -> None:
    """For any changes of the grace, restarts and batches do not change the results, and no window closes twice."""
    require_same(kind, incarnations, None)


@pytest.mark.parametrize("kind", KINDS)
def test_state_on_disk_knows_what_was_closed(kind: str) -> None:
    """State on disk and changelog agree, also if the grace becomes longer twice and shorter in between."""
    incarnations = [
        Incarnation(5, [([(b"a", 0), (b"b", 100)], True, 40)]),
        Incarnation(200, [([(b"a", 101), (b"b", 150), (b"c", 90)], True, 0), ([(b"a", 120)], False, 40)]),
        Incarnation(60, [([(b"b", 20), (b"a", 130)], False, 0)]),
        Incarnation(200, [([(b"a", 121), (b"c", 300), (b"b", 95)], True, 0), ([(b"d", 290)], False, 40)]),
    ]
    with TemporaryDirectory() as folder, directory_of(folder) as state:
        require_same(kind, incarnations, state)


def require_same(kind: str, incarnations: list[Incarnation], state: StateDirectory | None) -> None:
    """Runs the same records through two drivers. The second is restarted before each batch, with its state on disk."""
    drivers = [kinds_driver(kind, incarnations[0].close_delay_ms) for _ in range(2)]
    late: list[list[tuple[Any, Any]]] = [[], []]
    out: list[list[tuple[Any, Any, Any]]] = [[], []]
    wanted: list[tuple[bytes, int]] = []
    time = closed_to = -1
    for incarnation in incarnations:
        topology = cut(kind, incarnation.close_delay_ms)
        drivers = [gone_on_with(drivers[0], topology), gone_on_with(drivers[1], topology, state)]
        waits = topology.schemas()[0].close_delay_ms
        for records, by_column, quiet_ms in incarnation.batches:
            sent = [(key, 1_000 + at) for key, at in records]
            drivers[1] = gone_on_with(drivers[1], topology, state)
            for driver, how, own_late, own_out in zip(drivers, (by_column, not by_column), late, out, strict=True):
                (pipe_columns if how or not sent else pipe_singly)(driver, *sent)
                driver.task.needs_commit = True  # also without records
                driver.advance_wall_clock(quiet_ms)
                own_late += [(record.key, record.timestamp) for record in driver.read("late")]
                own_out += closed(driver)
                driver.read("out")
            for key, at in sent:
                time = max(time, at)
                closed_to = max(closed_to, time - waits)
                if at // SIZE_MS * SIZE_MS + SIZE_MS <= closed_to:
                    wanted.append((key, at))
            time += quiet_ms
            closed_to = max(closed_to, time - waits) if quiet_ms else closed_to
    drivers[1].close()
    assert late[0] == late[1]
    assert sorted(out[0]) == sorted(out[1])
    assert len(out[0]) == len(set(out[0])), "no window is closed twice"
    assert kind != "tumbling" or late[0] == wanted


def test_a_batch_over_files_must_be_complete_before_a_restart() -> None:
    """A batch's input is restored with the progress record and stays in later ones. Nothing else may start before the
    files are read completely."""
    for is_done in (False, True):
        before, after = new_task(), new_task()
        before.input = BatchInput("aa", 7, is_done=is_done)
        before.initialize(0)
        restore_progress(after, decode_progress(decode_entry(before.prepare_commit(0).changelog[-1][1]).body))
        assert after.input == before.input
        if is_done:
            require_whole_input("app", 0, after.input)
        else:
            with pytest.raises(ConfigError, match=r"app, partition 0.*7 rows"):
                require_whole_input("app", 0, after.input)
    require_whole_input("app", 0, new_task().input)


Pipe = Callable[..., None]
BEFORE = ((b"a", 4_500), (b"b", 5_000))
AFTER = ((b"b", 5_001), (b"a", 4_505), (b"b", 9_000))
PIPES = pytest.mark.parametrize("pipe", [pipe_singly, pipe_columns])


def no_record(driver: TopologyTestDriver) -> None:
    """A commit without a record, as a punctuation makes one."""
    driver.task.needs_commit = True
    driver.commit()


def no_key(driver: TopologyTestDriver) -> None:
    driver.pipe("in", key=None, value=b"{}", timestamp=4_000)


def no_value(driver: TopologyTestDriver) -> None:
    """A dead letter."""
    driver.pipe("in", key=b"a", value=b"{", timestamp=4_000)


def begun(kind: str, pipe: Pipe) -> TopologyTestDriver:
    """Return a driver with a long grace, and with a window that a short grace would close."""
    driver = kinds_driver(kind, LONG_MS)
    pipe(driver, *BEFORE)
    return driver


def ended(driver: TopologyTestDriver, pipe: Pipe) -> tuple[Any, Any]:
    """The windows that the last records close, and which of those records are late."""
    pipe(driver, *AFTER)
    return closed(driver), [(record.key, record.timestamp) for record in driver.read("late")]


@pytest.mark.parametrize("kind", KINDS)
@PIPES
@pytest.mark.parametrize("commit", [no_record, no_key, no_value])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_shorter_grace_that_is_reverted_closes_no_window(
    kind: str, pipe: Pipe, commit: Callable[[TopologyTestDriver], None], on_disk: bool
) -> None:
    """If only commits without a keyed record were made under a shorter grace, later records are in time and in the same
    windows as if it had never applied, in memory and on disk."""
    expected, late = ended(begun(kind, pipe), pipe)
    assert expected
    assert late == []
    with TemporaryDirectory() as folder, directory_of(folder) as directory:
        state: StateDirectory | None = directory if on_disk else None
        driver = gone_on_with(begun(kind, pipe), cut(kind, SHORT_MS), state)
        commit(driver)
        driver = gone_on_with(driver, cut(kind, 0), state)
        commit(driver)
        driver = gone_on_with(driver, cut(kind, LONG_MS), state)
        assert ended(driver, pipe) == (expected, [])
        driver.close()


@pytest.mark.parametrize("kind", KINDS)
@PIPES
@pytest.mark.parametrize("record_ms", [4_999, 4_400, None])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_window_due_under_a_shorter_grace_closes_with_the_next_record(
    kind: str, pipe: Pipe, record_ms: int | None, on_disk: bool
) -> None:
    """A window that is due under a shorter grace is closed by the first keyed record, even if that is late, or by an
    advance. It stays closed when the grace is changed back. This holds in memory and on disk."""
    with TemporaryDirectory() as folder, directory_of(folder) as directory:
        state: StateDirectory | None = directory if on_disk else None
        driver = gone_on_with(begun(kind, pipe), cut(kind, SHORT_MS), state)
        no_record(driver)
        assert closed(driver) == []
        if record_ms is not None:
            pipe(driver, (b"b", record_ms))
        else:
            for ms in (0, 1):  # it is quiet from the first look on
                driver.advance_wall_clock(ms)
        found = closed(driver)
        assert {row[0] for row in found} == {"a"}
        driver = gone_on_with(driver, cut(kind, LONG_MS), state)
        windows, late = ended(driver, pipe)
        assert late == [(b"a", 4_505)]
        assert {row[0] for row in windows} == {"b"}
        driver.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_close_time_never_goes_back(kind: str) -> None:
    """Progress records the close time beside the operator's time. Only closing windows advances it, whatever the grace
    is."""
    driver = begun(kind, pipe_singly)
    closed_ms = 5_000 - driver.topology.schemas()[0].close_delay_ms
    for grace_ms in (SHORT_MS, LONG_MS, 2 * LONG_MS):
        driver = gone_on_with(driver, cut(kind, grace_ms))
        assert progress_of(driver).close_times_ms == {"s": closed_ms}
        assert progress_of(driver).operator_times_ms == {"s": 5_000}
    driver.pipe("in", key=b"b", value=b"{}", timestamp=5_001)
    assert progress_of(driver).close_times_ms == {"s": closed_ms}
    driver = gone_on_with(driver, cut(kind, SHORT_MS))
    driver.pipe("in", key=b"b", value=b"{}", timestamp=5_001)
    assert progress_of(driver).close_times_ms == {"s": 5_001 - driver.topology.schemas()[0].close_delay_ms}


def sliding(grace_ms: int) -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().sliding_window(20, grace_ms).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_disk", [False, True])
def test_live_entries_before_the_close_time_are_closed(seed: int, on_disk: bool) -> None:
    """At every commit, under every grace, the live entries that also have a final entry are those that end before
    `open_from_ms`. The rows of the store that are not open are the same."""
    chance = random.Random(seed)
    live: dict[tuple[bytes, int], int] = {}
    final: set[tuple[bytes, int, int]] = set()

    def apply(change: Change) -> None:
        if change.operation == fmt.LIVE:
            live[change.key, change.start] = change.end
        else:
            live.pop((change.key, change.start), None)
        if change.operation == fmt.FINAL:
            final.add((change.key, change.start, change.end))

    with TemporaryDirectory() as folder, directory_of(folder) as directory:
        state: StateDirectory | None = directory if on_disk else None
        driver = gone_on_with(TopologyTestDriver(sliding(30)), sliding(30), state)
        reader, read, both = ChangelogReader(apply_one_by_one(apply)), 0, 0
        for at in range(0, 400, 4):
            if chance.random() < 0.1:
                driver = gone_on_with(driver, sliding(chance.choice([0, 30, 60])), state)
            pipe_singly(driver, (chance.choice([b"a", b"b"]), max(0, at - chance.choice([0, 0, 5, 40, 90]))))
            open_from_ms = progress_of(driver).open_from_ms(driver.topology.schemas()[0])
            for offset, (key, value) in enumerate(driver.changelog[read:], read):
                reader.feed_record(offset, key, value)
            read = len(driver.changelog)
            closed_entries = {(*window, end) for window, end in live.items()} & final
            assert closed_entries == {(*window, end) for window, end in live.items() if end < open_from_ms}
            rows = [row for row in driver.task.stores["s"].rows() if not is_open(row)]
            assert {(row.key.encode(), row.start, row.end) for row in rows} == closed_entries
            both += len(closed_entries)
        assert both
        driver.close()
