"""TimestampConverter: conversions between all formats."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.schema import BOOLEAN, INT64, Field, Schema, date_schema, timestamp_schema
from penstock.shared.connect.transforms.timestamps import TimestampConverterValue
from penstock.shared.testing.manual_clock import ManualClock
from tests.shared.connect.transforms.transforming import applied, configured

AT = dt.datetime(2024, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.UTC)
FORMAT = {"format": "yyyy-MM-dd HH:mm:ss.SSS"}


LOCAL = AT.astimezone(dt.timezone(dt.timedelta(hours=-5))) + dt.timedelta(microseconds=999)
"""The same time with another zone, in which it is still the day before, and with a part of a ms."""


@pytest.mark.parametrize("value", [AT, LOCAL, 1704164645678, "2024-01-02 03:04:05.678"])
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("Timestamp", AT),
        ("unix", 1704164645678),
        ("string", "2024-01-02 03:04:05.678"),
        ("Date", AT.date()),
        ("Time", AT.time()),
    ],
)
def test_conversions_between_formats(value: Any, target: str, expected: Any) -> None:
    """Each format is converted to each other one."""
    assert applied(TimestampConverterValue, value, target_type=target, **FORMAT).value == expected


@pytest.mark.parametrize(("precision", "unix"), [("seconds", 1704164645), ("microseconds", 1704164645678000)])
def test_unix_numbers_have_a_precision(precision: str, unix: int) -> None:
    """The unix precision applies to reading and writing; precision below a ms is lost."""
    more = {"unix_precision": precision}
    assert applied(TimestampConverterValue, AT, target_type="unix", **more).value == unix
    read = applied(TimestampConverterValue, unix, target_type="Timestamp", **more).value
    assert read == (AT.replace(microsecond=0) if precision == "seconds" else AT)


def test_one_field_is_converted() -> None:
    """One field and its schema are converted, and the others are unchanged."""
    assert applied(TimestampConverterValue, {"t": 0, "x": 1}, field="t", target_type="Date").value == {
        "t": dt.date(1970, 1, 1),
        "x": 1,
    }
    schema = Schema.struct("S", Field("t", timestamp_schema(optional=True)), Field("x", INT64))
    found = applied(TimestampConverterValue, {"t": AT, "x": 1}, schema, field="t", target_type="Date")
    assert found.value_schema == Schema.struct("S", Field("t", date_schema(optional=True)), Field("x", INT64))
    assert (
        applied(TimestampConverterValue, {"t": None, "x": 1}, schema, field="t", target_type="Date").value["t"] is None
    )


def test_invalid_times_and_formats_are_errors() -> None:
    """Other types and unparsable text are DataErrors, and invalid formats are ConfigErrors."""
    for value, settings in ((1.5, FORMAT), ("soon", FORMAT), ("2024", {})):
        with pytest.raises(DataError):
            applied(TimestampConverterValue, value, target_type="unix", **settings)
    with pytest.raises(DataError, match="known timestamp type"):
        applied(TimestampConverterValue, True, BOOLEAN, target_type="unix")
    with pytest.raises(ConfigError, match="requires format"):
        configured(TimestampConverterValue, target_type="string")
    with pytest.raises(ConfigError, match="not a date pattern"):
        configured(TimestampConverterValue, target_type="string", format="QQ")


def test_two_digit_years_are_near_the_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """The century of a year of two digits depends on the transform's clock."""
    monkeypatch.setattr(TimestampConverterValue, "clock", ManualClock(4_102_444_800_000))  # the year 2100
    found = applied(TimestampConverterValue, "50-05-01", target_type="Date", format="yy-MM-dd")
    assert found.value == dt.date(2050, 5, 1)
