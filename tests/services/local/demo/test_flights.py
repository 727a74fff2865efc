"""The demo's flights as events: their times, their order and cancelled flights."""

from __future__ import annotations

import io
from collections.abc import Iterable

import msgspec
import pyarrow

from penstock.services.local.demo.flights import (
    PLAN,
    FlightEvents,
    FlightRow,
    departed_minutes,
    in_order_of_departure,
    read_columns,
    topology,
)
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

ROW = FlightRow("2013-01-01T10:00:00Z", "15", "2", "UA", "1545", "EWR", "IAH")
SCHEDULED_MS = 1_357_035_300_000


def columns(rows: Iterable[FlightRow]) -> pyarrow.Table:
    return pyarrow.table(dict(zip(FlightRow._fields, zip(*rows, strict=True), strict=True)))


def test_a_flight_arrives_at_its_real_departure() -> None:
    """The arrival is the scheduled time plus the delay in minutes, and the event has the scheduled time."""
    late = ROW._replace(dep_delay="1301")
    assert departed_minutes(columns([late, ROW])).to_pylist() == [SCHEDULED_MS / 60_000 + delay for delay in (1_301, 2)]
    assert msgspec.json.decode(late.encode())["scheduled"] == SCHEDULED_MS


def test_a_cancelled_flight_has_no_delay_and_arrives_as_scheduled() -> None:
    """A delay of NA is null, not zero."""
    for missing in ("NA", ""):
        cancelled = ROW._replace(dep_delay=missing)
        assert departed_minutes(columns([cancelled])).to_pylist() == [SCHEDULED_MS / 60_000]
        assert msgspec.json.decode(cancelled.encode())["dep_delay"] is None


def test_flights_are_ordered_by_departure() -> None:
    """Flights are ordered by real departure, and those of one minute keep the file's order."""
    rows = [ROW._replace(flight="1", dep_delay="30"), ROW._replace(flight="2"), ROW._replace(flight="3")]
    flights = [msgspec.json.decode(line)["flight"] for line in in_order_of_departure(columns(rows))]
    assert flights == [2, 3, 1]
    assert in_order_of_departure(columns(rows), 2) == in_order_of_departure(columns(rows))[:2]


def test_columns_are_found_by_name() -> None:
    """The columns may be in any order, and others are passed over."""
    lines = [
        b"dest,year,minute,time_hour,dep_delay,origin,flight,carrier",
        b"IAH,2013,15,2013-01-01T10:00:00Z,2,EWR,1545,UA",
    ]
    assert read_columns(io.BytesIO(b"\n".join(lines))) == columns([ROW])


def test_the_flights_of_the_package() -> None:
    """The package has 336,776 flights, 8,255 of them cancelled."""
    events = FlightEvents()
    lines = list(events.lines())
    assert events.unfit == 8_255
    assert events.count() == len(lines) == 336_776
    assert sum(b'"dep_delay":null' in line for line in lines) == 8_255


def test_banks_have_count_delays_and_destinations() -> None:
    """Two departures ten minutes apart are one bank, and a cancelled flight is a dead letter with its reason."""
    driver = TopologyTestDriver(topology(), errors=ErrorHandlers())
    for minutes, delay, dest in ((0, "2.0", "IAH"), (10, "6.0", "MIA"), (12, "null", "MIA"), (120, "0.0", "IAH")):
        value = f'{{"dep_delay":{delay},"dest":"{dest}"}}'.encode()
        driver.pipe(PLAN.topic, key=b"UA-EWR", value=value, timestamp=SCHEDULED_MS + minutes * 60_000)
    [bank] = [msgspec.json.decode(record.value or b"") for record in driver.read(PLAN.results)]
    assert bank == {
        "key": "UA-EWR",
        "start": SCHEDULED_MS,
        "end": SCHEDULED_MS + 600_000,
        "flights": 2,
        "mean_delay": 4.0,
        "max_delay": 6.0,
        "total_delay": 8.0,
        "destinations": 2,
    }
    [dead_letter] = driver.read(PLAN.dead_letters)
    assert dict(dead_letter.headers)["penstock.dlq.message"] == b"flights: cancelled: no departure (dep_delay is null)"
