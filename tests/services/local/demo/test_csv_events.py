"""A user's CSV file becomes events, and invalid rows and options are reported."""

from __future__ import annotations

import gzip
import lzma
import zipfile
from pathlib import Path

import msgspec
import pytest

from penstock.services.local.demo.csv_events import (
    REJECTED_FIELD,
    TIME_FIELD,
    CsvEvents,
    CsvRow,
    NoTime,
    better_unit,
    csv_topology,
    formats_that_fit,
    read_rows,
    time_parser,
)
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

LATEST_MS = 2_000_000_000_000

TEXT = 'user,at,what\nann,2024-05-01T10:00:00Z,"a, b"\nbob,2024-05-01T12:00:00+02:00,x\n'
AT_MS = 1_714_557_600_000


def write(folder: Path, kind: str, text: str = TEXT) -> Path:
    path = folder / f"events.{kind}"
    data = text.encode()
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("events.csv", data)
            archive.writestr("__MACOSX/._events.csv", "as macOS writes it")
    else:
        path.write_bytes({"csv": lambda b: b, "gz": gzip.compress, "xz": lzma.compress}[kind](data))
    return path


@pytest.mark.parametrize("kind", ["csv", "gz", "xz", "zip"])
def test_every_compression_has_the_same_events(tmp_path: Path, kind: str) -> None:
    """Plain, gzip, xz and zip are detected by content and have the same events, in file order."""
    events = CsvEvents(write(tmp_path, kind), "user", "at")
    assert events.count() == 2
    assert [msgspec.json.decode(line) for line in events.lines()] == [
        {"user": "ann", "at": "2024-05-01T10:00:00Z", "what": "a, b", TIME_FIELD: AT_MS},
        {"user": "bob", "at": "2024-05-01T12:00:00+02:00", "what": "x", TIME_FIELD: AT_MS},
    ]


def test_the_plan_points_at_the_key_column(tmp_path: Path) -> None:
    """A column name is escaped as in JSON pointers."""
    path = write(tmp_path, "csv", "a/b~c,t\nk,2024-05-01\n")
    events = CsvEvents(path, "a/b~c", "t", gap="5m")
    assert events.plan.key == ("/a~1b~0c",)
    assert events.plan.options["gap"] == "5m"


def rows(events: CsvEvents) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in events.lines()]


def test_an_invalid_row_is_sent_with_its_reason(tmp_path: Path) -> None:
    """An invalid row is sent with its row, line and column, and with the event time of the row before."""
    text = 'user,at,what\n"",2024-05-01T10:00:00Z,a\nann,2024-05-01T10:00:00Z,"x\ny"\nbob,yesterday,b\neve\n'
    sent = rows(CsvEvents(write(tmp_path, "csv", text), "user", "at"))
    assert [row[TIME_FIELD] for row in sent] == [AT_MS] * 4
    assert [row.get(REJECTED_FIELD) for row in sent] == [
        "row 1 (line 2), column 'user': the key is empty",
        None,
        "row 3 (line 5), column 'at': 'yesterday' is not an ISO 8601 time",
        "row 4 (line 6), column 'at': the row ends after 1 of 3 columns",
    ]


def test_an_invalid_row_becomes_a_dead_letter_with_its_reason(tmp_path: Path) -> None:
    """The topology makes an invalid row a dead letter with the row's reason, and aggregates the others."""
    text = "user,at\nann,2024-05-01T10:00:00Z\nann,never\nann,2024-05-01T12:00:00Z\n"
    events = CsvEvents(write(tmp_path, "csv", text), "user", "at", gap="5m", grace="0s")
    driver = TopologyTestDriver(csv_topology(**events.plan.options), errors=ErrorHandlers())
    for line in events.lines():
        row = msgspec.json.decode(line)
        driver.pipe(events.plan.topic, key=row["user"].encode(), value=line, timestamp=row[TIME_FIELD])
    [dead_letter] = driver.read(events.plan.dead_letters)
    assert (
        dict(dead_letter.headers)["penstock.dlq.message"]
        == b"row 2 (line 3), column 'at': 'never' is not an ISO 8601 time"
    )
    [session] = [msgspec.json.decode(record.value or b"") for record in driver.read(events.plan.results)]
    assert (session["key"], session["events"]) == ("ann", 1)


def test_an_error_of_the_ingest_names_the_column(tmp_path: Path) -> None:
    """The ingest's JSON pointers are replaced by the file's columns, and its line by the row."""
    events = CsvEvents(write(tmp_path, "csv"), "user", "at")
    message = events.name_rejection(7, "time: /_event_time_ms is too far ahead; key: /user must be a string")
    assert message == "row 7: time: column 'at' is too far ahead; key: column 'user' must be a string"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "user,at\nann,yesterday\n",
            {},
            "row 1 .*column 'at'.*'yesterday'.*strptime",
        ),
        ("user,at\nann,1714557600000\n", {}, "--time-format epoch_ms reads it"),
        ("user,at\nann,1714557600000\n", {"time_format": "epoch"}, "future.*epoch_ms"),
        ("user,at\nann,2024-05-01\n", {"time_format": "epoch"}, "leave out --time-format"),
        ("user,at\nann,2024-05-01\n", {"time_format": "%Q"}, "--time-format: 'Q'"),
        ("user,at\nann,2024-05-01 UTC\n", {"time_format": "%Y-%m-%d %Z"}, "--time-format .*%Z.*%z"),
        ("user,at\n,2024-05-01\nbob\n", {}, "row 1 .*column 'user'.* 2 rows"),
        ("user,at\n", {}, "no rows"),
        (TEXT, {"gap": "bogus"}, "--gap: 'bogus'"),
        (TEXT, {"grace": "bogus"}, "--grace: 'bogus'"),
        (TEXT, {"gap": "0s"}, "--gap 0s"),
    ],
)
def test_errors_of_every_row_are_reported_before_sending(
    tmp_path: Path, text: str, options: dict[str, str], message: str
) -> None:
    """A time or key that is invalid in all of the first rows, and an invalid duration, are a
    ConfigError before anything is sent.
    """
    with pytest.raises(ConfigError, match=message):
        CsvEvents(write(tmp_path, "csv", text), "user", "at", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "time", "text", "message"),
    [
        ("who", "at", TEXT, "--key: .*'who'.*user, at, what"),
        ("user", "when", TEXT, "--time: .*no column 'when'"),
        ("user", "at", "", "it has none"),
        ("user", "at", "user;at\na;b\n", "user;at .*commas"),
        ("user", "at", "user, at\na,b\n", "it has user, ' at'"),
        ("user", "at", "user,at,user\na,b,c\n", "2 columns 'user'"),
        ("user", "at", f"user,at,{TIME_FIELD}\n", "taken by the demo"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, key: str, time: str, text: str, message: str) -> None:
    """The error for invalid columns names the option and the existing columns."""
    with pytest.raises(ConfigError, match=message):
        CsvEvents(write(tmp_path, "csv", text), key, time)


def test_a_limit_takes_a_prefix(tmp_path: Path) -> None:
    """`--events N` stops after N rows."""
    assert CsvEvents(write(tmp_path, "csv"), "user", "at", limit=1).count() == 1


def test_rows_have_numbers_and_lines(tmp_path: Path) -> None:
    """The header is row 0, blank lines have no number, and a field may contain several lines."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfk,v\r\n\r\na,"1\r\n2"\r\nb,3\r\n')
    assert list(read_rows(path)) == [
        CsvRow(0, 1, ["k", "v"]),
        CsvRow(1, 4, ["a", "1\r\n2"]),
        CsvRow(2, 5, ["b", "3"]),
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


@pytest.mark.parametrize(
    ("time_format", "text", "expected"),
    [
        (None, "2024-05-01 10:00:00", AT_MS),
        ("epoch", "1714557600.5", AT_MS + 500),
        ("epoch_ms", "1714557600000", AT_MS),
        ("epoch_us", "1714557600000000", AT_MS),
        ("%d/%m/%y %H:%M %z", "01/05/24 12:00 +0200", AT_MS),
        ("%%Z %Y-%m-%d %H", "%Z 2024-05-01 10", AT_MS),
    ],
)
def test_time_formats(time_format: str | None, text: str, expected: int) -> None:
    """Epochs, strptime formats and ISO 8601 are converted to ms since the epoch; without a zone the time is UTC."""
    assert time_parser(time_format, LATEST_MS)(text) == expected


@pytest.mark.parametrize(
    ("time_format", "text", "message"),
    [
        (None, "", "'' .*ISO 8601"),
        ("epoch", "nan", "'nan'.*--time-format 'epoch'"),
        ("epoch", "inf", "does not fit"),
        ("%H:%M", "10:00", "before 1970 by --time-format '%H:%M'"),
        (None, "2999-01-01", "in the future"),
        ("%", "x", "--time-format: stray %"),
        ("%d.%m.%Y %H:%m", "01.01.2013 10:15", "--time-format: .* 'm'"),
        (None, "x" * 1_000, "'x{40}' is no"),
    ],
)
def test_an_invalid_time_is_an_error_with_its_reason(time_format: str | None, text: str, message: str) -> None:
    """The error has the shortened text and the reason."""
    with pytest.raises(NoTime, match=message):
        time_parser(time_format, LATEST_MS)(text)


@pytest.mark.parametrize(
    ("text", "fitting"),
    [
        ("2024-05-01", ["ISO 8601"]),
        ("1714557600", ["--time-format epoch"]),
        ("1714557600000", ["--time-format epoch_ms"]),
        ("1714557600000000", ["--time-format epoch_us"]),
        ("1.5.24", []),
    ],
)
def test_formats_that_fit(text: str, fitting: list[str]) -> None:
    """Only formats that make the text a time of this century are suggested."""
    assert formats_that_fit(text, LATEST_MS) == fitting


@pytest.mark.parametrize(
    ("text", "time_format", "message"),
    [
        (
            "1714557600",
            "epoch_ms",
            "'1714557600' is a time in 1970 by --time-format epoch_ms; --time-format epoch reads it",
        ),
        ("1714557600000", "epoch_us", "--time-format epoch_ms reads it"),
        ("157766400000", "epoch_ms", None),
        ("1970-01-20", None, None),
    ],
)
def test_an_epoch_in_the_wrong_unit_is_detected(text: str, time_format: str | None, message: str | None) -> None:
    """Seconds read as milliseconds, which are times in January 1970, have a suggestion; true
    times of the seventies have none.
    """
    found = better_unit(text, time_format, LATEST_MS)
    assert found is message is None or (found is not None and message is not None and message in found)
