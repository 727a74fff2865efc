"""Turns a batch of records into columns: keys become numbers, values become arrays, and exceptional records are found.

The value type of the stream decides how values are decoded. `bytes` are not decoded at all. If the store needs only
numbers of a struct or a `dict`, a kernel reads them from the JSON where it can (`json_fields`). msgspec decodes all
other JSON. For a struct, it checks the declared fields and skips all others. It decodes a `dict` completely. All other
values are decoded by the source's deserializer.

A record is exceptional if it would be rejected as a single record: its key or value cannot be decoded, it has no
timestamp, its key is too large for a result, a function of the operator chain raises, or an aggregation rejects its
value. Exceptional records are processed one by one, so that the reason is found and reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.errors import PenstockError
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Columns, Int64Array
from penstock.shared.common.serialization import bytes_deserializer, json_deserializer
from penstock.shared.streams.task.json_fields import JsonFields
from penstock.shared.streams.task.operator_chain import OperatorChain
from penstock.shared.streams.topology import SourceNode
from penstock.shared.streams.windows.key_index import Int32Array, are_ascii
from penstock.shared.streams.windows.size_limits import KEY_GROWTH_MAX, check_key
from penstock.shared.streams.windows.state_columns import RecordNumbers, ValueRejected
from penstock.shared.streams.windows.window_store import WindowStore

UNDECODABLE = object()

NO_VALUE = -2
"""The code of a record that the store skips because it has no value. Any other negative code means no key."""
LEFT_SHARE_MAX = 1 / 4
"""If a kernel leaves a larger share of a batch than this to msgspec, msgspec reads the whole batch."""


@dataclass(slots=True)
class DecodedBatch:
    """A decoded batch, as columns."""

    codes: Int32Array
    """The numbers of the keys; negative for records that the store skips. The records that the operator chain had no
    time for, which are the last ones, are left out."""
    values: RecordNumbers
    """The numbers for the kernel. They, `inputs` and `is_out` may also have the records that `codes` leaves out."""
    inputs: list[list[Any]]
    """The values for each aggregation whose states are objects."""
    exceptional: list[int]
    """The indexes, ascending, of records that may be rejected as single records, and so must be processed one by
    one."""
    is_out: NDArray[np.bool_] | None = None
    """Marks the records that the operator chain has filtered out and those that it had no time for; None means that
    there is no chain."""

    def of(self, at: Int64Array) -> tuple[Int32Array, RecordNumbers, list[list[Any]]]:
        """Return codes, values and objects of the records at these indexes, which must ascend."""
        if len(at) == len(self.values.has[0] if len(self.values.has) else self.codes):
            return self.codes, self.values, self.inputs
        values = self.values
        indexes = at.tolist()
        some = RecordNumbers(np.ascontiguousarray(values.cells[:, at]), np.ascontiguousarray(values.has[:, at]))
        return self.codes[at], some, [[column[index] for index in indexes] for column in self.inputs]


class BatchDecoder:
    """Decodes the batches of one source for one store."""

    def __init__(
        self, source: SourceNode, store: WindowStore, key_bytes_max: int, chain: OperatorChain | None = None
    ) -> None:
        self._source = source
        self._store = store
        self._key_bytes_max = key_bytes_max
        self._chain = chain
        self._decode = _value_decoder(source)
        # JSON deserializers return None for a record without a value. Any other deserializer decides itself.
        self._has_none = source.value_type is not None
        self._fields = None if chain is not None or store.columns.objects else _json_fields_for_kernel(source, store)

    def of(self, columns: Columns) -> DecodedBatch | None:
        """Return the decoded batch, or None if it must be processed record by record."""
        exceptional: set[int] = set()
        if int(columns.timestamps.min()) < 0:
            exceptional.update(np.flatnonzero(columns.timestamps < 0).tolist())
        codes = self._key_codes(columns, exceptional)
        if self._fields is not None and (numbers := self._decode_json_numbers(columns, codes, exceptional)) is not None:
            return DecodedBatch(codes, numbers, [], sorted(exceptional))
        # No kernel reads these values, or it could not read enough of them.
        values: Sequence[Any] = columns.values
        if self._source.value is not bytes_deserializer:
            values = self._decode_values(columns.values, exceptional)
        is_out = None
        out = set[int]()
        count = len(columns)
        if self._chain is not None:
            values, is_out, count = self._chain.values(columns, values, exceptional)
            out = set(np.flatnonzero(is_out).tolist())
        null = self._skipped_values(values) - out
        states = self._state_columns(values, columns.timestamps, exceptional, out | null)
        if states is None:
            return None
        _mark_no_value(codes, np.array(sorted(null), np.int64))
        own = sorted(o for o in exceptional if o < count)
        return DecodedBatch(codes[:count], *states, own, is_out)

    def _decode_json_numbers(self, columns: Columns, codes: Int32Array, exceptional: set[int]) -> RecordNumbers | None:
        """Return the numbers that a kernel, helped by msgspec, reads from JSON; None if msgspec must read them all."""
        assert self._fields is not None
        values = PackedBytes.of(columns.values)
        cells, has, left = self._fields.read(values)
        self._store.columns.settle_zeros(cells)
        if not len(left):
            return RecordNumbers(cells, has)
        if len(left) > len(values) * LEFT_SHARE_MAX:
            return None
        own: set[int] = set()
        decoded = self._decode_values(values.at(left).tolist(), own)
        null = self._skipped_values(decoded)
        states = self._state_columns(decoded, columns.timestamps[left], own, null)
        if states is None:
            return None
        _mark_no_value(codes, left[sorted(null)])
        exceptional.update(left[sorted(own)].tolist())
        cells[:, left], has[:, left] = states[0]
        return RecordNumbers(cells, has)

    def _key_codes(self, columns: Columns, exceptional: set[int]) -> Int32Array:
        keys = PackedBytes.of(columns.keys)
        is_plain = self._source.key == "bytes" or are_ascii(keys)
        # ASCII is valid UTF-8, and if even the longest key fits with every byte escaped, no key must be checked alone.
        if not is_plain or int(keys.lengths.max()) * KEY_GROWTH_MAX + 4 > self._key_bytes_max:
            known = keys.tolist()
            unsound = {key for key in dict.fromkeys(known) if key is not None and not self._is_valid_key(key)}
            exceptional.update(at for at, key in enumerate(known) if key in unsound)
        return self._store.index.codes_of(keys)

    def _is_valid_key(self, key: bytes) -> bool:
        try:
            check_key(key.decode() if self._source.key == "string" else key, self._store.name, self._key_bytes_max)
        except (UnicodeDecodeError, PenstockError):
            return False
        return True

    def _decode_values(self, raw: Sequence[bytes | None], exceptional: set[int]) -> list[Any]:
        decode = self._decode
        if not self._has_none or None not in raw:
            # After an error, the loop below finds the records that cannot be decoded.
            with contextlib.suppress(Exception):
                return list(map(decode, raw))
        decoded = []
        for index, value in enumerate(raw):
            try:
                decoded.append(None if value is None and self._has_none else decode(value))
            except Exception:
                exceptional.add(index)
                decoded.append(UNDECODABLE)
        return decoded

    def _skipped_values(self, values: Sequence[Any]) -> set[int]:
        """Return the indexes of the records without a value, if the store skips these."""
        if not self._store.rule.skips_null_values:
            return set()
        return {index for index, value in enumerate(values) if value is None}

    def _find_rejected_values(self, values: Sequence[Any], out: set[int]) -> list[int]:
        rejected = []
        aggregations = self._store.columns.aggregations
        for index, value in enumerate(values):
            if index in out:
                continue
            # What a built-in aggregation rejects does not depend on the state. The exception is a sum that leaves 64
            # bits, which the kernel checks.
            try:
                for aggregation in aggregations:
                    aggregation.add(aggregation.initial(), value)
            except Exception:
                rejected.append(index)
        return rejected

    def _state_columns(
        self, values: Sequence[Any], timestamps: Int64Array, exceptional: set[int], out: set[int]
    ) -> tuple[RecordNumbers, list[list[Any]]] | None:
        """Return the values as columns for the aggregations; cells of exceptional records and of those in `out` are
        undefined.

        Records whose values an aggregation rejects are added to `exceptional`. If columns still cannot be made, return
        None: some number has a type that only the aggregation's `add` accepts.
        """
        try:
            return self._state_columns_without(values, timestamps, exceptional | out)
        except ValueRejected:
            # The error does not say which value was rejected. Find out one by one, and take the others as columns.
            exceptional.update(self._find_rejected_values(values, exceptional | out))
        try:
            return self._state_columns_without(values, timestamps, exceptional | out)
        except ValueRejected:
            return None

    def _state_columns_without(
        self, values: Sequence[Any], timestamps: Int64Array, without: set[int]
    ) -> tuple[RecordNumbers, list[list[Any]]]:
        """Return the columns of `_state_columns`, in which the cells of the records in `without` are undefined.

        Raises ValueRejected if one of the other records cannot be put into columns.
        """
        if not without:
            return self._store.columns.take(values, timestamps)
        fit = [index for index in range(len(values)) if index not in without]
        some, inputs = self._store.columns.take([values[index] for index in fit], timestamps[fit])
        whole = self._store.columns.no_values(len(values))
        whole.cells[:, fit], whole.has[:, fit] = some
        all_inputs: list[list[Any]] = []
        for own in inputs:
            column: list[Any] = [None] * len(values)
            for index, one in zip(fit, own, strict=True):
                column[index] = one
            all_inputs.append(column)
        return whole, all_inputs


def _mark_no_value(codes: Int32Array, at: Int64Array) -> None:
    # A record without a key as well is counted as one without a key, as when it is processed alone.
    codes[at[codes[at] >= 0]] = NO_VALUE


def _json_fields_for_kernel(source: SourceNode, store: WindowStore) -> JsonFields | None:
    """Return the fields that a kernel can read from the source's values; None if no kernel can read them."""
    if source.value_type is None or not source.is_json:
        return None
    return JsonFields.of(source.value_type, [number.field for number in store.columns.numbers])


def _value_decoder(source: SourceNode) -> Callable[[Any], Any]:
    """Return a function that decodes a value of a batch as the source's deserializer does, with few calls."""
    if source.value is json_deserializer:
        return msgspec.json.Decoder().decode
    if source.value_type is not None and source.is_json:
        return msgspec.json.Decoder(source.value_type).decode
    topic = source.topic
    deserialize = source.value
    return lambda data: deserialize(topic, data)
