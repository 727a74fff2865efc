"""A user's CSV file becomes events, and invalid rows and options are reported."""

from __future__ import annotations

import gzip
import lzma
import zipfile
from pathlib import Path

import msgspec
import pytest

from penstock.services.local.demo.csv_events import REFUSED_FIELD, TIME_FIELD, CsvEvents, topology
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

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
    assert [row.get(REFUSED_FIELD) for row in sent] == [
        "row 1 (line 2), column 'user': the key is empty",
        None,
        "row 3 (line 5), column 'at': 'yesterday' is not an ISO 8601 time",
        "row 4 (line 6), column 'at': the row ends after 1 of 3 columns",
    ]


def test_an_invalid_row_becomes_a_dead_letter_with_its_reason(tmp_path: Path) -> None:
    """The topology makes an invalid row a dead letter with the row's reason, and aggregates the others."""
    text = "user,at\nann,2024-05-01T10:00:00Z\nann,never\nann,2024-05-01T12:00:00Z\n"
    events = CsvEvents(write(tmp_path, "csv", text), "user", "at", gap="5m", grace="0s")
    driver = TopologyTestDriver(topology(**events.plan.options), errors=ErrorHandlers())
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
