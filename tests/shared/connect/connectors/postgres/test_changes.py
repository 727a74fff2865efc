"""Records out of changes, on bytes that Postgres wrote."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

from penstock.shared.connect.connectors.postgres.changes import Changes, Progress, place_of
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


def changes(offset: dict[str, Any] | None = None, **more: Any) -> tuple[Changes, Progress]:
    values = {
        "table.whitelist": [], "key.columns": [], "topic.prefix": "p-", "numeric.scale": 2,
        "tombstones.on.delete": True,
        **{name.replace("_", "."): value for name, value in more.items()},
    }  # fmt: skip
    progress = Progress(offset)
    return Changes(values, PARTITION, progress), progress


def read(made: Changes, *messages: bytes) -> list[SourceRecord]:
    return [record for message in messages for record in made.records(message)]


def shown(records: list[SourceRecord]) -> list[tuple[str, Any, Any, int]]:
    """Operation, key, value and number of each."""
    return [(r.headers[0].value, r.key, r.value, r.source_offset["change"]) for r in records]


def test_a_new_row_is_a_record_as_of_any_other_mode() -> None:
    """With its topic, its primary key, its types, and where and when it was committed."""
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


def test_a_row_that_goes_leaves_a_tombstone_or_what_is_known_of_it() -> None:
    """By the key that it had; where the whole row tells it apart and no columns are named it has none."""
    assert shown(read(changes()[0], BEGIN, SRC, DELETE)) == [("d", {"id": 3}, None, 1)]
    known = {"id": 3, "name": None, "price": None, "at": None, "big": None}
    assert shown(read(changes(tombstones_on_delete=False)[0], BEGIN, SRC, DELETE)) == [("d", {"id": 3}, known, 1)]
    whole = {"a": 2, "b": b"\x00\xff"}
    assert shown(read(changes()[0], BEGIN, ODD, DELETE_WHOLE)) == [("d", None, whole, 1)]
    assert shown(read(changes(key_columns=["a"])[0], BEGIN, ODD, DELETE_WHOLE)) == [("d", {"a": 2}, None, 1)]


def test_a_changed_key_deletes_the_old_one_first() -> None:
    """Both records are one change: nobody goes on between them."""
    made = read(changes()[0], BEGIN, SRC, UPDATE_KEY)
    assert shown(made) == [("d", {"id": 1}, None, 0), ("u", {"id": 3}, {**ONE, "id": 3}, 1)]
    made = read(changes(key_columns=["a"])[0], BEGIN, ODD, UPDATE_WHOLE)
    assert [operation for operation, *_ in shown(made)] == ["d", "u"]


def test_a_large_value_that_is_not_told_is_asked_for() -> None:
    """By the row's key; what comes is the record's."""
    made, _ = changes()
    [record] = read(made, BEGIN, SRC, UPDATE)
    [row] = made.incomplete
    assert (row.names, row.key, record.value["big"]) == (["big"], {"id": (23, "2")}, None)
    made.completed(row, {"big": "xxx"})
    assert (record.value["big"], record.value["price"]) == ("xxx", None)


def test_tables_that_are_not_wanted_are_passed_over() -> None:
    """By their names, with their schema where it is not public; a truncation makes no record."""
    wanted = read(changes(table_whitelist=["Odd"])[0], BEGIN, SRC, INSERT, ODD, INSERT_ODD, TRUNCATE)
    assert [(record.topic, record.source_offset["change"]) for record in wanted] == [("p-Odd", 2)]
    [named] = read(changes(table_whitelist=["public.Odd"])[0], BEGIN, ODD, INSERT_ODD)
    assert named.topic == "p-public.Odd"


def test_a_key_that_deletes_do_not_tell_is_refused() -> None:
    """A record with a key of nulls would delete nothing."""
    assert read(changes(key_columns=["name"])[0], BEGIN, SRC, INSERT)[0].key == {"name": "one"}
    for message in (DELETE, UPDATE_KEY):
        with pytest.raises(ConnectError, match=r"name of a changed or deleted row of src"):
            read(changes(key_columns=["name"])[0], BEGIN, SRC, message)
    with pytest.raises(ConnectError, match="not all of nope"):
        read(changes(key_columns=["nope"])[0], BEGIN, SRC)


def test_what_was_stored_is_not_read_again() -> None:
    """Also within a transaction; what is read once more after a lost connection is passed over too."""
    transaction = (BEGIN, SRC, INSERT, UPDATE, DELETE, COMMIT)
    made, _ = changes({"lsn": LSN, "change": 1})
    assert [number for *_, number in shown(read(made, *transaction))] == [2, 3]
    assert read(made, *transaction) == []
    made, _ = changes({"lsn": "0/1530387", "change": 9})
    assert len(read(made, *transaction)) == 3


def test_a_slot_moves_when_all_before_is_stored() -> None:
    """To where the reading ended, whatever it gave: what was not wanted, or nothing, holds it up in no case."""
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
def test_what_is_no_place_is_refused(offset: dict[str, Any]) -> None:
    """Such as an offset that someone set by hand."""
    with pytest.raises(ConnectError, match="is no offset"):
        place_of(offset)
