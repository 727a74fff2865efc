"""A user's own CSV file as events: each row a JSON object of its columns, with the parsed event time beside them.

Plain, gzip, xz and zip (of one file) are told apart by their first bytes. A row whose time cannot be read is sent
with a null time: the ingest endpoint refuses it, so that it is counted and named like any other bad event.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, cast

import msgspec

from services.local.demo.events import Plan
from shared.common.errors import ConfigError

TIME_FIELD = "_event_time_ms"
FIELD_BYTES_MAX = 1_000_000  # of one CSV field

EPOCH_FORMATS = {"epoch": 1_000.0, "epoch_s": 1_000.0, "epoch_ms": 1.0, "epoch_us": 0.001}


def time_parser(time_format: str | None) -> Callable[[str], int]:
    """Text to ms since the epoch, by `epoch`, `epoch_ms`, `epoch_us`, a strptime format, or ISO 8601 by default.

    A time without zone is taken as UTC. The parser raises ValueError for text that does not fit.

    >>> time_parser(None)("2013-01-01T10:15:00Z"), time_parser("%d.%m.%Y %H:%M")("01.01.2013 10:15")
    (1357035300000, 1357035300000)
    >>> time_parser("epoch")("1357035300.25")
    1357035300250
    """
    if time_format in EPOCH_FORMATS:
        factor = EPOCH_FORMATS[time_format]
        return lambda text: round(float(text) * factor)

    def parse(text: str) -> int:
        at = datetime.strptime(text, time_format) if time_format else datetime.fromisoformat(text)
        return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1_000)

    return parse


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """The file's text, unpacked; ConfigError where it cannot be read."""
    with contextlib.ExitStack() as stack:
        try:
            raw: IO[bytes] = stack.enter_context(path.open("rb"))
            magic = raw.read(6)
            raw.seek(0)
            if magic.startswith(b"\x1f\x8b"):
                raw = cast(IO[bytes], stack.enter_context(gzip.open(raw)))
            elif magic.startswith(b"\xfd7zXZ\x00"):
                raw = stack.enter_context(lzma.open(raw))
            elif magic.startswith(b"PK\x03\x04"):
                archive = stack.enter_context(zipfile.ZipFile(raw))
                names = [name for name in archive.namelist() if not name.endswith("/")]
                if len(names) != 1:
                    raise ConfigError(f"{path}: a zip with one file in it is needed, this one has {len(names)}")
                raw = stack.enter_context(archive.open(names[0]))
        except OSError as e:
            raise ConfigError(f"{path}: {e.strerror or e}") from None
        except zipfile.BadZipFile as e:
            raise ConfigError(f"{path}: {e}") from None
        yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")


class CsvEvents:
    """The rows of a file in file order, or the first `limit` of them."""

    def __init__(
        self,
        path: Path,
        key: str,
        time: str,
        *,
        time_format: str | None = None,
        gap: str = "30m",
        grace: str = "5m",
        limit: int | None = None,
    ) -> None:
        self._path, self._time, self._limit = path, time, limit
        self._parse_time = time_parser(time_format)
        csv.field_size_limit(FIELD_BYTES_MAX)
        with open_text(path) as text:
            columns = next(csv.reader(text), [])
        for name, option in ((key, "--key"), (time, "--time")):
            if name not in columns:
                raise ConfigError(f"{option}: {path} has no column {name!r}; it has {', '.join(columns) or 'none'}")
        if TIME_FIELD in columns:
            raise ConfigError(f"{path}: the column name {TIME_FIELD!r} is taken by the demo itself")
        self._columns = columns
        self.plan = Plan(
            topic="events",
            results="sessions",
            application="event-sessions",
            key=("/" + key.replace("~", "~0").replace("/", "~1"),),
            time=f"/{TIME_FIELD}",
            topology="services.local.topologies:sessions",
            options={"topic": "events", "results": "sessions", "gap": gap, "grace": grace},
            handler="services.local.demo.notable:store",
        )

    def count(self) -> int:
        return sum(1 for _ in self._rows())

    def lines(self) -> Iterator[bytes]:
        for row in self._rows():
            event: dict[str, str | int | None] = dict(zip(self._columns, row, strict=False))
            event[TIME_FIELD] = self._event_time(event.get(self._time))
            yield msgspec.json.encode(event)

    def _event_time(self, text: object) -> int | None:
        try:
            return self._parse_time(str(text))
        except (ValueError, OverflowError):
            return None

    def _rows(self) -> Iterator[list[str]]:
        with open_text(self._path) as text:
            reader = csv.reader(text)
            try:
                next(reader, None)
                yield from islice((row for row in reader if row), self._limit)
            except (csv.Error, UnicodeDecodeError, OSError, EOFError, lzma.LZMAError) as e:
                raise ConfigError(f"{self._path}, line {reader.line_num}: {e}") from None
