"""The changelog's entries: their exact bytes, and the errors of corrupt ones."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.aggregations.aggregation import Column, Count, CountDistinct, Mean
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.format import DecodedEntry, Progress, Takeover
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from penstock.shared.streams.state_store import NEVER

int64 = st.integers(-(2**63), 2**63 - 1)
epochs, stores, commits = st.integers(0, fmt.EPOCH_MAX), st.integers(0, 255), st.integers(0, 2**63 - 1)

SCHEMA = StoreSchema(
    name="banks",
    kind="session",
    key="string",
    gap_ms=30,
    grace_ms=15,
    emit="on_close",
    source="flights",
    results="out",
    late="flights-late",
    dead_letters="flights-dlq",
    aggregations=(AggregationSchema.of("n", Count()), AggregationSchema.of("delay", Mean("dep_delay"))),
)
PROGRESS = Progress(
    application="app",
    guarantee="exactly_once",
    sources={"flights": 7},
    operator_times_ms={"banks": 98},
    source_times_ms={"flights": 97},
    grids_ms={"compaction": 500},
    stores=(SCHEMA,),
    wall_ms=1_000,
    source_ids={"flights": "2ia3basOR-KblWWPsTuLbw"},
    close_times_ms={"banks": 53},
)
PROGRESS_JSON = (
    b'{"application":"app","guarantee":"exactly_once","sources":{"flights":7},'
    b'"operator_times_ms":{"banks":98},"source_times_ms":{"flights":97},"grids_ms":{"compaction":500},'
    b'"stores":[{"name":"banks","kind":"session","key":"string","gap_ms":30,"grace_ms":15,'
    b'"emit":"on_close","source":"flights","results":"out","late":"flights-late","dead_letters":"flights-dlq",'
    b'"aggregations":[{"name":"n","function":"count","field":null,'
    b'"state":[["n","int64"]],"result":"int64"},{"name":"delay","function":"mean","field":"dep_delay",'
    b'"state":[["sum","float64"],["n","int64"]],"result":"float64"}]}],"wall_ms":1000,"version":1,"source_ids":{"flights":"2ia3basOR-KblWWPsTuLbw"},'
    b'"idle_ms":0,"close_times_ms":{"banks":53}}'
)
TAKEOVER_JSON = b'{"application":"app","instance":"host-1","wall_ms":5,"version":1}'

# --- the bytes, hard-coded: a change here is a change of the format, and needs a new version ---


def test_golden_live() -> None:
    """A live entry is the envelope, start, end and state."""
    assert fmt.encode_live(3, 5, 7, 1, 2, b"\xab").hex() == (
        "014c0300000005000000000000000700000000000000010000000000000002ab"
    )


def test_golden_final() -> None:
    """A final entry is the envelope, start, end, the time of closing and state."""
    assert fmt.encode_final(3, 5, 7, 1, 2, 9, b"\xab").hex() == (
        "014603000000050000000000000007000000000000000100000000000000020000000000000009ab"
    )


def test_golden_deleted() -> None:
    """A deleted entry has the envelope and the start. A start before 1970 is negative."""
    assert fmt.encode_deleted(3, 5, 7, -1).hex() == "014403000000050000000000000007ffffffffffffffff"


def test_golden_progress() -> None:
    """A progress entry is the envelope of store 0 and JSON."""
    envelope = bytes.fromhex("014700000000050000000000000007")
    assert fmt.encode_progress(5, 7, PROGRESS) == envelope + PROGRESS_JSON


def test_golden_takeover() -> None:
    """A takeover entry is the envelope of store 0 and commit 0, and JSON."""
    envelope = bytes.fromhex("015400000000050000000000000000")
    assert fmt.encode_takeover(5, Takeover("app", "host-1", 5)) == envelope + TAKEOVER_JSON


def test_golden_state() -> None:
    """A state has its fixed columns in their order, then each binary column in its order after its length."""
    codec = StateCodec([Column("a", "binary"), Column("b", "int64"), Column("c", "float64"), Column("d", "binary")])
    packed = codec.pack([b"\x01\x02", -2, 1.5, b""])
    assert packed.hex() == "fffffffffffffffe3ff800000000000000000002010200000000"
    assert codec.unpack(packed) == [b"\x01\x02", -2, 1.5, b""]


# --- round trips ---


@given(stores, epochs, commits, int64, int64, int64, st.binary(max_size=40))
def test_entries_round_trip(
    store: int, epoch: int, commit: int, start: int, end: int, closed_at: int, state: bytes
) -> None:
    """An encoded entry is decoded unchanged, for all values that fit."""
    live = fmt.decode_entry(fmt.encode_live(store, epoch, commit, start, end, state))
    assert live == DecodedEntry(fmt.LIVE, store, epoch, commit, struct.pack(">qq", start, end) + state)
    final = fmt.decode_entry(fmt.encode_final(store, epoch, commit, start, end, closed_at, state))
    assert final == DecodedEntry(fmt.FINAL, store, epoch, commit, struct.pack(">qqq", start, end, closed_at) + state)
    deleted = fmt.decode_entry(fmt.encode_deleted(store, epoch, commit, start))
    assert deleted == DecodedEntry(fmt.DELETED, store, epoch, commit, struct.pack(">q", start))


@given(epochs, commits, st.dictionaries(st.text(), int64), st.dictionaries(st.text(), int64), int64)
def test_progress_round_trips(epoch: int, commit: int, sources: Any, grids: Any, time: int) -> None:
    """A decoded progress record equals the encoded one."""
    progress = msgspec.structs.replace(PROGRESS, sources=sources, grids_ms=grids, source_times_ms={"a": time})
    entry = fmt.decode_entry(fmt.encode_progress(epoch, commit, progress))
    assert entry[:4] == (fmt.PROGRESS, 0, epoch, commit)
    assert fmt.decode_progress(entry.body) == progress


values = {"int64": int64, "float64": st.floats(allow_nan=False), "binary": st.binary(max_size=20)}


@given(
    st.lists(st.sampled_from(list(values)), max_size=6).flatmap(
        lambda types: st.tuples(st.just(types), st.tuples(*(values[t] for t in types)), st.binary(max_size=5))
    )
)
def test_states_round_trip(given_state: tuple[list[Any], tuple[Any, ...], bytes]) -> None:
    """An unpacked state equals the packed one, for any columns. Many states are also unpacked from any start position
    in the bytes."""
    types, state, before = given_state
    codec = StateCodec([Column(f"c{i}", type_) for i, type_ in enumerate(types)])
    packed = codec.pack(state)
    assert codec.unpack(packed) == list(state)
    columns = codec.unpacked_columns(PackedBytes.of([before, packed, packed])[1:])
    assert [list(row) for row in zip(*columns, strict=True)] == ([list(state)] * 2 if types else [])


def test_only_sliding_windows_have_closed_live_entries() -> None:
    """Sliding windows are open from the store's close time on, other live entries always."""
    sliding = msgspec.structs.replace(SCHEMA, kind="sliding")
    assert PROGRESS.open_from_ms(sliding) == 53
    assert PROGRESS.open_from_ms(SCHEMA) == NEVER
    assert PROGRESS.open_from_ms(msgspec.structs.replace(sliding, name="other")) == NEVER


def test_state_columns_are_named_by_their_aggregation() -> None:
    """A store's columns are its aggregations', in order, each with the aggregation's name before its own."""
    distinct = AggregationSchema.of("who", CountDistinct("user"))
    schema = msgspec.structs.replace(SCHEMA, aggregations=(distinct, *SCHEMA.aggregations))
    assert [tuple(c) for c in schema.state_columns()] == [
        ("who_hll", "binary"),
        ("n_n", "int64"),
        ("delay_sum", "float64"),
        ("delay_n", "int64"),
    ]


# --- corruption ---


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "0 bytes has no envelope"),
        (b"", "0 bytes has no envelope"),
        (b"\x01L\x00", "3 bytes has no envelope"),
        (b"\x02" + fmt.encode_deleted(0, 1, 1, 0)[1:], "version 2; "),
        (b"\x01Y" + fmt.encode_deleted(0, 1, 1, 0)[2:], "unknown changelog operation b'Y'"),
        (b"\x01X" + fmt.encode_deleted(0, 1, 1, 0)[2:], "8 bytes.* 21 "),
        (fmt.encode_late(0, 1, 1, 5, 6, [7], None)[:-1], "to have missed 1 windows"),
        (fmt.encode_late(0, 1, 1, 5, 6, [7], None) + b"1", "to have missed 1 windows"),
        (fmt.encode_late(0, 1, 1, 5, 6, [7], b"")[:-1] + b"\2", "to have missed 1 windows"),
    ],
)
def test_corrupt_entries_are_rejected(value: bytes | None, message: str) -> None:
    """Bytes that are not an entry of this version are rejected with the reason."""
    with pytest.raises(CorruptRecord, match=message):
        fmt.decode_entry(value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}",
        PROGRESS_JSON.replace(b'"idle_ms":0', b'"idle_ms":"0"'),
        PROGRESS_JSON.replace(b'"source_times_ms":{"flights":97},', b""),
        b"\xff" + PROGRESS_JSON,
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_corrupt_progress_is_rejected(body: bytes) -> None:
    """A progress record that is cut off, incomplete, ill-typed or nested too deeply raises CorruptRecord."""
    with pytest.raises(CorruptRecord, match="progress record"):
        fmt.decode_progress(body)


@given(st.integers(0, 30))
def test_corrupt_states_are_rejected(length: int) -> None:
    """A state that is cut off anywhere, or too long, is rejected."""
    codec = StateCodec([Column("a", "int64"), Column("b", "binary"), Column("c", "binary")])
    packed = codec.pack([1, b"abc", b"defg"])
    assert len(packed) == 23
    wrong = packed[:length] if length < len(packed) else packed + bytes(length - len(packed) + 1)
    with pytest.raises(CorruptRecord, match="changelog state"):
        codec.unpack(wrong)
    with pytest.raises(CorruptRecord, match="changelog state"):
        codec.unpacked_columns(PackedBytes.of([packed, wrong, packed]))


# --- foreign records ---


@pytest.mark.parametrize("version", range(1, fmt.VERSIONS_MAX + 1))
def test_an_entry_of_any_version_is_never_foreign(version: int) -> None:
    """An entry of a future version is recognized by its mark, however short it is, so that it is not skipped."""
    for operation in b"LDFGTXAZ":
        assert not fmt.is_foreign_record(bytes([version, operation]))


@given(st.binary(max_size=40))
def test_a_foreign_record_cannot_be_decoded(value: bytes) -> None:
    """A record that is skipped as foreign cannot be decoded as an entry."""
    if fmt.is_foreign_record(value):
        with pytest.raises(CorruptRecord):
            fmt.decode_entry(value)
