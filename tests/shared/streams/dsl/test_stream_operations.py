"""The DSL: the effect of each call on the records and on the stored definition of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.shared.common.errors import ConfigError, ProcessingFailed, SchemaMismatch
from penstock.shared.common.serialization import json_deserializer, struct_deserializer
from penstock.shared.streams.aggregations.aggregation import Count, Mean, Sum
from penstock.shared.streams.dsl.builder import Stream, StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_json, encode_updates
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.window_result import WindowKey, WindowResult
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


class Click(msgspec.Struct):
    """An input value."""

    ms: int
    user: str = ""


def run(build: Any, *values: bytes | None, key: bytes | None = b"k", value: Any = dict) -> list[tuple[Any, Any]]:
    """Return the keys and values of the records that reach the topic `out` from these values."""
    builder = StreamsBuilder()
    build(builder.stream("in", value=value))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for one in values:
        driver.pipe("in", key=key, value=one, timestamp=1)
    assert driver.read("in-dlq") == []
    return [(record.key, record.value) for record in driver.read("out")]


def test_filter() -> None:
    """Only records for which the predicate is true pass."""
    got = run(lambda s: s.filter(lambda r: r.value["x"] > 1).to("out"), b'{"x":1}', b'{"x":2}')
    assert got == [(b"k", b'{"x":2}')]


def test_map_values() -> None:
    """Each value is replaced. Key, timestamp and headers stay."""
    builder = StreamsBuilder()
    builder.stream("in").map_values(lambda value: {"y": value["x"]}).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b'{"x":1}', timestamp=7, headers=(("h", b"1"),))
    (record,) = driver.read("out")
    assert (record.key, record.value, record.timestamp, record.headers) == (b"k", b'{"y":1}', 7, (("h", b"1"),))


def test_aggregations_are_bound_to_the_type_of_map_values() -> None:
    """Aggregations after a typed `map_values` are bound to its type."""
    builder = StreamsBuilder()
    mapped = builder.stream("in").map_values(lambda value: Click(value["x"]), value=Click)
    mapped.group_by_key().session_window(10).aggregate("s", sum=Sum("ms")).on_update().to("out")
    assert builder.build().stores["s"].schema.aggregations[0].result == "int64"
    with pytest.raises(ConfigError, match=r"Click .*field"):
        mapped.group_by_key().session_window(10).aggregate("t", sum=Sum("x"))


def test_flat_map_values() -> None:
    """Each value is replaced by none, one or several."""
    got = run(lambda s: s.flat_map_values(lambda value: value["all"]).to("out"), b'{"all":[1,2]}', b'{"all":[]}')
    assert got == [(b"k", b"1"), (b"k", b"2")]


def test_peek() -> None:
    """The action sees each record, and the record passes unchanged."""
    seen: list[Record] = []
    assert run(lambda s: s.peek(seen.append).to("out"), b"{}") == [(b"k", b"{}")]
    assert seen == [Record("k", {}, 1, ())]


def test_branch() -> None:
    """A record goes to the first branch whose predicate is true, and to no branch if none is."""

    def build(stream: Stream) -> None:
        small, even = stream.branch(lambda r: r.value < 3, lambda r: r.value % 2 == 0)
        small.map_values(lambda v: f"small {v}").to("out")
        even.map_values(lambda v: f"even {v}").to("out")

    got = run(build, b"1", b"2", b"3", b"4")
    assert [value for _, value in got] == [b'"small 1"', b'"small 2"', b'"even 4"']


def test_branch_calls_each_predicate_once() -> None:
    """Each predicate runs once for a record, so that a predicate that counts or samples is consistent."""
    times: list[int] = []

    def every_second(record: Record) -> bool:
        times.append(record.timestamp)
        return len(times) % 2 == 0

    for columns_min in (1, 1_000):
        times.clear()
        builder = StreamsBuilder()
        first, rest = builder.stream("in").branch(every_second, lambda record: True)
        first.to("first")
        rest.group_by_key().session_window(1_000).aggregate("s", n=Count()).on_update().to("rest")
        driver = TopologyTestDriver(builder.build(), columns_min=columns_min, errors=ErrorHandlers())
        driver.pipe_columns("in", [(b"k", b"{}", at) for at in range(10)])
        assert (times, len(driver.read("first"))) == (list(range(10)), 5)
        assert driver.read("rest")[-1].value == b'{"key":"k","start":0,"end":8,"n":5}'


def test_process_values_keeps_the_key() -> None:
    """A processor that forwards another key is rejected with the remedy.

    A processor that keeps the key needs no repartition topic.
    """

    class Doubling(Processor):
        def process(self, record: Record) -> None:
            self.context.forward(record._replace(value=2 * record.value))

    class Rekeying(Processor):
        def process(self, record: Record) -> None:
            self.context.forward(record._replace(key="other"))

    builder = StreamsBuilder()
    doubled = builder.stream("in").process_values(Doubling, name="doubling")
    doubled.group_by_key().session_window(10).aggregate("s", n=Count()).on_update().to("out")
    assert builder.build().internal_topics() == []
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b"7")
    assert driver.read("out")[0].value == b'{"key":"k","start":0,"end":0,"n":1}'
    other = StreamsBuilder()
    other.stream("in").process_values(Rekeying).to("out")
    with pytest.raises(ConfigError, match=r"'other'.*'k'.*process\(\)"):
        TopologyTestDriver(other.build(), errors=ErrorHandlers()).pipe("in", key=b"k", value=b"7")


@pytest.mark.parametrize("deduplicate", [True, False])
def test_retractions_are_not_aggregated(deduplicate: bool) -> None:
    """Records without a value, of a retracted window or a deleted row, are skipped and counted before a grouping."""
    builder = StreamsBuilder()
    sessions = builder.stream("in").group_by_key().session_window(10, 100).aggregate("s", n=Count()).on_update()
    by_all = sessions.key_by(lambda record: "all", name="all")
    by_all.group_by_key().tumbling_window(1_000).aggregate("u", n=Count()).on_update().to("out")
    rows = builder.table("rows").to_stream()
    rows.group_by_key().tumbling_window(1_000).aggregate("t", n=Count()).on_update().to("changes")
    driver = TopologyTestDriver(builder.build(), deduplicate_updates=deduplicate, errors=ErrorHandlers())
    for at in (0, 20, 10):  # the third makes one session of two that were shown
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at)
    assert [row.states[-1] for row in driver.store("u").rows()] == [3]
    for value in (b"1", None):
        driver.pipe("rows", key=b"k", value=value)
    assert driver.read("changes")[-1].value == b'{"key":"k","start":0,"end":1000,"n":1}'
    assert driver.metrics()["skipped_records"] == 3


def test_merge() -> None:
    """The records of both streams pass, each stream in its own order."""
    builder = StreamsBuilder()
    builder.stream("a").merge(builder.stream("b")).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for topic, value in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        driver.pipe(topic, key=b"k", value=value)
    assert [record.value for record in driver.read("out")] == [b"1", b"2", b"3"]


def test_merge_keeps_each_source_apart() -> None:
    """Late records and dead letters of merged streams go to the topics of their own source."""
    builder = StreamsBuilder()
    merged = builder.stream("a").merge(builder.stream("b"))
    merged.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("a", key=b"k", value=b"{}", timestamp=100)
    driver.pipe("b", key=b"k", value=b"{}", timestamp=0)
    driver.pipe("b", key=b"k", value=b"{", timestamp=0)
    assert [len(driver.read(t)) for t in ("a-late", "b-late", "a-dlq", "b-dlq")] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("value", "data", "expected"),
    [
        (dict, b'{"ms":1}', b'{"ms":1}'),
        (bytes, b"\xff", b"\xff"),
        (Click, b'{"ms":1,"other":2}', b'{"ms":1,"user":""}'),
        (dict[str, int], b'{"ms":1}', b'{"ms":1}'),
        (int | None, b"5", b"5"),
        (json_deserializer, b'{"ms":1}', b'{"ms":1}'),
        (Click, None, None),
    ],
)
def test_value_types(value: Any, data: bytes | None, expected: bytes | None) -> None:
    """Values are decoded by their type or by the given deserializer. Null stays null."""
    assert run(lambda s: s.to("out"), data, value=value) == [(b"k", expected)]


def test_a_deserializers_values_are_taken_for_dicts() -> None:
    """With a user's deserializer, fields are read by key and numbers are float64."""
    builder = StreamsBuilder()
    stream = builder.stream("in", value=lambda topic, data: msgspec.json.decode(data))
    windows = stream.group_by_key().session_window(10)
    windows.aggregate("s", sum=Sum("ms")).on_update().to("out", encode=encode_json)
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b'{"ms":4}')
    assert [record.value for record in driver.read("out")] == [b'{"key":"k","start":0,"end":0,"sum":4.0}']


def test_bytes_keys() -> None:
    """With `key="bytes"` a key need not be text. A window's key is then base64 in JSON, and raw as the record's key."""
    builder = StreamsBuilder()
    windows = builder.stream("in", key="bytes").group_by_key().session_window(10)
    windows.aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"\xff\x00", value=b"{}", timestamp=0)
    driver.pipe("in", key=b"\xff\x00", value=b"{}", timestamp=11)
    driver.crash()
    driver.restore()
    (record,) = driver.read("out")
    assert (record.key, record.value) == (b"\xff\x00", b'{"key":"/wA=","start":0,"end":0,"n":1}')
    assert [s.key for s in driver.task.stores["s"].rows()] == [b"\xff\x00"]


# --- encoders ---

WINDOW, RESULT = WindowKey("k", 1, 2), WindowResult("k", 1, 2, {"n": 3, "mean": 1.5})


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (Record("k", {"a": 1}, 0), (b"k", b'{"a":1}')),
        (Record("ä", b"raw", 0), ("ä".encode(), b"raw")),
        (Record(b"\xff", None, 0), (b"\xff", None)),
        (Record(None, [1], 0), (None, b"[1]")),
        (Record(7, "text", 0), (b"7", b'"text"')),
        (Record(WINDOW, RESULT, 0), (b"k", b'{"key":"k","start":1,"end":2,"n":3,"mean":1.5}')),
    ],
)
def test_encode_json(record: Record, expected: tuple[bytes | None, bytes | None]) -> None:
    """Text keys are written in UTF-8, bytes keys unchanged, and windows under their record key as one flat JSON
    object."""
    assert encode_json(record) == expected


def test_encode_updates() -> None:
    """With updates the key is the whole window, so that it identifies a retraction, which has no value."""
    key = b'{"key":"k","start":1,"end":2}'
    assert encode_updates(Record(WINDOW, RESULT, 0)) == (key, RESULT.to_json())
    assert encode_updates(Record(WINDOW, None, 0)) == (key, None)
    assert encode_updates(Record("k", None, 0)) == (b"k", None)


def test_on_update_uses_window_keys_also_downstream() -> None:
    """A stream of updates keeps its encoder through filters. A sink's own encoder has precedence."""
    builder = StreamsBuilder()
    table = builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count())
    updates = table.on_update().filter(lambda r: True)
    updates.to("out")
    updates.to("own", encode=lambda r: (b"mine", None))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b"{}", timestamp=5)
    assert [r.key for r in driver.read("out")] == [b'{"key":"k","start":5,"end":5}']
    assert [(r.key, r.value) for r in driver.read("own")] == [(b"mine", None)]


@pytest.mark.parametrize("kind", ["process", "map", "flat_map"])
def test_updates_keep_their_window_keys_below_functions_that_may_change_keys(kind: str) -> None:
    """The retraction of a session that grew deletes its own earlier result, not the result of another window."""

    class Pass(Processor):
        def process(self, record: Record) -> None:
            self.context.forward(record)

    functions = {"process": Pass, "map": lambda record: record, "flat_map": lambda record: [record]}
    builder = StreamsBuilder()
    updates = builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_update()
    getattr(updates, kind)(functions[kind]).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (5, 9):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at)
    first, grown = b'{"key":"k","start":5,"end":5}', b'{"key":"k","start":5,"end":9}'
    assert [r.key for r in driver.read("out")] == [first, first, grown]


def test_updates_that_are_joined_with_a_global_table_keep_their_window_keys() -> None:
    """A join with a global table leaves the keys as they are, so `to()` writes the whole window as the key, and the
    retraction of a session that grew deletes its earlier result."""
    builder = StreamsBuilder()
    names = builder.global_table("names")
    updates = builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_update()
    updates.left_join(names, lambda result, name: result.results, key=lambda r: r.key.key).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (5, 9):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at)
    first, grown = b'{"key":"k","start":5,"end":5}', b'{"key":"k","start":5,"end":9}'
    assert [(r.key, r.value) for r in driver.read("out")] == [(first, b'{"n":1}'), (first, None), (grown, b'{"n":2}')]


@pytest.mark.parametrize("updates_first", [True, False])
def test_updates_that_are_merged_keep_their_window_keys(updates_first: bool) -> None:
    """If one of two merged streams has updates, both write the window as key, so a retraction deletes only its own."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    closed = grouped.tumbling_window(10).aggregate("w", n=Count()).on_close()
    updates = grouped.session_window(10).aggregate("s", n=Count()).on_update()
    (updates.merge(closed) if updates_first else closed.merge(updates)).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (5, 9, 12):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at)
    windows = [(0, 10), (5, 5), (5, 9), (5, 12)]
    assert {r.key for r in driver.read("out")} == {b'{"key":"k","start":%d,"end":%d}' % window for window in windows}


# --- what the schema says ---


def test_the_schema_describes_the_windows() -> None:
    """A store's schema has all that readers of the changelog need. With a sink it also has the results' topic."""
    builder = StreamsBuilder()
    windows = builder.stream("in", value=Click, late="too-late").group_by_key().session_window(30, 15)
    closed = windows.aggregate("s", n=Count(), ms=Mean("ms")).on_close()
    assert builder.build().stores["s"].schema.results is None
    closed.to("out")
    schema = builder.build().stores["s"].schema
    assert (schema.gap_ms, schema.grace_ms, schema.emit, schema.key) == (30, 15, "on_close", "string")
    assert (schema.source, schema.results, schema.late, schema.dead_letters) == ("in", "out", "too-late", "in-dlq")
    assert [(a.name, a.function, a.field) for a in schema.aggregations] == [("n", "count", None), ("ms", "mean", "ms")]


def upstream_of(build: Callable[[StreamsBuilder, Stream], Stream]) -> tuple[str, ...]:
    builder = StreamsBuilder()
    stream = build(builder, builder.stream("in", value=Click))
    stream.group_by_key().session_window(30).aggregate("s", n=Count()).on_close().to("out")
    return builder.build().schemas()[0].upstream


@pytest.mark.parametrize(
    ("build", "upstream"),
    [
        (lambda _, stream: stream, ()),
        (lambda _, stream: stream.peek(print), ()),
        (lambda _, stream: stream.peek(print).filter(bool).peek(print), ("filter-3",)),
        (lambda _, stream: stream.map_values(lambda v: v).flat_map_values(list), ("map_values-2", "flat_map_values-3")),
        (lambda _, stream: stream.branch(bool, bool)[1], ("split-2",)),
        (lambda _, stream: stream.process_values(Processor, name="mine"), ("mine",)),
        (lambda builder, stream: stream.merge(builder.stream("other")), ("source-2", "merge-3")),
    ],
)
def test_the_schema_names_what_stands_before_the_window(build: Any, upstream: tuple[str, ...]) -> None:
    """Every node before a window that may drop, change or add records is named. Nodes after it are not."""
    assert upstream_of(build) == upstream


def test_the_schema_marks_fields_that_json_lacks() -> None:
    """Fields behind a user's deserializer are unknown, and results with another encoding name no results topic."""
    for value, verbatim in ((dict, True), (json_deserializer, True), (Click, True), (lambda topic, data: {}, False)):
        builder = StreamsBuilder()
        windows = builder.stream("in", value=value).group_by_key().session_window(30)
        windows.aggregate("s", ms=Mean("ms")).on_close().to("out", encode=lambda record: (None, None))
        (schema,) = builder.build().schemas()
        assert schema.aggregations[0].verbatim is verbatim
        assert schema.results is None


def test_a_store_has_a_name_of_its_own() -> None:
    """An unnamed store is named after the topic and the windows, whatever is between them.

    A second such store is rejected.
    """
    builder = StreamsBuilder()
    stream = builder.stream("clicks").filter(lambda r: True).key_by(lambda r: "k")
    stream.group_by_key().session_window(10).aggregate(n=Count()).on_close().to("out")
    stream.group_by_key().tumbling_window(10).aggregate(n=Count()).on_close().to("out2")
    assert list(builder.build().stores) == ["clicks-session", "clicks-tumbling"]
    with pytest.raises(ConfigError, match="of its own"):
        stream.group_by_key().tumbling_window(20).aggregate(n=Count()).on_close()


def test_a_changed_aggregation_under_a_derived_name_is_rejected() -> None:
    """A changed aggregation rejects the state under its derived store name, as under a given name."""

    def windows(aggregation: Count | Sum, *, filtered: bool) -> Topology:
        builder = StreamsBuilder()
        stream = builder.stream("clicks")
        if filtered:
            stream = stream.peek(lambda r: None)
        stream.group_by_key().session_window(10).aggregate(n=aggregation).on_close().to("out")
        return builder.build()

    driver = TopologyTestDriver(windows(Count(), filtered=False), errors=ErrorHandlers())
    driver.pipe("clicks", key=b"a", value=b"{}", timestamp=1)
    driver.topology = windows(Count(), filtered=True)
    driver.restore()
    assert len(driver.store("clicks-session")) == 1
    driver.topology = windows(Sum("ms"), filtered=True)
    with pytest.raises(SchemaMismatch, match="clicks-session"):
        driver.restore()


class Keeping(Processor):
    """A values processor that uses a store and a schedule, and holds records back until a commit."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: list[Record] = []

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self.rows = context.store("rows")
        context.schedule(
            10, PunctuationType.STREAM_TIME, lambda now: context.forward(Record("other", now, now)), start=10
        )

    def process(self, record: Record) -> None:
        self.rows.put(record.key, record.value)
        self.held.append(record)
        if record.value == "rekey":
            self.context.forward(record._replace(key="else"))

    def commit(self) -> None:
        while self.held:
            self.context.forward(self.held.pop())

    def close(self) -> None:
        self.calls.append("closed")


@pytest.mark.parametrize("row_type", [str, struct_deserializer(str)])
def test_a_values_processor_is_a_whole_processor(row_type: Any) -> None:
    """A values processor has stores, schedules, commit and close. It may change keys only outside of `process`."""
    made: list[Keeping] = []

    def supplier() -> Keeping:
        made.append(Keeping())
        return made[-1]

    builder = StreamsBuilder()
    builder.stream("in").process_values(supplier, builder.add_store("rows", row_type)).to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"k", value=b'"a"', timestamp=12)
    assert [(r.key, r.value) for r in driver.read("out")] == [(b"other", b"12"), (b"k", b'"a"')]
    assert driver.store("rows").get("k") == "a"
    driver.task.close()
    assert made[-1].calls == ["closed"]
    with pytest.raises(ProcessingFailed, match=r"'else'.*'k'"):
        driver.pipe("in", key=b"k", value=b'"rekey"', timestamp=13)


def test_a_processor_that_rekeys_is_repartitioned_before_a_grouping() -> None:
    """Records that `process` forwards pass a repartition topic before a grouping, and may have another key type."""

    class Rekeyed(Processor):
        def process(self, record: Record) -> None:
            self.context.forward(record._replace(key=record.value.encode()))

    builder = StreamsBuilder()
    stream = builder.stream("in").process(Rekeyed, name="users", key="bytes")
    stream.group_by_key().session_window(10)
    topology = builder.build()
    assert topology.internal_topics() == ["users-repartition"]
    assert [source.key for source in topology.sources()] == ["string", "bytes"]
