"""SimpleHeaderConverter: headers as text. The type of a text is inferred from its form.

>>> converter = SimpleHeaderConverter()
>>> [converter.to_connect_header("t", "h", text)[1] for text in (b"12", b"1.5", b"true", b"null", b"abc", b"[1,2]")]
[12, 1.5, True, None, 'abc', [1, 2]]
"""

from __future__ import annotations

import datetime as dt
import math
import re
from decimal import Decimal
from typing import Any

import msgspec

from penstock.shared.common.json_decoding import decode_json
from penstock.shared.connect.config_def import as_text
from penstock.shared.connect.converter import Converted, HeaderConverter
from penstock.shared.connect.converters.json import NOT_FINITE, value_to_json
from penstock.shared.connect.schema import (
    BOOLEAN,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
    Schema,
    date_schema,
    decimal_schema,
    time_schema,
    timestamp_schema,
)

NUMBER = re.compile(r"[+-]?[0-9]+")
DECIMAL = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.?[0-9]+)([eE][+-]?[0-9]{1,3})?")
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
DAY = re.compile(r"\d{4}-\d\d-\d\d")
CLOCK = re.compile(r"\d\d:\d\d:\d\d\.\d{3}Z")
INTEGERS = ((8, INT8), (16, INT16), (32, INT32), (64, INT64))


class SimpleHeaderConverter(HeaderConverter):
    """Text without its schema, which a reader infers.

    Digits, also with a sign, are read as the smallest integer type that fits, or else as a Decimal. A number with a
    point or an exponent is read as a FLOAT64, or as a Decimal if it is too large. A JSON array or object has no schema.
    Kafka's converter also infers smaller types of such numbers, and schemas of arrays and maps.
    """

    kafka_class = "org.apache.kafka.connect.storage.SimpleHeaderConverter"

    def from_connect_header(self, topic: str, name: str, schema: Schema | None, value: Any) -> bytes | None:
        if value is None:
            return None
        return header_text(value, schema).encode()

    def to_connect_header(self, topic: str, name: str, data: bytes | None) -> Converted:
        if data is None:
            return None, None
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return STRING, data.decode(errors="replace")
        return parsed_text(text)


def header_text(value: Any, schema: Schema | None) -> str:
    """A value as a header's text. A float has Java's form."""
    if isinstance(value, str):
        return value
    if isinstance(value, dt.datetime):
        at = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
        return at.astimezone(dt.UTC).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, dt.time):
        return value.strftime("%H:%M:%S.") + f"{value.microsecond // 1000:03d}Z"
    if isinstance(value, dict | list):
        return msgspec.json.encode(value_to_json(schema, value)).decode()
    if isinstance(value, bytes):
        return str(value_to_json(None, value))
    if isinstance(value, float):
        return _float_text(value)
    return as_text(value, None) or ""


def _float_text(number: float) -> str:
    # The repr of a subclass is another one: np.float64(1.5).
    number = float(number)
    if not math.isfinite(number):
        return NOT_FINITE[str(number)]
    if number == 0 or 1e-3 <= abs(number) < 1e7:
        return repr(number)
    mantissa, exponent = f"{Decimal(repr(number)).normalize():E}".split("E")
    return f"{mantissa}{'' if '.' in mantissa else '.0'}E{int(exponent)}"


def parsed_text(text: str) -> Converted:
    """Return the schema and the value that are inferred from a text."""
    if text in ("true", "false"):
        return BOOLEAN, text == "true"
    if text == "null":
        return None, None
    if NUMBER.fullmatch(text):
        whole = Decimal(text)
        for bits, schema in INTEGERS:
            if -(1 << bits - 1) <= whole < 1 << bits - 1:
                return schema, int(whole)
        return decimal_schema(0), whole
    if DECIMAL.fullmatch(text):
        number = float(text)
        if math.isinf(number):
            return decimal_schema(-int(Decimal(text).as_tuple().exponent)), Decimal(text)
        return FLOAT64, number
    try:
        if TIMESTAMP.fullmatch(text):
            return timestamp_schema(), dt.datetime.fromisoformat(text)
        if DAY.fullmatch(text):
            return date_schema(), dt.date.fromisoformat(text)
        if CLOCK.fullmatch(text):
            return time_schema(), dt.time.fromisoformat(text[:-1])
        if text[:1] + text[-1:] in ("[]", "{}"):
            return None, decode_json(text)
    except ValueError:
        pass
    return STRING, text
