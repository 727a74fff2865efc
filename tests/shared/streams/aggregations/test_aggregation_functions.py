"""Aggregation functions: results, merging, states as columns, the types of fields, and the values that each rejects."""

from __future__ import annotations

import math
import typing
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from itertools import permutations
from typing import Annotated, Any, NewType, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypeAliasType

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.records import INT64_MAX, INT64_MIN
from penstock.shared.streams.aggregations.aggregation import (
    Aggregate,
    Aggregation,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    Sum,
    field_types,
)
from penstock.shared.streams.aggregations.collect import CollectList, CollectSet
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.aggregations.latest import Latest
from penstock.shared.streams.aggregations.quantiles import KLL_K, RANKS, RANKS_MAX, Quantiles
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.windows.object_states import KLL_BYTES_MAX
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

Millis = NewType("Millis", int)
Timeout = NewType("Timeout", Millis)


class Flight(msgspec.Struct):
    """A value with a field of each kind."""

    delay: int
    speed: float
    dest: str
    maybe: int | None = None
    either: int | float = 0
    flag: bool = False
    limited: Annotated[int, msgspec.Meta(ge=0)] = 0
    named: Timeout | None = None


@dataclass
class Plain:
    """A dataclass is read like a struct."""

    delay: int


class Typed(TypedDict):
    """A typed dict is read as the dict it is."""

    delay: int


def fold(aggregation: Aggregation[Any], values: list[Any]) -> Any:
    state = aggregation.initial()
    for value in values:
        state = aggregation.add(state, value)
    return state


def of(*values: Any) -> list[dict[str, Any]]:
    return [{"x": value} for value in values]


NUMERIC: list[tuple[Aggregation[Any], Any]] = [(Sum("x"), 6.0), (Min("x"), 1.0), (Max("x"), 3.0), (Mean("x"), 2.0)]
ALL: list[Aggregation[Any]] = [Count(), *(a for a, _ in NUMERIC), CountDistinct("x"), Aggregate(int, max, max)]


@pytest.mark.parametrize(("aggregation", "expected"), NUMERIC)
def test_numbers(aggregation: Aggregation[Any], expected: float) -> None:
    """No values yield None, one value itself, several values the aggregate. A None among them is ignored."""
    assert aggregation.result(aggregation.initial()) is None
    assert aggregation.result(fold(aggregation, of(None))) is None
    assert aggregation.result(fold(aggregation, of(-7))) == -7
    assert aggregation.result(fold(aggregation, of(3, None, 1, 2, None))) == expected


def test_count_counts_records() -> None:
    """Count counts records, whatever their values."""
    assert Count().result(fold(Count(), [])) == 0
    assert Count().result(fold(Count(), [None, {}, 3])) == 3


def test_a_users_own() -> None:
    """Aggregate runs the user's three functions and keeps its state as JSON of the declared type."""
    longest = Aggregate(str, lambda state, value: max(state, value, key=len), lambda a, b: max(a, b, key=len), str)
    state = fold(longest, ["ab", "abcd", "c"])
    assert (longest.result(state), longest.to_columns(state)) == ("abcd", (b'"abcd"',))
    assert longest.merge(longest.from_columns((b'"abcde"',)), state) == "abcde"
    assert longest.result(longest.initial()) == ""


@pytest.mark.parametrize("aggregation", [Sum("delay"), Min("delay"), Max("delay"), Mean("delay")])
@given(st.lists(st.integers(-1_000, 1_000)), st.integers(0, 50))
def test_merged_equals_sequential(aggregation: Aggregation[Any], numbers: list[int], cut: int) -> None:
    """Two merged parts have the result of the whole, and the parts stay unchanged."""
    bound = aggregation.bind(Flight)
    flights = [Flight(n, 0.0, "") for n in numbers]
    a, b = fold(bound, flights[:cut]), fold(bound, flights[cut:])
    before = (a, b)
    assert bound.merge(a, b) == fold(bound, flights)
    assert (a, b) == before


@pytest.mark.parametrize("aggregation", ALL)
def test_merging_nothing_changes_nothing(aggregation: Aggregation[Any]) -> None:
    """The state of no records is neutral on both sides."""
    values = [4, 2] if isinstance(aggregation, Aggregate) else of(4, 2)
    state = fold(aggregation, values)
    for merged in (aggregation.merge(state, aggregation.initial()), aggregation.merge(aggregation.initial(), state)):
        assert aggregation.result(merged) == aggregation.result(state)


@pytest.mark.parametrize("aggregation", ALL)
@pytest.mark.parametrize("numbers", [[], [5], [3, -4, 3]])
def test_columns_round_trip(aggregation: Aggregation[Any], numbers: list[int]) -> None:
    """A state converted to columns and back has the same result, and the columns have the declared types."""
    state = fold(aggregation, numbers if isinstance(aggregation, Aggregate) else of(*numbers))
    columns = aggregation.to_columns(state)
    types = {"int64": int, "float64": float, "binary": bytes}
    assert [type(value) for value in columns] == [types[column.type] for column in aggregation.state_columns]
    again = aggregation.from_columns(columns)
    assert aggregation.result(again) == aggregation.result(state)
    assert aggregation.to_columns(again) == columns


@pytest.mark.parametrize("aggregation", [Sum("x"), Max("x")])
def test_a_result_does_not_change_by_being_kept(aggregation: Aggregation[Any]) -> None:
    """A result is encoded alike before and after its state is written and read."""
    state = fold(aggregation, of(3, 4))
    kept = aggregation.from_columns(aggregation.to_columns(state))
    assert msgspec.json.encode(aggregation.result(state)) == msgspec.json.encode(aggregation.result(kept))


@pytest.mark.parametrize(
    "aggregation", [CountDistinct("x"), Quantiles("x"), CollectList("x"), Aggregate(int, max, max)]
)
def test_a_cut_state_is_no_state(aggregation: Aggregation[Any]) -> None:
    """Whatever library decodes a state, a state that was cut short raises ValueError."""
    first, *rest = aggregation.to_columns(aggregation.initial())
    assert isinstance(first, bytes)
    for data in (first[:-1], b""):
        with pytest.raises(ValueError):  # each library has its own message
            aggregation.from_columns((data, *rest))


# --- rejections ---


@pytest.mark.parametrize("aggregation", [Sum("x"), Min("x"), Max("x"), Mean("x")])
@pytest.mark.parametrize("wrong", ["3", [1], {"a": 1}])
def test_a_value_that_is_not_a_number_is_rejected(aggregation: Aggregation[Any], wrong: Any) -> None:
    """A value that is not a number raises DataError, which names the field and the function."""
    with pytest.raises(DataError, match=rf"{aggregation.function}\('x'\).*number"):
        aggregation.add(aggregation.initial(), {"x": wrong})


@pytest.mark.parametrize("value", [{}, None, 7, "text", [1], b"x"])
@pytest.mark.parametrize("aggregation", [Sum("x"), CountDistinct("x")])
def test_a_missing_field_is_rejected(aggregation: Aggregation[Any], value: Any) -> None:
    """A value without the field, or without any fields, raises DataError, which names the field."""
    with pytest.raises(DataError, match="no field 'x'"):
        aggregation.add(aggregation.initial(), value)


@pytest.mark.parametrize("aggregation", [Sum("delay"), CountDistinct("dest")])
def test_a_tombstone_in_a_typed_stream_is_rejected(aggregation: Aggregation[Any]) -> None:
    """A null value where structs are expected is a DataError, not a crash."""
    bound = aggregation.bind(Flight)
    with pytest.raises(DataError, match="no field"):
        bound.add(bound.initial(), None)


def test_a_fraction_in_an_integer_field_is_rejected() -> None:
    """An int64 aggregation does not round."""
    bound = Sum("delay").bind(Flight)
    with pytest.raises(DataError, match=r"1\.5 .*integer"):
        bound.add(bound.initial(), Flight(1.5, 0.0, ""))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sum", "min", "max", "mean"])
@pytest.mark.parametrize("number", [INT64_MAX + 1, INT64_MIN - 1, 10**40])
def test_a_value_beyond_64_bits_is_rejected(name: str, number: int) -> None:
    """JSON's integers are unlimited, but the state's columns are not. Even the first value must fit."""
    bound = {"sum": Sum, "min": Min, "max": Max, "mean": Mean}[name]("delay").bind(Flight)
    with pytest.raises(DataError, match=rf"{name}\('delay'\).*64 bits"):
        bound.add(bound.initial(), Flight(number, 0.0, ""))


def test_a_sum_beyond_64_bits_is_rejected() -> None:
    """A sum that exceeds 64 bits by adding or merging raises DataError. The largest sum that fits is kept."""
    bound = Sum("delay").bind(Flight)
    state = fold(bound, [Flight(INT64_MAX, 0.0, "")])
    one = fold(bound, [Flight(1, 0.0, "")])
    for overflow in (lambda: bound.add(state, Flight(1, 0.0, "")), lambda: bound.merge(state, one)):
        with pytest.raises(DataError, match="64 bits"):
            overflow()
    assert bound.result(state) == INT64_MAX
    assert bound.result(bound.add(state, Flight(-1, 0.0, ""))) == INT64_MAX - 1


def test_an_integer_beyond_a_float_is_rejected() -> None:
    """An integer that no float64 holds is a DataError."""
    with pytest.raises(DataError, match="float64"):
        Sum("x").add(Sum("x").initial(), {"x": 10**400})


# --- binding ---


@pytest.mark.parametrize(
    ("field", "type_"),
    [
        *(("delay", "int64"), ("maybe", "int64"), ("flag", "int64"), ("limited", "int64"), ("named", "int64")),
        ("speed", "float64"),
    ],
)
def test_bound_columns_follow_the_annotation(field: str, type_: str) -> None:
    """An int field is summed as int64, also if it is optional, constrained, boolean or a NewType. A float field is
    summed as float64."""
    bound = Sum(field).bind(Flight)
    assert [tuple(c) for c in bound.state_columns] == [("sum", type_), ("n", "int64")]
    assert bound.result_type == type_
    assert Mean(field).bind(Flight).result_type == "float64"


@pytest.mark.parametrize("aggregation", [First("named"), Last("named")])
def test_first_and_last_of_a_new_type_keep_a_number(aggregation: Aggregation[Any]) -> None:
    """A NewType of int is kept as int64, as an int is."""
    assert aggregation.bind(Flight).result_type == "int64"


ALIAS = TypeAliasType("ALIAS", int)
OPTIONAL_ALIAS = TypeAliasType("OPTIONAL_ALIAS", Annotated[ALIAS, msgspec.Meta(ge=0)] | None)


# A stream's values cannot have such a field before Python 3.12, since msgspec does not know the aliases.
@pytest.mark.parametrize("hint", [ALIAS, ALIAS | None, OPTIONAL_ALIAS])
def test_a_type_alias_counts_as_its_type(hint: Any) -> None:
    """An alias (`type Ms = int`) counts as the type that it stands for, also if that is optional or constrained."""
    assert field_types(hint) == {int}


def test_a_mixed_annotation_is_a_float() -> None:
    """A field that may be int or float is float64."""
    assert Sum("either").bind(Flight).result_type == "float64"


def test_unbound_is_float() -> None:
    """If the type is unknown, numbers are float64."""
    for value_type in (dict, Any, None):
        bound = Sum("x").bind(value_type)
        assert bound.result_type == "float64"
        assert bound.result(fold(bound, of(2))) == 2.0


def test_bind_leaves_the_original() -> None:
    """One aggregation can be bound to several types."""
    mean = Mean("delay")
    bound = mean.bind(Flight)
    assert bound.result(fold(bound, [Flight(4, 0.0, "")])) == 4.0
    assert mean.result(fold(mean, [{"delay": 6}])) == 6.0


@pytest.mark.parametrize("value_type", [Plain, Typed])
def test_bind_to_other_types(value_type: Any) -> None:
    """Dataclasses are read by attribute, typed dicts by key, both with their annotations."""
    bound = Sum("delay").bind(value_type)
    assert (bound.result_type, bound.result(fold(bound, [value_type(delay=3)]))) == ("int64", 3)


@pytest.mark.parametrize("aggregation", [Sum("dealy"), CountDistinct("dealy")])
def test_bind_rejects_an_unknown_field(aggregation: Aggregation[Any]) -> None:
    """A field that the type lacks raises ConfigError, which lists the type's fields."""
    with pytest.raises(ConfigError, match=r"'dealy'.*Flight.*delay, speed, dest, "):
        aggregation.bind(Flight)


@pytest.mark.parametrize("aggregation", [Sum("dest"), Min("dest"), Max("dest"), Mean("dest"), Quantiles("dest")])
def test_bind_rejects_what_is_no_number(aggregation: Aggregation[Any]) -> None:
    """A field of another type raises ConfigError, which names it."""
    with pytest.raises(ConfigError, match=rf"{aggregation.function}\('dest'\).*str"):
        aggregation.bind(Flight)


class Renamed(msgspec.Struct, rename="camel"):
    delay_ms: int
    ms: float | None = None
    hops: int = 1
    fast: bool = False
    tags: list[str] = msgspec.field(default_factory=list)


class Listed(msgspec.Struct, array_like=True):
    ms: float


@pytest.mark.parametrize(
    ("value_type", "aggregation", "verbatim"),
    [
        (dict, Sum("ms"), True),
        (dict[str, Any], Sum("ms"), True),
        (dict[str, datetime], Last("ms"), False),
        (Renamed, Sum("ms"), True),
        (Renamed, Sum("delay_ms"), False),
        (Renamed, Sum("hops"), False),
        (Renamed, Sum("fast"), False),
        (Renamed, CountDistinct("tags"), False),
        (Listed, Sum("ms"), False),
        (Renamed, Count(), True),
    ],
)
def test_bind_marks_fields_that_json_has_verbatim(
    value_type: Any, aggregation: Aggregation[Any], verbatim: bool
) -> None:
    """A field that has another name in JSON, a default, or another type is not verbatim."""
    assert aggregation.bind(value_type).verbatim is verbatim


@pytest.mark.parametrize("value_type", [dict[int, Any], typing.Dict])  # noqa: UP006
def test_a_dict_without_text_keys_has_no_fields(value_type: Any) -> None:
    """JSON has only text as keys."""
    with pytest.raises(ConfigError, match="typed fields"):
        Sum("ms").bind(value_type)


def test_bind_rejects_a_type_without_fields() -> None:
    """bytes and unions of structs have no fields to name."""
    for value_type in (bytes, Flight | Plain):
        with pytest.raises(ConfigError, match=r"sum\('x'\)"):
            Sum("x").bind(value_type)


# --- distinct counts ---


@pytest.mark.parametrize("number", [0, 1, 2, 25, 100])
def test_distinct_is_exact_for_small_sets(number: int) -> None:
    """A few dozen different values are counted exactly, however often each comes."""
    values = of(*(f"dest-{i}" for i in range(number))) * 3
    assert CountDistinct("x").result(fold(CountDistinct("x"), values)) == number


def test_distinct_is_near_for_large_sets() -> None:
    """Ten thousand different values are counted within 7 % (three standard errors)."""
    got = CountDistinct("x").result(fold(CountDistinct("x"), of(*range(10_000))))
    assert abs(got - 10_000) < 700


@given(st.lists(st.text("abcdef", max_size=2), max_size=30), st.integers(0, 30))
def test_distinct_merges(values: list[str], cut: int) -> None:
    """Merged sketches count a common value once, and stay unchanged."""
    distinct = CountDistinct("x")
    a, b = fold(distinct, of(*values[:cut])), fold(distinct, of(*values[cut:]))
    before = (distinct.to_columns(a), distinct.to_columns(b))
    assert distinct.result(distinct.merge(a, b)) == len(set(values))
    assert (distinct.to_columns(a), distinct.to_columns(b)) == before


def test_distinct_of_any_kind_of_value() -> None:
    """Numbers, text, booleans and nested values are counted by value, the empty string included. None is not
    counted."""
    values = of(1, 1, 2.5, "a", "a", "ä", [1, 2], [1, 2], {"k": 1}, None, "", "")
    assert CountDistinct("x").result(fold(CountDistinct("x"), values)) == 7


def test_distinct_rejects_what_is_no_text() -> None:
    """Text that UTF-8 cannot encode raises DataError."""
    with pytest.raises(DataError, match="UTF-8"):
        CountDistinct("x").add(CountDistinct("x").initial(), {"x": "\ud800"})


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("window", ["session_window", "tumbling_window", "sliding_window"])
def test_an_aggregator_that_changes_its_state_leaves_no_trace_of_a_rejected_record(window: str, restored: bool) -> None:
    """A dead letter is in no state.

    This holds for a continued and a restored task, and for any aggregation that rejected the record.
    """

    def add(state: list[Any], value: Any) -> list[Any]:
        state.append(value["v"])
        state.append(value["w"])
        return state

    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    both = {"all": Aggregate(list, add, lambda a, b: a + b), "sum": Sum("v")}
    getattr(grouped, window)(10).aggregate("s", **both).on_update().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for i, value in enumerate((b'{"v":1,"w":1}', b'{"v":2}', b'{"v":"bad","w":2}')):
        driver.pipe("in", key=b"k", value=value, timestamp=20 + i)
    if restored:
        driver.crash()
        driver.restore()
    driver.read("out")
    driver.pipe("in", key=b"k", value=b'{"v":3,"w":3}', timestamp=25)
    assert len(driver.read("in-dlq")) == 2
    results = [msgspec.json.decode(record.value or b"{}").get("all") for record in driver.read("out")]
    assert [1, 1, 3, 3] in results
    assert all(result in (None, [1, 1], [3, 3], [1, 1, 3, 3]) for result in results)


@pytest.mark.parametrize(("state_type", "good", "bad"), [(int, b"1", b"1.5"), (float, b"1.5", b'"nan"')])
def test_an_aggregate_takes_only_states_that_can_be_restored(state_type: Any, good: bytes, bad: bytes) -> None:
    """A record is a dead letter if the JSON of its new state is not of the state's type. A restore succeeds."""
    total = Aggregate(
        state_type, lambda state, v: state + (float(v) if v == "nan" else v), lambda a, b: a + b, state_type
    )
    builder = StreamsBuilder()
    builder.stream("in", value=Any).group_by_key().session_window(10).aggregate("s", total=total).on_update().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for value in (good, bad):
        driver.pipe("in", key=b"k", value=value)
    driver.crash()
    driver.restore()
    assert [record.value for record in driver.read("in-dlq")] == [bad]
    (session,) = driver.store("s").rows()
    assert session.states == [msgspec.json.decode(good)]


def test_an_untyped_aggregate_takes_only_plain_json() -> None:
    """Without a `state_type`, a record that makes a tuple of the state, which a restart would read as a list, is a
    dead letter. The session stays as it was."""
    last = Aggregate(dict, lambda state, value: {"last": (value,) if value else [value]}, lambda a, b: b)
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", last=last).on_update().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for value in (b"0", b"1"):
        driver.pipe("in", key=b"k", value=value)
    assert [record.value for record in driver.read("in-dlq")] == [b"1"]
    (session,) = driver.store("s").rows()
    assert session.states == [{"last": [0]}]


class Total(msgspec.Struct):
    """A state that is no plain JSON."""

    n: int = 0


@pytest.mark.parametrize("made", [float("-inf"), (), Total(), object()], ids=["infinity", "tuple", "struct", "object"])
def test_an_initial_state_that_a_restore_would_change_is_rejected(made: Any) -> None:
    """An aggregation has its initial state also in windows that are restored without a state of it. No record could be
    rejected there, so the aggregation is."""
    with pytest.raises(ConfigError, match=r"^Aggregate: initial state .*"):
        Aggregate(lambda: made, lambda state, value: 1, lambda a, b: a)


def test_an_initializer_that_raises_is_rejected() -> None:
    """The initializer is called when the aggregation is made, and its error stops the program there."""
    with pytest.raises(ConfigError, match=r"^Aggregate: initializer .*ZeroDivisionError"):
        Aggregate(lambda: 1 // 0, lambda state, value: 1, lambda a, b: a)


@pytest.mark.parametrize("emit", ["on_close", "on_update"])
@pytest.mark.parametrize("restarts", [False, True])
def test_the_functions_of_an_aggregate_get_the_types_that_a_restore_gives(restarts: bool, emit: str) -> None:
    """A state of a subclass of `dict` is a plain `dict` at once, and not only after a restart: for the aggregator from
    the initial state on, for the merger, and in the results."""
    seen: list[Any] = []

    def add(state: Any, value: Any) -> Any:
        seen.append(type(state))
        return defaultdict(int, {**state, str(value): 1})

    def merge(earlier: Any, later: Any) -> Any:
        seen.extend((type(earlier), type(later)))
        return defaultdict(int, {**earlier, **later})

    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10, 20)
    results = getattr(windows.aggregate("s", own=Aggregate(lambda: defaultdict(int), add, merge)), emit)()
    results.filter(lambda record: record.value is not None).foreach(
        lambda record: seen.append(type(record.value.results["own"]))
    )
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (0, 1, 15, 8, 100):  # the fourth record merges two sessions
        driver.pipe("in", key=b"k", value=b"%d" % at, timestamp=at)
        if restarts:
            driver.crash()
            driver.restore()
    assert driver.read("in-dlq") == []
    assert len(seen) >= 8  # five additions, a merge of two states, and a result
    assert set(seen) == {dict}


def test_the_result_of_a_typed_aggregate_is_plain_json() -> None:
    """The nodes behind an aggregation get its results as they get them behind a repartition topic."""
    total = Aggregate(Total, lambda state, value: Total(state.n + value), lambda a, b: Total(a.n + b.n), Total)
    state = fold(total, [1, 2])
    assert (state, total.result(state)) == (Total(3), {"n": 3})


def _extended(earlier: list[int], later: list[int]) -> list[int]:
    earlier.extend(later)
    return earlier


def test_a_merger_may_change_its_arguments() -> None:
    """The merged states stay unchanged."""
    merging = Aggregate(list, lambda state, value: [*state, value], _extended)
    earlier, later = [1], [2]
    assert merging.merge(earlier, later) == [1, 2]
    assert (earlier, later) == ([1], [2])


def test_nan_is_the_greatest_number_and_there_is_one_zero() -> None:
    """The result does not depend on the order of values, and equals that of Spark, whose jobs merge the same states."""
    nan = float("nan")
    for kind, numbers, expected in (
        (Min, [1.0, nan, 2.0], "1.0"),
        (Max, [1.0, nan, 2.0], "nan"),
        (Min, [nan, nan], "nan"),
        (Min, [0.0, -0.0], "0.0"),
        (Max, [-0.0], "0.0"),
        (Sum, [-0.0], "0.0"),
        (Sum, [1.0, nan], "nan"),
    ):
        bound = kind("ms").bind(dict)
        for order in permutations(numbers):
            state = bound.initial()
            for number in order:
                state = bound.add(state, {"ms": number})
            assert repr(bound.result(state)) == expected


Moment = tuple[int, Any]


def fold_at(aggregation: Aggregation[Any], *moments: Moment) -> Any:
    """Return the state after the field `x` had these values at these times."""
    state = aggregation.initial()
    for at, value in moments:
        state = aggregation.add_at(state, {"x": value}, at)
    return state


def result_at(aggregation: Aggregation[Any], *moments: Moment) -> Any:
    return aggregation.result(fold_at(aggregation, *moments))


def test_first_and_last_go_by_event_time() -> None:
    """First and Last compare timestamps. The order of arrival decides only between equal timestamps. None is not a
    value."""
    moments = [(5, None), (20, "b"), (10, "a"), (10, "c"), (20, "d"), (30, None)]
    assert (result_at(First("x"), *moments), result_at(Last("x"), *moments)) == ("a", "d")
    assert (result_at(First("x")), result_at(Last("x"), (1, None))) == (None, None)


@pytest.mark.parametrize(("aggregation", "other_ms"), [(First("x"), 20), (Last("x"), 5)])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_first_and_last_keep_a_number_that_json_lacks(
    aggregation: Aggregation[Any], other_ms: int, number: float
) -> None:
    """NaN and the infinities are values: a value of another time does not replace them, also after a restore."""
    kept = aggregation.add_at(aggregation.initial(), {"x": number}, 10)
    restored = aggregation.from_columns(aggregation.to_columns(kept))
    for state in (kept, restored):
        added = aggregation.add_at(state, {"x": 7}, other_ms)
        assert aggregation.to_columns(added) == (10, b"null")
        assert msgspec.json.encode(aggregation.result(added)) == b"null"


def test_without_timestamps_all_is_one_moment() -> None:
    """`add` keeps the first or the last value in the order of arrival."""
    first, last = First("x"), Last("x")
    assert first.result(first.add(first.add(first.initial(), {"x": 1}), {"x": 2})) == 1
    assert last.result(last.add(last.add(last.initial(), {"x": 1}), {"x": 2})) == 2


def test_a_list_keeps_the_order_and_the_limit() -> None:
    """Values stay in the order of arrival. Values beyond the limit are counted and left out."""
    state = fold_at(CollectList("x", limit=3), (0, 3), (1, None), (2, 1), (3, 3), (4, 9))
    assert (CollectList("x").result(state), state[1]) == ([3, 1, 3], 4)


def test_a_set_keeps_each_value_once() -> None:
    """Values are compared by their JSON, so 1 and true are two values, and equal objects are one."""
    state = fold_at(
        CollectSet("x", limit=4), *((0, v) for v in (1, True, {"a": 1, "b": 2}, 1, {"b": 2, "a": 1}, "s", "t"))
    )
    assert (CollectSet("x").result(state), state[1]) == ([1, True, {"a": 1, "b": 2}, "s"], 7)


@pytest.mark.parametrize("make", [CollectList, CollectSet])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_collected_number_that_json_lacks_is_restored_as_nan(make: Any, number: float) -> None:
    """NaN and the infinities are values, and None is skipped. So a restored collection has NaN, and no None."""
    aggregation = make("x")
    state = fold_at(aggregation, (0, number), (1, None), (2, 7))
    first, second = aggregation.result(aggregation.from_columns(aggregation.to_columns(state)))
    assert (math.isnan(first), second) == (True, 7)


@pytest.mark.parametrize("make", [CollectList, CollectSet])
@pytest.mark.parametrize("limit", [0, 1e3, True])
def test_a_limit_that_is_no_positive_int_is_rejected(make: Any, limit: Any) -> None:
    """A collection without room for a value is invalid. A float cannot be the end of a slice."""
    with pytest.raises(ConfigError, match="limit must"):
        make("x", limit)


def test_a_value_without_json_is_rejected() -> None:
    """A value without JSON becomes a dead letter before it is added to a window."""
    for aggregation in (First("x"), Last("x"), CollectList("x"), CollectSet("x")):
        with pytest.raises(DataError, match=rf"{aggregation.function}\('x'\).*has no JSON"):
            fold_at(aggregation, (0, object()))
    with pytest.raises(DataError, match="no field 'x'"):
        First("x").add_at((-1, None), {}, 0)


moments_drawn = st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 5) | st.text(max_size=2)), max_size=15)
EACH = [First("x"), Last("x"), CollectList("x", 4), CollectSet("x", 3)]


@pytest.mark.parametrize("aggregation", EACH)
@given(moments_drawn, st.integers(0, 15))
def test_merged_collections_equal_sequential(aggregation: Aggregation[Any], moments: list[Moment], cut: int) -> None:
    """Two merged parts equal the whole, also after each was converted to columns. The empty state is neutral."""
    a, b, whole = (
        fold_at(aggregation, *moments[:cut]),
        fold_at(aggregation, *moments[cut:]),
        fold_at(aggregation, *moments),
    )
    kept = aggregation.merge(*(aggregation.from_columns(aggregation.to_columns(s)) for s in (a, b)))
    assert aggregation.merge(a, b) == whole == kept
    assert aggregation.merge(whole, aggregation.initial()) == whole == aggregation.merge(aggregation.initial(), whole)


@given(st.permutations([(i, f"v{i}") for i in range(6)]))
def test_first_and_last_do_not_depend_on_arrival(moments: list[Moment]) -> None:
    """The result is the same in any order of records with different times."""
    assert (result_at(First("x"), *moments), result_at(Last("x"), *moments)) == ("v0", "v5")


def test_in_a_session() -> None:
    """Sessions that merge keep the first and last of both, and the earlier one's list before the later one's."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10, 100)
    table = windows.aggregate("s", a=First("x"), z=Last("x"), all=CollectList("x"), each=CollectSet("x"))
    table.on_update().to("out")
    driver = TopologyTestDriver(builder.build())
    for at, x in ((40, 4), (20, 2), (21, 2), (30, 3)):
        driver.pipe("in", key=b"k", value=b'{"x":%d}' % x, timestamp=at)
        driver.crash()
        driver.restore()
    got = msgspec.json.decode(driver.read("out")[-1].value or b"")
    assert {n: got[n] for n in ("a", "z", "all", "each")} == {"a": 2, "z": 4, "all": [2, 2, 4, 3], "each": [2, 4, 3]}


class User(msgspec.Struct):
    """A value whose fields are not in alphabetical order."""

    name: str
    age: int


class Kind(Enum):
    """A value that is text in JSON."""

    A = "a"


class Event(msgspec.Struct):
    """A value whose fields are no plain JSON."""

    user: User
    kind: Kind
    tags: set[str]
    pair: tuple[int, int]
    at: datetime | None = None


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("columns_min", [1, 1 << 30])
def test_values_that_are_no_plain_json_are_the_same_before_and_after_a_restore(
    columns_min: int, restarts: bool
) -> None:
    """First, Last, CollectList and CollectSet have a value as plain JSON at once: a struct as a dict in the order of
    its fields, a set as a sorted list, an enum as its value, a datetime as text. A set has an equal value once."""
    seen: list[Any] = []
    builder = StreamsBuilder()
    windows = builder.stream("in", value=Event).group_by_key().session_window(10)
    aggregations = {"users": CollectSet("user"), "tags": CollectSet("tags"), "pairs": CollectList("pair")}
    results = windows.aggregate("s", user=First("user"), kind=Last("kind"), at=Last("at"), **aggregations).on_close()
    results.foreach(lambda record: seen.append(record.value.results))
    driver = TopologyTestDriver(builder.build(), columns_min=columns_min)
    tags = [f"t{i}" for i in range(9)]
    for shuffled in (tags, tags[::-1]):
        event = Event(User("ann", 30), Kind.A, set(), (1, 2), datetime(2020, 1, 1))
        value = msgspec.json.encode(msgspec.structs.replace(event, tags=shuffled))
        driver.pipe_columns("in", [(b"k", value, 0), (b"k", value, 1)])
        if restarts:
            driver.crash()
            driver.restore()
    driver.pipe("in", key=b"other", value=value, timestamp=100)
    ann = {"name": "ann", "age": 30}
    expected = {"user": ann, "kind": "a", "at": "2020-01-01T00:00:00", "users": [ann], "tags": [tags]}
    assert seen == [{**expected, "pairs": [[1, 2]] * 4}]
    assert [list(seen[0]["user"]), list(seen[0]["users"][0])] == [["name", "age"]] * 2


@pytest.mark.parametrize("columns_min", [1, 1 << 30])
def test_a_collected_set_has_dicts_once_whatever_the_order_of_their_keys(columns_min: int) -> None:
    """Dicts that differ only in the order of their keys, or in that of dicts in them, are equal for CollectSet."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10)
    windows.aggregate("s", each=CollectSet("x")).on_update().to("out")
    driver = TopologyTestDriver(builder.build(), columns_min=columns_min)
    values = (b'{"x":{"b":1,"a":{"d":2,"c":3}}}', b'{"x":{"a":{"c":3,"d":2},"b":1}}', b'{"x":{"a":{"d":2,"c":3}}}')
    driver.pipe_columns("in", [(b"k", value, 0) for value in values])
    result = msgspec.json.decode(driver.read("out")[-1].value or b"")
    assert result["each"] == [{"a": {"c": 3, "d": 2}, "b": 1}, {"a": {"c": 3, "d": 2}}]


@pytest.mark.parametrize("aggregation", [First("x"), Last("x"), CollectList("x"), CollectSet("x")])
def test_a_state_keeps_a_copy_of_a_value(aggregation: Aggregation[Any]) -> None:
    """A state has a copy of a value as plain JSON. A later change of the value does not change the state."""
    user = User("ann", 30)
    state = fold(aggregation, of(user))
    user.age = 31
    assert aggregation.result(state) in ({"age": 30, "name": "ann"}, [{"age": 30, "name": "ann"}])
    assert aggregation.result(aggregation.from_columns(aggregation.to_columns(state))) == aggregation.result(state)


def sketch_of(numbers: Any, aggregation: Quantiles | None = None) -> Any:
    aggregation = aggregation or Quantiles("x")
    state = aggregation.initial()
    for number in numbers:
        state = aggregation.add(state, {"x": number})
    return state


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=KLL_K // 2), st.integers(0, 60))
def test_few_values_are_exact(numbers: list[int], cut: int) -> None:
    """Up to the sketch's size a quantile is exact, also after a merge."""
    bound = Quantiles("x", [0, 0.5, 1])
    merged = bound.result(bound.merge(sketch_of(numbers[:cut]), sketch_of(numbers[cut:])))
    assert merged == bound.result(sketch_of(numbers))
    assert merged is not None
    assert (merged[0], merged[2]) == (min(numbers), max(numbers))
    assert sum(n <= merged[1] for n in numbers) * 2 >= len(numbers)
    assert sum(n >= merged[1] for n in numbers) * 2 >= len(numbers)


def test_many_values_are_estimated() -> None:
    """The quantiles of a hundred thousand values are within a few percent of rank, with a state of a few KiB."""
    state = sketch_of(range(100_000))
    result = Quantiles("x").result(state)
    assert result is not None
    assert all(abs(found / 100_000 - rank) < 0.04 for found, rank in zip(result, RANKS, strict=True))
    assert len(Quantiles("x").to_columns(state)[0]) < 8_000  # type: ignore[arg-type]


def test_quantiles_of_no_numbers_are_none() -> None:
    """Without a number the quantiles are None. The empty state survives its conversion to columns."""
    quantiles = Quantiles("x")
    assert quantiles.result(quantiles.from_columns(quantiles.to_columns(sketch_of([None])))) is None


def test_the_state_has_its_quantiles_as_json() -> None:
    """Readers of the changelog see the result without a sketch library, and a restored state has the same result."""
    quantiles = Quantiles("x", (0.25, 0.75))
    state = sketch_of([1, 2, 3, 4], quantiles)
    columns = quantiles.to_columns(state)
    assert (
        msgspec.json.decode(columns[1]) == quantiles.result(state) == quantiles.result(quantiles.from_columns(columns))
    )


def test_a_copy_is_another_sketch() -> None:
    """A change of the copy does not change the window's state."""
    quantiles, state = Quantiles("x"), sketch_of([1])
    quantiles.add(quantiles.copy(state), {"x": 5})
    assert quantiles.result(state) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("wrong", ["7", [1], 10**400])
def test_quantiles_reject_what_is_no_number(wrong: Any) -> None:
    """A value that is not a number, or larger than any float, is rejected before it is added to the sketch."""
    with pytest.raises(DataError, match="quantiles"):
        sketch_of([wrong])


@pytest.mark.parametrize("ranks", [(), (1.1,), (-0.1, 0.5), (0.5,) * (RANKS_MAX + 1)])
def test_ranks_are_shares(ranks: Any) -> None:
    """A rank below 0 or above 1, no rank and too many ranks are rejected."""
    with pytest.raises(ConfigError, match="ranks"):
        Quantiles("x", ranks)


def test_a_state_with_all_ranks_has_few_bytes() -> None:
    """A state with long values for the highest number of ranks does not exceed its limit."""
    quantiles = Quantiles("x", (0.5,) * RANKS_MAX)
    state = sketch_of([-1.2345678901234567e-300 * n for n in range(1, 50_000)], quantiles)
    assert sum(len(value) for value in quantiles.to_columns(state)) <= KLL_BYTES_MAX


def test_the_latest_timestamp_is_merged_and_kept() -> None:
    """The highest timestamp is the same whatever the order, and survives the changelog."""
    latest = Latest()
    state = latest.merge(latest.add_at(latest.initial(), None, 5), latest.add_at(7, None, 3))
    assert latest.result(latest.from_columns(latest.to_columns(latest.add(state, None)))) == 7
