"""Errors behind a store, in a punctuation, in a commit and at a sink: the node they are of, and the outputs that are
left out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.clients.dead_letters.dead_letter import DeadLetter, dead_letter_record, parse_dead_letter
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.errors import DataError, ProcessingFailed, RecordTooLarge
from penstock.shared.common.records import Columns, ConsumerRecord, ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Count, Max, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers, ExceptionHandler
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_json
from penstock.shared.streams.task.processor_nodes import ProcessorNodes, SinkNodeWriter
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import SinkNode
from penstock.shared.streams.window_result import WindowKey
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.consumed import as_consumed


def headers_of(record: ProducerRecord) -> dict[str, str]:
    """A dead letter's own headers and those of its origin, by the last parts of their names."""
    prefixes = ("penstock.dlq.", "penstock.origin.")
    return {n.removeprefix("penstock."): (v or b"").decode() for n, v in record.headers if n.startswith(prefixes)}


def sessions(emit: str = "on_close") -> Any:
    """Sessions whose result raises where the key is `bad`."""

    def fail(result: Any) -> Any:
        if result.key == "bad":
            raise KeyError("page")
        return result.results["n"]

    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count())
    getattr(windows, emit)().map_values(fail).to("out")
    return builder.build()


def closed_by_one_record(handler: ExceptionHandler, columns_min: int = 1) -> TopologyTestDriver:
    """Three sessions, of which the record at 100 closes those of `ann` and `bad`."""
    driver = TopologyTestDriver(sessions(), errors=ErrorHandlers(process=handler), columns_min=columns_min)
    keys = (b"ann", b"bad", b"bad", b"bob")
    driver.pipe_columns("in", [(k, b"{}", t) for k, t in zip(keys, (0, 1, 5, 100), strict=True)])
    return driver


@pytest.mark.parametrize("columns_min", [1, 1_000])
@pytest.mark.parametrize("handler", ["continue", "dead_letter"])
def test_a_result_that_a_node_rejects_is_left_out(handler: ExceptionHandler, columns_min: int) -> None:
    """A result for which a node raises is counted and left out, and its window is closed. Its dead letter names store,
    window and source record."""
    driver = closed_by_one_record(handler, columns_min)
    assert [record.value for record in driver.read("out")] == [b"1"]
    assert [session.key for session in driver.store("s").rows()] == ["bob"]
    counted = {name: driver.metrics()[name] for name in ("closed_windows", "dead_letters", "skipped_records")}
    is_dead_letter = handler == "dead_letter"
    assert counted == {
        "closed_windows": 2,
        "dead_letters": int(is_dead_letter),
        "skipped_records": int(not is_dead_letter),
    }
    coordinates = "node 'map_values-2', store 's', key 'bad', window 1 to 5, in-0@3"
    assert driver.task.metrics.rejected_at == {"dead_letters" if is_dead_letter else "skipped": coordinates}
    dead_letters = driver.read("in-dlq")
    assert len(dead_letters) == is_dead_letter
    for dead_letter in dead_letters:
        assert (dead_letter.key, dead_letter.value) == (b"bad", b'{"key":"bad","start":1,"end":5,"n":2}')
        assert headers_of(dead_letter) == {
            "dlq.stage": "process",
            "dlq.exception": "KeyError",
            "dlq.message": "'page'",
            "dlq.attempts": "1",
            "dlq.group": "test-driver",
            "dlq.node": "map_values-2",
            "dlq.timestamp": "5",
            "dlq.store": "s",
            "dlq.window_start": "1",
            "dlq.window_end": "5",
            "origin.topic": "in",
            "origin.partition": "0",
            "origin.offset": "3",
            "origin.key": "bob",
        }


def test_a_skipped_result_stays_skipped_after_a_restart() -> None:
    """The window counts as emitted: a new owner does not close it again, and continues."""
    driver = closed_by_one_record("dead_letter")
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"bob", value=b"{}", timestamp=200)
    assert ([record.value for record in driver.read("out")], len(driver.read("in-dlq"))) == ([b"1", b"1"], 1)


def test_fail_names_the_window() -> None:
    """With `fail` the task ends, and the error names node, record, store, key and window. Nothing of the record is
    committed."""
    with pytest.raises(ProcessingFailed, match=r"'map_values-2'.*in-0@3.*'s'.*'bad'.*KeyError: 'page'"):
        closed_by_one_record("fail")


def test_a_dead_letter_of_an_output_cannot_be_replayed() -> None:
    """A dead letter of a store's output cannot be parsed for replay, because the store has already counted its
    record."""
    (dead_letter,) = closed_by_one_record("dead_letter").read("in-dlq")
    with pytest.raises(DataError, match="'map_values-2'"):
        parse_dead_letter(as_consumed(dead_letter))


def test_a_dead_letter_of_an_output_with_the_headers_of_a_dead_letter_cannot_be_replayed() -> None:
    """An application that reads a dead-letter topic forwards records with a dead letter's headers. A replay would send
    a dead letter of its output to the topic that these headers name.
    """
    builder = StreamsBuilder()
    builder.table("in-dlq").to_stream().map_values(lambda value: value["x"]).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    source = DeadLetter(ConsumerRecord("in", 0, 7, 0, b"k", b"{}"), "process", "E", "no", 1, "g")
    older = dead_letter_record("in-dlq", source)
    driver.pipe("in-dlq", key=older.key, value=older.value, headers=older.headers)
    (dead_letter,) = driver.read("in-dlq-dlq")
    assert set(older.headers) < set(dead_letter.headers)
    with pytest.raises(DataError, match="'map_values-"):
        parse_dead_letter(as_consumed(dead_letter))


@pytest.mark.parametrize("deduplicate", [True, False])
def test_updates_of_a_commit_are_left_out_one_by_one(deduplicate: bool) -> None:
    """An output of a commit without a source record fails alone."""
    driver = TopologyTestDriver(sessions("on_update"), deduplicate_updates=deduplicate, errors=ErrorHandlers())
    for key in (b"ann", b"bad", b"bob"):
        driver.pipe("in", key=key, value=b"{}", timestamp=5)
    keys = [msgspec.json.decode(record.key or b"")["key"] for record in driver.read("out")]
    assert keys == ["ann", "bob"]
    (dead_letter,) = driver.read("in-dlq")
    assert ("origin.offset" in headers_of(dead_letter)) is not deduplicate
    assert headers_of(dead_letter)["dlq.window_start"] == "5"


def test_a_tables_change_is_left_out() -> None:
    """The table keeps the row. Its change, which a node behind it rejected, is a dead letter with its source record."""
    builder = StreamsBuilder()
    builder.table("t").to_stream().map_values(lambda value: value["x"]).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for value in (b'{"x":1}', b"{}", b'{"x":2}'):
        driver.pipe("t", key=b"k", value=value)
    assert [record.value for record in driver.read("out")] == [b"1", b"2"]
    (dead_letter,) = driver.read("t-dlq")
    headers = headers_of(dead_letter)
    assert (headers["dlq.store"], headers["origin.offset"], "dlq.window_start" in headers) == ("t", "1", False)


def test_siblings_and_branches_without_a_store_go_on() -> None:
    """An output that one child rejects is forwarded to the others. A failing sink costs no window of a sibling."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    windows = stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close()
    windows.map_values(lambda result: result.missing).to("bad")
    windows.to("good")
    stream.map_values(lambda value: value["x"]).to("branch")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (0, 100):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at)
    assert [len(driver.read(topic)) for topic in ("good", "bad", "branch")] == [1, 0, 0]
    assert [headers_of(dead_letter)["dlq.node"] for dead_letter in driver.read("in-dlq")] == [
        "map_values-5",
        "map_values-2",
        "map_values-5",
    ]
    assert len(driver.store("s")) == 1


def counted_and_split() -> TopologyTestDriver:
    """A count of all records, beside a branch of the odd ones with a sum and a branch of the others without a store."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    stream.group_by_key().aggregate("total", n=Count())
    odd, even = stream.branch(lambda record: record.value["n"] % 2 == 1, lambda record: True)
    odd.group_by_key().aggregate("sum", v=Sum("v"))
    even.map_values(lambda value: value["v"] + 1).to("even")
    return TopologyTestDriver(builder.build(), errors=ErrorHandlers())


def test_a_branch_that_rejects_a_counted_record_ends_the_task() -> None:
    """If an aggregate has counted a record, the task ends when an aggregate of a branch rejects it."""
    driver = counted_and_split()
    driver.pipe("in", key=b"k", value=b'{"n":1,"v":1}')
    with pytest.raises(ProcessingFailed, match=r"'sum'.*in-0@1"):
        driver.pipe("in", key=b"k", value=b'{"n":1,"v":"x"}')


@pytest.mark.parametrize("kind", ["to", "all", "flat_map_values"])
def test_one_part_of_a_split_record_may_be_rejected(kind: str) -> None:
    """A record is split into parts for one aggregate. An invalid part becomes a dead letter, and the other parts
    count."""

    class Split(Processor):
        def process(self, record: Record) -> None:
            for v in record.value["v"]:
                self.context.forward(record._replace(value={"v": v}), to="sum" if kind == "to" else None)

    builder = StreamsBuilder()
    stream = builder.stream("in")
    is_mapped = kind == "flat_map_values"
    parts = stream.flat_map_values(lambda r: [{"v": v} for v in r["v"]]) if is_mapped else stream.process_values(Split)
    parts.group_by_key().aggregate("sum", v=Sum("v"))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b'{"v":[1,"x",2]}')
    assert (len(driver.read("in-dlq")), driver.store("sum").get("k")["v"]) == (1, 3.0)


def test_a_part_that_one_of_two_aggregates_rejects_ends_the_task() -> None:
    """A part that one aggregate has counted and another one rejects is half counted."""
    builder = StreamsBuilder()
    parts = builder.stream("in").flat_map_values(lambda r: [{"v": v} for v in r["v"]]).group_by_key()
    parts.aggregate("total", n=Count())
    parts.aggregate("sum", v=Sum("v"))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    with pytest.raises(ProcessingFailed, match=r"'sum'.*in-0@0"):
        driver.pipe("in", key=b"k", value=b'{"v":[1,"x"]}')


def test_a_mapper_that_raises_at_a_later_part_rejects_the_record() -> None:
    """No store has taken an earlier part, so the dead letter is the source record, and a replay counts each part
    once."""
    builder = StreamsBuilder()
    parts = builder.stream("in").flat_map_values(lambda r: ({"v": 1 / v} for v in r["v"]))
    parts.group_by_key().aggregate("sum", v=Sum("v"))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for value in (b'{"v":[1,0]}', b'{"v":[2]}'):
        driver.pipe("in", key=b"k", value=value)
    (dead_letter,) = driver.read("in-dlq")
    assert parse_dead_letter(as_consumed(dead_letter)).record.value == b'{"v":[1,0]}'
    assert driver.store("sum").get("k")["v"] == 0.5


def test_a_branch_without_a_store_loses_only_its_output() -> None:
    """If an aggregate has counted a record, an error in a branch without a store is a dead letter of an output."""
    driver = counted_and_split()
    driver.pipe("in", key=b"k", value=b'{"n":2,"v":"x"}')
    assert (len(driver.read("in-dlq")), driver.store("total").get("k")["n"]) == (1, 1)


@pytest.mark.parametrize("kind", ["join", "left_join", "aggregated table", "branch"])
def test_a_joiner_that_raises_loses_only_its_output(kind: str) -> None:
    """If an aggregate has counted a record, an error of the joiner of a join with a table is a dead letter of an
    output: the join changes no store."""
    builder = StreamsBuilder()
    stream, rows = builder.stream("in"), builder.table("t")
    totals = stream.group_by_key().aggregate("total", n=Count())
    joined = stream.branch(lambda record: True)[0] if kind == "branch" else stream.filter(lambda record: True)
    join = joined.left_join if kind == "left_join" else joined.join
    join(totals if kind == "aggregated table" else rows, lambda value, row: value["x"]).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("t", key=b"k", value=b"{}")
    for value in (b'{"x":1}', b"{}", b'{"x":2}'):
        driver.pipe("in", key=b"k", value=value)
    assert [record.value for record in driver.read("out")] == [b"1", b"2"]
    assert (len(driver.read("in-dlq")), driver.store("total").get("k")["n"]) == (1, 3)


@pytest.mark.parametrize("counted", ["behind the join", "beside the join", "nowhere"])
def test_a_record_behind_a_join_is_counted_by_all_aggregates_or_none(counted: str) -> None:
    """A join with a table only reads its store. So the record is rejected, or the task ends if a count has taken it."""
    builder = StreamsBuilder()
    stream, rows = builder.stream("in"), builder.table("t")
    if counted == "beside the join":
        stream.group_by_key().aggregate("total", n=Count())
    joined = stream.join(rows, lambda value, row: value).group_by_key()
    if counted == "behind the join":
        joined.aggregate("total", n=Count())
    joined.aggregate("sum", v=Sum("v"))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("t", key=b"k", value=b"{}")
    if counted == "nowhere":
        driver.pipe("in", key=b"k", value=b'{"v":"x"}')
        (dead_letter,) = driver.read("in-dlq")
        assert parse_dead_letter(as_consumed(dead_letter)).record.value == b'{"v":"x"}'
        assert driver.store("sum").get("k") is None
    else:
        with pytest.raises(ProcessingFailed, match=r"'sum'.*in-0@0"):
            driver.pipe("in", key=b"k", value=b'{"v":"x"}')


def test_a_rejected_output_discards_earlier_outputs_of_its_record() -> None:
    """An output that is rejected halfway writes nothing."""

    class Halves(Processor):
        def process(self, record: Record) -> None:
            self.context.forward(record._replace(value="first half"))
            raise ValueError("second half")

    builder = StreamsBuilder()
    builder.table("t").to_stream().process_values(Halves).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("t", key=b"k", value=b"{}")
    assert (driver.read("out"), len(driver.read("t-dlq"))) == ([], 1)


def test_a_dead_letter_of_a_joins_input_has_the_inputs_value() -> None:
    """Inside a join of two streams, a value carries its side, which is not the user's."""
    builder = StreamsBuilder()
    changes, stream = builder.table("t").to_stream(), builder.stream("s")
    changes.join(stream, lambda change, value: change["missing"], JoinWindows.of(10), name="j").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("s", key=b"k", value=b'{"b":1}')
    driver.pipe("t", key=b"k", value=b'{"a":1}')
    assert [dead_letter.value for dead_letter in driver.read("t-dlq")] == [b'{"a":1}']


def test_a_result_that_cannot_be_made_is_left_out() -> None:
    """A user's aggregate that has no result for one window costs that result, and its window is closed."""
    builder = StreamsBuilder()

    class Share(Max):
        def result(self, state: Any) -> Any:
            return 12 // state[0]

    builder.stream("in").group_by_key().tumbling_window(10).aggregate("w", share=Share("n")).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at, n in ((0, 3), (10, 0), (20, 4), (30, 1)):
        driver.pipe("in", key=b"k", value=b'{"n":%d}' % n, timestamp=at)
    assert [msgspec.json.decode(record.value or b"")["share"] for record in driver.read("out")] == [4, 3]
    (dead_letter,) = driver.read("in-dlq")
    assert (dead_letter.key, dead_letter.value, headers_of(dead_letter)["dlq.window_start"]) == (b"k", None, "10")


def test_a_result_without_a_json_form_is_left_out() -> None:
    """The sink cannot encode the result, and the dead letter has the result's `repr`."""
    builder = StreamsBuilder()

    class Root(Max):
        def result(self, state: Any) -> Any:
            return complex(0, state[0])

    builder.stream("in").group_by_key().tumbling_window(10).aggregate("w", root=Root("n")).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (0, 10):
        driver.pipe("in", key=b"k", value=b'{"n":3}', timestamp=at)
    (dead_letter,) = driver.read("in-dlq")
    assert (dead_letter.key, dead_letter.value) == (
        b"k",
        b"WindowResult(key='k', start=0, end=10, results={'root': 3j})",
    )


def test_a_record_that_no_match_came_for_is_left_out() -> None:
    """A joiner that raises for an unmatched left record makes that record a dead letter, and later records continue."""
    builder = StreamsBuilder()
    left, right = builder.stream("left"), builder.stream("right")
    left.left_join(right, lambda own, other: other["x"], JoinWindows.of(10), name="j").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (0, 1, 100):
        driver.pipe("left", key=b"k", value=b"%d" % at, timestamp=at)
    dead_letters = driver.read("left-dlq")
    assert [(dead_letter.value, headers_of(dead_letter)["dlq.node"]) for dead_letter in dead_letters] == [
        (b"0", "j"),
        (b"1", "j"),
    ]
    assert len(driver.store("j-left")) == 1


class Ticking(Processor):
    """Forwards from a punctuation, which fails at 20."""

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        context.schedule(10, PunctuationType.STREAM_TIME, self._tick, start=10)

    def process(self, record: Record) -> None:
        pass

    def _tick(self, now_ms: int) -> None:
        self.context.forward(Record("tick", now_ms, now_ms))
        if now_ms == 20:
            raise KeyError("tick")
        self.context.forward(Record("tock", now_ms, now_ms))


def ticking(handler: ExceptionHandler) -> TopologyTestDriver:
    builder = StreamsBuilder()
    ticks = builder.stream("in").process_values(Ticking, name="ticking")
    ticks.map_values(lambda now: now // (now - 10)).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers(process=handler))
    for at in (10, 20, 30):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at)
    return driver


@pytest.mark.parametrize("handler", ["continue", "dead_letter"])
def test_a_punctuation_that_raises_is_cut_off(handler: ExceptionHandler) -> None:
    """Its earlier outputs are kept, rejected ones are left out, the next punctuation is called, and the task
    continues."""
    driver = ticking(handler)
    written = [(record.key, record.value) for record in driver.read("out")]
    assert written == [(b"tick", b"2"), (b"tick", b"1"), (b"tock", b"1")]
    dead_letters = [(dead_letter.key, headers_of(dead_letter)["dlq.node"]) for dead_letter in driver.read("in-dlq")]
    expected = [(b"tick", "map_values-2"), (b"tock", "map_values-2"), (None, "ticking")]
    assert dead_letters == (expected if handler == "dead_letter" else [])
    assert driver.metrics()["skipped_records"] == (0 if dead_letters else 3)


def test_a_punctuation_fails_where_that_is_wanted() -> None:
    """With `fail` the first error ends the task."""
    with pytest.raises(ProcessingFailed, match=r"'map_values-2'.*STREAM_TIME.*in-0@0"):
        ticking("fail")


@pytest.mark.parametrize("wraps", [False, True])
def test_half_of_a_change_ends_a_punctuation(wraps: bool) -> None:
    """The task ends if a node below a punctuation raises after it has changed its store, also if the callback raises
    another error for it."""

    class Sending(Ticking):
        def _tick(self, now_ms: int) -> None:
            try:
                self.context.forward(Record("tick", now_ms, now_ms))
            except KeyError as e:
                if wraps:
                    raise ValueError("not sent") from e
                raise

    class Keeping(Processor):
        def process(self, record: Record) -> None:
            self.context.store("kept").put(record.key, {"at": record.value})
            raise KeyError("half")

    builder = StreamsBuilder()
    ticks = builder.stream("in").process_values(Sending, name="sending")
    ticks.process_values(Keeping, builder.add_store("kept"), name="keeping").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    with pytest.raises(ProcessingFailed, match="STREAM_TIME"):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=10)


@pytest.mark.parametrize(("value", "node"), [(b"null", "filter-2"), (b"{}", "map_values-3"), (b'{"x":1}', "sink-4")])
def test_an_error_is_of_the_innermost_node(value: bytes, node: str) -> None:
    """In a chain of nodes the error names the node whose code raised, not its callers."""
    builder = StreamsBuilder()
    chain = builder.stream("in").filter(lambda record: "y" not in record.value).map_values(lambda value: value["x"])
    chain.to("out", lambda record: (None, record.value.encode()))
    task = StreamTask(builder.build(), 0, application="app", handlers=ErrorHandlers("fail", "fail", "fail"))
    task.initialize(0)
    with pytest.raises(ProcessingFailed, match=f"node '{node}': in-0@0 "):
        task.process(Columns.of([ConsumerRecord("in", 0, 0, 0, b"k", value)]), 0)


def test_a_rejection_that_ends_the_task_leaves_no_current_record() -> None:
    """The last commit still writes the results of the records before a rejected one. They do not name the rejected
    record as their source."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().tumbling_window(10).aggregate("w", n=Count()).on_update()
    windows.key_by(lambda record: "all", name="by-all").group_by_key().aggregate("all", n=Count())
    driver = TopologyTestDriver(
        builder.build(),
        errors=ErrorHandlers(deserialize="fail"),
        now_ms=1_000,
        max_future_ms=100,
        commit_each=False,
        deduplicate_updates=True,
    )
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    with pytest.raises(ProcessingFailed, match="in-0@1"):
        driver.pipe("in", key=b"zzz", value=b"{}", timestamp=5_000)
    (output,) = driver.task.prepare_commit(1_001).outputs
    assert headers_of(output) == {}


def test_an_error_from_elsewhere_is_of_no_node() -> None:
    """An error that was raised outside of the nodes names none."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    nodes = ProcessorNodes(builder.build(), 1_000, lambda record, source_key: None, lambda: None)
    assert nodes.node_of(KeyError()) is None


@pytest.mark.parametrize("header", [("trace", "abc"), (5, b"abc"), (None, b"abc"), ("\ud800", b"abc"), ("trace",)])
def test_a_dead_letter_leaves_out_headers_that_no_record_can_have(header: Any) -> None:
    """An output behind a store with an invalid header is a dead letter without the output's headers, and the task
    continues."""

    class Keeping(Processor):
        def process(self, record: Record) -> None:
            self.context.store("kept").put(record.key, record.value)
            self.context.forward(record._replace(headers=(header,)))

    builder = StreamsBuilder()
    builder.stream("in").process(Keeping, builder.add_store("kept")).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b"{}")
    (dead_letter,) = driver.read("in-dlq")
    assert (dead_letter.key, dead_letter.value, headers_of(dead_letter)["dlq.stage"]) == (b"k", b"{}", "produce")
    assert header not in dead_letter.headers
    assert driver.store("kept").get("k") == {}


def test_a_sink_takes_what_the_producer_takes() -> None:
    """The limit is the producer's own measure of a record, headers included."""
    headers = (("trace", b"1" * 50),)
    size = record_size(b"k", b"12", list(headers))
    written: list[tuple[ProducerRecord, bytes | None]] = []
    node = SinkNode("sink", "out", encode_json)
    sink = SinkNodeWriter(node, size, lambda *given: written.append(given), lambda: None)
    record = Record("k", 12, 7, headers)
    sink.process(record)
    windowed = record._replace(key=WindowKey("k", 5, 7))
    sink.process(windowed)
    expected = ProducerRecord("out", b"12", b"k", headers, None, 7)
    assert written == [(expected, None), (expected, None)]
    with pytest.raises(RecordTooLarge, match=f"topic out.*{size}.*max_request_size={size - 1}"):
        SinkNodeWriter(node, size - 1, lambda *given: None, lambda: None).process(record)


WINDOWS = ["tumbling_window", "hopping_window", "sliding_window", "session_window", "join"]


class Timed(Processor):
    """Sets a record's time to its value."""

    def process(self, record: Record) -> None:
        self.context.forward(record._replace(timestamp=record.value["at"]))


def windowed(kind: str, supplier: type[Processor] | None, **options: Any) -> TopologyTestDriver:
    """Windows of 10 ms over the output of a processor."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    stream = stream if supplier is None else stream.process_values(supplier)
    if kind == "join":
        stream.join(builder.stream("right"), lambda a, b: a, JoinWindows.of(10), name="s").to("out")
    else:
        sizes = (10, 5) if kind == "hopping_window" else (10,)
        getattr(stream.group_by_key(), kind)(*sizes).aggregate("s", n=Count()).on_close().to("out")
    return TopologyTestDriver(builder.build(), **options, errors=ErrorHandlers())


@pytest.mark.parametrize("columns_min", [1, 100])
@pytest.mark.parametrize("kind", WINDOWS)
def test_a_time_whose_window_would_leave_64_bits_is_a_dead_letter(kind: str, columns_min: int) -> None:
    """A record near the end of time is rejected before a window has it: it closes no window, and its task continues."""
    driver = windowed(kind, None, columns_min=columns_min)
    driver.pipe_columns("in", [(b"a", b"{}", 5), (b"a", b"{}", 2**63 - 1), (b"a", b"{}", 2**63 - 2), (b"a", b"{}", 6)])
    dead_letters = [parse_dead_letter(as_consumed(record)) for record in driver.read("in-dlq")]
    assert [(dead_letter.stage, dead_letter.record.offset) for dead_letter in dead_letters] == [
        ("process", 1),
        ("process", 2),
    ]
    assert "leaves 64 bits" in dead_letters[0].message
    assert (driver.task.times.operators[0].stream_time_ms, driver.read("out"), driver.read("in-late")) == (6, [], [])
    driver.crash()
    driver.restore()
    assert driver.task.sources["in"] == 4


@pytest.mark.parametrize("kind", WINDOWS)
def test_the_limit_on_the_future_is_of_the_time_that_a_window_meets(kind: str) -> None:
    """A time that a processor sets is held to `max_future_ms` as a record's own is."""
    driver = windowed(kind, Timed, now_ms=1_000, max_future_ms=100)
    for at in (990, 1_100, 1_101, 2**41, 995):
        driver.pipe("in", key=b"a", value=b'{"at":%d}' % at, timestamp=1_000)
    dead_letters = [parse_dead_letter(as_consumed(record)) for record in driver.read("in-dlq")]
    assert [dead_letter.record.offset for dead_letter in dead_letters] == [2, 3]
    assert "in the future; max_future_ms=100" in dead_letters[0].message
    assert driver.task.times.operators[0].stream_time_ms == 1_100


def test_a_punctuations_record_too_far_ahead_is_skipped() -> None:
    """It has no source record, so it is counted and has no other effect."""

    class Ticking(Processor):
        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            wall = PunctuationType.WALL_CLOCK_TIME
            context.schedule(10, wall, lambda now: self.context.forward(Record("k", {}, 2**41)))

        def process(self, record: Record) -> None:
            self.context.forward(record)

    driver = windowed("tumbling_window", Ticking, max_future_ms=100)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    driver.advance_wall_clock(10)
    assert (driver.task.metrics.skipped_total, driver.task.times.operators[0].stream_time_ms) == (1, 5)


@pytest.mark.parametrize("at", ["-1", "9223372036854775808", "1.5", "null"])
def test_an_invalid_time_is_rejected_when_forwarded(at: str) -> None:
    """A record with a negative or a missing time is rejected with a message that says so."""
    builder = StreamsBuilder()
    builder.stream("in").process(Timed, name="timed").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for time in (at, "0", "9223372036854775807"):
        driver.pipe("in", key=b"a", value=b'{"at":%s}' % time.encode(), timestamp=5)
    (dead_letter,) = [parse_dead_letter(as_consumed(record)) for record in driver.read("in-dlq")]
    assert (dead_letter.stage, dead_letter.record.offset) == ("process", 0)
    assert dead_letter.message.startswith("a record's timestamp must be a whole number of ms from 0 to 2^63 - 1, got ")
    assert [record.timestamp for record in driver.read("out")] == [0, 2**63 - 1]
