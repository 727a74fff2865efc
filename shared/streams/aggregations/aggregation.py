"""Aggregations whose state is a few typed columns and can be merged.

A user writes an aggregation unbound, such as `Mean("ms")`. `bind` returns the same aggregation for the value type of a
stream, which determines the types of the columns. The methods take a state as one Python value. In the changelog, in
the lake and in Spark the state is the columns `state_columns`: int64, float64 or binary. As in SQL, aggregations of a
field skip None. If there was no other value, `CountDistinct` returns 0, `CollectList` and `CollectSet` return an empty
list, and all others None.

>>> mean = Mean("ms").bind(dict)
>>> state = mean.add(mean.add(mean.initial(), {"ms": 4}), {"ms": 8})
>>> mean.result(mean.merge(state, mean.initial())), mean.to_columns(state), [c.name for c in mean.state_columns]
(6.0, (12.0, 2), ['sum', 'n'])
"""

from __future__ import annotations

import operator
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, Self

import msgspec
import msgspec.inspect
from typing_extensions import TypeVar

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.json_decoding import JSON_ERRORS
from penstock.shared.common.records import INT64_MAX, INT64_MIN
from penstock.shared.streams.user_code import SHOWN_MAX, plain

if TYPE_CHECKING:
    import datasketches

ColumnType = Literal["int64", "float64", "binary"]
NumberType = Literal["int64", "float64"]
ResultType = Literal["int64", "float64", "json"]
ColumnValue = int | float | bytes

# The types of values that `First`, `Last`, `CollectList` and `CollectSet` need not convert to plain JSON.
JSON_SCALARS = frozenset((str, int, float, bool, type(None)))
# This text stands for "" in a sketch, because DataSketches and Spark ignore "".
EMPTY_TEXT = "\x00the empty text"
# With this size, a sketch has at most about 2 KiB and a standard error of 2.3 %. It is exact for a few dozen values.
DISTINCT_LG_K = 11

State = TypeVar("State", default=Any)
Sketch = TypeVar("Sketch")


class Column(NamedTuple):
    """One column of an aggregation's state."""

    name: str
    type: ColumnType


class Aggregation(ABC, Generic[State]):
    """Computes one result from the records of a window, or of a key without windows."""

    function: str
    field: str | None = None
    # True if `add` changes the state that it receives.
    in_place: bool = False
    # The store's schema includes these parameters, because states do not contain them.
    parameters: tuple[float, ...] = ()
    # True if the stream's JSON values have the field in the form that is aggregated.
    verbatim: bool = True

    @property
    @abstractmethod
    def state_columns(self) -> tuple[Column, ...]:
        """The columns of the state, in the order of `to_columns`."""

    @property
    @abstractmethod
    def result_type(self) -> ResultType:
        """The type of `result`: a number, or `json` for anything that msgspec encodes. Only `json` may be mutable."""

    def bind(self, value_type: Any) -> Self:
        """Return the aggregation for a stream of `value_type`.

        Raises ConfigError if the type lacks the field, or if the aggregation cannot take the field's type.
        """
        return self

    @abstractmethod
    def initial(self) -> State:
        """Return the state of no records."""

    @abstractmethod
    def add(self, state: State, value: Any) -> State:
        """Return the state with one more record's value. An error is raised before the state is changed."""

    def add_at(self, state: State, value: Any, timestamp_ms: int) -> State:
        """As `add`, with the record's timestamp, for aggregations that depend on it."""
        return self.add(state, value)

    def copy(self, state: State) -> State:
        """Return a state from which another window can continue; `add` on either does not change the other."""
        return self.from_columns(self.to_columns(state)) if self.in_place else state

    @abstractmethod
    def merge(self, earlier: State, later: State) -> State:
        """Return the merged state of both, which are unchanged."""

    @abstractmethod
    def to_columns(self, state: State) -> tuple[ColumnValue, ...]:
        """Return the state as column values."""

    @abstractmethod
    def from_columns(self, columns: Sequence[Any]) -> State:
        """Return the state from column values. Raises ValueError if they contain no state."""

    @abstractmethod
    def result(self, state: State) -> Any:
        """Return the result. It may share objects with the state, so callers pass user code a copy."""


class Count(Aggregation[int]):
    """The number of records."""

    function = "count"
    state_columns = (Column("n", "int64"),)
    result_type = "int64"

    def initial(self) -> int:
        return 0

    def add(self, state: int, value: Any) -> int:
        return state + 1

    def merge(self, earlier: int, later: int) -> int:
        return earlier + later

    def to_columns(self, state: int) -> tuple[ColumnValue, ...]:
        return (state,)

    def from_columns(self, columns: Sequence[Any]) -> int:
        return int(columns[0])

    def result(self, state: int) -> int:
        return state


class OfField(Aggregation[State]):
    """An aggregation over one field of the value."""

    def __init__(self, field: str) -> None:
        self.field: str = field
        self._get: Callable[[Any], Any] = operator.itemgetter(field)

    def bind(self, value_type: Any) -> Self:
        bound = type(self).__new__(type(self))
        bound.__dict__.update(self.__dict__)
        if value_type in (dict, Any, None):
            return bound
        if typing.get_origin(value_type) is dict and typing.get_args(value_type)[:1] == (str,):
            # A declared type of the values may have converted the JSON.
            bound.verbatim = typing.get_args(value_type)[1:] == (Any,)
            return bound
        try:
            hints = typing.get_type_hints(value_type)
        except (TypeError, NameError):
            raise ConfigError(f"{self.function}({self.field!r}): {value_type!r} has no typed fields") from None
        if self.field not in hints:
            known = ", ".join(hints) or "none"
            raise ConfigError(
                f"{self.function}({self.field!r}): {value_type.__name__} has no such field (it has {known})"
            )
        if not typing.is_typeddict(value_type):
            bound._get = operator.attrgetter(self.field)
        bound._bind_field(hints[self.field])
        bound.verbatim = _is_verbatim_field(value_type, self.field)
        return bound

    def _bind_field(self, hint: Any) -> None:
        """Set the aggregation's type from its field's annotation."""

    def _number_types(self, hint: Any) -> set[Any]:
        """Return the types of a number field by its annotation, except None.

        Raises ConfigError for any type but numbers and None.
        """
        options = field_types(hint)
        if not options <= {int, float, bool}:
            raise ConfigError(f"{self.function}({self.field!r}): the field is {hint}, not a number")
        return options

    def _field_value(self, value: Any) -> Any:
        try:
            return self._get(value)
        except (KeyError, TypeError, AttributeError):
            raise DataError(f"{self.function}({self.field!r}): the value has no field {self.field!r}") from None

    def _plain_json(self, value: Any) -> Any:
        """Return a field's value as a restore decodes it: a dict for a struct, a sorted list for a set.

        Raises DataError if the value has no JSON.
        """
        return value if type(value) in JSON_SCALARS else msgspec.json.decode(self._json(value))

    def _json(self, value: Any) -> bytes:
        """Return a value's JSON; it is equal for equal dicts and sets. Raises DataError if the value has none."""
        try:
            return msgspec.json.encode(value, order="deterministic")
        except (TypeError, ValueError) as e:
            raise DataError(f"{self.function}({self.field!r}): {value!r} has no JSON: {e}") from None

    def _require_number(self, value: Any, type_: NumberType) -> float | int:
        """Return a field's value as a number of `type_`. Raises DataError if it is not such a number."""
        if not isinstance(value, int | float):
            raise DataError(f"{self.function}({self.field!r}): {value!r} is not a number")
        if type_ == "float64":
            try:
                return float(value)
            except OverflowError:
                raise DataError(f"{self.function}({self.field!r}): the integer does not fit into a float64") from None
        if not isinstance(value, int):
            raise DataError(f"{self.function}({self.field!r}): {value!r} is not an integer")
        return self._in_64_bits(int(value))

    def _in_64_bits(self, number: int) -> int:
        if not INT64_MIN <= number <= INT64_MAX:
            raise DataError(f"{self.function}({self.field!r}): {number} does not fit into 64 bits")
        return number


Number = tuple[float | int, int]
"""A number and the count of values it was made of."""


class _OfNumber(OfField[Number]):
    """State: a number and the count of its values; with 0 values the number has no meaning."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.type: NumberType = "float64"

    def _bind_field(self, hint: Any) -> None:
        options = self._number_types(hint)
        if options == {int} or options == {bool}:
            self.type = "int64"

    @property
    def state_columns(self) -> tuple[Column, ...]:
        return (Column(self.function if self.function != "mean" else "sum", self.type), Column("n", "int64"))

    @property
    def result_type(self) -> ResultType:
        return self.type

    def initial(self) -> Number:
        return (0, 0)

    def number(self, value: Any) -> float | int | None:
        """Return the field as a number of `self.type`, or None if it is None. Raises DataError if it is neither."""
        field_value = self._field_value(value)
        if field_value is None:
            return None
        # -0.0 becomes 0.0, so that there is one zero, as in the kernels' columns.
        return self._require_number(field_value, self.type) + 0

    def add(self, state: Number, value: Any) -> Number:
        number = self.number(value)
        return state if number is None else self.merge(state, (number, 1))

    def merge(self, earlier: Number, later: Number) -> Number:
        if later[1] == 0:
            return earlier
        if earlier[1] == 0:
            return later
        combined = self._combine_numbers(earlier[0], later[0])
        if self.type == "int64":
            self._in_64_bits(int(combined))
        return (combined, earlier[1] + later[1])

    @abstractmethod
    def _combine_numbers(self, a: float | int, b: float | int) -> float | int: ...

    def to_columns(self, state: Number) -> tuple[ColumnValue, ...]:
        return (state[0] if self.type == "int64" else float(state[0]), state[1])

    def from_columns(self, columns: Sequence[Any]) -> Number:
        return (columns[0], columns[1])

    def result(self, state: Number) -> float | int | None:
        return state[0] if state[1] else None


class Sum(_OfNumber):
    """The sum of a field: int64 for a field that is typed `int` or `bool`, otherwise float64."""

    function = "sum"

    def _combine_numbers(self, a: float | int, b: float | int) -> float | int:
        return a + b


class Min(_OfNumber):
    """The lowest value of a field; NaN counts as the highest number, as in Spark."""

    function = "min"

    def _combine_numbers(self, a: float | int, b: float | int) -> float | int:
        return b if b < a or a != a else a


class Max(_OfNumber):
    """The highest value of a field; NaN counts as the highest number, as in Spark."""

    function = "max"

    def _combine_numbers(self, a: float | int, b: float | int) -> float | int:
        return b if b > a or b != b else a


class Mean(Sum):
    """The mean of a field, as float64; the state is its sum and its count."""

    function = "mean"

    @property
    def result_type(self) -> ResultType:
        return "float64"

    def result(self, state: Number) -> float | None:
        return state[0] / state[1] if state[1] else None


class CountDistinct(OfField["datasketches.hll_sketch"]):
    """The estimated number of different values of a field. The state is an HLL sketch of Apache DataSketches.

    Spark's `hll_sketch_estimate` and `hll_union` read this state. None is skipped. A value that is not a `str`, `int`,
    `float` or `bool` is counted as its `str`.
    """

    function = "count_distinct"
    in_place = True
    state_columns = (Column("hll", "binary"),)
    result_type = "int64"

    def initial(self) -> datasketches.hll_sketch:
        # Readers of late records and of settings import this module without the extra `streams`.
        import datasketches

        return datasketches.hll_sketch(DISTINCT_LG_K)

    def add(self, state: datasketches.hll_sketch, value: Any) -> datasketches.hll_sketch:
        item = self._distinct_item(value)
        if item is not None:
            state.update(item)
        return state

    def _distinct_item(self, value: Any) -> str | int | float | None:
        field_value = self._field_value(value)
        item = field_value if field_value is None or isinstance(field_value, str | int | float) else str(field_value)
        # DataSketches and Spark ignore the empty text, but it is a value.
        if item == "":
            return EMPTY_TEXT
        try:
            return item.encode().decode() if isinstance(item, str) and not item.isascii() else item
        except UnicodeEncodeError:
            raise DataError(f"{self.function}({self.field!r}): {item!r} is not encodable as UTF-8") from None

    def merge(self, earlier: datasketches.hll_sketch, later: datasketches.hll_sketch) -> datasketches.hll_sketch:
        import datasketches

        union = datasketches.hll_union(DISTINCT_LG_K)
        union.update(earlier)
        union.update(later)
        return union.get_result(datasketches.tgt_hll_type.HLL_4)

    def to_columns(self, state: datasketches.hll_sketch) -> tuple[ColumnValue, ...]:
        return (bytes(state.serialize_compact()),)

    def from_columns(self, columns: Sequence[Any]) -> datasketches.hll_sketch:
        import datasketches

        return sketch_of(datasketches.hll_sketch.deserialize, columns[0])

    def result(self, state: datasketches.hll_sketch) -> int:
        estimate: float = state.get_estimate()
        return round(estimate)


class Aggregate(Aggregation[Any]):
    """An aggregation by a user's initializer, aggregator and merger, as in Kafka Streams. The state is kept as JSON.

    A restart decodes the state as `state_type`. A state that a function returns is encoded and decoded at once, and the
    decoded copy is the state, so a restart changes nothing. `add` and `merge` raise DataError if the copy does not
    equal what the function returned.

    The constructor calls the initializer once. It raises ConfigError if the initializer raises, or if the initial state
    cannot be restored unchanged.

    The functions get copies of the state, so they may change them. With a `state_type` too, the result is a value of
    JSON's own types, such as dict and list.
    """

    function = "aggregate"
    state_columns = (Column("json", "binary"),)
    result_type = "json"

    def __init__(
        self,
        initializer: Callable[[], Any],
        aggregator: Callable[[Any, Any], Any],
        merger: Callable[[Any, Any], Any],
        state_type: Any = Any,
    ) -> None:
        make_initial = plain("Aggregate: initializer", initializer)
        self._aggregator = plain("Aggregate: aggregator", aggregator)
        self._merger = plain("Aggregate: merger", merger)
        self._decode = msgspec.json.Decoder(state_type).decode
        self._is_plain = state_type is Any
        try:
            initial = make_initial()
        except Exception as e:
            raise ConfigError(f"Aggregate: initializer {initializer!r} raised {type(e).__name__}: {e}") from e
        try:
            self._initial = self.to_columns(self._restored(initial))
        except Exception as e:
            shown = repr(initial)[:SHOWN_MAX]
            raise ConfigError(f"Aggregate: initial state {shown} cannot be stored: {type(e).__name__}: {e}") from e

    def initial(self) -> Any:
        return self.from_columns(self._initial)

    def add(self, state: Any, value: Any) -> Any:
        # The function may change its argument and then raise. The state must be as before.
        return self._restored(self._aggregator(self._copied(state), value))

    def merge(self, earlier: Any, later: Any) -> Any:
        return self._restored(self._merger(self._copied(earlier), self._copied(later)))

    def to_columns(self, state: Any) -> tuple[ColumnValue, ...]:
        return (msgspec.json.encode(state),)

    def from_columns(self, columns: Sequence[Any]) -> Any:
        return self._decode(columns[0])

    def _copied(self, state: Any) -> Any:
        return self.from_columns(self.to_columns(state))

    def _restored(self, state: Any) -> Any:
        """Return what a restore makes of a new state. Raises DataError unless it equals the state."""
        return restored_state(self, state, self.to_columns(state))

    def result(self, state: Any) -> Any:
        # Plain JSON, as it is behind a repartition topic. So the nodes below need no `state_type`.
        return state if self._is_plain else msgspec.json.decode(msgspec.json.encode(state))


def restored_state(aggregation: Aggregation[Any], state: Any, columns: Sequence[ColumnValue]) -> Any:
    """Return what a restore makes of a state's columns. Raises DataError unless it equals the state.

    A state may be any object that has JSON. Without a declared type a restore makes a list of a tuple, a dict of a
    struct, and text of a datetime. JSON has no NaN and no infinity. Such a state is rejected at once. Otherwise user
    code would see another value after the next restart, or every restore would fail.
    """
    try:
        restored = aggregation.from_columns(columns)
    except JSON_ERRORS as e:
        raise DataError(f"a value cannot be restored as its declared type: {e} (NaN is null in JSON)") from e
    if restored != state:
        was, becomes = map(repr, _different_parts(state, restored))
        if was == becomes:
            raise DataError(
                f"a value does not equal its restored copy, which is {was[:SHOWN_MAX]} as well: a class in it does not "
                "compare by value (a struct or a dataclass with eq=False), or it is a NaN"
            )
        raise DataError(
            f"a restore would make {becomes[:SHOWN_MAX]} of {was[:SHOWN_MAX]}: declare the type of the values, or use "
            "JSON's own types (dict with text keys, list, str, int, float, bool, None)"
        )
    return restored


def _different_parts(state: Any, restored: Any) -> tuple[Any, Any]:
    """Return the innermost parts that differ of a state and the restored state."""
    if type(state) is type(restored):
        if isinstance(state, dict) and state.keys() == restored.keys():
            return next(_different_parts(part, restored[key]) for key, part in state.items() if part != restored[key])
        if isinstance(state, list | tuple) and len(state) == len(restored):
            return next(_different_parts(*parts) for parts in zip(state, restored, strict=True) if parts[0] != parts[1])
    return state, restored


def sketch_of(deserialize: Callable[[bytes], Sketch], data: bytes) -> Sketch:
    """Return the sketch that `data` contain. Raises ValueError if they contain none."""
    try:
        return deserialize(data)
    except (IndexError, RuntimeError) as e:
        # DataSketches raises these errors for bytes of the wrong length.
        raise ValueError(f"{len(data)} bytes are no sketch: {e}") from None


def _is_verbatim_field(value_type: Any, field: str) -> bool:
    """Return whether the stream's JSON values have the field in the form that is aggregated (`Aggregation.verbatim`).

    The values must be objects in JSON, and the field must have the same name there. If it has a default, the default
    must be None. Its type must need no conversion.
    """
    info = msgspec.inspect.type_info(value_type)
    found = next((f for f in getattr(info, "fields", ()) if f.name == field), None)
    if found is None or found.encode_name != field or getattr(info, "array_like", False):
        return False
    defaults = found.default in (None, msgspec.NODEFAULT) and found.default_factory is msgspec.NODEFAULT
    types_ = found.type.types if isinstance(found.type, msgspec.inspect.UnionType) else (found.type,)
    return bool(defaults and all(type(t) in _VERBATIM_TYPES for t in types_))


_VERBATIM_TYPES = (
    *(msgspec.inspect.IntType, msgspec.inspect.FloatType),
    *(msgspec.inspect.StrType, msgspec.inspect.NoneType),
)


def field_types(hint: Any) -> set[Any]:
    """Return the types that an aggregation's field may have by its annotation, except None.

    A NewType and a type alias (`type Ms = int`) count as the type that they stand for.

    >>> field_types(int | None)
    {<class 'int'>}
    """
    # Not by the class of an alias, which is in `typing` only since Python 3.12, and another in `typing_extensions`.
    for name in ("__supertype__", "__value__"):
        if hasattr(hint, name):
            return field_types(getattr(hint, name))
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return field_types(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return {found for option in typing.get_args(hint) for found in field_types(option)}
    return set() if hint is types.NoneType else {hint}
