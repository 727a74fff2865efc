"""What flows between two nodes of the DSL: where it came from, its types, and how it is written."""

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
from penstock.shared.streams.task.result_encoders import encode_json
from penstock.shared.streams.task.user_functions import require_callable
from penstock.shared.streams.topology import Encoder, KeyType, SourceNode


@dataclass(frozen=True, slots=True)
class Flow:
    """`value` is the type of the values, `is_rekeyed` says that records of one key may be in several partitions.

    `is_windowed` says that the keys are windows, `window_key` what those windows' own keys are. `mixed` names the types
    of the values where merged streams have different ones, `origin` the topic where the records entered the topology.
    `has_deletions` says that a record without a value may tell of a window that was retracted or a row that is gone.
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
    """A type as a message names it."""
    return getattr(value, "__name__", None) or repr(value)


def is_type(value: Any) -> bool:
    """Whether it is a type that msgspec may decode to, and no deserializer."""
    return isinstance(value, type) or typing.get_origin(value) is not None


def deserializer_of(value: Any) -> Deserializer:
    """How values of a type are read; a deserializer is its own. ConfigError for anything else."""
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
