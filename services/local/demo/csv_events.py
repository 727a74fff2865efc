"""A user's CSV file as events: each row is a JSON object of its columns, with the parsed event time beside them.

Errors that affect every row are reported before anything runs: a wrong column, a time format that parses none of the
first rows, an invalid duration. A single row without a key or with an unreadable time is still sent, with the reason
and the event time of the row before. The topology rejects it, so it becomes a dead letter that names the row and the
column, and the audit counts it like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from penstock.api.settings import IngestSettings
from penstock.services.local.demo.csv_file import HEADER, Row, read_rows
from penstock.services.local.demo.event_time import POSSIBLE, NoTime, better_unit, formats_that_fit, time_parser
from penstock.services.local.demo.events import Plan
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.durations import parse_ms
from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.common.serialization import json_deserializer
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology

TIME_FIELD = "_event_time_ms"
REFUSED_FIELD = "_refused"
PROBED_ROWS = 100  # at least one of these first rows must have a key and a time
COLUMNS_SHOWN = 50
TOPIC, RESULTS = "events", "sessions"
DEFAULT_GAP, DEFAULT_GRACE = "30m", "15m"


def topology(gap: str = DEFAULT_GAP, grace: str = DEFAULT_GRACE, suffix: str = "") -> Topology:
    """Return sessions per key with their number of events. Rows marked as rejected become dead letters.

    `suffix` is appended to the output topics.
    """
    builder = StreamsBuilder()
    late = f"{TOPIC}-late{suffix}"
    dead_letters = f"{TOPIC}-dlq{suffix}"
    events = builder.stream(TOPIC, value=accepted, late=late, dead_letters=dead_letters)
    windows = events.group_by_key().session_window(parse_ms(gap), parse_ms(grace))
    windows.aggregate(RESULTS, events=Count()).on_close().to(RESULTS + suffix)
    return builder.build()


def accepted(topic: str, data: bytes | None) -> Any:
    """Deserialize a row. Raises SerializationError with the reason for a row marked as rejected."""
    row = json_deserializer(topic, data)
    if isinstance(row, dict) and REFUSED_FIELD in row:
        raise SerializationError(str(row[REFUSED_FIELD]))
    return row


class BadRow(ValueError):
    """A row that cannot be an event. `time_text` is the text of the time, if that is the reason."""

    def __init__(self, reason: str, time_text: str | None = None) -> None:
        super().__init__(reason)
        self.time_text = time_text


class CsvEvents:
    """The rows of a file in file order, or the first `limit` of them. Raises ConfigError if they cannot be events."""

    def __init__(
        self,
        path: Path,
        key: str,
        time: str,
        *,
        time_format: str | None = None,
        gap: str = DEFAULT_GAP,
        grace: str = DEFAULT_GRACE,
        limit: int | None = None,
        now_ms: int | None = None,
    ) -> None:
        self._path = path
        self._key = key
        self._time = time
        self._limit = limit
        self._latest_ms = (SYSTEM_CLOCK.now_ms() if now_ms is None else now_ms) + IngestSettings().max_future_ms
        self._time_format = time_format
        self._parse_time = time_parser(time_format, self._latest_ms)
        self.plan = _plan_of_csv_replay(key, gap, grace)
        header, *probed = list(islice(read_rows(path, limit), PROBED_ROWS + 1)) or [Row(HEADER, 1, [])]
        self._columns = _checked_columns(path, header.fields, key, time)
        self._key_at = self._columns.index(key)
        self._time_at = self._columns.index(time)
        self._first_ms = self._first_event_time(probed)
        self._count: int | None = None
        self.unfit = 0

    def count(self) -> int:
        """Return the number of rows. Reads the whole file, so a truncated file is found before anything is sent."""
        if self._count is None:
            self._count = sum(row.number != HEADER for row in read_rows(self._path, self._limit))
        return self._count

    def lines(self) -> Iterator[bytes]:
        """Yield each row as a line of JSON, with its event time, and with a reason if it is to be rejected."""
        last_ms = self._first_ms
        self.unfit = 0
        for row in read_rows(self._path, self._limit):
            if row.number == HEADER:
                continue
            event: dict[str, str | int] = dict(zip(self._columns, row.fields, strict=False))
            try:
                last_ms = self._event_time(row)
            except BadRow as e:
                self.unfit += 1
                event[REFUSED_FIELD] = f"{self._describe_row(row)}, {e}"
                event.setdefault(self._key, "")
            event[TIME_FIELD] = last_ms
            yield msgspec.json.encode(event)

    def name_rejection(self, number: int, message: str) -> str:
        """Return an error of the ingest in the file's own terms."""
        for pointer, column in ((self.plan.key[0], self._key), (self.plan.time, self._time)):
            message = message.replace(pointer, f"column {column!r}")
        return f"row {number}: {message}"

    def _event_time(self, row: Row) -> int:
        """Return the row's event time. Raises BadRow, with the column, if the row cannot be an event."""
        have = len(row.fields)
        wanted = len(self._columns)
        for at, column in ((self._key_at, self._key), (self._time_at, self._time)):
            if at >= have:
                raise BadRow(f"column {column!r}: the row ends after {have} of {wanted} columns")
        if not row.fields[self._key_at]:
            raise BadRow(f"column {self._key!r}: the key is empty")
        text = row.fields[self._time_at]
        try:
            return self._parse_time(text)
        except NoTime as e:
            raise BadRow(f"column {self._time!r}: {e}", text) from None

    def _first_event_time(self, rows: list[Row]) -> int:
        """Return the first event time of these rows. Raises ConfigError, with the first row's reason, without one."""
        first: BadRow | None = None
        for row in rows:
            try:
                at_ms = self._event_time(row)
            except BadRow as e:
                first = first or e
                continue
            if wrong := better_unit(row.fields[self._time_at], self._time_format, self._latest_ms):
                raise ConfigError(f"{self._path}, {self._describe_row(row)}, column {self._time!r}: {wrong}")
            return at_ms
        if first is None:
            raise ConfigError(f"{self._path} has no rows below its header")
        others = f" (and none of the first {len(rows)} rows can be taken)" if len(rows) > 1 else ""
        hint = "" if first.time_text is None else _suggest_time_format(first.time_text, self._latest_ms)
        raise ConfigError(f"{self._path}, {self._describe_row(rows[0])}, {first}{others}{hint}")

    @staticmethod
    def _describe_row(row: Row) -> str:
        return f"row {row.number} (line {row.line})"


def _suggest_time_format(text: str, latest_ms: int) -> str:
    fitting = formats_that_fit(text, latest_ms)
    if not fitting:
        return f"; --time-format takes {POSSIBLE}"
    return (
        f"; {fitting[0]} reads it" if fitting[0].startswith("--") else f"; it is {fitting[0]}: leave out --time-format"
    )


def _plan_of_csv_replay(key: str, gap: str, grace: str) -> Plan:
    for option, text in (("--gap", gap), ("--grace", grace)):
        try:
            parse_ms(text)
        except ConfigError as e:
            raise ConfigError(f"{option}: {e}") from None
    try:
        topology(gap, grace)
    except ConfigError as e:
        raise ConfigError(f"--gap {gap} --grace {grace}: {e}") from None
    return Plan(
        topic=TOPIC,
        results=RESULTS,
        application="event-sessions",
        key=("/" + key.replace("~", "~0").replace("/", "~1"),),
        time=f"/{TIME_FIELD}",
        topology="penstock.services.local.demo.csv_events:topology",
        options={"gap": gap, "grace": grace},
        handler="penstock.services.local.demo.notable:store",
        unfit="row without a key or a time",
    )


def _checked_columns(path: Path, columns: list[str], key: str, time: str) -> list[str]:
    shown = ", ".join(name if name and name == name.strip() else repr(name) for name in columns[:COLUMNS_SHOWN])
    more = f" and {len(columns) - COLUMNS_SHOWN} more" if len(columns) > COLUMNS_SHOWN else ""
    for name, option in ((key, "--key"), (time, "--time")):
        if name not in columns:
            hint = "" if len(columns) != 1 else " (columns are separated by commas)"
            raise ConfigError(f"{option}: {path} has no column {name!r}; it has {shown or 'none'}{more}{hint}")
        if columns.count(name) > 1:
            raise ConfigError(f"{option}: {path} has {columns.count(name)} columns {name!r}; rename one")
    for name in (TIME_FIELD, REFUSED_FIELD):
        if name in columns:
            raise ConfigError(f"{path}: the column name {name!r} is taken by the demo itself")
    return columns
