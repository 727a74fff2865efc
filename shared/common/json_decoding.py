"""Decodes JSON from outside: from users, topics, files and other processes. Every failure is one error, InvalidJson.

msgspec's decoders raise several errors: of their own for malformed data, UnicodeDecodeError within a string, and
RecursionError for deep nesting. `decode_json` converts them. Code that decodes a value of each record calls a decoder
of its own, which saves a function call, and catches `JSON_ERRORS`. `invalid_json` converts these to InvalidJson.

msgspec rejects some valid JSON: lone surrogates, and floats out of the range of a double. A schema may have them, for
example in a `pattern`. So `decode_schema` uses Python's decoder.

>>> decode_json(b'{"user": "ann"}')
{'user': 'ann'}
>>> decode_json('[1, "a"]', list[int])
Traceback (most recent call last):
    ...
penstock.shared.common.json_decoding.JsonTypeMismatch: Expected `int`, got `str` - at `$[1]`
>>> decode_json("[" * 100_000)
Traceback (most recent call last):
    ...
penstock.shared.common.json_decoding.InvalidJson: nested too deeply
"""

from __future__ import annotations

import json
import re
from decimal import InvalidOperation
from typing import Any, Final, NoReturn, TypeVar, overload

import msgspec
from typing_extensions import Buffer

T = TypeVar("T")

JSON_ERRORS: Final = (ValueError, RecursionError, InvalidOperation)
"""What a JSON decoder of msgspec raises for invalid data. InvalidOperation is from Decimal as its `float_hook`."""

NOT_UTF8 = "not UTF-8"
"""The message of InvalidJson for text that is not UTF-8."""

JSON_POINTER: Final = re.compile(r"(/([^~/]|~[01])*)*")
"""The form of a JSON pointer (RFC 6901). The empty pointer refers to the whole document."""

_decode_any = msgspec.json.Decoder().decode


class InvalidJson(ValueError):
    """The data cannot be decoded: it is malformed, truncated, not UTF-8, nested too deeply, or of another type, or a
    number is out of range.

    The message is usually the decoder's.
    """


class JsonTypeMismatch(InvalidJson):
    """The value does not fit the requested type, or a number is out of range. The message has its path, if known."""


def invalid_json(error: Exception) -> InvalidJson:
    """Return the InvalidJson for one of JSON_ERRORS that a decoder raised."""
    if isinstance(error, msgspec.ValidationError):
        return JsonTypeMismatch(str(error))
    if isinstance(error, RecursionError):
        return InvalidJson("nested too deeply")
    if isinstance(error, UnicodeError):
        return InvalidJson(NOT_UTF8)
    if isinstance(error, InvalidOperation):
        return JsonTypeMismatch("Number out of range")
    return InvalidJson(str(error))


@overload
def decode_json(data: Buffer | str) -> Any: ...
@overload
def decode_json(data: Buffer | str, kind: type[T]) -> T: ...
@overload
def decode_json(data: Buffer | str, kind: Any) -> Any: ...
def decode_json(data: Buffer | str, kind: Any = None) -> Any:
    """Return the value of JSON: of the type `kind`, or plain dicts, lists, strings and numbers by default.

    Raises InvalidJson; its subclass JsonTypeMismatch if the data is JSON of another type.
    """
    try:
        return _decode_any(data) if kind is None else msgspec.json.decode(data, type=kind)
    except JSON_ERRORS as e:
        raise invalid_json(e) from e


def decode_schema(data: bytes | str) -> Any:
    """Return the value of a schema's JSON, such as a JSON Schema or an Avro schema. Raises InvalidJson.

    A lone surrogate stays in its text. A float out of the range of a double is infinite.

    >>> decode_schema(r'{"pattern": "\\ud800", "maximum": 1e400}')
    {'pattern': '\\ud800', 'maximum': inf}
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(text, parse_constant=_reject_constant)
    except JSON_ERRORS as e:
        raise invalid_json(e) from e


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
