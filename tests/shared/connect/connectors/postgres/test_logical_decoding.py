"""Logical decoding: records from changes, on bytes that Postgres wrote, and the progress of a slot."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.connect.connectors.postgres.logical import SlotProgress, SlotReader, lsn_of, lsn_text, position_of
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SourceRecord
from tests.shared.connect.connectors.postgres.recorded import (
    BEGIN,
    COMMIT,
    DELETE,
    DELETE_WHOLE,
    INSERT,
    INSERT_ODD,
    ODD,
    SRC,
    TRUNCATE,
    UPDATE,
    UPDATE_KEY,
    UPDATE_WHOLE,
)

PARTITION = {"protocol": "1", "slot": "s"}
LSN = "0/1530388"
ONE = {
    "id": 1,
    "name": "one",
    "price": Decimal("1.50"),
    "at": dt.datetime(2024, 1, 1, 12, 0, 0, 250_000, tzinfo=dt.UTC),
    "big": None,
}


def changes(offset: dict[str, Any] | None = None, **more: Any) -> tuple[SlotReader, SlotProgress]:
    values = {
        "table.whitelist": [], "key.columns": [], "topic.prefix": "p-", "numeric.scale": 2,
        "tombstones.on.delete": True,
        **{name.replace("_", "."): value for name, value in more.items()},
    }  # fmt: skip
    progress = SlotProgress(offset)
    return SlotReader(values, PARTITION, progress), progress


def read(made: SlotReader, *messages: bytes) -> list[SourceRecord]:
    return [record for message in messages for record in made.records(message)]


def shown(records: list[SourceRecord]) -> list[tuple[str, Any, Any, int]]:
    """Operation, key, value and change number of each record."""
    return [(r.headers[0].value, r.key, r.value, r.source_offset["change"]) for r in records]


def test_an_insert_becomes_a_record() -> None:
    """An insert becomes a record with topic, primary key, types, offset, and the commit's
    position and time as headers.
    """
    [record] = read(changes()[0], BEGIN, SRC, INSERT, COMMIT)
    assert (record.topic, record.key, record.value) == ("p-src", {"id": 1}, ONE)
    assert record.value_schema is not None
    record.value_schema.validate(record.value)
    assert (record.source_partition, record.source_offset) == (PARTITION, {"lsn": LSN, "change": 1})
    assert [(header.name, header.value) for header in record.headers] == [
        ("__op", "c"),
        ("__lsn", LSN),
        ("__source_ts_ms", 1795346955952),
    ]


def test_a_delete_becomes_a_tombstone_or_the_known_columns() -> None:
    """A delete becomes a tombstone with the row's key.

    With `tombstones.on.delete=false`, or if there is no key, it becomes the known columns.
    """
    assert shown(read(changes()[0], BEGIN, SRC, DELETE)) == [("d", {"id": 3}, None, 1)]
    known = {"id": 3, "name": None, "price": None, "at": None, "big": None}
    assert shown(read(changes(tombstones_on_delete=False)[0], BEGIN, SRC, DELETE)) == [("d", {"id": 3}, known, 1)]
    whole = {"a": 2, "b": b"\x00\xff"}
    assert shown(read(changes()[0], BEGIN, ODD, DELETE_WHOLE)) == [("d", None, whole, 1)]
    assert shown(read(changes(key_columns=["a"])[0], BEGIN, ODD, DELETE_WHOLE)) == [("d", {"a": 2}, None, 1)]


def test_a_changed_key_deletes_the_old_one_first() -> None:
    """A changed key becomes a delete and an update that belong to one change, so no task restarts between them."""
    made = read(changes()[0], BEGIN, SRC, UPDATE_KEY)
    assert shown(made) == [("d", {"id": 1}, None, 0), ("u", {"id": 3}, {**ONE, "id": 3}, 1)]
    made = read(changes(key_columns=["a"])[0], BEGIN, ODD, UPDATE_WHOLE)
    assert [operation for operation, *_ in shown(made)] == ["d", "u"]


def test_an_unchanged_large_value_is_looked_up() -> None:
    """An update without its unchanged large value is incomplete until the value is looked up by the row's key."""
    made, _ = changes()
    [record] = read(made, BEGIN, SRC, UPDATE)
    [row] = made.incomplete
    assert (row.names, row.key, record.value["big"]) == (["big"], {"id": (23, "2")}, None)
    made.completed(row, {"big": "xxx"})
    assert (record.value["big"], record.value["price"]) == ("xxx", None)


def test_other_tables_and_truncations_are_skipped() -> None:
    """Changes of tables outside the whitelist and truncations become no records; a whitelist may name the schema."""
    wanted = read(changes(table_whitelist=["Odd"])[0], BEGIN, SRC, INSERT, ODD, INSERT_ODD, TRUNCATE)
    assert [(record.topic, record.source_offset["change"]) for record in wanted] == [("p-Odd", 2)]
    [named] = read(changes(table_whitelist=["public.Odd"])[0], BEGIN, ODD, INSERT_ODD)
    assert named.topic == "p-public.Odd"


def test_a_key_column_missing_from_deletes_is_an_error() -> None:
    """A key column that deletes and key updates do not contain is an error, as is an unknown key column."""
    assert read(changes(key_columns=["name"])[0], BEGIN, SRC, INSERT)[0].key == {"name": "one"}
    for message in (DELETE, UPDATE_KEY):
        with pytest.raises(ConnectError, match=r"name.*row of src"):
            read(changes(key_columns=["name"])[0], BEGIN, SRC, message)
    with pytest.raises(ConnectError, match="not all of nope"):
        read(changes(key_columns=["nope"])[0], BEGIN, SRC)


def test_stored_changes_are_not_read_again() -> None:
    """Changes up to the stored offset are skipped, also within a transaction and after a reconnect."""
    transaction = (BEGIN, SRC, INSERT, UPDATE, DELETE, COMMIT)
    made, _ = changes({"lsn": LSN, "change": 1})
    assert [number for *_, number in shown(read(made, *transaction))] == [2, 3]
    assert read(made, *transaction) == []
    made, _ = changes({"lsn": "0/1530387", "change": 9})
    assert len(read(made, *transaction)) == 3


def test_a_slot_moves_when_all_before_is_stored() -> None:
    """The slot advances to the end of the read log once all records before it are stored,
    whether records were skipped or not.
    """
    made, progress = changes(table_whitelist=["src"])
    progress.mark(0x10)
    assert progress.settled() == 0x10
    read(made, BEGIN, SRC, INSERT, UPDATE, ODD, INSERT_ODD, COMMIT)
    progress.mark(0x2000000)
    assert progress.settled() is None
    assert progress.stored({"lsn": LSN, "change": 1}) is None
    progress.mark(0x2000010)
    assert progress.stored({"lsn": LSN, "change": 2}) == 0x2000010
    progress.mark(0x2000020)
    assert (progress.settled(), progress.settled()) == (0x2000020, None)


@pytest.mark.parametrize("offset", [{}, {"lsn": 7}, {"lsn": "x"}, {"lsn": "0/1", "change": "many"}])
def test_an_invalid_offset_is_an_error(offset: dict[str, Any]) -> None:
    """An invalid offset, such as one set by hand, is an error."""
    with pytest.raises(ConnectError, match="is not an offset"):
        position_of(offset)


@given(st.integers(0, 2**64 - 1))
def test_lsns_round_trip_as_text(lsn: int) -> None:
    """An LSN is formatted and parsed as in Postgres, and invalid text is a DataError."""
    assert lsn_of(lsn_text(lsn)) == lsn
    with pytest.raises(DataError):
        lsn_of("here")
