"""Logical decoding in the Postgres source: records from changes, and the progress of a slot.

The changes are bytes that Postgres 15 wrote.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.connectors.postgres.columns import TYPE_NAMES, value_from, value_of
from penstock.shared.connect.connectors.postgres.logical import LogicalReader, SlotProgress, SlotReader, position_of
from penstock.shared.connect.connectors.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Truncate,
    Type,
    Update,
    decode_pgoutput,
    lsn_of,
    lsn_text,
)
from penstock.shared.connect.connectors.postgres.source import (
    PostgresSourceConnector,
    PostgresSourceTask,
    source_settings,
)
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import Offset, Partition, SourceRecord
from penstock.shared.connect.runtime.abstract_source_task import WorkerSourceTaskContext
from penstock.shared.connect.runtime.offset_backing_store import StoredOffsetReader
from penstock.shared.connect.schema import OPTIONAL_FLOAT32, OPTIONAL_FLOAT64
from tests.shared.connect.connectors.postgres.recorded import (
    ALL,
    BEGIN,
    COMMIT,
    DELETE,
    DELETE_WHOLE,
    INSERT,
    INSERT_ODD,
    INSERT_SOLD,
    ODD,
    PRICE,
    SIZE,
    SOLD,
    SRC,
    TRUNCATE,
    UPDATE,
    UPDATE_KEY,
    UPDATE_WHOLE,
)
from tests.shared.connect.harness import Store

PARTITION = {"protocol": "1", "slot": "s"}
LSN = "0/1530388"
ONE = {
    "id": 1,
    "name": "one",
    "price": Decimal("1.50"),
    "at": dt.datetime(2024, 1, 1, 12, 0, 0, 250_000, tzinfo=dt.UTC),
    "big": None,
}

WHOLE = ("2", r"\x00ff")

OIDS = {name: oid for oid, name in TYPE_NAMES.items()}

LOGICAL = {"connection.url": "postgresql://x/y", "mode": "logical", "topic.prefix": "", "slot.name": "s_1"}


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


def test_a_column_of_a_domain_has_the_base_type() -> None:
    """A column of a domain has the base type, as in the other modes. A type of a schema is text, whatever its name."""
    [record] = read(changes()[0], BEGIN, PRICE, SIZE, SOLD, INSERT_SOLD)
    assert record.value == {"id": 1, "price": Decimal("1.50"), "size": "x"}
    assert record.value_schema is not None
    record.value_schema.validate(record.value)


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
    assert (row.names, row.key, record.value["big"]) == (["big"], {"id": "2"}, None)
    row.complete({"big": "xxx"})
    assert (record.value["big"], record.value["price"]) == ("xxx", None)


@pytest.mark.parametrize("later", [SRC.replace(b"src", b"dst"), SRC.replace(b"big", b"bag")], ids=["table", "column"])
def test_an_incomplete_row_keeps_the_table_of_its_update(later: bytes) -> None:
    """A large value is looked up for the table as it was at the update, although it was renamed, out of the whitelist,
    or its column was renamed.
    """
    made, _ = changes(table_whitelist=["src"])
    [record] = read(made, BEGIN, SRC, UPDATE, later)
    [row] = made.incomplete
    row.complete({"big": "xxx"})
    assert record.value["big"] == "xxx"


def test_an_unchanged_large_key_is_known() -> None:
    """An unchanged large value of the replica identity is taken from the old row, so the key stays the same.

    In another column of `key.columns` it is an error, since the log does not contain it.
    """
    update = UPDATE_KEY.replace(b"t\x00\x00\x00\x013", b"u")
    assert shown(read(changes()[0], BEGIN, SRC, update)) == [("u", {"id": 1}, ONE, 1)]
    with pytest.raises(ConnectError, match=r"big.*row of src"):
        read(changes(key_columns=["id", "big"])[0], BEGIN, SRC, UPDATE)


def test_other_tables_and_truncations_are_skipped() -> None:
    """Changes of tables outside the whitelist and truncations become no records; a whitelist may name the schema."""
    wanted = read(changes(table_whitelist=["Odd"])[0], BEGIN, SRC, INSERT, ODD, INSERT_ODD, TRUNCATE)
    assert [(record.topic, record.source_offset["change"]) for record in wanted] == [("p-Odd", 2)]
    [named] = read(changes(table_whitelist=["public.Odd"])[0], BEGIN, ODD, INSERT_ODD)
    assert named.topic == "p-public.Odd"


def test_a_key_column_missing_from_old_rows_is_an_error() -> None:
    """A key column that is not in old rows is an error of deletes and updates, as is an unknown key column.

    An update may have changed this column: its old key would stay in the topic.
    """
    assert read(changes(key_columns=["name"])[0], BEGIN, SRC, INSERT)[0].key == {"name": "one"}
    for message in (DELETE, UPDATE_KEY, UPDATE):
        with pytest.raises(ConnectError, match=r"name.*row of src"):
            read(changes(key_columns=["name"])[0], BEGIN, SRC, message)
    with pytest.raises(ConnectError, match="not all of nope"):
        read(changes(key_columns=["nope"])[0], BEGIN, SRC)


def test_a_change_without_a_record_can_be_skipped() -> None:
    """The error for a change that cannot become a record has the offset after it. From there on, reading continues.

    The position stays before the change.
    """
    made, progress = changes(key_columns=["name"])
    assert len(read(made, BEGIN, SRC, INSERT)) == 1
    with pytest.raises(ConnectError, match=r"name.*row of src") as failed:
        read(made, UPDATE)
    assert progress.read == (lsn_of(LSN), 1)
    text = re.search(r"alter its offsets with (\{.*\})", str(failed.value))
    assert text is not None
    [altered] = json.loads(text[1])["offsets"]
    assert altered["partition"] == PARTITION
    made, _ = changes(altered["offset"], key_columns=["name"])
    assert [number for *_, number in shown(read(made, BEGIN, SRC, INSERT, UPDATE, INSERT))] == [3]


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
    assert progress.target == 0x10
    read(made, BEGIN, SRC, INSERT, UPDATE, ODD, INSERT_ODD, COMMIT)
    progress.mark(0x2000000)
    progress.stored({"lsn": LSN, "change": 1})
    assert progress.target == 0x10
    progress.mark(0x2000010)
    progress.stored({"lsn": LSN, "change": 2})
    assert progress.target == 0x2000010
    progress.mark(0x2000020)
    assert progress.target == 0x2000020


async def test_what_is_stored_while_the_slot_moves_moves_it_next() -> None:
    """If later records are stored while the slot moves, the next move goes to their end."""
    reader = LogicalReader(source_settings().parse(LOGICAL), None)
    progress, moves = reader._progress, list[str]()

    class Connection:
        async def execute(self, _: str, slot: str, lsn: str, **options: Any) -> None:
            moves.append(lsn)
            reader.stored({"lsn": "0/20", "change": 1})

    for lsn in (0x10, 0x20):
        progress.read = (lsn, 1)
        progress.mark(lsn)
    reader.stored({"lsn": "0/10", "change": 1})
    for _ in range(3):
        await reader.move_slot(Connection())
    assert moves == ["0/10", "0/20"]


def fail_after(reader: LogicalReader, position: tuple[int, int]) -> None:
    """Set that the change after this position, up to which all changes were read, cannot become a record."""
    reader._progress.read = position
    reader._failure = ConnectError("no record")


async def test_a_change_without_a_record_fails_once_the_records_before_it_are_stored() -> None:
    """Until all records before the change are stored, the reader returns none and is idle. Then it raises its error."""
    reader = LogicalReader(source_settings().parse(LOGICAL), None)
    fail_after(reader, (0x20, 2))
    for offset in (None, {"lsn": "0/20", "change": 1}):
        reader.stored(offset)
        assert (await reader.read(None), reader.is_idle) == ([], True)
    reader.stored({"lsn": "0/20", "change": 2})
    with pytest.raises(ConnectError, match="no record"):
        await reader.read(None)


async def test_a_poll_after_a_change_without_a_record_reads_what_is_stored() -> None:
    """If the stored offset could not be read at the last commit, the next poll reads it, and raises the error. With
    exactly-once sources no other commit follows."""

    class Offsets(StoredOffsetReader):
        async def offset(self, partition: Partition) -> Offset | None:
            return stored

    class Connection:
        def is_closed(self) -> bool:
            return False

        def terminate(self) -> None: ...

    stored: Offset | None = None
    task = PostgresSourceTask()
    task.context = WorkerSourceTaskContext({}, AllowedFiles(), Offsets(Store(), "c"))
    await task.start(LOGICAL | {"poll.interval.ms": "1"})
    task._connection = Connection()
    assert task._logical is not None
    fail_after(task._logical, (0x20, 2))
    assert await task.poll() == []
    stored = {"lsn": "0/20", "change": 2}
    with pytest.raises(ConnectError, match="no record"):
        await task.poll()


@pytest.mark.parametrize("offset", [{}, {"lsn": 7}, {"lsn": "x"}, {"lsn": "0/1", "change": "many"}])
def test_an_invalid_offset_is_an_error(offset: dict[str, Any]) -> None:
    """An invalid offset, such as one set by hand, is an error."""
    with pytest.raises(ConnectError, match="is not an offset"):
        position_of(offset)


@given(st.integers(0, 2**64 - 1))
def test_lsns_round_trip_as_text(lsn: int) -> None:
    """An LSN is formatted and parsed as in Postgres."""
    assert lsn_of(lsn_text(lsn)) == lsn


@pytest.mark.parametrize("text", ["here", "-1/2", "0x1/2", "1/1FFFFFFFF", "1_0/2", " 1/2", "1/2/3", ""])
def test_invalid_lsns(text: str) -> None:
    """Text that Postgres would not write is a DataError, also if Python reads it as numbers."""
    with pytest.raises(DataError):
        lsn_of(text)


def test_begin_has_the_position_and_the_time_of_the_commit() -> None:
    """Begin has the commit's position and time, so the Commit itself is ignored."""
    begin = decode_pgoutput(BEGIN)
    assert begin == Begin(0x1530388, 848662155952317)
    assert isinstance(begin, Begin)
    assert begin.committed_ms == 1795346955952
    assert decode_pgoutput(COMMIT) is None


def test_a_relation_describes_a_table() -> None:
    """Relation has the table's name, its replica identity, and its columns with types."""
    assert decode_pgoutput(SRC) == Relation(
        16384, "public", "src", "d",
        (RelationColumn("id", True, 23), RelationColumn("name", False, 25), RelationColumn("price", False, 1700),
         RelationColumn("at", False, 1184), RelationColumn("big", False, 25)),
    )  # fmt: skip
    odd = decode_pgoutput(ODD)
    assert isinstance(odd, Relation)
    assert (odd.name, odd.identity, [column.is_key for column in odd.columns]) == ("Odd", "f", [True, True])


def test_a_type_has_the_name_of_its_base_type() -> None:
    """Type has a type's OID, with schema and name of the base type. The schema of Postgres's own types is empty."""
    assert decode_pgoutput(PRICE) == Type(16387, "", "numeric")
    assert decode_pgoutput(SIZE) == Type(16394, "s", "int4")


def test_inserts_updates_deletes_and_truncates() -> None:
    """Insert, Update, Delete and Truncate have the new row, and the old row or its key if it is sent."""
    at = "2024-01-01 12:00:00.25+00"
    assert decode_pgoutput(INSERT) == Insert(16384, ("1", "one", "1.5", at, None))
    assert decode_pgoutput(UPDATE) == Update(16384, None, ("2", "zwei", "NaN", None, UNCHANGED))
    assert decode_pgoutput(UPDATE_KEY) == Update(16384, ("1", None, None, None, None), ("3", "one", "1.5", at, None))
    assert decode_pgoutput(UPDATE_WHOLE) == Update(16391, ("1", r"\x00ff"), WHOLE)
    assert decode_pgoutput(DELETE) == Delete(16384, ("3", None, None, None, None))
    assert decode_pgoutput(DELETE_WHOLE) == Delete(16391, WHOLE)
    assert decode_pgoutput(TRUNCATE) == Truncate((16384, 16391))


def test_other_messages_are_ignored() -> None:
    """A message of another kind is None."""
    assert decode_pgoutput(b"O" + bytes(12)) is None


def test_a_delete_without_an_old_row_is_an_error() -> None:
    """A Delete has the old row or its key, never a new row."""
    with pytest.raises(DataError, match="old row"):
        decode_pgoutput(DELETE.replace(b"K", b"N", 1))


@given(st.sampled_from(ALL), st.data())
def test_a_truncated_message_is_an_error(message: bytes, data: st.DataObject) -> None:
    """A message that is cut off anywhere is a DataError."""
    end = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(DataError):
        decode_pgoutput(message[:end])


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int8", "-9223372036854775808", -(2**63)),
        ("float8", "1e-300", 1e-300),
        ("float4", "-Infinity", -math.inf),
        ("bool", "t", True),
        ("bool", "f", False),
        ("bytea", r"\x", b""),
        ("bytea", r"\x00ff", b"\x00\xff"),
        ("numeric", "12345678901234567890.125", Decimal("12345678901234567890.125")),
        ("date", "2024-02-29", dt.date(2024, 2, 29)),
        ("date", "infinity", dt.date.max),
        ("date", "20244-01-15", dt.date.max),
        ("date", "0044-03-15 BC", dt.date.min),
        ("time", "23:59:59.999999", dt.time(23, 59, 59, 999_999)),
        ("time", "24:00:00", dt.time.max),
        ("timestamp", "2024-01-01 12:00:00", dt.datetime(2024, 1, 1, 12)),
        ("timestamp", "-infinity", dt.datetime.min),
        ("timestamptz", "10000-01-01 00:00:00+00", dt.datetime.max),
        ("timestamptz", "0044-03-15 12:00:00+00 BC", dt.datetime.min),
        ("timestamptz", "1999-12-31 23:59:59.5+00", dt.datetime(1999, 12, 31, 23, 59, 59, 500_000, tzinfo=dt.UTC)),
    ],
)
def test_texts_become_values(kind: str, text: str, value: Any) -> None:
    """Texts of all types are converted to values. Times beyond Python's range become its minimum or maximum."""
    assert value_from(OIDS[kind], text) == value


def test_a_real_has_the_same_digits_in_each_mode() -> None:
    """mode=logical reads the text of a `real`. The other modes read its bytes, which the driver makes a double."""
    from_text = value_of(value_from(OIDS["float4"], "21.3"), OPTIONAL_FLOAT32, 9)
    assert value_of(21.299999237060547, OPTIONAL_FLOAT32, 9) == from_text == 21.3
    assert value_of(21.299999237060547, OPTIONAL_FLOAT64, 9) == 21.299999237060547


def test_other_types_are_text() -> None:
    """Values of all other types are text."""
    assert value_from(2950, "{1,2}") == "{1,2}"


def errors(**more: str) -> dict[str, list[str]]:
    """The errors of each invalid setting."""
    props = {**LOGICAL, **{name.replace("_", "."): value for name, value in more.items()}}
    return {value.name: value.errors for value in PostgresSourceConnector().validate(props) if value.errors}


def test_logical_decoding_needs_a_slot_and_no_tables() -> None:
    """Logical decoding requires a valid slot name, needs no tables and does not accept a query."""
    assert errors() == {}
    assert errors(table_whitelist="a,b") == {}
    for name in ("", "Slot", "a-b", "x" * 64):
        assert list(errors(slot_name=name)) == ["slot.name"]
    assert list(errors(query="SELECT 1")) == ["query"]


async def test_a_slot_has_one_reader() -> None:
    """Logical decoding has one task with any `tasks.max`, and does not start with invalid settings."""
    connector = PostgresSourceConnector()
    await connector.start({**LOGICAL, "table.whitelist": "a,b"})
    assert await connector.task_configs(5) == [{**LOGICAL, "table.whitelist": "a,b"}]
    with pytest.raises(ConfigError, match=r"slot\.name"):
        await connector.start({**LOGICAL, "slot.name": ""})
    with pytest.raises(ConfigError, match=r"mode=logical.*query"):
        await connector.start({**LOGICAL, "query": "SELECT 1"})


async def test_a_slots_offset_can_be_altered() -> None:
    """A slot's offset can be altered or deleted; an invalid offset or partition is an error. An offset of another
    connector can be deleted."""
    connector, slot = PostgresSourceConnector(), {"protocol": "1", "slot": "s_1"}
    assert await connector.alter_offsets(LOGICAL, [(slot, {"lsn": "0/16B3748"}), (slot, None)])
    with pytest.raises(ConnectError, match="is not an offset"):
        await connector.alter_offsets(LOGICAL, [(slot, {"lsn": "here"})])
    with pytest.raises(ConnectError, match="a partition is"):
        await connector.alter_offsets(LOGICAL, [({"slots": "s_1"}, {"lsn": "0/16B3748"})])
    assert await connector.alter_offsets(LOGICAL, [({"filename": "in"}, None)])
