"""A compiled kernel that reads numbers from flat JSON objects without a Python object for each value.

The kernel reads objects whose members are printable ASCII strings without escapes, numbers of few digits without an
exponent, `true`, `false` and `null`. All members of the value's type must be present, once each and with the right
type. Any other value is left to msgspec, which accepts or rejects it. So the results are the same as if msgspec decoded
all values.

>>> class Click(msgspec.Struct):
...     ms: int
...     score: float | None
>>> fields = JsonFields.of(Click, ["score"])
>>> raw = PackedBytes.of([b'{"ms":4,"path":"/","score":0.5}', b'{"ms":4,"score":null}', b'{"ms":"4","score":1}'])
>>> numbers, has, left = fields.read(raw)
>>> numbers.view(np.float64).tolist(), has.tolist(), left.tolist()
([[0.5, 0.0, 0.0]], [[1, 0, 0]], [2])
"""

# ruff: noqa: SIM110
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect
from numpy.typing import NDArray

from penstock.shared.common.compiled import compiled
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array

INT, FLOAT, BOOL, TEXT = range(4)
"""The kinds of members."""
UNKNOWN = -1
"""The kind of members that the type lacks: their values are skipped."""

TAB = ord("\t")
NEWLINE = ord("\n")
CARRIAGE_RETURN = ord("\r")
SPACE = ord(" ")
QUOTE = ord('"')
COMMA = ord(",")
MINUS = ord("-")
POINT = ord(".")
DIGIT_0 = ord("0")
DIGIT_9 = ord("9")
COLON = ord(":")
BACKSLASH = ord("\\")
LOWER_F = ord("f")
LOWER_T = ord("t")
OPENING_BRACE = ord("{")
CLOSING_BRACE = ord("}")
TILDE = ord("~")
"""The last printable character of ASCII; the first one is the space."""

INT_DIGITS_MAX = 18
"""An int64 holds every integer of up to this many digits."""

FLOAT_DIGITS_MAX = 15
"""A float holds every integer of up to this many digits exactly, and each power of ten up to this one.

So the quotient of such an integer and power is rounded once.
"""
FLOAT_DIGITS_END = 10**FLOAT_DIGITS_MAX
"""The lowest integer with more digits."""

_POWERS = np.array([10.0**i for i in range(FLOAT_DIGITS_MAX + 1)])


@compiled
def _skip_json_space(data, at, stop):
    while at < stop and (data[at] == SPACE or data[at] == NEWLINE or data[at] == CARRIAGE_RETURN or data[at] == TAB):
        at += 1
    return at


@compiled
def _json_string_end(data, at, stop):
    """Return the index of the closing quote of a string whose opening quote is before `at`.

    Returns -1 if the string does not end, or has an escape or a byte that is not printable ASCII.
    """
    while at < stop:
        byte = data[at]
        if byte == QUOTE:
            return at
        if byte == BACKSLASH or byte < SPACE or byte > TILDE:
            return -1
        at += 1
    return -1


@compiled
def _parse_json_number(data, at, stop):
    """Return all digits as one integer, the number of digits after the point, whether it is negative, and the end.

    The end is -1 if this is not a number, or one that is left to msgspec.
    """
    is_negative = data[at] == MINUS
    if is_negative:
        at += 1
    first = at
    digits = np.int64(0)
    while at < stop and DIGIT_0 <= data[at] <= DIGIT_9:
        if at - first == INT_DIGITS_MAX:
            return digits, 0, is_negative, -1
        digits = digits * 10 + (data[at] - DIGIT_0)
        at += 1
    count = at - first
    # Not JSON: no digit, or a leading zero. msgspec rejects it with its own message.
    if count == 0 or (count > 1 and data[first] == DIGIT_0):
        return digits, 0, is_negative, -1
    after_point = 0
    if at < stop and data[at] == POINT:
        at += 1
        while at < stop and DIGIT_0 <= data[at] <= DIGIT_9:
            if count + after_point >= FLOAT_DIGITS_MAX:
                return digits, 0, is_negative, -1
            digits = digits * 10 + (data[at] - DIGIT_0)
            after_point += 1
            at += 1
        if after_point == 0:
            return digits, 0, is_negative, -1
    return digits, after_point, is_negative, at


@compiled
def _is_json_word(data, at, stop, word):
    if stop - at < len(word):
        return False
    for i in range(len(word)):
        if data[at + i] != word[i]:
            return False
    return True


@compiled
def _find_json_member(data, start, end, names, name_ends):
    """Return the index of the member whose name is `data[start:end]`; -1 if there is none."""
    before = 0
    for field in range(len(name_ends)):
        length = name_ends[field] - before
        if length == end - start:
            is_same = True
            for j in range(length):
                if data[start + j] != names[before + j]:
                    is_same = False
                    break
            if is_same:
                return field
        before = name_ends[field]
    return -1


@compiled
def _read_json_object(
    data, at, stop, names, name_ends, kinds, nullable, powers, null, true, false, numbers, floats, has, i, seen
):
    """Read one object into column i; return False if it is left to msgspec."""
    # 1. Read the opening brace. An object without members is left to msgspec.
    at = _skip_json_space(data, at, stop)
    if at >= stop or data[at] != OPENING_BRACE:
        return False
    at = _skip_json_space(data, at + 1, stop)
    found = 0
    while True:
        # 2. Read the name of a member, and find the member in the type.
        if at >= stop or data[at] != QUOTE:
            return False
        end = _json_string_end(data, at + 1, stop)
        if end < 0:
            return False
        field = _find_json_member(data, at + 1, end, names, name_ends)
        kind = UNKNOWN
        if field >= 0:
            # A repeated member. msgspec decides which one counts.
            if seen[field] == i + 1:
                return False
            seen[field] = i + 1
            found += 1
            kind = kinds[field]
        # 3. Read the colon.
        at = _skip_json_space(data, end + 1, stop)
        if at >= stop or data[at] != COLON:
            return False
        at = _skip_json_space(data, at + 1, stop)
        if at >= stop:
            return False
        # 4. Read the value. Its first byte determines its kind. A wrong kind is left to msgspec.
        byte = data[at]
        if byte == QUOTE:
            if kind != TEXT and kind != UNKNOWN:
                return False
            at = _json_string_end(data, at + 1, stop)
            if at < 0:
                return False
            at += 1
        elif byte == MINUS or DIGIT_0 <= byte <= DIGIT_9:
            digits, after_point, is_negative, at = _parse_json_number(data, at, stop)
            if at < 0:
                return False
            if kind == INT:
                if after_point:
                    return False
                numbers[field, i] = -digits if is_negative else digits
                has[field, i] = 1
            elif kind == FLOAT:
                # msgspec decides which sign the value of `-0` has.
                is_whole_minus_0 = is_negative and digits == 0 and after_point == 0
                if digits >= FLOAT_DIGITS_END or is_whole_minus_0:
                    return False
                value = digits / powers[after_point]
                floats[field, i] = -value if is_negative else value
                has[field, i] = 1
            elif kind != UNKNOWN:
                return False
        elif _is_json_word(data, at, stop, null):
            if field >= 0 and not nullable[field]:
                return False
            at += len(null)
        elif byte in (LOWER_T, LOWER_F):
            word = true if byte == LOWER_T else false
            if not _is_json_word(data, at, stop, word) or (kind != BOOL and kind != UNKNOWN):
                return False
            if kind == BOOL:
                numbers[field, i] = byte == LOWER_T
                has[field, i] = 1
            at += len(word)
        # A nested value, or no JSON.
        else:
            return False
        # 5. Read the comma before the next member, or the closing brace. Numbers with an exponent are rare, and are
        #    left to msgspec.
        at = _skip_json_space(data, at, stop)
        if at >= stop:
            return False
        if data[at] == CLOSING_BRACE:
            break
        if data[at] != COMMA:
            return False
        at = _skip_json_space(data, at + 1, stop)
    # 6. All members of the type are present, and only white space follows the object.
    return found == len(kinds) and _skip_json_space(data, at + 1, stop) == stop


@compiled
def read_json_fields(
    data, starts, lengths, names, name_ends, kinds, nullable, powers, null, true, false, numbers, floats, has, seen,
    left,
):  # fmt: skip
    """Read the members of objects into `numbers` and `has`. Return how many objects are left to msgspec.

    The indexes of those objects go to `left`. `floats` is the same memory as `numbers`. `seen` is scratch memory, at
    first 0 for each member.
    """
    count = 0
    for i in range(len(starts)):
        if lengths[i] < 0 or not _read_json_object(
            data, starts[i], starts[i] + lengths[i], names, name_ends, kinds, nullable, powers, null, true, false,
            numbers, floats, has, i, seen,
        ):  # fmt: skip
            for f in range(len(kinds)):
                numbers[f, i] = 0
                has[f, i] = 0
            left[count] = i
            count += 1
    return count


def _bytes(text: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(text, np.uint8)


_WORDS = tuple(map(_bytes, (b"null", b"true", b"false")))


class JsonFields:
    """The members of one type's values, and those that are wanted as numbers."""

    def __init__(self, members: Sequence[tuple[str, int, bool]], wanted: Sequence[str]) -> None:
        """Each of `members` is the name in the JSON, the kind, and whether it may be null."""
        names = [name.encode() for name, _, _ in members]
        self._names = _bytes(b"".join(names))
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self._kinds = np.array([kind for _, kind, _ in members], np.int64)
        self._nullable = np.array([is_nullable for _, _, is_nullable in members], np.bool_)
        at = {name: i for i, (name, _, _) in enumerate(members)}
        self._wanted = np.array([at[name] for name in wanted], np.int64)

    def __repr__(self) -> str:
        return f"<JsonFields {bytes(self._names)!r}, {len(self._wanted)} wanted>"

    @classmethod
    def of(cls, value_type: Any, wanted: Sequence[str]) -> JsonFields | None:
        """Return the reader of the `wanted` fields of this type; None if the kernel cannot read the type.

        The type `dict` stands for any JSON object; its wanted fields are read as floats. The caller has checked that
        any other type declares the wanted fields as numbers.
        """
        if value_type is dict:
            return cls([(name, FLOAT, True) for name in dict.fromkeys(wanted)], wanted)
        if not (isinstance(value_type, type) and issubclass(value_type, msgspec.Struct)):
            return None
        info = inspect.type_info(value_type)
        if not isinstance(info, inspect.StructType) or info.tag is not None or info.array_like:
            return None
        if info.forbid_unknown_fields or hasattr(value_type, "__post_init__"):
            return None
        members: list[tuple[str, int, bool]] = []
        encoded: dict[str, str] = {}
        for field in info.fields:
            kind = _json_member_kind(field.type)
            if kind is None or not field.encode_name.isascii():
                return None
            members.append((field.encode_name, *kind))
            encoded[field.name] = field.encode_name
        return cls(members, [encoded[name] for name in wanted])

    def read(self, values: PackedBytes) -> tuple[Int64Array, NDArray[np.uint8], Int64Array]:
        """Return the numbers, whether each is present, and the indexes of the values that msgspec must decode.

        The first two arrays have the shape (wanted fields, values). A cell has the bits of an int64 or a float64, by
        the field's type. In the columns of values for msgspec no number is present.
        """
        count = len(values)
        members = len(self._kinds)
        numbers = np.zeros((members, count), np.int64)
        has = np.zeros((members, count), np.uint8)
        left = np.empty(count, np.int64)
        lefts = read_json_fields(
            values.data, values.offsets, values.lengths, self._names, self._ends, self._kinds, self._nullable, _POWERS,
            *_WORDS, numbers, numbers.view(np.float64), has, np.zeros(members, np.int64), left,
        )  # fmt: skip
        return numbers[self._wanted], has[self._wanted], left[:lefts]


_KINDS: dict[type, int] = {
    inspect.IntType: INT,
    inspect.FloatType: FLOAT,
    inspect.BoolType: BOOL,
    inspect.StrType: TEXT,
}


def _json_member_kind(type_: inspect.Type) -> tuple[int, bool] | None:
    """Return a member's kind and whether it may be null; None if the kernel of `JsonFields` does not read its type."""
    options = type_.types if isinstance(type_, inspect.UnionType) else (type_,)
    kinds = set()
    for option in options:
        if isinstance(option, inspect.NoneType):
            continue
        if type(option) not in _KINDS or any(getattr(option, name) is not None for name in option.__struct_fields__):
            return None
        kinds.add(_KINDS[type(option)])
    is_nullable = any(isinstance(option, inspect.NoneType) for option in options)
    if kinds == {INT, FLOAT}:
        return FLOAT, is_nullable
    return (kinds.pop(), is_nullable) if len(kinds) == 1 else None


def compile_json_fields() -> None:
    """Compile the kernel that reads fields of JSON objects, or load it from numba's cache."""
    JsonFields([("a", INT, False)], ["a"]).read(PackedBytes.of([b'{"a":1}']))
