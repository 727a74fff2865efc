"""The kernel that reads numbers from JSON accepts no value that msgspec rejects, and reads the same numbers."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.aggregations.aggregation import Max, Sum
from penstock.shared.streams.aggregations.first_last import First
from penstock.shared.streams.task.json_fields import JsonFields
from penstock.shared.streams.windows.state_columns import StateColumns, ValueRejected
from tests.property_tests import examples


class Click(msgspec.Struct):
    ms: int
    score: float | None
    path: str
    ok: bool | None
    rate: int | float


class Renamed(msgspec.Struct, rename="camel"):
    took_ms: int


TYPES = {"struct": (Click, ["ms", "score", "ok", "rate"]), "dict": (dict, ["ms", "score"])}

PLAIN = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=6)
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.integers(-1000, 1000), st.floats(), st.decimals(-1000, 1000, places=3).map(float)
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, PLAIN, st.text(max_size=4))
WHOLE = st.fixed_dictionaries(
    {
        "ms": st.integers(-(2**40), 2**40),
        "score": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60),
        "path": PLAIN,
        "ok": st.none() | st.booleans(),
        "rate": st.floats(0, 1) | st.integers(0, 10),
    },
    optional={"agent": PLAIN, "n": NUMBERS, "deep": st.lists(st.integers())},
)
ANYTHING = st.dictionaries(st.sampled_from(["ms", "score", "path", "ok", "rate", "x"]), SCALARS, max_size=7)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """JSON of clicks and of other values, with and without white space, partly damaged or with duplicate members."""
    value = draw(WHOLE | ANYTHING)
    digits = draw(st.sampled_from([None, None, 1, 3, 20]))  # of floats with a fixed number of them, however large
    pairs = [
        f"{json.dumps(k)}:{json.dumps(v) if digits is None or type(v) is not float else f'{v:.{digits}f}'}"
        for k, v in value.items()
    ]
    if pairs and draw(st.integers(0, 9)) == 0:
        pairs.append(draw(st.sampled_from(pairs)))
    gap = draw(st.sampled_from(["", "", " ", "\n\t"]))
    text = bytearray((gap + "{" + gap + f"{gap},{gap}".join(pairs) + "}" + gap).encode())
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(text) - 1))
        text[at : at + draw(st.integers(0, 1))] = draw(
            st.sampled_from(
                [b"-", b"0", b"1", b".", b"e5", b'"', b"\\", b"{", b"}", b",", b" ", b"\x7f", b"\xc3", b"+"]
            )
        )
    return bytes(text)


def by_msgspec(kind: str, value: bytes) -> Any:
    """Return the cells and their presence as msgspec decodes them, or None if the value is rejected."""
    value_type, wanted = TYPES[kind]
    columns = StateColumns([Sum(name).bind(value_type) for name in wanted])
    try:
        decoded = msgspec.json.Decoder(value_type if value_type is not dict else Any).decode(value)
        taken, _ = columns.take([decoded], np.zeros(1, np.int64))
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueRejected):
        return None
    return taken.cells[:, 0].tolist(), taken.has[:, 0].tolist()


@settings(max_examples=examples(1_500))
@given(st.sampled_from(sorted(TYPES)), documents())
@example("struct", b'{"ms":-0,"score":-0.0,"path":"","ok":true,"rate":1}')
@example("struct", b'{"ms":-0,"score":-0,"path":"","ok":true,"rate":-0}')
@example("struct", b'{"ms":01,"score":1,"path":"","ok":true,"rate":1}')
@example("struct", b'{"ms":1,"score":9007199254740993,"path":"","ok":true,"rate":1}')
@example("struct", b'{"ms":1,"score":0.30000000000000004,"path":"","ok":false,"rate":1.}')
@example("struct", b'{"ms":1,"score":-2612015285688329.500,"path":"","ok":false,"rate":1}')
@example("dict", b'{"ms":1e400,"score":1}')
@example("dict", b'{"ms":null,"score":1,"n":01}')
def test_numbers_equal_those_of_msgspec(kind: str, value: bytes) -> None:
    """A value that is not left is accepted by msgspec, and each number of it is the same to the bit."""
    value_type, wanted = TYPES[kind]
    fields = JsonFields.of(value_type, wanted)
    assert fields is not None
    cells, has, left = fields.read(PackedBytes.of([value, value]))
    StateColumns([Sum(name).bind(value_type) for name in wanted]).settle_zeros(cells)
    if len(left):
        assert left.tolist() == [0, 1]
        assert not cells.any()
        assert not has.any()
    else:
        assert (cells[:, 0].tolist(), has[:, 0].tolist()) == by_msgspec(kind, value)
        assert cells[:, 0].tolist() == cells[:, 1].tolist()


def test_ordinary_values_are_read() -> None:
    """The values are flat objects as json.dumps writes them, with nulls."""
    fields = JsonFields.of(Click, ["ms", "score", "ok", "rate"])
    assert fields is not None
    whole = json.dumps({"ms": -12, "score": 2.25, "path": "/a b", "ok": True, "rate": 7, "agent": "x"}).encode()
    cells, has, left = fields.read(PackedBytes.of([whole, None, whole.replace(b"2.25", b"null")]))
    assert left.tolist() == [1]
    assert cells[0].tolist() == [-12, 0, -12]
    assert cells[1].view(np.float64).tolist() == [2.25, 0.0, 0.0]
    assert has[1].tolist() == [1, 0, 0]
    assert (cells[2].tolist(), cells[3].view(np.float64).tolist()) == ([1, 0, 1], [7.0, 0.0, 7.0])


def test_a_renamed_field_is_found_under_its_name_in_the_json() -> None:
    """The struct's own names are those of the aggregations."""
    fields = JsonFields.of(Renamed, ["took_ms"])
    assert fields is not None
    cells, _, left = fields.read(PackedBytes.of([b'{"tookMs":3}', b'{"took_ms":3}']))
    assert (cells.tolist(), left.tolist()) == ([[3, 0]], [1])


class Nested(msgspec.Struct):
    ms: int
    user: Renamed


class Bounded(msgspec.Struct):
    ms: Annotated[int, msgspec.Meta(ge=0)]


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    ms: int


class Tagged(msgspec.Struct, tag=True):
    ms: int


class Checked(msgspec.Struct):
    ms: int

    def __post_init__(self) -> None:
        if self.ms == 0:
            raise ValueError("no time")


@pytest.mark.parametrize("value_type", [Nested, Bounded, Strict, Tagged, Checked, int, "Click"])
def test_types_that_msgspec_alone_can_check_are_left_to_it(value_type: Any) -> None:
    """Constraints, nested structs, tags, unknown fields that are forbidden, and checks of the user's own."""
    assert JsonFields.of(value_type, []) is None


def test_a_first_value_keeps_its_sign() -> None:
    """-0.0 is read with its sign. A sum makes it 0.0 afterwards."""
    fields = JsonFields.of(Click, ["score"])
    assert fields is not None
    raw = PackedBytes.of([b'{"ms":5,"score":-0.0,"path":"","ok":null,"rate":1}'])
    by_type = {}
    for kind in (Sum, First):
        cells, _, _ = fields.read(raw)
        StateColumns([kind("score").bind(Click)]).settle_zeros(cells)
        by_type[kind] = np.signbit(cells.view(np.float64)).tolist()
    assert by_type == {Sum: [[False]], First: [[True]]}


def test_one_field_may_be_wanted_twice() -> None:
    """Two aggregations of one field each have its numbers."""
    columns = StateColumns([Sum("ms").bind(Click), Max("ms").bind(Click)])
    fields = JsonFields.of(Click, [number.field for number in columns.numbers])
    assert fields is not None
    cells, _, _ = fields.read(PackedBytes.of([b'{"ms":5,"score":1,"path":"","ok":null,"rate":1}']))
    assert cells.tolist() == [[5], [5]]


class Odd(dict[str, Any]):
    """A value of the user's own class whose fields cannot be read."""

    def __getitem__(self, name: str) -> Any:
        raise ValueError("odd")


def test_a_value_that_raises_any_error_is_rejected() -> None:
    """Its record can then be handled by itself, where the error has its own handling."""
    columns = StateColumns([Sum("ms").bind(dict)])
    with pytest.raises(ValueRejected):
        columns.take([Odd()], np.zeros(1, np.int64))
