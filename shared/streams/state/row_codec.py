"""Encodes a store's keys and states as the changelog's bytes, and decodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.shared.common.errors import DataError, StateStoreFailed
from penstock.shared.common.json_decoding import JSON_ERRORS
from penstock.shared.streams.aggregations.aggregation import Aggregation
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import TYPES_GROW, StoreSchema


class RowCodec:
    """Keys and states of the store with this schema and these aggregations."""

    def __init__(self, schema: StoreSchema, aggregations: Sequence[Aggregation[Any]]) -> None:
        self._name = schema.name
        self.is_text = schema.key == "string"
        self._aggregations = tuple(aggregations)
        self._codec = StateCodec(schema.state_columns())
        self._slices = []
        at = 0
        for aggregation in self._aggregations:
            self._slices.append(slice(at, at + len(aggregation.state_columns)))
            at = self._slices[-1].stop

    def key_of(self, data: bytes) -> str | bytes:
        """Decode a key."""
        return data.decode() if self.is_text else data

    def pack(self, states: Sequence[Any]) -> bytes:
        """Encode one row's states."""
        return self._codec.pack([v for a, s in zip(self._aggregations, states, strict=True) for v in a.to_columns(s)])

    def unpack(self, data: bytes) -> list[Any]:
        """Decode the states of one row. Raises StateStoreFailed if they cannot be decoded."""
        try:
            columns = self._codec.unpack(data)
            return [a.from_columns(columns[own]) for a, own in zip(self._aggregations, self._slices, strict=True)]
        except msgspec.ValidationError as e:
            raise StateStoreFailed(f"store {self._name!r}: {e}. {TYPES_GROW}") from e
        except (DataError, *JSON_ERRORS) as e:
            raise StateStoreFailed(f"store {self._name!r}: a row cannot be read: {e}") from e


def row_layout(stores: tuple[StoreSchema, ...]) -> tuple[object, ...]:
    """Return what determines how rows are encoded; if it differs, stored rows cannot be decoded."""
    return tuple(
        (s.name, s.kind, s.key, tuple((a.name, a.function, a.field, a.state) for a in s.aggregations)) for s in stores
    )
