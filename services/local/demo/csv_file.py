"""A user's CSV file as rows of text (an edge): decompressed, decoded, and with one-line errors for other files.

Plain, gzip, xz and zip (of one file) are detected by their first bytes. The file is read more than once, so it must be
a regular file.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple, cast

from penstock.shared.common.errors import ConfigError

FIELD_BYTES_MAX = 1_000_000  # of one CSV field
HEADER = 0  # the number of the row with the columns' names
_UNREADABLE = (OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


class Row(NamedTuple):
    """One row: its number (1 is the first below the header), the line of the file that it ends on, its fields."""

    number: int
    line: int
    fields: list[str]


def read_rows(path: Path, limit: int | None = None) -> Iterator[Row]:
    """Yield the header as row 0, then the rows in file order, or the first `limit` of them. Blank lines are skipped.

    Raises ConfigError with the file, the line and the reason if the file cannot be read.
    """
    csv.field_size_limit(FIELD_BYTES_MAX)
    with _open_bytes(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text)
        rows = (fields for fields in reader if fields)
        try:
            for number, fields in enumerate(islice(rows, None if limit is None else limit + 1)):
                if number == HEADER and any("\0" in name for name in fields):
                    raise ConfigError(f"{path} is not a text file")
                yield Row(number, reader.line_num, fields)
        except UnicodeDecodeError as e:
            raise ConfigError(_no_text(path, e)) from None
        except (csv.Error, *_UNREADABLE) as e:
            raise ConfigError(f"{path}, line {reader.line_num + 1}: {_reason_of_file_error(e)}") from None


@contextlib.contextmanager
def _open_bytes(path: Path) -> Iterator[IO[bytes]]:
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
                names = [name for name in archive.namelist() if not name.endswith("/")]
                if len(names) != 1:
                    raise ConfigError(f"{path}: a zip with one file in it is needed, this one has {len(names)}")
                raw = stack.enter_context(archive.open(names[0]))
        except _UNREADABLE as e:
            raise ConfigError(f"{path}: {_reason_of_file_error(e)}") from None
        yield raw


def _reason_of_file_error(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _no_text(path: Path, error: UnicodeDecodeError) -> str:
    """Return the error with the line that is not UTF-8. The decoder works in blocks and knows no line numbers."""
    with _open_bytes(path) as raw:
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
