"""Reading a CSV file as rows."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import pytest

from penstock.services.local.demo.csv_file import Row, read_rows
from penstock.shared.common.errors import ConfigError


def test_rows_have_numbers_and_lines(tmp_path: Path) -> None:
    """The header is row 0, blank lines have no number, and a field may contain several lines."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfk,v\r\n\r\na,"1\r\n2"\r\nb,3\r\n')
    assert list(read_rows(path)) == [
        Row(0, 1, ["k", "v"]),
        Row(1, 4, ["a", "1\r\n2"]),
        Row(2, 5, ["b", "3"]),
    ]
    assert [row.number for row in read_rows(path, limit=1)] == [0, 1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"n\xe9,at\na,b\n", r"f, line 1: byte 2 .*iconv"),
        (b"k,at\n" + b"x,y\n" * 5_000 + b"\xe9,y\n", r"f, line 5002: byte 1 \(0xe9\)"),
        (b"\xff\xfek\0,\0", "f is not a text"),
        (b"k\0\0,\x01\n", "f is not a text"),
        (gzip.compress(b"k,at\n" + b"x,y\n" * 50_000)[:-20], "f, line .*ended before"),
        (b"PK\x03\x04 no zip", "f: .*zip"),
        (b"k,at\n" + b"x" * 1_000_001, "f, line .*field larger than"),
    ],
)
def test_invalid_csv_is_an_error_of_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    """Other encodings, binaries and damaged archives are a ConfigError of one line, with the line number if known."""
    path = tmp_path / "f"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as raised:
        list(read_rows(path))
    assert "\n" not in str(raised.value)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    """A missing file, a folder, and a zip of several files are a ConfigError."""
    with pytest.raises(ConfigError, match=r"nowhere\.csv: No such file"):
        list(read_rows(tmp_path / "nowhere.csv"))
    with pytest.raises(ConfigError, match="is a folder"):
        list(read_rows(tmp_path))
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "")
        archive.writestr("b", "")
    with pytest.raises(ConfigError, match="has 2"):
        list(read_rows(tmp_path / "two.zip"))
