"""The calls of the DSL that are rejected while a topology is built. The error names the argument."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Count, Mean, Sum
from penstock.shared.streams.dsl.builder import GlobalTable, Stream, StreamsBuilder, Table, WindowedTable
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stateless import SameKey
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor


class Click(msgspec.Struct):
    """A value of one type."""

    ms: int


class View(msgspec.Struct):
    """A value of another type."""

    ms: int


class Plain:
    """A class that msgspec cannot decode."""


class Page(msgspec.Struct):
    """A value that contains itself, and a class that msgspec cannot decode."""

    next: Page | None
    parts: dict[str, tuple[int, Plain]]


def clicks(builder: StreamsBuilder | None = None) -> Stream:
    return (builder or StreamsBuilder()).stream("clicks")


def counted(builder: StreamsBuilder | None = None) -> WindowedTable:
    return clicks(builder).group_by_key().session_window(10).aggregate("s", n=Count())


def pair(left: Any, right: Any) -> Any:
    return [left, right]


WRONG: list[tuple[str, Callable[[], Any]]] = [
    ("filter: predicate must be callable, got 3", lambda: clicks().filter(3)),  # type: ignore[arg-type]
    ("filter_not: predicate must be", lambda: clicks().filter_not(None)),  # type: ignore[arg-type]
    ("map_values: mapper must be", lambda: clicks().map_values("x")),  # type: ignore[arg-type]
    ("flat_map_values: mapper must be", lambda: clicks().flat_map_values("x")),  # type: ignore[arg-type]
    ("map: mapper must be", lambda: clicks().map("x")),  # type: ignore[arg-type]
    ("flat_map: mapper must be", lambda: clicks().flat_map("x")),  # type: ignore[arg-type]
    ("key_by: selector must be", lambda: clicks().key_by("user")),  # type: ignore[arg-type]
    ("peek: action must be", lambda: clicks().peek(0)),  # type: ignore[arg-type]
    ("foreach: action must be", lambda: clicks().foreach(0)),  # type: ignore[arg-type]
    ("branch: predicate must be", lambda: clicks().branch(0)),  # type: ignore[arg-type]
    ("branch: at least one predicate", lambda: clicks().branch()),
    ("process: supplier", lambda: clicks().process(3)),  # type: ignore[arg-type]
    ("process: supplier returned None", lambda: clicks().process(lambda: None)),  # type: ignore[arg-type,return-value]
    ("process: supplier returned <object .*, not a Processor", lambda: clicks().process(lambda: object())),  # type: ignore[arg-type,return-value]
    ("process: supplier is the class int, not a sub", lambda: clicks().process(int)),  # type: ignore[arg-type]
    ("process: supplier is called without .*'processor'", lambda: clicks().process(SameKey)),  # type: ignore[arg-type]
    ("process_values: supplier is called without .*'r'", lambda: clicks().process_values(lambda r: r)),  # type: ignore[arg-type]
    ("process: supplier .* the same", lambda: clicks().process(functools.cache(Processor))),
    ("process_values: supplier .* the same", lambda: clicks().process_values(functools.cache(Processor))),
    ("join: joiner must be", lambda: clicks().join(clicks(), 3, JoinWindows.of(5))),  # type: ignore[arg-type]
    ("join: windows must be JoinWindows", lambda: clicks().join(clicks(), pair, 5)),  # type: ignore[arg-type]
    ('stream: key must be "string" or "bytes"', lambda: StreamsBuilder().stream("c", key="int")),  # type: ignore[arg-type]
    ('key_by: key must be "string"', lambda: clicks().key_by(str, key="int")),  # type: ignore[arg-type]
    ("global_table: key must be", lambda: StreamsBuilder().global_table("c", key="int")),  # type: ignore[arg-type]
    ("add_store: key must be", lambda: StreamsBuilder().add_store("c", key="int")),  # type: ignore[arg-type]
    ("stream: topic must be a topic's name", lambda: StreamsBuilder().stream("")),
    ("stream: late must be a topic's name", lambda: StreamsBuilder().stream("c", late="a b")),
    ("global_table: topic must be", lambda: StreamsBuilder().global_table("a/b")),
    ("to: topic must be .* got 'bad topic!'", lambda: clicks().to("bad topic!")),
    ("session_window: gap must be .* got '30m'", lambda: clicks().group_by_key().session_window("30m")),  # type: ignore[arg-type]
    ("session_window: gap must be", lambda: clicks().group_by_key().session_window(None)),  # type: ignore[arg-type]
    ("session_window: gap must be", lambda: clicks().group_by_key().session_window(math.nan)),  # type: ignore[arg-type]
    ("tumbling_window: size must be", lambda: clicks().group_by_key().tumbling_window(math.inf)),  # type: ignore[arg-type]
    ("hopping_window: advance must be", lambda: clicks().group_by_key().hopping_window(5, 0)),
    ("sliding_window: difference must be", lambda: clicks().group_by_key().sliding_window(-1)),
    ("grace must be", lambda: clicks().group_by_key().session_window(5, None)),  # type: ignore[arg-type]
    ("JoinWindows: before_ms must be", lambda: JoinWindows(timedelta(seconds=1), 5)),  # type: ignore[arg-type]
    ("JoinWindows: difference must be", lambda: JoinWindows.of("5s")),  # type: ignore[arg-type]
    (
        r"n is the class Count; an aggregation is made of it: Count\(",
        lambda: clicks().group_by_key().session_window(5).aggregate("s", n=Count),  # type: ignore[arg-type]
    ),
    ("n must be an aggregation", lambda: clicks().group_by_key().session_window(5).aggregate("s", n=3)),  # type: ignore[arg-type]
    ("name must be text", lambda: clicks().group_by_key().session_window(5).aggregate(Count(), n=Count())),  # type: ignore[arg-type]
    ("key_by: name must be text, got 3", lambda: clicks().key_by(str, name=3)),  # type: ignore[arg-type]
    ("map: name must be text, got ''", lambda: clicks().map(lambda r: r, name="")),
    ("group_by: name|key_by: name", lambda: clicks().group_by(str, name=b"x")),  # type: ignore[arg-type]
    ("process: name must be text", lambda: clicks().process(Processor, name=3)),  # type: ignore[arg-type]
    ("join: name must be text", lambda: clicks().join(clicks(), pair, JoinWindows.of(5), name=3)),  # type: ignore[arg-type]
    ("table: name must be text", lambda: StreamsBuilder().table("t", name=3)),  # type: ignore[arg-type]
    ("global_table: name must be text", lambda: StreamsBuilder().global_table("t", name=3)),  # type: ignore[arg-type]
    ("add_store: name must be text", lambda: StreamsBuilder().add_store("")),
    ("add_store: a store needs a name", lambda: StreamsBuilder().add_store(None)),  # type: ignore[arg-type]
    ("value=Plain: msgspec", lambda: StreamsBuilder().stream("t", Plain)),
    ("value=Plain: msgspec", lambda: StreamsBuilder().table("t", Plain)),
    ("value=Plain: msgspec", lambda: StreamsBuilder().global_table("t", Plain)),
    ("value=Plain: msgspec", lambda: StreamsBuilder().add_store("t", Plain)),
    ("add_store: value must be a type", lambda: StreamsBuilder().add_store("t", lambda topic, data: data)),
    ("value=list: msgspec cannot decode the class Plain", lambda: StreamsBuilder().stream("t", list[Plain])),
    ("value=Page: msgspec cannot decode the class Plain", lambda: StreamsBuilder().stream("t", Page)),
    ("ErrorHandlers: deserialize must be one of dead_letter", lambda: ErrorHandlers("nope")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("message", "call"), WRONG, ids=range(len(WRONG)))
def test_arguments(message: str, call: Callable[[], Any]) -> None:
    """An invalid argument raises ConfigError, which names it."""
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_decorated_supplier_needs_no_arguments_of_its_own() -> None:
    """A supplier whose decorator fills in its arguments is accepted, although it keeps the signature that it wraps."""

    def made_with(processor: Processor) -> Processor:
        return SameKey(processor)

    @functools.wraps(made_with)
    def supplier() -> Processor:
        return made_with(Processor())

    clicks().process(supplier)  # type: ignore[arg-type]
    clicks().process_values(supplier)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["by user", "by/user", "x" * 240])
def test_names_that_topics_are_made_of(name: str) -> None:
    """A name is validated only if an internal topic is named after it."""
    for call in (
        lambda: clicks().key_by(str, name=name).group_by_key(),
        lambda: clicks().group_by(str, name=name),
        lambda: clicks().process(Processor, name=name).repartition(),
    ):
        with pytest.raises(ConfigError, match=r"name='.*235"):
            call()
    builder = StreamsBuilder()
    clicks(builder).key_by(str, name=name).to("out")
    builder.build()


def test_a_name_that_is_too_long_with_the_application_before_it() -> None:
    """A name's length is checked once the application is known, before any topic is created."""
    builder = StreamsBuilder()
    clicks(builder).key_by(str, name="x" * 200).repartition().to("out")
    topology = builder.build()
    assert topology.of_application("a" * 36).internal_topics() == ["a" * 36 + "-" + "x" * 200 + "-repartition"]
    with pytest.raises(ConfigError, match=r"'aaa.*250.*249"):
        topology.of_application("a" * 37)


def test_windows_need_a_key_by() -> None:
    """A windowed result cannot be grouped or joined by its window. The error names key_by."""
    builder = StreamsBuilder()
    table, results = builder.table("users"), counted(builder).on_close()
    for call in (
        results.group_by_key,
        results.repartition,
        lambda: results.join(table, pair),
        lambda: results.left_join(builder.stream("x"), pair, JoinWindows.of(5)),
        lambda: builder.stream("y").join(results, pair, JoinWindows.of(5)),
        results.filter(lambda r: True).map_values(lambda v: v.results).group_by_key,
    ):
        with pytest.raises(ConfigError, match=r"the keys are windows.*key_by"):
            call()


def test_two_builders() -> None:
    """Streams and tables of two builders cannot be combined."""
    other = StreamsBuilder()
    sides: list[tuple[Stream | Table | GlobalTable, dict[str, Any]]] = [
        (other.stream("b"), {"windows": JoinWindows.of(5)}),
        (other.table("t"), {}),
        (other.global_table("g"), {"key": lambda r: r.key}),
    ]
    for side, how in sides:
        with pytest.raises(ConfigError, match=r"join.*StreamsBuilders"):
            clicks().join(side, pair, **how)
    with pytest.raises(ConfigError, match="merge: the two sides"):
        clicks().merge(other.stream("c"))


def test_mixed_values() -> None:
    """Merged streams of two types can be written and counted.

    To be repartitioned, summed or joined they need one type.
    """
    builder = StreamsBuilder()
    merged = builder.stream("a", Click).merge(builder.stream("b", View))
    merged.to("out")
    merged.group_by_key().session_window(5).aggregate("n", n=Count()).on_close().to("counts")
    with pytest.raises(ConfigError, match=r"aggregate\('m'\).*different types.*Click, View.*map_values"):
        merged.filter(lambda r: True).group_by_key().session_window(5).aggregate("m", ms=Sum("ms"))
    with pytest.raises(ConfigError, match=r"repartition: .*different types"):
        merged.key_by(lambda r: "k").group_by_key()
    with pytest.raises(ConfigError, match="different types"):
        merged.join(builder.table("t"), pair)
    same = merged.map_values(lambda v: Click(v.ms), value=Click)
    same.group_by_key().session_window(5).aggregate("s", ms=Sum("ms")).on_close().to("sums")
    builder.build()


def test_an_aggregate_needs_one_emission() -> None:
    """An aggregate needs exactly one of on_close() and on_update()."""
    builder = StreamsBuilder()
    windows = counted(builder)
    with pytest.raises(ConfigError, match=r"aggregate\('s'\): say when"):
        builder.build()
    windows.on_close()
    builder.build()
    with pytest.raises(ConfigError, match="either on_close"):
        windows.on_update()


def test_each_of_two_aggregates_with_one_name_needs_an_emission() -> None:
    """The emission of the first aggregate is not that of the second."""
    builder = StreamsBuilder()
    grouped = clicks(builder).group_by_key()
    windows = [grouped.session_window(10).aggregate("s", n=Count()) for _ in range(2)]
    windows[0].on_close()
    with pytest.raises(ConfigError, match=r"aggregate\('s'\): say when"):
        builder.build()


@pytest.mark.parametrize("is_rekeyed", [False, True])
def test_loops(is_rekeyed: bool) -> None:
    """A sink is rejected if its records come from its own topic, also through an intermediate topic."""
    builder = StreamsBuilder()
    stream = clicks(builder)
    (stream.key_by(lambda r: "k").repartition() if is_rekeyed else stream).to("clicks")
    with pytest.raises(ConfigError, match=r"to\('clicks'\).*'clicks'"):
        builder.build()


def test_a_topic_of_another_branch_is_no_loop() -> None:
    """A sink may write a topic from which other records of the topology come."""
    builder = StreamsBuilder()
    builder.table("users")
    clicks(builder).to("users")
    assert "users" in builder.build().output_topics()


def looped(late: str | None = None, dead_letters: str | None = None, to: str = "out", *, rekeyed: bool = False) -> Any:
    """Return a topology with sessions of "a" and a stream from "b" to a topic."""
    builder = StreamsBuilder()
    stream = builder.stream("a", late=late, dead_letters=dead_letters)
    (stream.key_by(lambda r: "k") if rekeyed else stream).group_by_key().session_window(10).aggregate(
        "s", n=Count()
    ).on_close().to("sessions")
    builder.stream("b", dead_letters="b-dlq").to(to)
    return builder.build()


@pytest.mark.parametrize("rekeyed", [False, True])
@pytest.mark.parametrize("argument", ["late", "dead_letters"])
def test_late_records_and_dead_letters_may_not_return(argument: str, rekeyed: bool) -> None:
    """Late records and dead letters may not return to their own stream, also not through another stream of the
    topology."""
    with pytest.raises(ConfigError, match=rf"{argument}='a'"):
        looped(**{argument: "a"}, rekeyed=rekeyed)
    with pytest.raises(ConfigError, match=r"to\('a'\).*'a'.*by way of"):
        looped(**{argument: "b"}, to="a", rekeyed=rekeyed)


def test_another_stream_may_read_dead_letters() -> None:
    """Another stream may read a stream's dead letters. A stream without windows has no late records, so its late topic
    may be its source."""
    assert "b" in looped(dead_letters="b").output_topics()
    builder = StreamsBuilder()
    builder.stream("a", late="a").to("out")
    builder.build()


def test_loops_of_two_streams() -> None:
    """Two streams that write to each other's source are a loop."""
    builder = StreamsBuilder()
    builder.stream("a").to("b")
    builder.stream("b").to("a")
    with pytest.raises(ConfigError, match=r"to\('a'\).*'a'.*by way of b"):
        builder.build()


def windows_of(builder: StreamsBuilder) -> Any:
    return builder.stream("in", value=Click).group_by_key().session_window(10)


@pytest.mark.parametrize("name", ["key", "start", "end"])
def test_reserved_result_names(name: str) -> None:
    """A result may not have the name of a part of its window."""
    with pytest.raises(ConfigError, match=rf"aggregate\('s'\).*{name}"):
        windows_of(StreamsBuilder()).aggregate("s", **{name: Count()})


def test_no_aggregation() -> None:
    """An aggregate without aggregations is rejected by its name."""
    with pytest.raises(ConfigError, match=r"aggregate\('s'\): at least one"):
        windows_of(StreamsBuilder()).aggregate("s")


def test_no_such_field() -> None:
    """A field that the stream's type lacks is rejected when the topology is built."""
    with pytest.raises(ConfigError, match=r"mean\('msec'\).*Click.*ms"):
        windows_of(StreamsBuilder()).aggregate("s", ms=Mean("msec"))


def test_a_store_name_is_taken_once() -> None:
    """Two stores of one name are rejected, and so is one table emitted twice."""
    builder = StreamsBuilder()
    table = windows_of(builder).aggregate("s", n=Count())
    table.on_close().to("out")
    with pytest.raises(ConfigError, match="store 's'"):
        table.on_update()


def test_a_topic_has_one_source() -> None:
    """Reading one topic twice is rejected. The stream must be branched instead."""
    builder = StreamsBuilder()
    builder.stream("in")
    with pytest.raises(ConfigError, match="topic 'in'"):
        builder.stream("in")


def test_a_processor_name_is_taken_once() -> None:
    """Two processors of one name are rejected."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    stream.process(Processor, name="mine")
    with pytest.raises(ConfigError, match="name 'mine'"):
        stream.process(Processor, name="mine")


@pytest.mark.parametrize("operation", ["process", "process_values"])
def test_a_processor_uses_stores_that_were_added(operation: str) -> None:
    """`build` rejects a processor that names an unknown store. A store may be added after its processor."""
    builder = StreamsBuilder()
    getattr(clicks(builder), operation)(Processor, "counts", name="mine")
    with pytest.raises(ConfigError, match=r"'mine'.*'counts'"):
        builder.build()
    builder.add_store("counts")
    assert builder.build().stores.keys() == {"counts"}


def test_a_global_table_comes_before_its_processor() -> None:
    """A processor knows only the global tables that were added before it; `build` rejects later ones."""
    builder = StreamsBuilder()
    clicks(builder).process(Processor, "airports", name="mine")
    builder.global_table("airports")
    with pytest.raises(ConfigError, match=r"'mine'.*'airports'.*before"):
        builder.build()


def test_nothing_defined() -> None:
    """A topology without a stream is rejected."""
    with pytest.raises(ConfigError, match="no stream was defined"):
        StreamsBuilder().build()


@pytest.mark.parametrize("value", [None, 3, "json", len, lambda data: data], ids=range(5))
def test_no_type(value: Any) -> None:
    """A value type that is neither a type nor a deserializer, a function of a topic and bytes, is rejected."""
    with pytest.raises(ConfigError, match="value"):
        StreamsBuilder().stream("in", value=value)


@pytest.mark.parametrize(("gap", "grace"), [(0, 0), (-1, 0), (1.5, 0), (1, -1)])
def test_durations(gap: Any, grace: Any) -> None:
    """A gap below 1 ms, a fractional gap and a negative grace are rejected."""
    with pytest.raises(ConfigError, match="whole number of ms"):
        StreamsBuilder().stream("in").group_by_key().session_window(gap, grace)
