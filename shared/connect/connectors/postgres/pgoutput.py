"""Decodes the messages of Postgres's plugin `pgoutput`, protocol version 1.

Each row of `pg_logical_slot_get_binary_changes` is one message. Numbers are big-endian, names end with a zero byte, and
the value of a column is text. The formats are those of Postgres's documentation, "Logical Replication Message Formats".

>>> decode_pgoutput(bytes.fromhex("420000000001530388000303da8e5700bd000002d6"))
Begin(final_lsn=22217608, committed_us=848662155952317)
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from penstock.shared.common.errors import DataError

EPOCH_MS = 946_684_800_000
"""2000-01-01, the start of Postgres's timestamps, in ms since 1970."""
_LSN = re.compile("([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def lsn_of(text: str) -> int:
    """Return an LSN, a position in Postgres's log, as a number. Raises DataError for invalid text.

    >>> lsn_of("1/2A")
    4294967338
    """
    if (match := _LSN.fullmatch(text)) is None:
        raise DataError(f"{text!r} is not an LSN")
    return (int(match[1], 16) << 32) + int(match[2], 16)


def lsn_text(lsn: int) -> str:
    """Return an LSN, a position in Postgres's log, as Postgres writes it.

    >>> lsn_text(4294967338)
    '1/2A'
    """
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


class Unchanged:
    """A large value that an update did not change, so the log does not contain it."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()
Values = tuple[str | Unchanged | None, ...]
"""A row: the text of each column, None for null."""


class Begin(NamedTuple):
    """A transaction begins. All changes up to the next Begin belong to it."""

    final_lsn: int
    committed_us: int

    @property
    def committed_ms(self) -> int:
        """The time at which Postgres committed the transaction, in ms since 1970."""
        return EPOCH_MS + self.committed_us // 1000


class RelationColumn(NamedTuple):
    """A column. `is_key` is true if it is part of the replica identity."""

    name: str
    is_key: bool
    type_oid: int


class Relation(NamedTuple):
    """A table's definition for the changes that follow."""

    oid: int
    namespace: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


class Type(NamedTuple):
    """A type that the next Relation uses and that is not built in.

    For a domain, the namespace and the name are those of its base type. The namespace of a built-in type is empty.
    """

    oid: int
    namespace: str
    name: str


class Insert(NamedTuple):
    """A new row."""

    oid: int
    new: Values


class Update(NamedTuple):
    """A changed row. `old` is the row before, or None. With replica identity FULL, it has all columns, otherwise those
    of the key."""

    oid: int
    old: Values | None
    new: Values


class Delete(NamedTuple):
    """A deleted row. With replica identity FULL, `old` has all columns, otherwise those of the key."""

    oid: int
    old: Values


class Truncate(NamedTuple):
    """Tables that were truncated."""

    oids: tuple[int, ...]


Message = Begin | Relation | Type | Insert | Update | Delete | Truncate


def decode_pgoutput(data: bytes) -> Message | None:
    """Decode one message of Postgres's `pgoutput`. Raises DataError if it cannot be decoded.

    Returns None for a message that is ignored: a commit, an origin, or an application's message.
    """
    cursor = _Cursor(data)
    try:
        return _decode_message(cursor)
    except (struct.error, IndexError, ValueError) as e:
        raise DataError(f"not a message of pgoutput: {data[:40].hex()}: {e}") from None


def _decode_message(cursor: _Cursor) -> Message | None:
    kind = cursor.letter()
    if kind == "B":
        return Begin(*cursor.take("!QQxxxx"))
    if kind == "R":
        (oid,) = cursor.take("!I")
        namespace = cursor.text()
        name = cursor.text()
        identity = cursor.letter()
        (count,) = cursor.take("!H")
        return Relation(oid, namespace, name, identity, tuple(cursor.column() for _ in range(count)))
    if kind == "Y":
        (oid,) = cursor.take("!I")
        return Type(oid, cursor.text(), cursor.text())
    if kind == "T":
        (count,) = cursor.take("!Ix")
        return Truncate(cursor.take(f"!{count}I"))
    if kind not in ("I", "U", "D"):
        return None
    (oid,) = cursor.take("!I")
    if kind == "I":
        cursor.letter()
        return Insert(oid, cursor.values())
    before = cursor.letter()
    old = None if before == "N" else cursor.values()
    if kind == "D":
        if old is None:
            raise ValueError("a Delete has neither an old row nor its key")
        return Delete(oid, old)
    if old is not None:
        cursor.letter()
    return Update(oid, old, cursor.values())


class _Cursor:
    """A position in a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def letter(self) -> str:
        self._at += 1
        return chr(self._data[self._at - 1])

    def text(self) -> str:
        end = self._data.index(0, self._at)
        found = self._data[self._at : end].decode()
        self._at = end + 1
        return found

    def column(self) -> RelationColumn:
        (flags,) = self.take("!B")
        name = self.text()
        (oid,) = self.take("!Ixxxx")
        return RelationColumn(name, bool(flags & 1), oid)

    def values(self) -> Values:
        (count,) = self.take("!H")
        return tuple(self._read_column_value() for _ in range(count))

    def _read_column_value(self) -> str | Unchanged | None:
        kind = self.letter()
        if kind == "n":
            return None
        if kind == "u":
            return UNCHANGED
        if kind != "t":
            raise ValueError(f"a value of kind {kind!r}")
        (length,) = self.take("!I")
        end = self._at + length
        if end > len(self._data):
            raise ValueError("it ends within a value")
        found = self._data[self._at : end].decode()
        self._at = end
        return found
