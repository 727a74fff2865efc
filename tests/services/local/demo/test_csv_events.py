"""A user's CSV file as events."""

from __future__ import annotations

import gzip
import lzma
import zipfile
from pathlib import Path

import msgspec
import pytest

from services.local.demo.csv_events import TIME_FIELD, CsvEvents, time_parser
from shared.common.errors import ConfigError

TEXT = 'user,at,what\nann,2024-05-01T10:00:00Z,"a, b"\nbob,2024-05-01T12:00:00+02:00,x\n'
AT_MS = 1_714_557_600_000


def write(folder: Path, kind: str, text: str = TEXT) -> Path:
    path = folder / f"events.{kind}"
    data = text.encode()
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("events.csv", data)
    else:
        path.write_bytes({"csv": lambda b: b, "gz": gzip.compress, "xz": lzma.compress}[kind](data))
    return path


@pytest.mark.parametrize("kind", ["csv", "gz", "xz", "zip"])
def test_every_packing_gives_the_same_events(tmp_path: Path, kind: str) -> None:
    """Plain, gzip, xz and zip are told apart by content and read alike, in file order."""
    events = CsvEvents(write(tmp_path, kind), "user", "at")
    assert events.count() == 2
    assert [msgspec.json.decode(line) for line in events.lines()] == [
        {"user": "ann", "at": "2024-05-01T10:00:00Z", "what": "a, b", TIME_FIELD: AT_MS},
        {"user": "bob", "at": "2024-05-01T12:00:00+02:00", "what": "x", TIME_FIELD: AT_MS},
    ]


def test_the_plan_points_at_the_key_column(tmp_path: Path) -> None:
    """A column name with the characters that JSON pointers escape is escaped."""
    path = write(tmp_path, "csv", "a/b~c,t\nk,2024-05-01\n")
    events = CsvEvents(path, "a/b~c", "t", gap="5m")
    assert events.plan.key == ("/a~1b~0c",)
    assert events.plan.options["gap"] == "5m"


@pytest.mark.parametrize(
    ("time_format", "text", "expected"),
    [
        (None, "2024-05-01 10:00:00", AT_MS),
        ("epoch", "1714557600.5", AT_MS + 500),
        ("epoch_ms", "1714557600000", AT_MS),
        ("epoch_us", "1714557600000000", AT_MS),
        ("%d/%m/%y %H:%M %z", "01/05/24 12:00 +0200", AT_MS),
    ],
)
def test_time_formats(time_format: str | None, text: str, expected: int) -> None:
    """Epochs, strptime formats and ISO 8601 give ms since the epoch; without a zone it is UTC."""
    assert time_parser(time_format)(text) == expected


def test_a_row_whose_time_cannot_be_read_is_sent_with_a_null_time(tmp_path: Path) -> None:
    """It is not dropped here: the ingest endpoint refuses it, and so it is counted."""
    events = CsvEvents(write(tmp_path, "csv", "user,at\nann,yesterday\nbob\n"), "user", "at")
    assert [msgspec.json.decode(line)[TIME_FIELD] for line in events.lines()] == [None, None]


@pytest.mark.parametrize(
    ("key", "time", "text", "says"),
    [
        ("who", "at", TEXT, "--key: .*no column 'who'; it has user, at, what"),
        ("user", "when", TEXT, "--time: .*no column 'when'"),
        ("user", "at", "", "it has none"),
        ("user", "at", f"user,at,{TIME_FIELD}\n", "taken by the demo"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, key: str, time: str, text: str, says: str) -> None:
    """The option and the columns that there are stand in the error."""
    with pytest.raises(ConfigError, match=says):
        CsvEvents(write(tmp_path, "csv", text), key, time)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """A missing file, a zip of several files, and bytes that are no text."""
    with pytest.raises(ConfigError, match=r"nowhere\.csv: No such file"):
        CsvEvents(tmp_path / "nowhere.csv", "a", "b")
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        archive.writestr("a", "")
        archive.writestr("b", "")
    with pytest.raises(ConfigError, match="has 2"):
        CsvEvents(tmp_path / "two.zip", "a", "b")
    (tmp_path / "latin.csv").write_bytes(b"user,at\n" + b"x,2024-05-01\n" * 5_000 + b"\xe9\xe9,2024-05-01\n")
    with pytest.raises(ConfigError, match=r"latin\.csv, line"):
        CsvEvents(tmp_path / "latin.csv", "user", "at").count()


def test_a_limit_takes_a_prefix(tmp_path: Path) -> None:
    """`--events N` stops after N rows."""
    assert CsvEvents(write(tmp_path, "csv"), "user", "at", limit=1).count() == 1
