"""Logical decoding: a publication's changes through a replication slot, by SQL functions.

The slot marks where the source continues, and makes Postgres keep the log from there on. It moves only when the records
read before are stored. The reader reads from a temporary copy of the slot. The copy moves with every read, so nothing
is decoded twice. It is dropped with the connection, and the next connection makes a new copy of the slot.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.connect.connectors.postgres import sql
from penstock.shared.connect.connectors.postgres.bulk_read import BulkRead
from penstock.shared.connect.connectors.postgres.changes import Incomplete, SlotProgress, SlotReader
from penstock.shared.connect.connectors.postgres.columns import TEXT_STYLES
from penstock.shared.connect.connectors.postgres.database import driver
from penstock.shared.connect.connectors.postgres.pgoutput import lsn_of, lsn_text
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import Offset, SourceRecord

log = get_logger(__name__)

SLOT_NAME = re.compile("[a-z0-9_]{1,63}")
CHANGES_MAX = 50_000
"""The approximate number of changes that Postgres decodes in one read. The last transaction is complete."""


class LogicalReader:
    """Reads one slot."""

    def __init__(self, values: Mapping[str, Any], stored: Offset | None) -> None:
        self._values = values
        self._slot = values["slot.name"]
        self._publication = values["publication.name"] or self._slot
        self._was_read = stored is not None
        self._progress = SlotProgress(stored)
        self._changes = SlotReader(values, self.partition_of(self._slot), self._progress)
        self._connection: Any = None
        self._copy = ""
        self._reading: BulkRead | None = None
        self._has_records = False
        self._move_to: int | None = None
        self.is_idle = False

    def __repr__(self) -> str:
        return f"<LogicalReader of {self._slot}, {self._progress!r}>"

    @staticmethod
    def partition_of(slot: str) -> dict[str, str]:
        """The source partition of a slot."""
        return {"protocol": "1", "slot": slot}

    async def read(self, connection: Any) -> list[SourceRecord]:
        """The next records. `is_idle` is set if there are no more for now."""
        if connection is not self._connection:
            self._reading = None
            await self._prepare_replication(connection)
            self._connection = connection
        if self._reading is None:
            await self.move_slot(connection)
            self._reading = await self._begin_bulk_read(connection)
            self._has_records = False
        before = self._progress.read
        try:
            records = await self._read_changes(connection, self._reading)
        except BaseException:
            self._progress.read = before  # the records were not returned, so they are read again
            raise
        self.is_idle = self._reading is None and not self._has_records
        return records

    async def _read_changes(self, connection: Any, reading: BulkRead) -> list[SourceRecord]:
        rows = await reading.rows()
        self._changes.incomplete.clear()
        records = [record for row in rows for record in self._changes.records(row["data"])]
        for incomplete in self._changes.incomplete:
            await self._complete_large_values(connection, incomplete)
        self._has_records = self._has_records or bool(records)
        if len(rows) < self._values["batch.max.rows"]:
            self._reading = None
            await self._end_bulk_read(connection, reading)
        return records

    async def move_slot(self, connection: Any) -> None:
        """Move the slot to the position up to which everything is stored, if that is ahead of the slot."""
        if (target := self._move_to) is not None:
            # A slot that was moved further by hand stays there.
            await connection.execute(
                "SELECT pg_replication_slot_advance(slot_name, $2::text::pg_lsn) FROM pg_replication_slots "
                "WHERE slot_name = $1 AND confirmed_flush_lsn < $2::text::pg_lsn",
                self._slot, lsn_text(target),
            )  # fmt: skip
            self._move_to = None

    def stored(self, offset: Offset | None) -> None:
        """Note that this offset is stored."""
        self._set_slot_target(self._progress.stored(offset))

    def _set_slot_target(self, target: int | None) -> None:
        """Sets the log position to which the replication slot moves next."""
        if target is not None:
            self._move_to = target

    async def _begin_bulk_read(self, connection: Any) -> BulkRead:
        names = '"' + self._publication.replace('"', '""') + '"'
        statement = (
            f"SELECT data FROM pg_logical_slot_get_binary_changes('{self._copy}', NULL, {CHANGES_MAX}, "
            f"'proto_version', '1', 'publication_names', {_quote_sql_literal(names)})"
        )
        begun = await BulkRead.begun(connection, statement, self._values["batch.max.rows"], 1)
        # The cursor is held at once, so that a paused task leaves no transaction open.
        await begun.hold()
        return begun

    async def _end_bulk_read(self, connection: Any, reading: BulkRead) -> None:
        await reading.end()
        # The copy's position includes changes without records, so the slot moves past them as well.
        at = await connection.fetchval(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1", self._copy
        )
        self._progress.mark(lsn_of(at))
        self._set_slot_target(self._progress.settled())

    async def _complete_large_values(self, connection: Any, row: Incomplete) -> None:
        """Read the current large values that an update left out. If the row no longer exists they stay null."""
        if not row.key:  # without a key, no row can be identified
            return
        oids = [oid for oid, _ in row.key.values()]
        types = await connection.fetch(
            "SELECT format_type(oid, -1) AS name FROM unnest($1::oid[]) WITH ORDINALITY u (oid, at) ORDER BY at",
            oids,
        )
        wheres = [
            f"{sql.column(name)} = ${at}::text::{kind['name']}"
            for at, (name, kind) in enumerate(zip(row.key, types, strict=True), start=1)
        ]
        wanted = ", ".join(f"{sql.column(name)}::text" for name in row.names)
        table = f"{sql.column(row.relation.namespace)}.{sql.column(row.relation.name)}"
        found = await connection.fetchrow(
            f"SELECT {wanted} FROM {table} WHERE {' AND '.join(wheres)}", *(text for _, text in row.key.values())
        )
        if found is not None:
            self._changes.completed(row, dict(zip(row.names, found, strict=True)))

    # --- the publication and the slot ---

    async def _prepare_replication(self, connection: Any) -> None:
        await connection.execute(TEXT_STYLES)
        level = await connection.fetchval("SHOW wal_level")
        if level != "logical":
            raise ConnectError(
                f"mode=logical needs wal_level=logical, and this Postgres has wal_level={level}: run ALTER SYSTEM SET "
                "wal_level = 'logical', and start Postgres again"
            )
        await self._ensure_publication(connection)
        await self._ensure_replication_slot(connection)
        self._copy = f"penstock_{uuid.uuid4().hex[:16]}"
        await self._create_replication_object(
            connection,
            f"SELECT pg_copy_logical_replication_slot('{self._slot}', '{self._copy}', true)",
            "a temporary copy of the slot cannot be created",
        )

    async def _ensure_publication(self, connection: Any) -> None:
        name = self._publication
        tables = self._values["table.whitelist"]
        if await connection.fetchval("SELECT 1 FROM pg_publication WHERE pubname = $1", name) is None:
            create = f"CREATE PUBLICATION {sql.column(name)} FOR TABLE {', '.join(sql.quoted(t) for t in tables)}"
            if not self._values["slot.autocreate"] or not tables:
                hint = create if tables else f"CREATE PUBLICATION {sql.column(name)} FOR TABLE …"
                raise ConnectError(f"there is no publication {name}; create it: {hint}")
            for table in tables:
                await self._check_identity(connection, table)
            await self._create_replication_object(
                connection, f"{create} WITH (publish = 'insert, update, delete')", "the publication cannot be created"
            )
            log.info("created a publication", publication=name, tables=tables)
        rows = await connection.fetch(
            "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = $1", name
        )
        there = {f"{row['schemaname']}.{row['tablename']}" for row in rows}
        for table in tables:
            if (table if "." in table else f"public.{table}") not in there:
                raise ConnectError(
                    f"the publication {name} has no table {table}: ALTER PUBLICATION {sql.column(name)} ADD TABLE "
                    f"{sql.quoted(table)}"
                )

    async def _check_identity(self, connection: Any, table: str) -> None:
        """Check that a published table has a replica identity; without one Postgres rejects its updates and deletes."""
        named = table if "." in table else f"public.{table}"
        found = await connection.fetchrow(
            "SELECT relreplident = 'd' AS by_key, relreplident = 'n' AS nothing, EXISTS (SELECT 1 FROM pg_index "
            "WHERE indrelid = c.oid AND indisprimary) AS has_key FROM pg_class c WHERE c.oid = to_regclass($1)",
            sql.quoted(named),
        )
        if found is None:
            raise ConnectError(f"there is no table {table}")
        if found["nothing"] or (found["by_key"] and not found["has_key"]):
            raise ConnectError(
                f"{table} has no primary key: once it is published, Postgres rejects updates and deletes of its rows; "
                f"ALTER TABLE {sql.quoted(table)} REPLICA IDENTITY FULL, or create the publication yourself"
            )

    async def _ensure_replication_slot(self, connection: Any) -> None:
        found = await connection.fetchrow(
            "SELECT plugin, database, wal_status, current_database() AS here FROM pg_replication_slots "
            "WHERE slot_name = $1", self._slot,
        )  # fmt: skip
        if found is None:
            await self._make_replication_slot(connection)
        elif found["plugin"] != "pgoutput" or found["database"] != found["here"]:
            raise ConnectError(
                f"the replication slot {self._slot} is of plugin {found['plugin']} in database {found['database']}: "
                "choose another slot (slot.name)"
            )
        elif found["wal_status"] == "lost":
            raise ConnectError(
                f"the replication slot {self._slot} has lost changes, since the log grew beyond "
                f"max_slot_wal_keep_size: drop it with SELECT pg_drop_replication_slot('{self._slot}'), reset the "
                "connector's offsets, and read the tables again"
            )
        self._was_read = True

    async def _make_replication_slot(self, connection: Any) -> None:
        # A new slot begins at the current end of the log, so the changes since the stored offset would be lost.
        if self._was_read:
            raise ConnectError(
                f"the replication slot {self._slot} is gone, and with it the changes since it was last read: reset the "
                "connector's offsets, and read the tables again"
            )
        create = f"SELECT pg_create_logical_replication_slot('{self._slot}', 'pgoutput')"
        if not self._values["slot.autocreate"]:
            raise ConnectError(f"there is no replication slot {self._slot}; create it: {create}")
        await self._create_replication_object(connection, create, "the replication slot cannot be created")
        log.info("created a replication slot", slot=self._slot)

    async def _create_replication_object(self, connection: Any, statement: str, message: str) -> None:
        """Execute a statement. Raises ConnectError with the statement if Postgres rejects it."""
        pg = driver().exceptions
        try:
            await connection.execute(statement)
        except (pg.InsufficientPrivilegeError, pg.ConfigurationLimitExceededError, pg.FeatureNotSupportedError) as e:
            raise ConnectError(
                f"{message}: {e}; run it as a user with the privilege, or raise the limit: {statement}"
            ) from e


def _quote_sql_literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
