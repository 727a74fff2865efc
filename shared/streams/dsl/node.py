"""The description of the records between two nodes of the DSL: their origin, types and encoding."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.serialization import (
    Deserializer,
    bytes_deserializer,
    json_deserializer,
    struct_deserializer,
)
from penstock.shared.streams.result_encoders import encode_json
from penstock.shared.streams.topology import Encoder, KeyType, SourceNode
from penstock.shared.streams.user_code import require_callable


@dataclass(frozen=True, slots=True)
class Flow:
    """`value` is the type of the values. `is_rekeyed` means that records of one key may be in several partitions.

    `is_windowed` means that the keys are windows; `window_key` is the type of those windows' own keys. `mixed` names
    the types of the values if merged streams have different ones. `origin` is the topic where the records entered the
    topology. `has_deletions` means that a record without a value may stand for a retracted window or a deleted row.
    """

    source: SourceNode
    value: Any
    key: KeyType
    encode: Encoder = encode_json
    is_rekeyed: bool = False
    is_windowed: bool = False
    window_key: KeyType = "string"
    mixed: tuple[str, ...] = ()
    origin: str = ""
    has_deletions: bool = False


def type_name(value: Any) -> str:
    """Return a type's name for a message."""
    return getattr(value, "__name__", None) or repr(value)


def is_type(value: Any) -> bool:
    """Return whether this is a type that msgspec may decode to, and not a deserializer."""
    return isinstance(value, type) or typing.get_origin(value) is not None


def deserializer_of(value: Any) -> Deserializer:
    """Return the deserializer for a type; a deserializer is returned as it is. Raises ConfigError for anything else."""
    if value is dict:
        return json_deserializer
    if value is bytes:
        return bytes_deserializer
    if is_type(value):
        return struct_deserializer(value)
    if callable(value):
        require_callable("stream: value, a deserializer,", value)
        deserializer: Deserializer = value
        return deserializer
    raise ConfigError(f"stream: value must be a type or a deserializer, got {value!r}")
