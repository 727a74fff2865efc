"""Records in the late topic, with a source record and without one, and behind a repartition topic."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.clients.dead_letters.late_record_headers import (
    CHANGELOG_ID,
    HEADERS,
    LATENESS_MS,
    OFFSET,
    STORE,
    TOPIC,
    parse_late_record,
)
from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.errors import DataError
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.task import late_records
from penstock.shared.streams.task.late_records import forwarded_late_record, late_record
from penstock.shared.streams.task.origin_headers import (
    KEY,
    KEY_BYTES_MAX,
    origin_headers,
    original_record,
)
from penstock.shared.streams.task.origin_headers import OFFSET as ORIGIN_OFFSET
from penstock.shared.streams.task.origin_headers import PARTITION as ORIGIN_PARTITION
from penstock.shared.streams.task.origin_headers import TOPIC as ORIGIN_TOPIC
from penstock.shared.streams.task.outputs import OutputColumns
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.window_result import WindowKey, WindowResult
from penstock.shared.testing.topology_test_driver import APPLICATION, TopologyTestDriver
from tests.consumed import as_consumed
from tests.documents import DOCS

WALL, STREAM = PunctuationType.WALL_CLOCK_TIME, PunctuationType.STREAM_TIME


def ticking(type_: PunctuationType, time_of: Callable[[int], int], key: str | None = "tick") -> type[Processor]:
    """A processor that forwards its records, and one of its own every 10 ms."""

    class Ticking(Processor):
        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            context.schedule(10, type_, lambda now: self.context.forward(Record(key, {"n": 1}, time_of(now))))

        def process(self, record: Record) -> None:
            self.context.forward(record)

    return Ticking


def windowed(kind: str, supplier: type[Processor]) -> TopologyTestDriver:
    return TopologyTestDriver(topology_of(kind, supplier))


def topology_of(kind: str, supplier: type[Processor]) -> Topology:
    """The processor's records in windows of a kind, or joined."""
    builder = StreamsBuilder()
    stream = builder.stream("in").process_values(supplier)
    if kind == "join":
        stream.join(builder.stream("right"), lambda left, right: left, JoinWindows.of(5), name="s").to("out")
    else:
        grouped = stream.group_by_key()
        getattr(grouped, kind)(10).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


KINDS = ["tumbling_window", "session_window", "sliding_window", "join"]


def test_a_skipped_record_of_a_punctuation_has_no_source_record() -> None:
    """The last skipped record is the callback's, not one that was skipped earlier."""
    driver = windowed("tumbling_window", ticking(WALL, lambda now: now, key=None))
    driver.pipe("in", key=None, value=b"{}", timestamp=1_000_000)
    assert driver.task.metrics.rejected_at == {"skipped": "in-0@0"}
    driver.advance_wall_clock(10)
    assert driver.task.metrics.skipped_total == 2
    assert driver.task.metrics.rejected_at == {"skipped": "of no source record"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_of_a_wall_clock_punctuation_may_be_late(kind: str) -> None:
    """A late record that a wall-clock callback forwards goes to the late topic without a source record, and the task
    continues."""
    driver = windowed(kind, ticking(WALL, lambda now: now))
    driver.pipe("in", key=b"a", value=b"{}", timestamp=1_000_000)
    driver.advance_wall_clock(10)
    (late,) = driver.read("in-late")
    headers = dict(late.headers)
    assert (late.key, late.value, late.timestamp) == (b"tick", b'{"n":1}', 10)
    assert OFFSET not in headers
    assert int(headers[LATENESS_MS] or b"") > 900_000
    assert (headers[STORE] or b"").startswith(b"s")
    assert driver.task.metrics.committed.late == 1
    assert driver.task.metrics.rejected_at["late"].endswith("of no source record")
    driver.pipe("in", key=b"a", value=b"{}", timestamp=1_000_001)
    assert driver.task.sources["in"] == 2


def test_a_late_record_of_a_stream_time_punctuation_is_not_the_source_record() -> None:
    """The record that advanced the time is in its window. The record that the callback forwarded is late."""
    driver = windowed("tumbling_window", ticking(STREAM, lambda now: max(0, now - 500)))
    driver.pipe("in", key=b"a", value=b'{"mine":1}', timestamp=1000)
    (late,) = driver.read("in-late")
    assert (late.key, late.timestamp, OFFSET in dict(late.headers)) == (b"tick", 500, False)


def test_lateness_is_that_of_the_time_which_a_processor_sets() -> None:
    """The late record is the unchanged source record. Its lateness is that of the time that the window got, so it can
    be read back."""

    class Earlier(Processor):
        def process(self, record: Record) -> None:
            self.context.forward(record._replace(timestamp=record.value["at"]))

    driver = windowed("tumbling_window", Earlier)
    driver.pipe("in", key=b"a", value=b'{"at":100}', timestamp=1_000)
    driver.pipe("in", key=b"b", value=b'{"at":7}', timestamp=1_000)
    (late,) = driver.read("in-late")
    assert (late.value, late.timestamp, dict(late.headers)[LATENESS_MS]) == (b'{"at":7}', 1_000, b"93")
    assert parse_late_record(as_consumed(late)).record.offset == 1


def test_a_stored_record_that_is_forwarded_is_the_late_record() -> None:
    """A processor with a store may forward an earlier record, which is then the late record. The record that it
    processes is not late."""

    class Delaying(Processor):
        def process(self, record: Record) -> None:
            held = self.context.store("held")
            if (earlier := held.get("last")) is not None:
                self.context.forward(Record(record.key, earlier["value"], earlier["at"]))
            held.put("last", {"value": record.value, "at": record.timestamp})

    builder = StreamsBuilder()
    delayed = builder.stream("in").process_values(Delaying, builder.add_store("held"))
    delayed.group_by_key().tumbling_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    for x, at in ((1, 100), (2, 5), (3, 101)):
        driver.pipe("in", key=b"a", value=b'{"x":%d}' % x, timestamp=at)
    (late,) = driver.read("in-late")
    assert (late.value, late.timestamp, OFFSET in dict(late.headers)) == (b'{"x":2}', 5, False)
    assert driver.task.metrics.late_total == 1


def test_behind_a_table_join_a_late_record_is_the_source_record() -> None:
    """The join with a table only looks up a row, so the source record can be replayed."""
    builder = StreamsBuilder()
    joined = builder.stream("in").left_join(builder.table("users"), lambda value, user: {"user": user})
    joined.group_by_key().tumbling_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    for at in (100, 5):
        driver.pipe("in", key=b"a", value=b'{"x":1}', timestamp=at)
    (late,) = driver.read("in-late")
    assert (late.value, dict(late.headers)[OFFSET]) == (b'{"x":1}', b"1")


def test_a_late_record_that_was_split_is_sent_once_for_each_store() -> None:
    """A replay splits the source record again."""
    builder = StreamsBuilder()
    parts = builder.stream("in").flat_map_values(lambda value: value["parts"]).group_by_key()
    for name in ("v", "w"):
        parts.tumbling_window(10).aggregate(name, n=Sum("n")).on_close().to(name)
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    value = b'{"parts":[{"n":1},{"n":2},{"n":3}]}'
    for at in (100, 0, 1):
        driver.pipe("in", key=b"a", value=value, timestamp=at)
    late = [parse_late_record(as_consumed(record)) for record in driver.read("in-late")]
    assert [(one.record.offset, one.message[-1]) for one in late] == [(1, "v"), (1, "w"), (2, "v"), (2, "w")]
    assert driver.metrics()["late_records"] == 4


def test_a_late_record_of_a_rejected_part_is_not_sent() -> None:
    """The late record of a rejected part is dropped with it. The next late part sends the record, and later ones do
    not."""

    class SplitByTime(Processor):
        def process(self, record: Record) -> None:
            for at, n in record.value["parts"]:
                self.context.forward(Record(record.key, {"n": n}, at))

    builder = StreamsBuilder()
    parts = builder.stream("in").process_values(SplitByTime).map_values(lambda value: value).group_by_key()
    for name, grace in (("v", 0), ("w", 1_000)):
        parts.tumbling_window(10, grace).aggregate(name, n=Sum("n")).on_close().to(name)
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b'{"parts":[[100,1],[0,"x"],[0,1],[0,"x"],[0,1]]}')
    assert (len(driver.read("in-late")), len(driver.read("in-dlq")), driver.metrics()["late_records"]) == (1, 2, 1)


def test_a_late_record_has_the_id_of_the_changelog() -> None:
    """Late records have the id of the changelog's topic, once the task knows it, with a source record or without
    one."""
    for late in ({"key": b"a", "value": b"{}", "timestamp": 5}, None):
        driver = windowed("tumbling_window", ticking(WALL, lambda now: now))
        driver.task.changelog_id = "an id"
        driver.pipe("in", key=b"a", value=b"{}", timestamp=1_000_000)
        driver.advance_wall_clock(10) if late is None else driver.pipe("in", **late)
        (found,) = driver.read("in-late")
        assert dict(found.headers)[CHANGELOG_ID] == b"an id"


def test_the_document_names_the_headers() -> None:
    """docs/streams.md names every header of late records and of origins."""
    named = re.findall(r"`(penstock\.(?:late|origin)\.\w+)`", (DOCS / "streams.md").read_text(encoding="utf-8"))
    assert sorted(named) == sorted((*HEADERS, CHANGELOG_ID, ORIGIN_TOPIC, ORIGIN_PARTITION, ORIGIN_OFFSET, KEY))


def test_a_punctuation_has_no_record_metadata() -> None:
    """In a STREAM_TIME callback there is no record that is being processed."""
    seen: list[Any] = []

    class Reading(Processor):
        def init(self, context: ProcessorContext) -> None:
            context.schedule(10, STREAM, lambda now: seen.append(context.record_metadata))

        def process(self, record: Record) -> None:
            pass

    builder = StreamsBuilder()
    builder.stream("in").process(Reading)
    TopologyTestDriver(builder.build()).pipe("in", value=b"{}", timestamp=5)
    assert seen == [None]


def test_a_record_that_a_commit_forwards_may_be_late() -> None:
    """A record that was held back until a commit, and is then too late for its window, is a late record and no
    error."""

    class Holding(Processor):
        held: Record

        def process(self, record: Record) -> None:
            self.held = record

        def commit(self) -> None:
            self.context.forward(self.held)

    builder = StreamsBuilder()
    held = builder.stream("in").process_values(Holding)
    held.group_by_key().tumbling_window(5).aggregate("u", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=100)
    driver.pipe("in", key=b"b", value=b"{}", timestamp=50)
    (late,) = driver.read("in-late")
    assert (late.key, late.timestamp, dict(late.headers)[STORE]) == (b"b", 50, b"u")
    assert driver.task.metrics.committed.late == 1


def test_anything_can_be_written_as_late() -> None:
    """Values without a JSON form are written as their repr, or as their type's name if that raises. Invalid UTF-8 is
    escaped, and a value that is too large is left out."""

    class Odd:
        def __repr__(self) -> str:
            return "Odd()"

    class Mute:
        def __repr__(self) -> str:
            raise KeyError("no text")

    def written(key: Any, value: Any, record_bytes_max: int = 1_000) -> tuple[bytes | None, bytes | None]:
        late = forwarded_late_record(Record(key, value, 5), "late", 9, 9, "s", "app", None, record_bytes_max)
        return late.key, late.value

    window = WindowKey("k", 1, 2)
    assert written("k", {"x": Odd()}) == (b"k", b'{"x":"Odd()"}')
    assert written(7, None) == (b"7", None)
    assert written("\ud800", {"x": "\ud800"}) == (b"\\ud800", b"{'x': '\\ud800'}")
    assert written(window, WindowResult("k", 1, 2, {"n": 3})) == (b"k", b'{"key":"k","start":1,"end":2,"n":3}')
    odd = WindowResult("k", 1, 2, {"n": Odd()})
    assert written(window, odd) == (b"k", repr(odd).encode())
    assert written(window, WindowResult("k", 1, 2, {"n": Mute()})) == (b"k", b"<WindowResult>")
    assert written("k", {"x": Mute()}) == (b"k", b"<dict>")
    assert written(b"k", b"x" * 2_000) == (b"k", None)


def test_a_late_record_leaves_out_headers_that_no_record_can_have() -> None:
    """A late record that a processor with a store has forwarded with an invalid header is written without it."""

    class Keeping(Processor):
        def process(self, record: Record) -> None:
            self.context.store("kept").put(record.key, record.value)
            headers: Any = (("trace", "abc"),)
            self.context.forward(record._replace(headers=headers))

    builder = StreamsBuilder()
    stream = builder.stream("in").process_values(Keeping, builder.add_store("kept"))
    stream.group_by_key().tumbling_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for timestamp in (100, 5):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=timestamp)
    (late,) = driver.read("in-late")
    assert (late.key, late.value, "trace" in dict(late.headers)) == (b"k", b"{}", False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["value", "key", "headers"])
def test_a_late_record_of_a_punctuation_is_never_too_large(kind: str, part: str) -> None:
    """A late record without a source record, or the dead letter in its place, fits into a request, whichever of its
    parts is too large."""
    large = "x" * 5_000
    forwarded = {
        "value": Record("tick", large, 10),
        "key": Record(large, "v", 10),
        "headers": Record("tick", "v", 10, (("trace", large.encode()),)),
    }[part]

    class Ticking(Processor):
        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            context.schedule(10, WALL, lambda now: self.context.forward(forwarded))

        def process(self, record: Record) -> None:
            self.context.forward(record)

    task = StreamTask(topology_of(kind, Ticking), 0, application="app", record_bytes_max=2_000)
    task.initialize(0)
    task.process(Columns.of([ConsumerRecord("in", 0, 0, 1_000_000, b"a", b"{}")]), 0)
    task.punctuate_wall_clock(10)
    (late,) = task.prepare_commit(20).outputs
    assert late.topic == ("in-dlq" if part == "key" else "in-late")
    assert record_size(late.key, late.value, list(late.headers)) <= 2_000
    assert large.encode() not in (late.key, late.value, *dict(late.headers).values())


texts = st.one_of(st.none(), st.binary(max_size=4))
own_headers = st.lists(st.tuples(st.sampled_from(["trace", "é", "", "n" * 70]), texts), max_size=3).map(tuple)


@st.composite
def batches(draw: st.DrawFn) -> Columns:
    """Records of a batch of which many are late, in lists or packed."""
    rows = draw(st.lists(st.tuples(st.one_of(st.none(), st.binary(max_size=3)), texts, own_headers), min_size=1))
    times = draw(st.lists(st.integers(0, 2_000), min_size=len(rows), max_size=len(rows)))
    has_headers = draw(st.booleans())
    records = [
        ConsumerRecord("clicks", 2, 5 + i * 3, at, key, value, own if has_headers else ())
        for i, (at, (key, value, own)) in enumerate(zip(times, rows, strict=True))
    ]
    columns = Columns.of(records)
    if draw(st.booleans()):
        columns = replace(columns, keys=PackedBytes.of(columns.keys), values=PackedBytes.of(columns.values))
        if columns.headers is not None:
            columns = replace(columns, headers=PackedHeaders.of(columns.headers))
    return columns


@settings(deadline=None)
@given(batches(), st.sampled_from(["session_window", "tumbling_window", "sliding_window"]), st.booleans(), st.data())
def test_late_records_in_columns_are_those_one_by_one(
    columns: Columns, kind: str, has_changelog: bool, data: st.DataObject
) -> None:
    """Late records of columns equal those of single records in key, value, time, headers and order, and do not keep the
    batch in memory."""
    builder = StreamsBuilder()
    grouped = builder.stream("clicks", key="bytes", value=bytes).group_by_key()
    store = data.draw(st.sampled_from(["visits", "s\u00e9ances", "\u8a2a\u554f"]))
    getattr(grouped, kind)(10).aggregate(store, n=Count()).on_close().to("out")
    commits, tasks, made = [], [], builder.build()
    for columns_min, late_min in ((1, 1), (1, 1_000), (1_000, 1)):
        task = StreamTask(made, 2, application="shop", columns_min=columns_min)
        task.changelog_id = "an id" if has_changelog else None
        task.initialize(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(late_records, "COLUMNS_MIN", late_min)
            task.process(Columns.of([ConsumerRecord("clicks", 2, 0, 1_000, b"k", b"")]), 0)
            task.process(columns, 0)
        tasks.append(task)
        commits.append(task.prepare_commit(0))
    in_columns, _, one_by_one = commits
    late = [[record for record in commit.outputs if record.topic == "clicks-late"] for commit in commits]
    assert late[0] == late[1] == late[2]
    assert in_columns.outputs == commits[1].outputs
    assert sorted(map(repr, in_columns.outputs)) == sorted(map(repr, one_by_one.outputs))
    assert len({task.metrics.late_total for task in tasks} | {len(late[0])}) == 1
    assert [task.metrics.rejected_at for task in tasks[1:]] == [tasks[0].metrics.rejected_at] * 2
    assert all(parse_late_record(as_consumed(record)).record.topic == "clicks" for record in late[0])
    for item in in_columns.produced.items:
        if item.topic == "clicks-late":
            assert isinstance(item, OutputColumns)
            assert len(item.values.data) == item.values.sizes().sum()


def test_a_late_record_is_read_back_as_its_source_record() -> None:
    """Key, value, event time, coordinates and the record's own headers are unchanged, beside the reason for its
    lateness."""
    source = ConsumerRecord("clicks", 2, 17, 1_000, b"ann", b"{}", (("trace", b"a"),))
    made = late_record(source, "clicks-late", 1_000, 1_500, 2_000, store="visits", application="shop")
    marked = late_record(source, "clicks-late", 1_000, 1_500, 2_000, "visits", "shop", "an id")
    assert marked.headers == (*made.headers, ("penstock.late.changelog_id", b"an id"))
    for headers in (made.headers, marked.headers):
        there = ConsumerRecord("clicks-late", 0, 3, 1_000, made.key, made.value, headers)
        parsed = parse_late_record(there)
        assert parsed.record == source
    assert (parsed.stage, parsed.message, parsed.group) == ("late", "500 ms too late for visits", "shop")
    for headers in ((), made.headers[:-1], (*made.headers[:-1], ("penstock.late.offset", b"x"))):
        with pytest.raises(DataError, match="clicks-late-0@3"):
            parse_late_record(ConsumerRecord("clicks-late", 0, 3, 1_000, made.key, made.value, headers))


@pytest.mark.parametrize("ids", [("an id", "another"), ("an id", ""), ("", "another")])
def test_the_late_record_of_a_late_record_is_read_back_as_the_first_one(ids: tuple[str, str]) -> None:
    """An application that reads a late topic may make late records. Their source record keeps its own headers."""
    source = ConsumerRecord("clicks", 2, 17, 1_000, b"ann", b"{}", (("trace", b"a"),))
    for topic, offset, changelog_id in zip(("clicks-late", "clicks-late-late"), (3, 4), ids, strict=True):
        first = source
        made = late_record(first, topic, 1_000, 1_500, 2_000, "visits", "shop", changelog_id)
        source = ConsumerRecord(topic, 0, offset, 1_000, made.key, made.value, tuple(made.headers))
    assert parse_late_record(source).record == first


def test_a_late_record_that_a_processor_forwarded_is_no_source_record() -> None:
    """It has not the coordinates of an older late record whose headers the processor forwarded."""
    source = ConsumerRecord("clicks", 2, 17, 1_000, b"ann", b"{}", ())
    first = late_record(source, "clicks-late", 1_000, 1_500, 2_000, "visits", "shop")
    made = forwarded_late_record(
        Record(b"ann", b"changed", 1_000, tuple(first.headers)), "late", 1_500, 2_000, "visits", "shop", "", 10**6
    )
    with pytest.raises(DataError, match=r"lacks the headers penstock\.late\.topic"):
        parse_late_record(ConsumerRecord("late", 0, 4, 1_000, made.key, made.value, tuple(made.headers)))


TRACE = (("trace", b"a1"),)


def driver_of(times: int, columns_min: int = 100) -> TopologyTestDriver:
    """Sessions by a key that was changed so many times."""
    builder = StreamsBuilder()
    stream = builder.stream("orders")
    for i in range(times):
        stream = stream.key_by(lambda record: record.value["user"], name=f"by-{i}").repartition()
    stream.to("seen")
    stream.group_by_key().session_window(10).aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    return TopologyTestDriver(builder.build(), partition=3, columns_min=columns_min, errors=ErrorHandlers())


def pipe(driver: TopologyTestDriver, *times: int) -> None:
    for at in times:
        value = msgspec.json.encode({"user": "ann", "x": at})
        driver.pipe("orders", key=b"order-%d" % at, value=value, timestamp=at, headers=TRACE)


@pytest.mark.parametrize("times", [1, 2])
def test_a_late_record_behind_a_repartition_topic_is_the_one_of_that_topic(times: int) -> None:
    """It has key, value and coordinates of the last repartition topic, to which it may be sent again. In headers it has
    the coordinates and the raw key of the first source topic."""
    driver = driver_of(times)
    pipe(driver, 100, 5)
    (late,) = driver.read("orders-late")
    found = parse_late_record(as_consumed(late)).record
    assert found == driver.source_log[f"{APPLICATION}-by-{times - 1}-repartition"][1]
    assert (found.key, found.headers[:1]) == (b"ann", TRACE)
    source = original_record(found)
    assert (source.topic, source.partition, source.offset, source.key) == ("orders", 3, 1, b"order-5")
    assert driver.task.metrics.rejected_at["late"] == "orders-3@1"


@pytest.mark.parametrize(("columns_min", "late_min"), [(1, 1), (1, 100), (100, 1)])
def test_a_late_record_with_another_value_is_no_record_of_the_source(
    columns_min: int, late_min: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the value was changed before the repartition topic, the late record names the repartition topic, in columns or
    not."""
    monkeypatch.setattr(late_records, "COLUMNS_MIN", late_min)
    builder = StreamsBuilder()
    changed = builder.stream("orders").map_values(lambda value: {"twice": 2 * value["x"]})
    stream = changed.key_by(lambda record: "ann", name="by-user")
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), columns_min=columns_min, commit_each=False, errors=ErrorHandlers())
    pipe(driver, 100, 5, 101, 6)
    driver.commit()
    driver.commit()
    late = driver.read("orders-late")
    log = driver.source_log[f"{APPLICATION}-by-user-repartition"]
    assert [parse_late_record(as_consumed(record)).record for record in late] == [log[1], log[3]]
    assert [record.value for record in late] == [b'{"twice":10}', b'{"twice":12}']
    assert driver.task.metrics.rejected_at["late"] == "orders-0@3"


def test_results_have_only_the_users_headers() -> None:
    """The headers of the repartition topic are of the application's own, and in no result."""
    driver = driver_of(2)
    pipe(driver, 5)
    assert [record.headers for record in driver.read("seen")] == [TRACE]


def test_a_dead_letter_can_be_replayed_and_found() -> None:
    """It names the repartition topic, to which it may be sent again, and in headers its source record."""
    driver = driver_of(1)
    driver.pipe("orders", key=b"order-1", value=b'{"user":"ann","x":"bad"}', timestamp=5, headers=TRACE)
    (dead,) = driver.read("orders-dlq")
    dead_letter = parse_dead_letter(as_consumed(dead))
    origin = dict(dead_letter.record.headers)
    assert (dead_letter.record.topic, dead_letter.record.key) == (f"{APPLICATION}-by-0-repartition", b"ann")
    assert (origin[ORIGIN_TOPIC], origin[ORIGIN_OFFSET], origin[KEY]) == (b"orders", b"0", b"order-1")


def test_a_users_topic_is_not_believed() -> None:
    """Headers of these names in a topic that is not the application's own are headers like any other."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    forged = origin_headers(ConsumerRecord("other", 9, 9, 0, b"x", None))
    for at in (100, 5):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at, headers=forged)
    (late,) = driver.read("in-late")
    assert (dict(late.headers)[TOPIC], dict(late.headers)[OFFSET], late.key) == (b"in", b"1", b"k")


@pytest.mark.parametrize(("key", "shown"), [(None, None), (b"k", b"k"), (b"k" * (KEY_BYTES_MAX + 1), None)])
def test_a_key_that_is_too_long_is_not_carried(key: bytes | None, shown: bytes | None) -> None:
    """The raw source key is restored. If it is null or too long, no other key is named, also in a second repartition
    topic."""
    source = ConsumerRecord("in", 1, 2, 5, key, b"v")
    again = ConsumerRecord("app-repartition", 0, 0, 5, b"new", b"v", origin_headers(source))
    assert original_record(again) == ConsumerRecord("in", 1, 2, 5, shown, b"v")
    assert (KEY in dict(again.headers)) is (shown is not None)
    assert origin_headers(original_record(again)) == again.headers
    plain = ConsumerRecord("app-repartition", 0, 0, 5, b"new", b"v", TRACE)
    assert original_record(plain) is plain
