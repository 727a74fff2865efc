"""A user's CSV file as events: each row is a JSON object of its columns, with the parsed event time beside them.

Errors that affect every row are reported before anything runs: a wrong column, a time format that parses none of the
first rows, an invalid duration. A single row without a key or with an invalid time is still sent, marked with the
reason. Its event time is that of the last valid row before it, or else of the first valid row. The topology rejects it,
so it becomes a dead letter that names the row and the column. The audit counts it like any other dead letter.

The file may be plain, gzip, xz or a zip of one file, detected by its first bytes. It is read more than once, so it must
be a regular file.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import msgspec

from penstock.api.settings import IngestSettings
from penstock.services.local.demo.events import PipelinePlan
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.common.serialization import json_deserializer
from penstock.shared.common.time_text import duration_ms
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology

EPOCH_FORMATS = {"epoch": 1_000.0, "epoch_ms": 1.0, "epoch_us": 0.001}
POSSIBLE = "epoch, epoch_ms, epoch_us or a strptime format such as '%d.%m.%Y %H:%M'"
# A guessed format is wrong if it yields a time before the year 2000.
GUESSED_FROM_MS = 946_684_800_000
# An epoch that is read in too small a unit yields a time before the year 1980.
UNLIKELY_BEFORE_MS = 315_532_800_000
# An error message shows at most this many characters of a time.
SHOWN_MAX = 40

TimeParser = Callable[[str], int]

# A longer CSV field is an error. The csv module counts characters, not bytes.
FIELD_CHARACTERS_MAX = 1_000_000
# The row with this number has the columns' names.
HEADER = 0
_UNREADABLE = (OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)

TIME_FIELD = "_event_time_ms"
REJECTED_FIELD = "_rejected"
# At least one of this many first rows must have a key and a time.
PROBED_ROWS = 100
COLUMNS_SHOWN = 50
TOPIC = "events"
RESULTS = "sessions"
DEFAULT_GAP = "30m"
DEFAULT_GRACE = "15m"


def csv_topology(gap: str = DEFAULT_GAP, grace: str = DEFAULT_GRACE, suffix: str = "") -> Topology:
    """Return the demo's topology for the events of a user's CSV file: sessions per key with their number of events.

    Rows that are marked as rejected become dead letters. `suffix` is appended to the output topics.
    """
    builder = StreamsBuilder()
    late = f"{TOPIC}-late{suffix}"
    dead_letters = f"{TOPIC}-dlq{suffix}"
    events = builder.stream(TOPIC, value=deserialize_csv_row, late=late, dead_letters=dead_letters)
    windows = events.group_by_key().session_window(duration_ms(gap), duration_ms(grace))
    windows.aggregate(RESULTS, events=Count()).on_close().to(RESULTS + suffix)
    return builder.build()


def deserialize_csv_row(topic: str, data: bytes | None) -> Any:
    """Deserialize the event of a CSV row. Raises SerializationError with its reason if it is marked as rejected."""
    row = json_deserializer(topic, data)
    if isinstance(row, dict) and REJECTED_FIELD in row:
        raise SerializationError(str(row[REJECTED_FIELD]))
    return row


class BadRow(ValueError):
    """A row that cannot be an event. `time_text` is the text of the row's time if the time is invalid."""

    def __init__(self, reason: str, time_text: str | None = None) -> None:
        super().__init__(reason)
        self.time_text = time_text


class CsvEvents:
    """The rows of a CSV file as events, in file order, or the first `limit` of them.

    Raises ConfigError if the file cannot be read, if an argument is invalid or does not fit the file, or if none of the
    first PROBED_ROWS rows can be an event.
    """

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
        header, *probed = list(islice(read_rows(path, limit), PROBED_ROWS + 1)) or [CsvRow(HEADER, 1, [])]
        self._columns = _checked_columns(path, header.fields, key, time)
        self._key_at = self._columns.index(key)
        self._time_at = self._columns.index(time)
        self._first_ms = self._first_event_time(probed)
        self._count: int | None = None
        self.unfit = 0

    def count(self) -> int:
        """Return the number of rows that are sent. The first call reads them all.

        So a truncated gzip, xz or zip file raises ConfigError before anything is sent.
        """
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
                event[REJECTED_FIELD] = f"{self._describe_row(row)}, {e}"
                event.setdefault(self._key, "")
            event[TIME_FIELD] = last_ms
            yield msgspec.json.encode(event)

    def name_rejection(self, number: int, message: str) -> str:
        """Return ingest's error `message` with the row's number, and with column names in place of JSON pointers."""
        for pointer, column in ((self.plan.key[0], self._key), (self.plan.time, self._time)):
            message = message.replace(pointer, f"column {column!r}")
        return f"row {number}: {message}"

    def _event_time(self, row: CsvRow) -> int:
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

    def _first_event_time(self, rows: list[CsvRow]) -> int:
        """Return the event time of the first row that can be an event.

        Raises ConfigError if there are no rows or none can be an event; the message has the first row's reason. Also
        raises ConfigError if another epoch format or ISO 8601 fits the time of that row better.
        """
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
    def _describe_row(row: CsvRow) -> str:
        return f"row {row.number} (line {row.line})"


def _suggest_time_format(text: str, latest_ms: int) -> str:
    fitting = formats_that_fit(text, latest_ms)
    if not fitting:
        return f"; --time-format takes {POSSIBLE}"
    return (
        f"; {fitting[0]} reads it" if fitting[0].startswith("--") else f"; it is {fitting[0]}: leave out --time-format"
    )


def _plan_of_csv_replay(key: str, gap: str, grace: str) -> PipelinePlan:
    for option, text in (("--gap", gap), ("--grace", grace)):
        try:
            duration_ms(text)
        except ConfigError as e:
            raise ConfigError(f"{option}: {e}") from None
    try:
        csv_topology(gap, grace)
    except ConfigError as e:
        raise ConfigError(f"--gap {gap} --grace {grace}: {e}") from None
    return PipelinePlan(
        topic=TOPIC,
        results=RESULTS,
        application="event-sessions",
        key=("/" + key.replace("~", "~0").replace("/", "~1"),),
        time=f"/{TIME_FIELD}",
        topology="penstock.services.local.demo.csv_events:csv_topology",
        options={"gap": gap, "grace": grace},
        handler="penstock.services.local.demo.handler:store",
        unfit="incomplete row",
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
    for name in (TIME_FIELD, REJECTED_FIELD):
        if name in columns:
            raise ConfigError(f"{path}: the column name {name!r} is taken by the demo itself")
    return columns


class CsvRow(NamedTuple):
    """One row of a CSV file: its number (1 is the first below the header), the line that it ends on, its fields."""

    number: int
    line: int
    fields: list[str]


def read_rows(path: Path, limit: int | None = None) -> Iterator[CsvRow]:
    """Yield the header of a CSV file as row 0, then its rows in file order, or the first `limit` of them.

    Blank lines are skipped. Raises ConfigError if the file cannot be read, with the file, the reason and, if a line
    caused it, the line.
    """
    csv.field_size_limit(FIELD_CHARACTERS_MAX)
    with _open_decompressed_csv(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text)
        rows = (fields for fields in reader if fields)
        try:
            for number, fields in enumerate(islice(rows, None if limit is None else limit + 1)):
                if number == HEADER and any("\0" in name for name in fields):
                    raise ConfigError(f"{path} is not a text file")
                yield CsvRow(number, reader.line_num, fields)
        except UnicodeDecodeError as e:
            raise ConfigError(_csv_decoding_error(path, e)) from None
        except (csv.Error, *_UNREADABLE) as e:
            raise ConfigError(f"{path}, line {reader.line_num + 1}: {_reason_of_file_error(e)}") from None


@contextlib.contextmanager
def _open_decompressed_csv(path: Path) -> Iterator[IO[bytes]]:
    with contextlib.ExitStack() as stack:
        try:
            if path.exists() and not path.is_file():
                kind = "a folder" if path.is_dir() else "no regular file, and the file is read more than once"
                raise ConfigError(f"{path} is {kind}")
            raw: IO[bytes] = stack.enter_context(path.open("rb"))
            magic = raw.read(6)
            raw.seek(0)
            if magic.startswith(b"\x1f\x8b"):
                raw = cast(IO[bytes], stack.enter_context(gzip.open(raw)))
            elif magic.startswith(b"\xfd7zXZ\x00"):
                raw = stack.enter_context(lzma.open(raw))
            elif magic.startswith(b"PK\x03\x04"):
                archive = stack.enter_context(zipfile.ZipFile(raw))
                # Of macOS's zips, a second file describes each file.
                names = [n for n in archive.namelist() if not n.endswith("/") and not n.startswith("__MACOSX/")]
                if len(names) != 1:
                    raise ConfigError(f"{path}: a zip with one file in it is needed, this one has {len(names)}")
                raw = stack.enter_context(archive.open(names[0]))
        except _UNREADABLE as e:
            raise ConfigError(f"{path}: {_reason_of_file_error(e)}") from None
        yield raw


def _reason_of_file_error(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _csv_decoding_error(path: Path, error: UnicodeDecodeError) -> str:
    """Return the error that names the first line that is not UTF-8.

    The file is read again line by line, because the decoder works in blocks and does not know line numbers.
    """
    with _open_decompressed_csv(path) as raw:
        for number, line in enumerate(raw, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as e:
                if b"\0" in line:
                    return f"{path} is not a text file (line {number} contains NUL bytes)"
                byte = line[e.start]
                column = e.start + 1
                return (
                    f"{path}, line {number}: byte {column} (0x{byte:02x}) is not UTF-8; "
                    f"if the file is Latin-1, convert it: iconv -f LATIN1 -t UTF-8"
                )
    return f"{path} is not UTF-8: {error.reason}"


class NoTime(ValueError):
    """A text of a CSV file that is not an event time. The message has the reason."""


def time_parser(time_format: str | None, latest_ms: int) -> TimeParser:
    """Return the parser of a CSV file's event times, from text to ms since the epoch.

    `time_format` is one of EPOCH_FORMATS or a strptime format; None is ISO 8601. A time without zone is UTC.
    The parser raises NoTime for other text, and for times before 1970 or after `latest_ms`. Raises ConfigError for a
    format with %Z.

    >>> parse = time_parser("%d.%m.%Y %H:%M", 2_000_000_000_000)
    >>> parse("01.01.2013 10:15"), time_parser("epoch", 2_000_000_000_000)("1357035300.25")
    (1357035300000, 1357035300250)
    >>> parse("yesterday")
    Traceback (most recent call last):
        ...
    penstock.services.local.demo.csv_events.NoTime: 'yesterday' does not fit --time-format '%d.%m.%Y %H:%M'
    """
    read = _event_time_reader(time_format)
    wanted = "is not an ISO 8601 time" if time_format is None else f"does not fit --time-format {time_format!r}"

    def parse_event_time(text: str) -> int:
        try:
            at_ms = read(text)
        except re.error as e:
            # strptime raises re.error if a directive occurs twice.
            raise NoTime(f"--time-format: {e}") from None
        except (ValueError, OverflowError) as e:
            if "bad directive" in str(e) or "stray %" in str(e):
                raise NoTime(f"--time-format: {e}") from None
            raise NoTime(f"{text[:SHOWN_MAX]!r} {wanted}") from None
        if not 0 <= at_ms <= latest_ms:
            where = "before 1970" if at_ms < 0 else "in the future"
            by_format = "" if time_format is None else f" by --time-format {time_format!r}"
            raise NoTime(f"{text[:SHOWN_MAX]!r} is a time {where}{by_format}")
        return at_ms

    return parse_event_time


def formats_that_fit(text: str, latest_ms: int) -> list[str]:
    """Return the formats that parse the text as a time of this century: `--time-format …`, or `ISO 8601`, the default.

    >>> formats_that_fit("1357035300123", 2_000_000_000_000), formats_that_fit("yesterday", 2_000_000_000_000)
    (['--time-format epoch_ms'], [])
    """
    fitting = []
    for name in (None, "epoch", "epoch_ms", "epoch_us"):
        try:
            if time_parser(name, latest_ms)(text) >= GUESSED_FROM_MS:
                fitting.append(f"--time-format {name}" if name else "ISO 8601")
        except NoTime:
            continue
    return fitting


def better_unit(text: str, time_format: str | None, latest_ms: int) -> str | None:
    """If `time_format` is an epoch format and parses the text as a time before 1980, return a hint to a better format.

    A better format is another epoch format, or ISO 8601, that parses the text as a time of this century. Returns None
    if there is none, and for any other `time_format`.

    >>> better_unit("1714557600", "epoch_ms", 2_000_000_000_000)
    "'1714557600' is a time in 1970 by --time-format epoch_ms; --time-format epoch reads it"
    >>> better_unit("1714557600", "epoch", 2_000_000_000_000)
    """
    if time_format not in EPOCH_FORMATS:
        return None
    at_ms = time_parser(time_format, latest_ms)(text)
    fitting = formats_that_fit(text, latest_ms)
    if at_ms >= UNLIKELY_BEFORE_MS or not fitting:
        return None
    year = datetime.fromtimestamp(at_ms / 1_000, UTC).year
    return f"{text[:SHOWN_MAX]!r} is a time in {year} by --time-format {time_format}; {fitting[0]} reads it"


def _event_time_reader(time_format: str | None) -> TimeParser:
    factor = EPOCH_FORMATS.get(time_format or "")
    if factor is not None:
        return lambda text: round(float(text) * factor)
    # With %Z strptime drops the zone, so a time of another zone would be read as UTC.
    if time_format and "%Z" in time_format.replace("%%", ""):
        raise ConfigError(f"--time-format {time_format!r}: %Z is not supported; use %z (+0100) or write UTC as text")

    def read_event_time(text: str) -> int:
        at = datetime.strptime(text, time_format) if time_format else datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1_000)

    return read_event_time
