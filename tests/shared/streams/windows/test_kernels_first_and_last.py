"""First and Last of numbers, which a kernel keeps in columns: against the same aggregations of values of any kind."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.streams.aggregations.aggregation import Aggregation
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_rule import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples

KINDS: dict[str, Any] = {
    "session": lambda grouped, grace: grouped.session_window(10, grace),
    "tumbling": lambda grouped, grace: grouped.tumbling_window(10, grace),
    "hopping": lambda grouped, grace: grouped.hopping_window(25, 10, grace),
    "sliding": lambda grouped, grace: grouped.sliding_window(10, grace),
}
RESULTS: dict[str, Aggregation[Any]] = {"n0": First("n"), "n1": Last("n"), "ms0": First("ms"), "ms1": Last("ms")}

Piped = tuple[bytes, bytes, int]


class Value(msgspec.Struct):
    """Numbers, either of which may be missing."""

    n: int | None = None
    ms: float | None = None


def driver_of(kind: str, grace: int, emit: Emit, value: Any, *, deduplicates: bool = True) -> TopologyTestDriver:
    builder = StreamsBuilder()
    windows = KINDS[kind](builder.stream("in", value=value).group_by_key(), grace)
    table = windows.aggregate("s", **RESULTS)
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return TopologyTestDriver(builder.build(), commit_each=False, deduplicate_updates=deduplicates, columns_min=4)


def results(driver: TopologyTestDriver) -> list[Any]:
    """Results since the last look, in an order of their own."""
    return sorted(((r.key, r.value, r.timestamp) for r in driver.read("out")), key=repr)


def windows(driver: TopologyTestDriver) -> list[Any]:
    return sorted((w.key, w.start, w.end, w.states) for w in driver.task.stores["s"].rows())


numbers = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.sampled_from([0.0, -0.0, 1.5, -2.25, 1e300]),
)
records = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b"]),
        numbers.map(lambda pair: msgspec.json.encode({"n": pair[0], "ms": pair[1]})),
        st.integers(0, 120),
    ),
    max_size=60,
)


@settings(max_examples=examples(200))
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([0, 7, 200]),
    st.sampled_from(["on_close", "on_update"]),
    records,
    st.integers(1, 20),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
)
def test_numbers_equal_values_of_any_kind(
    kind: str, grace: int, emit: Emit, piped: list[Piped], size: int, crash_at: int, deduplicates: bool
) -> None:
    """Results and states are those of a stream whose fields have no type, over a restore in the middle too."""
    typed = driver_of(kind, grace, emit, Value, deduplicates=deduplicates)
    plain = driver_of(kind, grace, emit, dict, deduplicates=deduplicates)
    assert (typed.task.stores["s"].windows.columns.objects, typed.task.vectorized_executors != {}) == (
        [],
        deduplicates or emit == "on_close",
    )
    for number, start in enumerate(range(0, len(piped), size)):
        for driver in (typed, plain):
            driver.pipe_columns("in", piped[start : start + size])
            driver.commit()
            if number == crash_at:
                driver.crash()
                driver.restore()
        assert results(typed) == results(plain)
        assert windows(typed) == windows(plain)


@pytest.mark.parametrize(
    ("hint", "types"),
    [(int, "int64"), (int | None, "int64"), (float, "float64"), (bool, None), (int | float, None), (str, None)],
)
def test_only_fields_of_one_type_of_number_are_columns(hint: Any, types: str | None) -> None:
    """True is not 1, and 3 is not 3.0: a field that may be either keeps its values as objects."""
    value = msgspec.defstruct("Value", [("x", hint)])
    for unbound, op in ((First("x"), k.FIRST), (Last("x"), k.LAST)):
        bound = unbound.bind(value)
        columns = StateColumns([bound])
        assert bound.type == types
        assert bound.result_type == (types or "json")
        assert columns.program[0][0] == (k.OBJECT if types is None else op)
        assert columns.types == (("object",) if types is None else ("int64", types))


@pytest.mark.parametrize("value", [{"n": 2**63}, {"n": 1.5}, {"n": "1"}, {}])
def test_what_is_not_the_fields_number_is_refused(value: dict[str, Any]) -> None:
    """A value that its column cannot represent is rejected before a window has it, as with Sum."""
    values = StateColumns([First("n").bind(Value)]).no_values(1)
    first = First("n").bind(Value)
    first._get = lambda value: value["n"]
    with pytest.raises(DataError):
        StateColumns([first]).take_one(value, values)
    with pytest.raises(DataError):
        first.add(first.initial(), value)
