"""User code: functions that return a coroutine or generator, copies of values that it may change, and forwarded
headers."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

from penstock.shared.clients.dead_letters.dead_letter import MESSAGE
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count
from penstock.shared.streams.dsl.builder import Stream, StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.user_code import plain, require_callable, user_copy
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


async def later(*_: Any) -> Any:
    """A coroutine function."""


async def stream_of(*_: Any) -> AsyncIterator[int]:
    """An async generator function."""
    yield 1


def piece_by_piece(*_: Any) -> Iterator[int]:
    """A generator function."""
    yield 1


class Callback:
    """A callable object that is async, with an async method."""

    async def __call__(self, *_: Any) -> Any:
        """Called."""

    async def method(self, *_: Any) -> Any:
        """Called by name."""


class AsyncProcess(Processor):
    """A processor with an async `process`."""

    async def process(self, record: Record) -> None:  # type: ignore[override]
        self.context.forward(record)


class GeneratorProcess(Processor):
    """A processor whose `process` is a generator function."""

    def process(self, record: Record) -> Iterator[Record]:  # type: ignore[override]
        yield record


class AsyncInit(Processor):
    """A processor with an async `init`."""

    async def init(self, context: ProcessorContext) -> None:  # type: ignore[override]
        super().init(context)

    def process(self, record: Record) -> None:
        self.context.forward(record)


UNFINISHED = [
    later,
    stream_of,
    piece_by_piece,
    Callback(),
    Callback().method,
    functools.partial(later, 1),
    functools.partial(functools.partial(Callback(), 1), 2),
]

USES: dict[str, Callable[[Stream, Any], Any]] = {
    "filter: predicate": lambda s, f: s.filter(f),
    "filter_not: predicate": lambda s, f: s.filter_not(f),
    "map_values: mapper": lambda s, f: s.map_values(f),
    "map: mapper": lambda s, f: s.map(f),
    "key_by: selector": lambda s, f: s.key_by(f),
    "peek: action": lambda s, f: s.peek(f),
    "foreach: action": lambda s, f: s.foreach(f),
    "branch: predicate": lambda s, f: s.branch(f),
    "to: encode": lambda s, f: s.to("out", f),
    "join: joiner": lambda s, f: s.join(s._builder.table("t"), f),
    "join: key": lambda s, f: s.join(s._builder.global_table("g"), max, key=f),
    "value": lambda s, f: s._builder.stream("other", f),
    "process: supplier": lambda s, f: s.process(f),
    "Aggregate: initializer": lambda s, f: Aggregate(f, max, max),
    "Aggregate: aggregator": lambda s, f: Aggregate(dict, f, max),
    "Aggregate: merger": lambda s, f: Aggregate(dict, max, f),
}


@pytest.mark.parametrize("function", UNFINISHED, ids=range(len(UNFINISHED)))
@pytest.mark.parametrize("use", USES)
def test_rejected_when_the_topology_is_written(use: str, function: Any) -> None:
    """A coroutine or generator function is rejected, even if it is wrapped. The error names the argument."""
    with pytest.raises(ConfigError, match=f"^{use}.*plain function"):
        USES[use](StreamsBuilder().stream("in"), function)


@pytest.mark.parametrize("function", [later, stream_of])
def test_flat_map_functions_may_be_generators(function: Any) -> None:
    """flat_map_values accepts a function that returns a generator. flat_map and flat_map_values reject coroutine and
    async generator functions."""
    for name in ("flat_map", "flat_map_values"):
        with pytest.raises(ConfigError, match=f"{name}: mapper"):
            getattr(StreamsBuilder().stream("in"), name)(function)
    builder = StreamsBuilder()
    builder.stream("in").flat_map_values(lambda v: (v["n"] + i for i in range(2))).to("out")
    assert outcome(builder) == ([b"1", b"2"], [])


@pytest.mark.parametrize("made", [AsyncProcess, GeneratorProcess, AsyncInit])
@pytest.mark.parametrize("way", ["process", "process_values"])
def test_processors(made: type[Processor], way: str) -> None:
    """A Processor with an async method is rejected: a class at once, and the result of another supplier when the task
    is created."""
    with pytest.raises(ConfigError, match=rf"{way}: {made.__name__}: (process|init)\(\)"):
        getattr(StreamsBuilder().stream("in"), way)(made)
    builder = StreamsBuilder()
    getattr(builder.stream("in"), way)(lambda: made()).to("out")
    with pytest.raises(ConfigError, match=rf"{made.__name__}: (process|init)\(\)"):
        TopologyTestDriver(builder.build(), errors=ErrorHandlers())


@pytest.mark.parametrize("method", ["add", "bind", "copy"])
def test_aggregations(method: str) -> None:
    """An aggregation class of the user with an async method is rejected."""
    own = type("Own", (Count,), {method: later})
    with pytest.raises(ConfigError, match=rf"n: {method}\(\)"):
        StreamsBuilder().stream("in").group_by_key().session_window(5).aggregate("s", n=own())


def outcome(builder: StreamsBuilder) -> tuple[list[bytes | None], list[str]]:
    """Return the results and the dead letters' errors of one record."""
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b'{"n":1}', timestamp=5)
    out = driver.read("out") if "out" in driver.topology.output_topics() else []
    messages = [(text or b"").decode() for r in driver.read("in-dlq") for n, text in r.headers if n == MESSAGE]
    return [r.value for r in out], messages


RETURNED: dict[str, Callable[[Stream], Any]] = {
    "filter: predicate": lambda s: s.filter(lambda r: later(r)).to("out"),  # type: ignore[arg-type, return-value]
    "filter_not: predicate": lambda s: s.filter_not(lambda r: later(r)).to("out"),  # type: ignore[arg-type, return-value]
    "map_values: mapper": lambda s: s.map_values(lambda v: later(v)).to("out", lambda r: (None, b"lost")),
    "key_by: selector": lambda s: s.key_by(lambda r: later(r)).to("out", lambda r: (None, b"lost")),
    "peek: action": lambda s: s.peek(lambda r: piece_by_piece(r)).to("out"),  # type: ignore[arg-type]
    "foreach: action": lambda s: s.foreach(lambda r: later(r)),  # type: ignore[arg-type]
    "branch: predicate": lambda s: s.branch(lambda r: later(r))[0].to("out"),  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize("use", RETURNED)
def test_a_coroutine_that_a_plain_function_returns(use: str) -> None:
    """If a plain function returns a coroutine, its record becomes a dead letter and has no result."""
    builder = StreamsBuilder()
    RETURNED[use](builder.stream("in"))
    results, (message,) = outcome(builder)
    assert results == []
    assert message.startswith(use)
    assert "has yet to run" in message


@pytest.mark.parametrize("way", ["process", "process_values"])
def test_a_coroutine_that_process_returns(way: str) -> None:
    """If `process` returns a coroutine, its record becomes a dead letter that names the processor class."""

    class Delegates(Processor):
        def process(self, record: Record) -> None:
            return later(record)  # type: ignore[return-value]

    builder = StreamsBuilder()
    getattr(builder.stream("in"), way)(Delegates, name="own").to("out")
    results, (message,) = outcome(builder)
    assert results == []
    assert "Delegates.process() returned a coroutine" in message
    assert ("'own': " in message) == (way == "process")


def test_schedules() -> None:
    """`schedule` rejects an async callback. If a plain callback returns a coroutine, that is an error of the
    callback."""

    class Scheduling(Processor):
        def __init__(self, callback: Any) -> None:
            self._callback = callback

        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            context.schedule(5, PunctuationType.STREAM_TIME, self._callback)

        def process(self, record: Record) -> None:
            self.context.forward(record)

    def scheduling(callback: Any) -> StreamsBuilder:
        builder = StreamsBuilder()
        builder.stream("in").process(lambda: Scheduling(callback)).to("out")
        return builder

    with pytest.raises(ConfigError, match="schedule: callback"):
        TopologyTestDriver(scheduling(Callback().method).build(), errors=ErrorHandlers())
    results, (message,) = outcome(scheduling(lambda now: later(now)))
    assert results == [b'{"n":1}']
    assert message.startswith("schedule: callback returned a coroutine")


def test_a_finished_value_is_returned_unchanged() -> None:
    """A finished value is returned unchanged. Classes and built-in functions count as plain functions."""
    for value in (None, True, 0, [1], {"a": 1}, range(3)):
        assert plain("a function", lambda value=value: value)() is value
    for function in (dict, len, functools.partial(max, 1), print, Callback):
        require_callable("a function", function)


class Point(msgspec.Struct):
    """A value that can be changed."""

    x: list[int]


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "text", b"bytes"])
def test_immutable_values_are_not_copied(value: Any) -> None:
    """Numbers, text and bytes are not copied."""
    assert user_copy(value) is value


@pytest.mark.parametrize("value", [[1, [2]], {"a": {"b": [1]}}, {1, 2}, Point([1]), (1, [2]), [Point([1])]])
def test_mutable_values_are_copied_deeply(value: Any) -> None:
    """A copy is equal and of the same type, and shares nothing that can be changed."""
    copied, before = user_copy(value), repr(value)
    assert (copied, type(copied)) == (value, type(value))
    spoil(copied)
    assert repr(value) == before


def spoil(value: Any) -> None:
    """Change all that can be changed."""
    match value:
        case Point():
            spoil(value.x)
        case list() | tuple():
            for item in value:
                spoil(item)
            if isinstance(value, list):
                value.append(9)
        case dict():
            for item in value.values():
                spoil(item)
            value["new"] = 9
        case set():
            value.add(9)


class Tagging(Processor):
    def process(self, record: Record) -> None:
        assert record.headers == (("trace", b"1"),)
        self.context.forward(Record(record.key, record.value, record.timestamp, {"tag": b"2", "none": None}))


class Reading(Processor):
    def process(self, record: Record) -> None:
        assert record.headers == (("tag", b"2"), ("none", None))
        self.context.forward(record)


def test_headers_may_be_a_dict() -> None:
    """The next processor and the sink read pairs."""
    builder = StreamsBuilder()
    builder.stream("clicks").process(Tagging).process(Reading).to("tagged")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("clicks", key=b"ann", value=b"1", headers={"trace": b"1"})
    driver.commit()
    (record,) = driver.read("tagged")
    assert record.headers == (("tag", b"2"), ("none", None))


FORWARDED: dict[str, Callable[[Stream, Any], Stream]] = {
    "map": lambda s, made: s.map(lambda r: made),
    "flat_map": lambda s, made: s.flat_map(lambda r: [made]),
    "process": lambda s, made: s.process(lambda: Forwarding(made)),
    "process_values": lambda s, made: s.process_values(lambda: Forwarding(made)),
}


class Forwarding(Processor):
    def __init__(self, made: Any) -> None:
        self._made = made

    def process(self, record: Record) -> None:
        self.context.forward(self._made)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (("k", 1), "a node must forward a Record, got tuple"),
        (None, "a node must forward a Record, got NoneType"),
        (Record("a", 1, 0, None), "a record's headers must be pairs or a dict, got NoneType"),  # type: ignore[arg-type]
        (Record("a", 1, 0, {"n": "x"}), "topic out, header 0 'n': the value must be bytes, got str"),  # type: ignore[dict-item]
        (Record("a", 1, 0, (1,)), "topic out, header 0: not a pair of a name and a value"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("use", FORWARDED)
def test_invalid_records_are_rejected(use: str, made: Any, message: str) -> None:
    """The error of anything but a Record says what it is, and that of an invalid header names the header."""
    builder = StreamsBuilder()
    FORWARDED[use](builder.stream("in"), made).to("out")
    assert outcome(builder) == ([], [message])
