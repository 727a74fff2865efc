"""The binary format of the changelog, version 1.

A changelog partition is a write-ahead log with one owner at a time. Every record's value is an envelope and a body.
All numbers are big-endian:

    offset  size  envelope
    0       1     format version (1)
    1       1     operation: L live row, D deleted row, F final, X late record, G progress, T takeover
    2       1     store number (its index in the progress record's `stores`; 0 for G and T)
    3       4     owner epoch, int32
    7       8     commit number, int64
    15            body

    L body: start int64, end int64, state
    F body: start int64, end int64, stream time at which the window was closed int64, state
    D body: start int64
    X body: timestamp int64, source offset int64 (-1: none), number of missed windows uint32, each one's start int64,
            one byte (1: a state follows, 0: none), state of this record alone
    G body: JSON, `Progress`        T body: JSON, `Takeover`

`state` has the int64 and float64 columns of the store's aggregations in order, 8 bytes each. The binary columns follow
in order, each as a uint32 length and that many bytes. The record's key is the window's key; G and T have no key. A
window or row is identified by (store, key, start): L replaces it, D removes it, F removes it and adds one immutable
closed window.

The reader's rule. A takeover record with a higher epoch than the one in force puts its epoch in force. Readers ignore
any other takeover record. An entry counts if two conditions hold: its epoch is in force at its offset, and the next
progress record of that epoch, still in force, has the same commit number. Within a commit all F and D of a store come
before its L, because a closed session and the key's next live session may have the same start.

Late records. An X is a record that arrived after some or all of its windows were closed. It is written if the
application has a lake, and changes no state.

Foreign records. Other clients with write access may write other records to the topic. Entries of every format version
begin with a mark of two bytes: a version from 1 to VERSIONS_MAX, then a capital letter. JSON, text, protocol buffers
and the framings of schema registries do not begin like that. A record without the mark is foreign and has no meaning. A
record that has the mark and cannot be decoded is an error, because to skip it could lose state silently.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from penstock.shared.common.errors import ConfigError, CorruptRecord
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.state_store import NEVER

FORMAT_VERSION = 1
# Higher versions could not be told from protocol buffers, which begin with a byte of 8 or higher.
VERSIONS_MAX = 7
MAGIC_BYTES = 2
ENVELOPE = struct.Struct(">BcBiq")
START_END = struct.Struct(">qq")
START_END_CLOSED = struct.Struct(">qqq")
START = struct.Struct(">q")
TIME_OFFSET_COUNT = struct.Struct(">qqI")
LENGTH = struct.Struct(">I")

LIVE = b"L"
DELETED = b"D"
FINAL = b"F"
LATE = b"X"
PROGRESS = b"G"
TAKEOVER = b"T"
# Owners take epochs up to this one. Readers reject records with a higher epoch.
EPOCH_MAX = 2**31 - 2
# The envelope has one byte for a store's number.
STORES_MAX = 256
BODY_BYTES_MIN = {
    LIVE: START_END.size,
    DELETED: START.size,
    FINAL: START_END_CLOSED.size,
    LATE: TIME_OFFSET_COUNT.size + 1,
    PROGRESS: 0,
    TAKEOVER: 0,
}


class BatchInput(msgspec.Struct, frozen=True):
    """How far `penstock batch` has read the history in files."""

    fingerprint: str
    """Identifies the files and the way they are read."""
    rows: int
    """The number of rows of the partition that were read: all of them if `is_done`."""
    is_done: bool
    live_from: dict[str, dict[int, int]] = {}
    """The offset at which the live application begins, for all topics and partitions. A batch that is repeated keeps
    these offsets, whatever was written to the topics meanwhile."""


def require_whole_input(application: str, partition: int, progress_input: BatchInput | msgspec.UnsetType) -> None:
    """Raise ConfigError if a batch over files did not finish the partition: its files must be read before topics."""
    if isinstance(progress_input, BatchInput) and not progress_input.is_done:
        raise ConfigError(
            f"{application}, partition {partition}: a batch over files ended after {progress_input.rows} rows; run it "
            "again as it was, which continues there, or start afresh (`penstock streams reset`)"
        )


class Progress(msgspec.Struct, frozen=True):
    """The record that ends every commit: the task's progress, and all else that a restart needs besides rows."""

    application: str
    guarantee: Literal["exactly_once", "at_least_once"]
    """The owner's processing guarantee."""
    sources: dict[str, int]
    """The next offset to read in this partition, by source topic. Empty until `input`, if present, is done."""
    operator_times_ms: dict[str, int]
    """The stream time of each windowed, aggregating or joining operator by the name of its store (of a join, the left
    one); -1 before its first record."""
    source_times_ms: dict[str, int]
    """The time of each source topic: the highest timestamp of its records. Watermarks advance the time of a repartition
    topic without a record, and idleness that of the other topics. A topic without a record is absent."""
    grids_ms: dict[str, int]
    """The next due time of each named punctuation schedule (`punctuation`)."""
    stores: tuple[StoreSchema, ...]
    wall_ms: int
    """The time of the commit."""
    version: int = FORMAT_VERSION
    source_ids: dict[str, str] = {}
    """The topic ids that the offsets of `sources` belong to, by topic. The id of an absent topic is not known."""
    idle_ms: int = 0
    """The total by which time has advanced without a record."""
    close_times_ms: dict[str, int] = {}
    """The close times of operators, by the names of `operator_times_ms`: windows whose last moment is below it are
    closed. An operator that never closes has none, nor has one before its first record."""
    input: BatchInput | msgspec.UnsetType = msgspec.UNSET
    """Present if a batch read history from files."""

    @property
    def stream_time_ms(self) -> int:
        """The task's stream time: the highest of its sub-topologies; -1 before the first record."""
        return max(self.source_times_ms.values(), default=-1)

    def open_from_ms(self, store: StoreSchema) -> int:
        """Return the time below which a live entry's end means that the entry's window is closed.

        Only a store of sliding windows keeps live entries of closed windows, because later windows may begin with their
        states. For all other stores, and before the first record, return NEVER.
        """
        return self.close_times_ms.get(store.name, NEVER) if store.kind == "sliding" else NEVER


class Takeover(msgspec.Struct, frozen=True):
    """The first record of a new owner: from here on only its epoch counts."""

    application: str
    instance: str
    wall_ms: int
    version: int = FORMAT_VERSION


class DecodedEntry(NamedTuple):
    """One decoded changelog record; `body` follows the envelope."""

    operation: bytes
    store: int
    epoch: int
    commit: int
    body: bytes

    def takes_over_from(self, epoch: int) -> bool:
        """Return whether an owner with an epoch above `epoch` takes over here. If so, readers ignore later entries of
        `epoch`.
        """
        return self.operation == TAKEOVER and self.epoch > epoch


def encode_live(store: int, epoch: int, commit: int, start: int, end: int, state: bytes) -> bytes:
    return ENVELOPE.pack(FORMAT_VERSION, LIVE, store, epoch, commit) + START_END.pack(start, end) + state


def encode_final(store: int, epoch: int, commit: int, start: int, end: int, closed_at: int, state: bytes) -> bytes:
    head = ENVELOPE.pack(FORMAT_VERSION, FINAL, store, epoch, commit)
    return head + START_END_CLOSED.pack(start, end, closed_at) + state


def encode_late(
    store: int, epoch: int, commit: int, timestamp: int, offset: int, missed: Sequence[int], state: bytes | None
) -> bytes:
    head = ENVELOPE.pack(FORMAT_VERSION, LATE, store, epoch, commit)
    head += TIME_OFFSET_COUNT.pack(timestamp, offset, len(missed)) + b"".join(map(START.pack, missed))
    return head + (b"\0" if state is None else b"\1" + state)


def encode_deleted(store: int, epoch: int, commit: int, start: int) -> bytes:
    return ENVELOPE.pack(FORMAT_VERSION, DELETED, store, epoch, commit) + START.pack(start)


def encode_progress(epoch: int, commit: int, progress: Progress) -> bytes:
    return ENVELOPE.pack(FORMAT_VERSION, PROGRESS, 0, epoch, commit) + msgspec.json.encode(progress)


def encode_takeover(epoch: int, takeover: Takeover) -> bytes:
    return ENVELOPE.pack(FORMAT_VERSION, TAKEOVER, 0, epoch, 0) + msgspec.json.encode(takeover)


def is_foreign_record(value: bytes | None) -> bool:
    """Return whether a record's value lacks the mark that entries of every format version begin with.

    >>> is_foreign_record(b'{"carrier":"UA"}'), is_foreign_record(None), is_foreign_record(b"\\x02Lwhatever comes next")
    (True, True, False)
    """
    if value is None or len(value) < MAGIC_BYTES:
        return True
    return not (1 <= value[0] <= VERSIONS_MAX and 65 <= value[1] <= 90)


def operation_of(value: bytes | None) -> bytes:
    """Return the operation of an entry of any format version: TAKEOVER means the same in all of them.

    >>> operation_of(b"\\x07T of a version to come") == TAKEOVER, operation_of(None)
    (True, b'')
    """
    return b"" if value is None else value[1:MAGIC_BYTES]


def decode_entry(value: bytes | None) -> DecodedEntry:
    """Decode the value of one changelog record. Raises CorruptRecord if it is not an entry of this format version."""
    if value is None or len(value) < ENVELOPE.size:
        raise CorruptRecord(f"a changelog record of {0 if value is None else len(value)} bytes has no envelope")
    version, operation, store, epoch, commit = ENVELOPE.unpack_from(value)
    if version != FORMAT_VERSION:
        raise CorruptRecord(f"changelog format version {version}; this release reads version {FORMAT_VERSION}")
    if (least := BODY_BYTES_MIN.get(operation)) is None:
        raise CorruptRecord(f"unknown changelog operation {operation!r}")
    if epoch < 0 or commit < 0:
        raise CorruptRecord(f"a changelog record of epoch {epoch}, commit {commit}; neither is ever negative")
    if epoch > EPOCH_MAX:
        raise CorruptRecord(f"a changelog record of epoch {epoch}; {EPOCH_MAX} is the highest that an owner takes")
    body = value[ENVELOPE.size :]
    if len(body) < least or (operation == DELETED and len(body) != least):
        raise CorruptRecord(f"a changelog entry {operation!r} has {len(body)} bytes of body, {least} were expected")
    if operation == LATE:
        _, _, count = TIME_OFFSET_COUNT.unpack_from(body)
        has_state = TIME_OFFSET_COUNT.size + count * START.size
        if len(body) <= has_state or body[has_state] > 1 or (not body[has_state] and len(body) > has_state + 1):
            raise CorruptRecord(f"a late record of {len(body)} bytes has the wrong size to have missed {count} windows")
    return DecodedEntry(operation, store, epoch, commit, body)


REMEDY = (
    "Put the topic back from a copy, or start afresh (`penstock streams reset`). A newer format version needs the "
    "release that writes it. See docs/changelog-format.md, Foreign and corrupt records"
)
"""The remedy for an invalid record; part of the error's message."""


def decode_progress(body: bytes) -> Progress:
    """Decode the body of a progress record, which is JSON. Raises CorruptRecord if it is invalid."""
    try:
        return decode_json(body, Progress)
    except InvalidJson as e:
        raise CorruptRecord(f"a progress record cannot be read: {e}") from None
