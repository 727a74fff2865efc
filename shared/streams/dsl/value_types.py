"""The argument `value` of the DSL: the type of a topic's values, or a deserializer."""

from __future__ import annotations

import typing
from typing import Any

import msgspec

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.serialization import (
    Deserializer,
    StructDeserializer,
    bytes_deserializer,
    check_serializer,
    json_deserializer,
    struct_deserializer,
)
from penstock.shared.streams.user_code import require_callable


def value_type_name(value: Any) -> str:
    """Return the name of a type of values for a message."""
    return getattr(value, "__name__", None) or repr(value)


def is_value_type(value: Any) -> bool:
    """Return whether the DSL's `value` is a type that msgspec may decode to, and not a deserializer."""
    return isinstance(value, type) or typing.get_origin(value) is not None


def without_deserializer(value: Any) -> Any:
    """Return the type for which `value_deserializer` returns the deserializer `value`, if any, else `value` itself.

    >>> without_deserializer(struct_deserializer(list[int])), without_deserializer(bytes_deserializer)
    (list[int], <class 'bytes'>)
    """
    if value is json_deserializer:
        return dict
    if value is bytes_deserializer:
        return bytes
    # Of JSON, `struct_deserializer(dict)` takes only objects, and `struct_deserializer(bytes)` reads base64.
    if isinstance(value, StructDeserializer) and value.kind not in (dict, bytes) and is_value_type(value.kind):
        return value.kind
    return value


def value_deserializer(value: Any) -> Deserializer:
    """Return the deserializer for a type, or `value` itself if it is a deserializer.

    Raises ConfigError if it is neither, or has a class that msgspec cannot decode, such as a pydantic model.
    """
    if value is dict:
        return json_deserializer
    if value is bytes:
        return bytes_deserializer
    if is_value_type(value):
        if (found := _undecodable_class(value)) is not None:
            raise ConfigError(
                f"value={value_type_name(value)}: msgspec cannot decode the class {found.__name__} from JSON; use a "
                "msgspec.Struct, a dataclass or a TypedDict, or a deserializer"
            )
        return struct_deserializer(value)
    if callable(value):
        require_callable("value, a deserializer,", value)
        check_serializer("value, a deserializer,", value)
        deserializer: Deserializer = value
        return deserializer
    raise ConfigError(f"value must be a type or a deserializer, got {value!r}")


def row_deserializer(value: Any) -> Deserializer:
    """Return `value_deserializer(value)`, but JSON's `null` is None for every type, so that it deletes a row.

    >>> row_deserializer(list[int])("topic", b"null") is None
    True
    """
    deserializer = value_deserializer(value)
    if isinstance(deserializer, StructDeserializer):
        return struct_deserializer(typing.cast(Any, deserializer.kind | None))
    return deserializer


def _undecodable_class(value: Any) -> type | None:
    """Return a class that msgspec cannot decode from JSON, and that is `value` or within this type, or None."""
    left: list[Any] = [msgspec.inspect.type_info(value)]
    seen = set()
    while left:
        info = left.pop()
        # A type may contain itself.
        if id(info) in seen:
            continue
        seen.add(id(info))
        # msgspec takes any class, and leaves an unknown one to a `dec_hook`. It decodes `object` as any JSON.
        if isinstance(info, msgspec.inspect.CustomType) and info.cls is not object:
            return info.cls
        if isinstance(info, tuple):
            left += info
        elif isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
            left += (getattr(info, name) for name in info.__struct_fields__)
    return None
