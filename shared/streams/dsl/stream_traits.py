"""The traits of a stream of the DSL: the origin, the types and the encoding of its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.shared.streams.result_encoders import encode_json
from penstock.shared.streams.topology import Encoder, KeyType, SourceNode


@dataclass(frozen=True, slots=True)
class StreamTraits:
    """The traits of a stream's records.

    Of merged streams, `source`, `value`, `window_key` and `origin` are those of the first stream. `encode` is
    `encode_updates` if one of the streams has it, otherwise that of the first stream.
    """

    source: SourceNode
    """The records' source node: after a repartition, the node that reads the repartition topic."""
    value: Any
    """The type of the values."""
    key: KeyType
    """The type of the record keys."""
    origin: str
    """The topic where the records entered the topology, before any repartition."""
    encode: Encoder = encode_json
    """The default encoder of `Stream.to`."""
    is_rekeyed: bool = False
    """Whether keys may have changed, so that records of one key may be in several partitions."""
    rekeyed_by: str | None = None
    """The name that the user gave to the operation that changed the keys, if any; the repartition topic is named after
    it."""
    is_windowed: bool = False
    """Whether keys may be `WindowKey`s."""
    window_key: KeyType = "string"
    """The type of the record keys in `WindowKey`s."""
    mixed: tuple[str, ...] = ()
    """The names of the types of the values if merged streams have different ones."""
    has_deletions: bool = False
    """Whether a record without a value may be a retracted window or a deleted row."""
