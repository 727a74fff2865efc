"""The traits of a stream of the DSL: the origin, the types and the encoding of its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.shared.streams.result_encoders import encode_json
from penstock.shared.streams.topology import Encoder, KeyType, SourceNode


@dataclass(frozen=True, slots=True)
class StreamTraits:
    """The traits of a stream's records.

    `source` is the records' source node: after a repartition, the node that reads the repartition topic. `origin` is
    the topic where the records entered the topology, before any repartition. `value` is the type of the values. `mixed`
    names the types of the values if merged streams have different ones. `encode` is the default encoder of `Stream.to`.

    `is_rekeyed` means that keys may have changed, so records of one key may be in several partitions. `rekeyed_by` is
    the name that the user gave to the operation that changed them, if any; the repartition topic is named after it.
    `is_windowed` means that keys may be `WindowKey`s, and `window_key` is the type of the record keys in them.
    `has_deletions` means that a record without a value may be a retracted window or a deleted row.

    Of merged streams, `source`, `value`, `encode`, `window_key` and `origin` are those of the first stream.
    """

    source: SourceNode
    value: Any
    key: KeyType
    encode: Encoder = encode_json
    is_rekeyed: bool = False
    rekeyed_by: str | None = None
    is_windowed: bool = False
    window_key: KeyType = "string"
    mixed: tuple[str, ...] = ()
    origin: str = ""
    has_deletions: bool = False
