"""The outcome of an error behind a store, in a punctuation and in a commit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.common.errors import DataError, ProcessingFailed
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Count, Max
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers, ExceptionHandler
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
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
def test_a_result_that_a_node_refuses_is_left_out(handler: ExceptionHandler, columns_min: int) -> None:
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


def test_what_was_left_out_stays_so_after_a_restart() -> None:
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


def test_what_a_node_had_sent_on_is_taken_back() -> None:
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
