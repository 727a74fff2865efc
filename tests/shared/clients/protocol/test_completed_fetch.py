"""Decoding fetched bytes into columns: slices, gaps, control batches, aborted batches and corrupt bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.shared.clients.protocol import completed_fetch as completed_fetch_module
from penstock.shared.clients.protocol import record_batches
from penstock.shared.clients.protocol.completed_fetch import DECODED_RECORDS, CompletedFetch
from penstock.shared.clients.protocol.record_batches import crc32c, new_batch_builder, seal_batch
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Columns
from tests.property_tests import examples
from tests.shared.clients.protocol.compressions import COMPRESSION

CONTROL, LOG_APPEND_TIME = 0x20, 0x08
ABORT, COMMIT = 0, 1


def batch(
    *values: bytes | None,
    offset: int = 0,
    producer_id: int = -1,
    headers: Any = (),
    compression: str = "none",
    delta: int = 0,
) -> bytes:
    """Return a batch. With a `delta`, its records' offsets are wrong: the kernel leaves it to aiokafka's reader."""
    builder = new_batch_builder(1 << 20, producer_id >= 0)
    for i, value in enumerate(values):
        builder.append(i + delta, 1_000 + i, b"k", value, list(headers))
    sealed = seal_batch(builder, (producer_id, 0, 0), COMPRESSION[compression])
    return rewritten(sealed, offset, delta=len(values) - 1)


def rewritten(sealed: bytes, offset: int, attributes: int = 0, delta: int | None = None) -> bytes:
    """A batch with another base offset, more attributes or another last offset delta, and a valid checksum."""
    data = bytearray(sealed)
    data[0:8] = offset.to_bytes(8, "big")
    data[22] |= attributes
    if delta is not None:
        data[23:27] = delta.to_bytes(4, "big")
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    return bytes(data)


def marker(kind: int, offset: int, producer_id: int) -> bytes:
    """The control batch that ends a transaction."""
    builder = new_batch_builder(1_000, True)
    builder.append(0, 5, struct.pack(">hh", 0, kind), b"", [])
    return rewritten(seal_batch(builder, (producer_id, 0, -1)), offset, CONTROL)


READERS = {"aiokafka": False, "kernel": True}
reader = False


@pytest.fixture(params=READERS, autouse=True)
def each_reader(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs every test with both decoders, which share one contract."""
    global reader
    reader = READERS[request.param]
    yield
    reader = False


def completed_fetch(*batches: bytes, start: int = 0, aborted: Any = None, packed: bool | None = None) -> CompletedFetch:
    return CompletedFetch("t", 0, start, b"".join(batches), aborted, packed=reader if packed is None else packed)


def rows(columns: Columns | None) -> list[tuple[int, bytes | None]]:
    return [] if columns is None else list(zip(columns.offsets.tolist(), columns.values, strict=True))


def test_columns() -> None:
    """Batches are decoded into one set of columns. The headers are None if no record has any."""
    fetched = completed_fetch(batch(b"a", None), batch(b"c", offset=7))
    assert (fetched.position, fetched.end_offset) == (0, 8)
    columns = fetched.read(None)
    assert columns is not None
    assert (columns.topic, columns.partition, columns.keys) == ("t", 0, [b"k"] * 3)
    assert rows(columns) == [(0, b"a"), (1, None), (7, b"c")]
    assert (columns.timestamps.tolist(), columns.headers) == ([1_000, 1_001, 1_000], None)
    assert (columns.timestamps.dtype, columns.offsets.dtype) == (np.int64, np.int64)
    assert (fetched.position, fetched.is_done, fetched.read(None)) == (8, True, None)


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed(compression: str) -> None:
    """Batches of every compression codec are decoded."""
    assert rows(completed_fetch(batch(b"a" * 100, b"b" * 100, compression=compression)).read(None)) == [
        (0, b"a" * 100),
        (1, b"b" * 100),
    ]


def test_headers() -> None:
    """If one record has headers, every record has a list of headers, which may be empty."""
    columns = completed_fetch(
        batch(b"a"), batch(b"b", offset=1, headers=[("h", b"1"), ("n", None)]), batch(b"c", offset=2)
    ).read(None)
    assert columns is not None
    assert columns.headers == [(), (("h", b"1"), ("n", None)), ()]


@pytest.mark.parametrize("start", [0, 2])
def test_a_header_name_that_is_not_utf8(start: int) -> None:
    """Each invalid byte of it is read as U+FFFD, as in Java. It does not stop the partition."""
    valid = batch(b"b", b"c", headers=[("nXX", b"\xff"), ("\xe9", None)])
    invalid = rewritten(valid.replace(b"nXX", b"n\xff\xfe"), 1)
    columns = completed_fetch(batch(b"a"), invalid, batch(b"d", offset=3, headers=[("h", b"")]), start=start).read(None)
    assert columns is not None
    own = (("n\ufffd\ufffd", b"\xff"), ("\xe9", None))
    whole = [((0, b"a"), ()), ((1, b"b"), own), ((2, b"c"), own), ((3, b"d"), (("h", b""),))]
    assert list(zip(rows(columns), columns.headers or (), strict=True)) == whole[start:]


def test_records_before_the_start_are_left_out() -> None:
    """Records before the fetch offset are left out, in a batch that contains the offset and in batches before it."""
    fetched = completed_fetch(batch(b"x"), batch(b"a", b"b", b"c", offset=1), start=3)
    assert rows(fetched.read(None)) == [(3, b"c")]
    assert fetched.position == 4


def test_a_compacted_batch() -> None:
    """A batch with records removed by compaction has gaps and keeps its last offset."""
    holes = rewritten(batch(b"a", b"b"), 10, delta=9)
    fetched = completed_fetch(holes, batch(b"c", offset=20))
    assert rows(fetched.read(None)) == [(10, b"a"), (11, b"b"), (20, b"c")]
    empty = completed_fetch(rewritten(seal_batch(new_batch_builder(100, False), (-1, -1, -1)), 5, delta=4), start=5)
    assert (empty.end_offset, empty.read(None), empty.position, empty.is_done) == (10, None, 10, True)


def test_slices() -> None:
    """A limit cuts columns. The position is always after the last returned record."""
    fetched = completed_fetch(batch(*[b"%d" % i for i in range(10)]), marker(COMMIT, 10, 5))
    seen = []
    for expected in (4, 8, 11):
        seen += rows(fetched.read(4))
        assert fetched.position == expected
    assert seen == [(i, b"%d" % i) for i in range(10)]
    assert fetched.is_done


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    limits=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    start=st.integers(0, 30),
)
def test_any_slicing_returns_every_record_once(sizes: list[int], limits: list[int], start: int) -> None:
    """For any batches and limits, every record from the start offset on is returned once and in order."""
    batches, end = [], 0
    for size in sizes:
        batches.append(batch(*[b"%d" % i for i in range(end, end + size)], offset=end))
        end += size
    start = min(start, end - 1)
    fetched, seen, turn = completed_fetch(*batches, start=start), [], 0
    while not fetched.is_done:
        part = rows(fetched.read(limits[turn % len(limits)]))
        assert len(part) <= limits[turn % len(limits)]
        seen += part
        assert fetched.position == seen[-1][0] + 1
        turn += 1
    assert seen == [(i, b"%d" % i) for i in range(start, end)]
    assert fetched.position == fetched.end_offset == end


def test_a_short_read_does_not_decode_everything() -> None:
    """Batches beyond the limit are not decoded, so a corrupt batch after them raises no error."""
    many = batch(*[b"x"] * DECODED_RECORDS)
    broken = bytearray(batch(b"value", offset=DECODED_RECORDS))
    broken[-3] ^= 0xFF
    fetched = completed_fetch(many, bytes(broken))
    assert len(rows(fetched.read(1))) == 1


def test_aborted_transactions() -> None:
    """With read_committed, batches of an aborted transaction are left out up to its marker. A later transaction is
    returned."""
    batches = (
        batch(b"a", producer_id=5),
        batch(b"b", offset=1, producer_id=6),
        batch(b"c", offset=2, producer_id=5),
        marker(ABORT, 3, 5),
        batch(b"d", offset=4, producer_id=5),
        marker(COMMIT, 5, 6),
        marker(COMMIT, 6, 5),
    )
    fetched = completed_fetch(*batches, aborted=[(5, 0)])
    assert rows(fetched.read(None)) == [(1, b"b"), (4, b"d")]
    assert (fetched.position, fetched.is_done) == (7, True)
    assert [value for _, value in rows(completed_fetch(*batches).read(None))] == [b"a", b"b", b"c", b"d"]
    again = (batch(b"e", offset=7, producer_id=5), marker(ABORT, 8, 5), batch(b"f", offset=9))
    fetched = completed_fetch(*batches, *again, aborted=[(5, 0), (5, 7)])
    assert rows(fetched.read(None)) == [(1, b"b"), (4, b"d"), (9, b"f")]


def test_nothing_but_an_aborted_transaction() -> None:
    """A completed fetch may contain no visible record. Its position still moves past the aborted transaction."""
    fetched = completed_fetch(batch(b"a", producer_id=5), marker(ABORT, 1, 5), aborted=[(5, 0)])
    assert (fetched.read(None), fetched.position, fetched.is_done) == (None, 2, True)


def test_a_corrupt_batch() -> None:
    """Records before a corrupt batch are returned. Then every call raises an error with topic, partition and offset,
    and no later record is returned."""
    broken = bytearray(batch(b"value", offset=2))
    broken[-3] ^= 0xFF
    fetched = completed_fetch(batch(b"a", b"b"), bytes(broken), batch(b"c", offset=3))
    assert rows(fetched.read(None)) == [(0, b"a"), (1, b"b")]
    for _ in range(2):
        with pytest.raises(CorruptRecord, match=r"^t-0.*offset 2.*checksum$"):
            fetched.read(None)
        assert (fetched.position, fetched.is_done) == (2, False)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (batch(b"a")[:40], "40 bytes"),
        (struct.pack(">qi", 0, 3) + bytes(30), "an impossible length of 3 bytes"),
        (struct.pack(">qi", 0, 20) + b"\0\0\0\0\x02" + bytes(40), "an impossible length of 20 bytes"),
        (rewritten(batch(b"a" * 50, b"b")[:-9] + bytes(9), 0), "a batch cannot be read"),
        (rewritten(batch(b"a", b"b"), 0, attributes=5), "Unknown compression codec"),
    ],
)
def test_a_malformed_batch_is_never_returned_in_part(data: bytes, why: str) -> None:
    """A malformed batch is never returned in part. The error has its topic, partition and offset."""
    with pytest.raises(Exception, match=f"t-0 .*offset 0: .*{why}"):
        completed_fetch(data).read(None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), at=st.integers(0, 90), noise=st.binary(min_size=1, max_size=40))
def test_noise(data: bytes, at: int, noise: bytes) -> None:
    """Arbitrary bytes decode to columns, to nothing, or raise CorruptRecord."""
    whole = batch(b"abc", b"def", headers=[("h", b"v")])
    for bytes_ in (data, whole[:at] + noise + whole[at + len(noise) :]):
        fetched = completed_fetch(bytes_)
        try:
            while not fetched.is_done:
                fetched.read(1)
        except CorruptRecord as e:
            assert str(e).startswith("t-0 at offset ")  # noqa: PT017


def test_a_cut_off_batch_at_the_end() -> None:
    """A truncated last batch is left for the next fetch."""
    fetched = completed_fetch(batch(b"a"), batch(b"b", offset=1)[:-5])
    assert (rows(fetched.read(None)), fetched.end_offset, fetched.is_done) == ([(0, b"a")], 1, True)


def test_the_oldest_formats() -> None:
    """Message formats 0 and 1 of old logs are decoded too."""
    for magic in (0, 1):
        builder = LegacyRecordBatchBuilder(magic, 0, 1_000)
        for i in range(2):
            assert builder.append(i, 7, b"k", b"%d" % i) is not None
        columns = completed_fetch(bytes(builder.build()), start=1).read(None)
        assert columns is not None
        assert (rows(columns), columns.timestamps.tolist()) == ([(1, b"1")], [7 if magic else -1])


def test_its_repr_has_coordinates() -> None:
    """The repr has topic, partition, bytes and offsets."""
    assert repr(completed_fetch(batch(b"a"))) == f"<CompletedFetch t-0, {len(batch(b'a'))} bytes from 0 to 1>"


def test_a_later_abort_does_not_hide_a_batch_that_cannot_be_read() -> None:
    """A corrupt batch of a committed transaction raises an error, even if its producer aborts its next transaction."""
    damaged = bytearray(transaction(b"value", 2, 5))
    damaged[damaged.index(b"value") - 1] = 0xFF  # the length of the value goes on without end
    fix_checksum(damaged)
    before = transaction(b"first", 0, 6) + marker(COMMIT, 1, 6)
    after = marker(COMMIT, 3, 5) + transaction(b"gone", 4, 5)
    fetched = completed_fetch(before, bytes(damaged), after, aborted=[(5, 4)])
    assert rows(fetched.read(None)) == [(0, b"first")]
    with pytest.raises(CorruptRecord, match="t-0 at offset 2"):
        fetched.read(None)
    assert fetched.position == 2


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("unusual", [lambda i: True, lambda i: i % 2, lambda i: i % 10 == 9, lambda i: i > 150])
def test_the_work_for_batches_that_the_kernel_does_not_decode_is_linear(
    monkeypatch: pytest.MonkeyPatch, unusual: Callable[[int], bool], compression: str
) -> None:
    """Each batch is decompressed and planned a few times at most, wherever the batches for aiokafka's reader are."""
    planned = []

    def count_plan_row(d: Any, one: Any, *bounds: int) -> Any:
        planned.append(one)
        return plan_row(d, one, *bounds)

    plan_row = completed_fetch_module._plan_row
    monkeypatch.setattr(completed_fetch_module, "_plan_row", count_plan_row)
    n = 200
    headers = [[("h", b"1")] if unusual(i) else [] for i in range(n)]
    batches = [
        batch(b"%d" % i, offset=i, headers=h, compression=compression, delta=len(h)) for i, h in enumerate(headers)
    ]
    columns = completed_fetch(*batches).read(None)
    assert rows(columns) == [(i, b"%d" % i) for i in range(n)]
    assert columns is not None
    assert columns.headers == list(map(tuple, headers))
    assert len(planned) <= 4 * n


@pytest.mark.parametrize("compression", ["gzip", "lz4", "zstd"])
def test_a_batch_that_is_too_large_without_compression(monkeypatch: pytest.MonkeyPatch, compression: str) -> None:
    """It is an error with its offset, and is not decompressed further than the limit. A smaller one is read."""
    monkeypatch.setattr(record_batches, "UNCOMPRESSED_BATCH_BYTES_MAX", 20_000)
    monkeypatch.setattr(record_batches, "TYPICAL_RATIO_MAX", 1)
    small = b"x" * 19_900
    data = batch(small, compression=compression) + batch(b"y" * 20_000, offset=1, compression=compression)
    fetched = completed_fetch(data)
    assert rows(fetched.read(1)) == [(0, small)]
    with pytest.raises(CorruptRecord, match="20000 bytes") as e:
        fetched.read(1)
    assert "at offset 1:" in str(e.value)


@pytest.mark.parametrize("other", [{"headers": [("h", b"1")], "delta": 1}, {"compression": "gzip"}])
def test_columns_of_alternating_batches_hold_each_byte_once(other: dict[str, Any]) -> None:
    """If every second batch is decoded in another way, the columns hold the bytes of keys and values once."""
    values = [b"%03d" % i * 100 for i in range(100)]
    batches = [batch(value, None, offset=2 * i, **(other if i % 2 else {})) for i, value in enumerate(values)]
    columns = completed_fetch(*batches, packed=True).read(None)
    assert columns is not None
    assert columns.offsets.tolist() == list(range(200))
    assert columns.keys == [b"k"] * 200
    assert columns.values == [found for value in values for found in (value, None)]
    held = [column.data.nbytes for column in (columns.keys, columns.values) if isinstance(column, PackedBytes)]
    assert held == [200, 100 * 300]


def transaction(value: bytes, offset: int, producer_id: int) -> bytes:
    builder = new_batch_builder(1_000, True)
    builder.append(0, 5, b"k", value, [])
    return rewritten(seal_batch(builder, (producer_id, 0, 0)), offset)


def outcome(data: bytes, start: int, aborted: Any, limit: int | None, *, packed: bool) -> list[Any]:
    """Return all decoded records and the final error."""
    fetched, seen = completed_fetch(data, start=start, aborted=aborted, packed=packed), []
    try:
        while not fetched.is_done:
            columns = fetched.read(limit)
            if columns is not None:
                headers = columns.headers
                seen.append((columns.keys, columns.values, columns.timestamps.tolist(), columns.offsets.tolist()))
                seen.append([()] * len(columns) if headers is None else list(headers))
                seen.append((columns.leader_epoch, fetched.position))
    # The cause is left out: aiokafka reads a varint beyond the end of a batch, so its text depends on foreign memory.
    except Exception as e:
        seen.append((type(e), str(e).partition(": a batch cannot be read")[0], fetched.position))
    return seen


TEXTS = st.none() | st.binary(max_size=300)
RECORDS = st.lists(
    st.tuples(st.integers(0, 10**14), TEXTS, TEXTS, st.lists(st.tuples(st.text(max_size=5), TEXTS), max_size=2)),
    max_size=6,
)


@st.composite
def logs(draw: st.DrawFn) -> bytes:
    """Generates batches as brokers store them: compressed, transactional, with gaps, or with log append time."""
    data, offset = [], draw(st.integers(0, 50))
    for _ in range(draw(st.integers(1, 5))):
        records = draw(RECORDS)
        producer_id = draw(st.sampled_from([-1, 5, 6]))
        builder = new_batch_builder(1 << 20, producer_id >= 0)
        for i, (timestamp, key, value, headers) in enumerate(records):
            builder.append(i, timestamp, key, value, headers)
        sealed = seal_batch(builder, (producer_id, 0, 0), COMPRESSION[draw(st.sampled_from(sorted(COMPRESSION)))])
        delta = max(len(records) - 1, 0) + draw(st.sampled_from([0, 0, 3]))
        data.append(rewritten(sealed, offset, draw(st.sampled_from([0, 0, LOG_APPEND_TIME])), delta))
        offset += delta + 1
        if producer_id >= 0 and draw(st.booleans()):
            data.append(marker(draw(st.sampled_from([ABORT, COMMIT])), offset, producer_id))
            offset += 1
    return b"".join(data)


def with_deltas(
    deltas: list[int], offset: int, spread: int, compression: str = "none", attributes: int = 0
) -> tuple[bytes, int]:
    """Return a batch with the given offset deltas of its records and the given last offset delta."""
    builder = new_batch_builder(1 << 20, False)
    for i, delta in enumerate(deltas):
        builder.append(delta, 1_000 + i, b"k%d" % i, b"v%d" % i, [])
    last = max(0, *deltas) + spread
    return rewritten(
        seal_batch(builder, (-1, -1, -1), COMPRESSION[compression]), offset, attributes, max(0, last)
    ), last


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("deltas", [[0, 0], [1, 0], [0, 1, 1, 2], [0, 2, 1], [3, 2, 1, 0], [0, -1], [-1, 0], [2, 2, 2]])
def test_offsets_that_do_not_rise_are_read_as_by_aiokafka(deltas: list[int], start: int) -> None:
    """A batch with non-increasing offsets and a valid checksum is decoded as by aiokafka, although no broker writes
    one."""
    data = with_deltas(deltas, 0, 1)[0] + batch(b"after", offset=10)
    for limit in (None, 1, 2):
        assert outcome(data, start, None, limit, packed=True) == outcome(data, start, None, limit, packed=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    batches=st.lists(
        st.tuples(
            st.lists(st.integers(-1, 6), min_size=1, max_size=5),
            st.integers(-2, 2),
            st.sampled_from(["none", "none", "gzip"]),
            st.sampled_from([0, LOG_APPEND_TIME]),
        ),
        min_size=1,
        max_size=3,
    ),
    start=st.integers(0, 12),
    limit=st.none() | st.integers(1, 4),
)
def test_any_offset_deltas_are_read_as_by_aiokafka(
    batches: list[tuple[list[int], int, str, int]], start: int, limit: int | None
) -> None:
    """Decreasing, repeated, negative and too large offset deltas are decoded as by aiokafka."""
    data, offset = b"", 0
    for deltas, spread, compression, attributes in batches:
        made, last = with_deltas(deltas, offset, spread, compression, attributes)
        data, offset = data + made, offset + max(0, last) + 1
    assert outcome(data, start, None, limit, packed=True) == outcome(data, start, None, limit, packed=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(300), deadline=None)
@given(
    data=logs(),
    start=st.integers(0, 60),
    aborted=st.none() | st.lists(st.tuples(st.sampled_from([5, 6]), st.integers(0, 60)), max_size=2),
    limit=st.none() | st.integers(1, 5),
    noise=st.lists(st.tuples(st.integers(0, 2_000), st.binary(min_size=1, max_size=3)), max_size=3),
    fixes=st.booleans(),
)
def test_both_readers_accept_and_reject_the_same(
    data: bytes, start: int, aborted: Any, limit: int | None, noise: list[tuple[int, bytes]], fixes: bool
) -> None:
    """For any bytes, valid or damaged, records and errors equal those of aiokafka's decoder."""
    broken = bytearray(data)
    for at, bytes_ in noise:
        broken[at % len(data) : at % len(data) + len(bytes_)] = bytes_
    if fixes:
        fix_checksum(broken)
    packed = outcome(bytes(broken), start, aborted, limit, packed=True)
    assert packed == outcome(bytes(broken), start, aborted, limit, packed=False)


def fix_checksum(data: bytearray) -> None:
    """Recomputes the checksums."""
    at = 0
    while len(data) - at >= 61:
        stop = at + 12 + int.from_bytes(data[at + 8 : at + 12], "big", signed=True)
        if stop <= at + 61 or stop > len(data):
            return
        data[at + 17 : at + 21] = crc32c(bytes(data[at + 21 : stop])).to_bytes(4, "big")
        at = stop
