"""The position of a Postgres source in one table or query: the next query, and the offset of each returned row.

A row's offset is the position at which reading continues if that row is the last one in Kafka. With an incrementing
column each row has its own position. With a timestamp alone, rows of the same time share a position. Then only the last
row of a time has that time in its offset, and a query returns all rows of a time or none. Times without a zone are UTC;
the session must have that zone.

>>> values = {"mode": "timestamp", "incrementing.column.name": "", "timestamp.column.name": ["at"],
...           "batch.max.rows": 100, "timestamp.delay.interval.ms": 0, "timestamp.initial": None}
>>> reader = TableReader(values, "clicks", "", None)
>>> noon = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)
>>> [offset.get("timestamp") for offset in reader.read([{"at": noon}, {"at": noon}])]
[None, 1704110400000]
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from penstock.shared.connect.connectors.postgres import sql
from penstock.shared.connect.connectors.postgres.columns import BEFORE_YEAR_1, aware
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.schema import timestamp_to_ms

NOW = -1
"""The value of `timestamp.initial` for Postgres's time at the task's first read. The caller sets this time."""


class TableReader:
    """The queries of one table or query, and the position up to which it was read. The caller executes the queries."""

    def __init__(self, values: Mapping[str, Any], table: str, query: str, offset: Mapping[str, Any] | None) -> None:
        self.table = table
        self._mode = values["mode"]
        self._inc = values["incrementing.column.name"]
        self._stamps = values["timestamp.column.name"]
        self._limit = values["batch.max.rows"]
        self._delay_ms = values["timestamp.delay.interval.ms"]
        self._from = f"({query}) q" if query else sql.quoted(table)
        self.partition = self.partition_of(table, query)
        offset = offset or {}
        self.incrementing: int | None = offset.get("incrementing")
        initial = values["timestamp.initial"]
        self.timestamp: dt.datetime | None = moment_of(offset.get("timestamp"), offset.get("timestamp_nanos"))
        if self.timestamp is None and initial not in (None, NOW):
            self.timestamp = moment_of(initial, None)

    def __repr__(self) -> str:
        return f"<TableReader {self.table}, {self.offset()}>"

    @staticmethod
    def partition_of(table: str, query: str) -> dict[str, str]:
        """Return the source partition of a table or query."""
        return {"protocol": "1", **({"query": "query"} if query else {"table": table})}

    @property
    def stamp(self) -> str:
        """The time of a row, as SQL."""
        names = ",".join(sql.quoted_column(name) for name in self._stamps)
        return f"coalesce({names})" if len(self._stamps) > 1 else names

    def statement(self) -> tuple[str, list[Any]]:
        """Return the next query and its parameters."""
        if self._mode == "bulk":
            return f"SELECT * FROM {self._from}", []
        wheres: list[str] = []
        orders: list[str] = []
        arguments: list[Any] = []

        def add_sql_argument(value: Any, kind: str) -> str:
            arguments.append(value)
            return f"${len(arguments)}::{kind}"

        inc = sql.quoted_column(self._inc) if "incrementing" in self._mode else ""
        if "timestamp" in self._mode:
            orders.append(self.stamp)
            wheres.append(f"{self.stamp} < now() - {add_sql_argument(self._delay_ms, 'bigint')} * interval '1 ms'")
            if self.timestamp is not None:
                last = add_sql_argument(self.timestamp, "timestamptz")
                beyond = f"{self.stamp} > {last}"
                if inc and self.incrementing is not None:
                    beyond += f" OR ({self.stamp} = {last} AND {inc} > {add_sql_argument(self.incrementing, 'bigint')})"
                wheres.append(f"({beyond})")
        elif self.incrementing is not None:
            wheres.append(f"{inc} > {add_sql_argument(self.incrementing, 'bigint')}")
        if inc:
            orders.append(inc)
        where = f" WHERE {' AND '.join(wheres)}" if wheres else ""
        # With a timestamp alone, a plain LIMIT could separate rows of the same time.
        limit = f"FETCH FIRST {self._limit} ROWS {'ONLY' if inc else 'WITH TIES'}"
        return f"SELECT * FROM {self._from}{where} ORDER BY {', '.join(orders)} {limit}", arguments

    def read(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Record that the rows of a query's result were read. Returns the offset of each row."""
        if self._mode == "timestamp":
            return self._offsets_by_timestamp(rows)
        offsets = []
        for row in rows:
            if "incrementing" in self._mode:
                self.incrementing = self._number_of_row(row)
            if "timestamp" in self._mode:
                self.timestamp = self._timestamp_of_row(row)
            offsets.append(self.offset())
        return offsets

    def _offsets_by_timestamp(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        moments = [self._timestamp_of_row(row) for row in rows]
        offsets = []
        for at, moment in enumerate(moments):
            if moments[at + 1 : at + 2] != [moment]:
                self.timestamp = moment
            offsets.append(self.offset())
        return offsets

    def _number_of_row(self, row: Mapping[str, Any]) -> int:
        value = row[self._inc]
        number = value
        # A column of type numeric.
        if isinstance(value, Decimal) and value.is_finite() and value == int(value):
            number = int(value)
        # The next query passes it as a bigint.
        if type(number) is not int or not -(2**63) <= number < 2**63:
            raise ConnectError(f"{self.table}.{self._inc}: {value!r} is not an integer of 64 bits")
        return number

    def _timestamp_of_row(self, row: Mapping[str, Any]) -> dt.datetime:
        name, value = next((name, row[name]) for name in self._stamps if row[name] is not None)
        if not isinstance(value, dt.datetime):
            raise ConnectError(f"{self.table}.{name}: {value!r} is not a timestamp")
        if value is BEFORE_YEAR_1:
            # All these times have this value. As the position, it would skip those of the rows that are not read yet.
            raise ConnectError(
                f"{self.table}.{name}: -infinity or a time before the year 1 cannot be a position: replace it in a "
                "query (query), or start at a later time (timestamp.initial)"
            )
        return aware(value)

    def offset(self) -> dict[str, Any]:
        """Return the position at which reading continues, as a source offset."""
        found: dict[str, Any] = {}
        if self.incrementing is not None and "incrementing" in self._mode:
            found["incrementing"] = self.incrementing
        if self.timestamp is not None and "timestamp" in self._mode:
            found["timestamp"] = timestamp_to_ms(self.timestamp)
            found["timestamp_nanos"] = self.timestamp.microsecond * 1000
        return found


def check_offset(mode: str, offset: Mapping[str, Any]) -> None:
    """Raise ConnectError unless a task with this mode can continue at the offset. An empty offset is the start."""
    positions = [name for name in ("timestamp", "incrementing") if name in mode]
    known = [*positions, "timestamp_nanos"] if "timestamp" in mode else positions
    fits = all(name in known and type(value) is int and -(2**63) <= value < 2**63 for name, value in offset.items())
    # With both columns, a time alone is a position. A number alone is none: all rows would be read again.
    if not fits or (offset and positions[0] not in offset):
        expected = f"64-bit integers for {', '.join(known)}" if known else "none"
        raise ConnectError(
            f"{dict(offset)} is not an offset of mode={mode}: expected {expected}. After a change of the mode, alter "
            "or reset the offsets while the connector is stopped"
        )
    try:
        moment_of(offset.get("timestamp"), offset.get("timestamp_nanos"))
    except (OverflowError, OSError, ValueError):
        raise ConnectError(f"{dict(offset)} is not an offset: the time is out of range") from None


def moment_of(ms: int | None, nanos: int | None) -> dt.datetime | None:
    """Return a stored time as a datetime in UTC, or None if `ms` is None.

    `ms` is the time in ms since the epoch. `nanos` are the ns within its second, or None if they are not known.
    """
    if ms is None:
        return None
    at = dt.datetime.fromtimestamp(ms // 1000, dt.UTC)
    return at.replace(microsecond=(ms % 1000) * 1000 if nanos is None else nanos // 1000)
