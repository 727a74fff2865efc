"""The converters that are part of Penstock, with the names that configurations use.

Each class is imported when it is first used.
"""

from typing import TYPE_CHECKING

from penstock.shared.connect.builtin import builtin as _builtin

if TYPE_CHECKING:
    from penstock.shared.connect.converters.avro import AvroConverter
    from penstock.shared.connect.converters.json import JsonConverter
    from penstock.shared.connect.converters.json_schema import JsonSchemaConverter
    from penstock.shared.connect.converters.plain import (
        BooleanConverter,
        ByteArrayConverter,
        DoubleConverter,
        FloatConverter,
        IntegerConverter,
        LongConverter,
        ShortConverter,
        StringConverter,
    )
    from penstock.shared.connect.converters.simple_header import SimpleHeaderConverter

__all__ = [
    "AvroConverter",
    "BooleanConverter",
    "ByteArrayConverter",
    "DoubleConverter",
    "FloatConverter",
    "IntegerConverter",
    "JsonConverter",
    "JsonSchemaConverter",
    "LongConverter",
    "ShortConverter",
    "SimpleHeaderConverter",
    "StringConverter",
]


if not TYPE_CHECKING:  # with __getattr__ a type checker would accept every name

    def __getattr__(name: str) -> type:
        return _builtin(__name__, name)


def __dir__() -> list[str]:
    return sorted(__all__)
