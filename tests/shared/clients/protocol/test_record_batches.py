"""Record batches: compressed at the configured level, encoded from columns as by aiokafka's builder byte for byte, with
packed headers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol.column_batch_builder import (
    NO_HEADERS,
    SINGLE_RECORD_BATCH_OVERHEAD_MAX,
    ColumnBatchBuilder,
    EncodableColumns,
    encode_records,
)
from penstock.shared.clients.protocol.packed_headers import PackedHeaders, header_block
from penstock.shared.clients.protocol.record_batches import (
    ATTRIBUTES_AT,
    CRC_AT,
    Compression,
    compression_of,
    crc32c,
    new_batch_builder,
    read_batch_records,
    read_batches,
    record_size,
    seal_batch,
)
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import HeaderColumn, Headers
from tests.documents import ROOT
from tests.shared.clients.protocol.compressions import COMPRESSION

RANDOM = random.Random(1)
TEXT = [b" ".join(RANDOM.choice((b"carrier", b"origin", b"delay", b"%d" % i)) for i in range(200)) for _ in range(20)]
NOISE = [RANDOM.randbytes(100)]


def sealed(values: list[bytes], compression: Compression) -> bytearray:
    builder = new_batch_builder(1 << 20, False)
    for index, value in enumerate(values):
        builder.append(index, 1_000 + index, b"key", value, [])
    return seal_batch(builder, (7, 1, 0), compression)


@pytest.mark.parametrize("name", list(COMPRESSION))
def test_compressed_batches_round_trip(name: str) -> None:
    """Records, codec, length and checksum are correct for every compression."""
    data = sealed(TEXT, COMPRESSION[name])
    assert [value for _, _, value, _ in read_batch_records(data)] == TEXT
    assert data[ATTRIBUTES_AT + 1] & 7 == COMPRESSION[name].codec
    assert int.from_bytes(data[8:12], "big") == len(data) - 12
    assert int.from_bytes(data[CRC_AT : CRC_AT + 4], "big") == crc32c(bytes(data[ATTRIBUTES_AT:]))
    (batch,) = read_batches(bytes(data))
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (7, 1, 0)


@pytest.mark.parametrize("name", ["gzip", "snappy", "lz4", "zstd"])
def test_a_batch_that_would_grow_is_not_compressed(name: str) -> None:
    """A batch that compression would enlarge is written with codec `none`."""
    assert sealed(NOISE, COMPRESSION[name]) == sealed(NOISE, COMPRESSION["none"])


@pytest.mark.parametrize(("name", "low", "high"), [("gzip", 1, 9), ("lz4", 1, 12), ("zstd", -50, 19)])
def test_the_level_is_used(name: str, low: int, high: int) -> None:
    """A higher level makes a smaller batch of the same records."""
    sizes = {level: len(sealed(TEXT, compression_of(name, level))) for level in (low, high)}
    assert sizes[high] < sizes[low]
    assert all(read_batch_records(sealed(TEXT, compression_of(name, level)))[0][2] == TEXT[0] for level in sizes)


def test_the_default_levels_are_those_of_java() -> None:
    """gzip at zlib's default (6), lz4 at 9, zstd at 3."""

    def records(compression: Compression) -> Any:
        return sealed(TEXT, compression)[61:]

    plain = bytes(sealed(TEXT, COMPRESSION["none"])[61:])
    assert len(zlib.compress(plain, 6)) + 12 == len(records(COMPRESSION["gzip"]))
    assert records(COMPRESSION["lz4"]) == records(compression_of("lz4", 9))
    assert records(COMPRESSION["zstd"]) == records(compression_of("zstd", 3))


Own = list[tuple[str, bytes | None]]
Row = tuple[int, bytes | None, bytes | None, Own]

ROOM = 70_000
"""More than any one record here takes."""

strings = st.one_of(
    st.none(),
    st.binary(max_size=12),
    st.sampled_from([b"", b"x" * 62, b"x" * 63, b"x" * 64, b"y" * 8_192]),
)
times = st.one_of(
    st.integers(0, 2**63 - 1),
    st.integers(1_700_000_000_000, 1_700_000_009_000),
    st.sampled_from([0, 63, 2**63 - 1]),
)
names = st.one_of(st.text(max_size=8), st.sampled_from(["", "trace", "naïve", "x" * 64]))
headers = st.one_of(st.just(list[Any]()), st.lists(st.tuples(names, strings), max_size=3))
plain = st.lists(st.tuples(times, strings, strings, st.just(list[Any]())), min_size=1, max_size=40)
rows = st.one_of(plain, st.lists(st.tuples(times, strings, strings, headers), min_size=1, max_size=40))
states = st.tuples(st.integers(-1, 2**63 - 1), st.integers(-1, 2**15 - 1), st.integers(-1, 2**31 - 1))


def columns_of(records: list[Row]) -> EncodableColumns:
    timestamps = np.array([record[0] for record in records], np.int64)
    keys, values = (PackedBytes.of([record[column] for record in records]) for column in (1, 2))  # type: ignore[misc]
    own = [record[3] for record in records]
    return EncodableColumns.of(keys, values, timestamps, PackedHeaders.of(own).blocks if any(own) else NO_HEADERS)


def agree(records: list[Row], batch_size: int, transactional: bool, state: tuple[int, int, int]) -> None:
    """The kernel and aiokafka's builder stop at the same record and write the same bytes."""
    builder = ColumnBatchBuilder(batch_size + ROOM, batch_size, transactional=transactional)
    taken = builder.extend(columns_of(records), np.arange(len(records)), 0, len(records))
    other, count = new_batch_builder(batch_size, transactional), 0
    while count < len(records) and other.append(count, *records[count]) is not None:
        count += 1
    assert (taken, builder.count, builder.size()) == (count, count, other.size())
    assert bytes(seal_batch(builder, state)) == bytes(seal_batch(other, state))


@given(rows, st.integers(61, 30_000), st.booleans(), states)
def test_it_writes_what_aiokafka_writes(
    records: list[Row], batch_size: int, transactional: bool, state: tuple[int, int, int]
) -> None:
    """Nulls, empty and large strings, headers and decreasing timestamps are encoded to the same bytes. The first record
    may exceed the batch size."""
    agree(records, batch_size, transactional, state)


@given(rows, st.lists(st.integers(0, 40), max_size=4), st.integers(61, 2_000))
def test_a_batch_is_filled_in_parts(records: list[Row], cuts: list[int], batch_size: int) -> None:
    """Several calls write the same batch as one call. A full batch accepts no more records."""
    columns, order = columns_of(records), np.arange(len(records))
    at_once, in_parts = (ColumnBatchBuilder(batch_size + ROOM, batch_size, transactional=False) for _ in range(2))
    taken = at_once.extend(columns, order, 0, len(records))
    at = 0
    for stop in [*sorted(min(cut, len(records)) for cut in cuts), len(records)]:
        at = in_parts.extend(columns, order, at, max(at, stop))
        if at < stop:
            break
    assert (at, bytes(in_parts.build())) == (taken, bytes(at_once.build()))


def test_rows_are_encoded_in_their_order() -> None:
    """The rows of one partition are encoded in order, wherever they are in the columns."""
    records: list[Row] = [(i, b"k%d" % i, b"v%d" % i, []) for i in range(10)]
    builder = ColumnBatchBuilder(1_000, 1_000, transactional=False)
    assert builder.extend(columns_of(records), np.array([9, 7, 5, 3, 1]), 1, 4) == 4
    assert [value for _, _, value, _ in read_batch_records(builder.build())] == [b"v7", b"v5", b"v3"]


def test_a_record_that_the_buffer_has_no_room_for_is_not_written() -> None:
    """Nothing is written beyond the buffer, although the batch size does not limit the first record."""
    records: list[Row] = [(5, None, b"x" * 500, [])]
    builder = ColumnBatchBuilder(200, 100, transactional=False)
    assert builder.extend(columns_of(records), np.arange(1), 0, 1) == 0
    assert (builder.count, builder.size()) == (0, 61)


@given(strings, strings, headers)
def test_the_size_bound_of_a_record_is_at_least_aiokafkas(key: bytes | None, value: bytes | None, own: Own) -> None:
    """A record that passes the quick size check passes the exact one. Headers are counted exactly."""
    block = header_block(own) or b"\0"
    assert record_size(key, value, own) == record_size(key, value, []) + len(block) - 1
    assert (
        record_size(key, value, own)
        <= SINGLE_RECORD_BATCH_OVERHEAD_MAX + len(key or b"") + len(value or b"") + len(block) - 1
    )


@pytest.mark.parametrize("name", COMPRESSION)
def test_it_is_compressed_when_it_is_sealed(name: str) -> None:
    """A sealed batch is compressed like a batch of aiokafka's builder: its records and codec are read back."""
    records: list[Row] = [(i, None, b"the same again" * 10, [("again", b"%d" % i)]) for i in range(20)]
    builder = ColumnBatchBuilder(10_000, 10_000, transactional=False)
    builder.extend(columns_of(records), np.arange(20), 0, 20)
    other = new_batch_builder(10_000, False)
    for index, record in enumerate(records):
        other.append(index, *record)
    sealed = bytes(seal_batch(builder, (7, 3, 11), COMPRESSION[name]))
    assert sealed == bytes(seal_batch(other, (7, 3, 11), COMPRESSION[name]))
    assert read_batch_records(sealed) == records


def test_single_records_are_not_encoded_by_the_kernel() -> None:
    """Single records are encoded by aiokafka's builder."""
    assert ColumnBatchBuilder(100, 100, transactional=False).append(0, 5, None, b"v", []) is None


def test_one_compiled_kernel_accepts_any_array() -> None:
    """Writable buffers, slices with a step and arrays of another memory order use the same compiled kernel."""
    records: list[Row] = [(i, b"k%d" % i, b"v%d" % i, []) for i in range(10)]
    keys, values = (PackedBytes.of([record[column] for record in records]) for column in (1, 2))  # type: ignore[misc]
    written = PackedBytes(keys.data.copy(), keys.offsets.copy(), keys.lengths.copy())
    stepped = np.arange(20)[::2] // 2
    plain = ColumnBatchBuilder(1_000, 1_000, transactional=False)
    plain.extend(columns_of(records), np.arange(10), 0, 10)
    before = len(getattr(encode_records, "signatures", ()))
    odd = ColumnBatchBuilder(1_000, 1_000, transactional=False)
    odd.extend(EncodableColumns.of(written, values[::1], stepped), np.arange(10), 0, 10)
    assert bytes(odd.build()) == bytes(plain.build())
    assert len(getattr(encode_records, "signatures", ())) == before


def odd_and_many() -> None:
    """Records whose lengths and deltas have every varint width."""
    records: list[Row] = [(2**62, None, b"", []), (0, b"", None, []), (2**63 - 1, b"k" * 8_192, b"v" * 64, [])]
    own: Own = [("é" * 40, None), ("", b"x" * 200)]
    records += [(i * 50, b"%d" % i, b"v" * i, own[: i % 3] * (i % 2)) for i in range(200)]
    agree(records, 60_000, True, (2**40, 5, 2**31 - 1))


def test_the_functions_run_without_a_compiler() -> None:
    """With NUMBA_DISABLE_JIT=1 the functions write the same bytes and emit no overflow warning."""
    odd_and_many()
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    code = f"import {__name__} as these; these.odd_and_many()"
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], cwd=ROOT, env=environment, check=True)


header_values = st.one_of(st.none(), st.binary(max_size=9), st.sampled_from([b"", b"x" * 64, b"y" * 9_000]))
header_tuples = st.lists(st.tuples(st.text(max_size=9), header_values), max_size=3).map(tuple)


@given(st.lists(header_tuples, max_size=9), st.data())
def test_headers_can_be_appended(rows: list[Headers], data: st.DataObject) -> None:
    """Constants and nullable columns are appended to the headers of each record, however many it has."""
    packed = PackedHeaders.of(rows)
    assert packed == rows
    assert (packed.blocks.lengths > 0).tolist() == [len(row) > 0 for row in rows]
    names = data.draw(st.lists(st.text(max_size=70), min_size=64 if data.draw(st.booleans()) else 1, max_size=66))
    column = st.lists(header_values, min_size=len(rows), max_size=len(rows)).map(PackedBytes.of)
    more = [(name, data.draw(column) if i % 2 else b"x" * i) for i, name in enumerate([*names, "last"])]
    if not any(isinstance(value, PackedBytes) for _, value in more):
        more.append(("column", data.draw(column)))
    found = packed.followed_by(more)
    for row, (own, given_) in enumerate(zip(found, rows, strict=True)):
        others = [(name, value[row] if isinstance(value, PackedBytes) else value) for name, value in more]
        assert own == (*given_, *others)


def test_slices_and_indexing() -> None:
    """Slices and indexing work, and the result equals any sequence of the same headers."""
    rows: list[Any] = [(("a", b"1"),), (), (("é", None), ("", b""))]
    packed = PackedHeaders.of(rows)
    assert PackedHeaders.of(packed) is packed
    assert (packed[1:], packed.at(np.array([2, 0]))) == (rows[1:], [rows[2], rows[0]])
    assert packed == HeaderColumn(rows)
    assert packed != rows[:2]
    assert repr(packed[:1]) == "PackedHeaders.of([(('a', b'1'),)])"
    assert PackedHeaders(PackedBytes.of([None, b""])) == [(), ()]
