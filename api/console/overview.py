"""Builds the dashboard's overview from the samples of each service.

Sans-IO. Samples go in, and one plain value comes out. Unknown values are None. Rates are taken over the last seconds.
A counter that fell was reset by a restart of its service, and counts from zero again:

>>> rate = Rate(window_ms=5_000)
>>> rate.add(0, 100), rate.add(1_000, 600), rate.add(2_000, 200)
(None, 500.0, 350.0)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.console.history import Point
from penstock.api.console.samples import KafkaSample, ServiceSample
from penstock.api.console.watches import GroupWatch, Latency, restore_estimate_s
from penstock.api.http import field_types as of

RATE_WINDOW_MS = 5_000
COMPACTIONS_MAX = 10

STORED = "penstock_ingest_stored_records_total"
REFUSED = "penstock_ingest_rejected_records_total"
REFUSED_REQUESTS = "penstock_ingest_rejected_requests_total"
LATE = "penstock_streams_late_records_total"
DEAD_LETTERS_SUFFIX = "_dead_letters_total"


class ServiceRow(TypedDict):
    """A service, as it answered last."""

    name: Annotated[str, Field(examples=["producer"])]
    url: of.Text
    status: Annotated[str, Field(examples=["ok"])]
    detail: of.Text
    checks: Annotated[dict[str, Any], Field(examples=[{"kafka": {"status": "ok"}}])]


class KafkaState(TypedDict):
    """Kafka, as it answered last. `error` is empty if it answered."""

    cluster_id: of.ClusterId | None
    brokers: of.Count | None
    error: of.Text


class GroupState(TypedDict):
    """A group with the change of its lag per second (negative: catching up)."""

    group: of.Group
    state: Annotated[str, Field(examples=["Stable"])]
    members: of.Count
    lag: of.Lag
    lag_per_second: of.Rate | None
    catch_up_s: of.Seconds | None


class GroupEvent(TypedDict):
    """A change of a group."""

    at_ms: of.TimeMs
    group: of.Group
    what: Annotated[str, Field(examples=["members 1 to 2"])]


class IngestState(TypedDict):
    """The ingest of all services."""

    p50_ms: of.Rate | None
    p99_ms: of.Rate | None
    stored: of.Rate | None
    records_per_second: of.Rate | None
    rejected: of.Rate | None
    rejected_requests: of.Rate | None


class StreamsOverview(TypedDict):
    """The tasks of all applications, in the shape of `/v1/streams/tasks`."""

    tasks: Annotated[list[dict[str, Any]], Field(examples=[[{"partition": 0, "state": "running"}]])]
    open_sessions: of.Count | None
    closed_sessions: of.Count | None
    late_records: of.Rate | None
    late_per_second: of.Rate | None
    restore_estimate_s: of.Seconds | None


class Overview(TypedDict):
    """The dashboard's data; unknown values are None."""

    now_ms: of.TimeMs
    services: list[ServiceRow]
    kafka: KafkaState
    groups: list[GroupState]
    groups_omitted: of.Count
    rebalances: list[GroupEvent]
    ingest: IngestState
    streams: StreamsOverview
    dead_letters: of.Rate | None
    compactions: Annotated[list[dict[str, Any]], Field(examples=[[{"status": "done", "rows": 42}]])]


class OverviewProvider(Protocol):
    """What the dashboard's routes need."""

    async def overview(self) -> dict[str, Any]:
        """Return the newest overview as plain values (see `build`)."""
        ...

    def history(self) -> list[Point]:
        """Return the points so far, oldest first (see `penstock.api.console.history`)."""
        ...


class Rate:
    """Increase of a counter per second over a sliding window."""

    def __init__(self, window_ms: int = RATE_WINDOW_MS) -> None:
        self._window_ms = window_ms
        self._points: deque[tuple[int, float]] = deque()
        self._last: float | None = None
        self._total = 0.0

    def add(self, monotonic_ms: int, value: float | None) -> float | None:
        """Add a sample; None if the counter could not be read. Returns the rate, or None with too few samples."""
        if value is None:
            return None
        if self._last is not None:
            self._total += value - self._last if value >= self._last else value
        self._last = value
        self._points.append((monotonic_ms, self._total))
        while len(self._points) > 2 and self._points[1][0] <= monotonic_ms - self._window_ms:
            self._points.popleft()
        first_ms, first = self._points[0]
        return (self._total - first) * 1_000 / (monotonic_ms - first_ms) if monotonic_ms > first_ms else None


class OverviewBuilder:
    """Builds overviews from samples. Keeps only the state that rates and group events need."""

    def __init__(self) -> None:
        self._ingest_rate = Rate()
        self._late_rate = Rate()
        self._latency = Latency()
        self._groups = GroupWatch()

    def build(
        self, services: Sequence[ServiceSample], kafka: KafkaSample, *, now_ms: int, monotonic_ms: int
    ) -> dict[str, Any]:
        """Return the overview as plain values."""
        stored = _total(services, lambda name: name == STORED)
        streams = _of_each_application(services)
        tasks = [task for stream in streams for task in _tasks(stream)]
        late = _sum(tasks, "late_records")
        all_late = _total(services, lambda name: name == LATE) if late is None else late
        dead = _total(services, lambda name: name.startswith("penstock_") and name.endswith(DEAD_LETTERS_SUFFIX))
        compactions = [dict(run) for stream in streams for run in stream.get("compactions", ())]
        return {
            "now_ms": now_ms,
            "services": [_service(sample) for sample in services],
            "kafka": {"cluster_id": kafka.cluster_id, "brokers": kafka.brokers, "error": kafka.error},
            "groups": self._groups.see(kafka.groups, now_ms=now_ms, monotonic_ms=monotonic_ms),
            "groups_omitted": kafka.groups_omitted,
            "rebalances": list(self._groups.events),
            "ingest": {
                **self._latency.see(services, monotonic_ms),
                "stored": stored,
                "records_per_second": self._ingest_rate.add(monotonic_ms, stored),
                "rejected": _total(services, lambda name: name == REFUSED),
                "rejected_requests": _total(services, lambda name: name == REFUSED_REQUESTS),
            },
            "streams": {
                "tasks": sorted(tasks, key=lambda task: task.get("partition", -1)),
                "open_sessions": _sum(tasks, "open_sessions"),
                "closed_sessions": _sum(tasks, "closed_sessions"),
                "late_records": all_late,
                "late_per_second": self._late_rate.add(monotonic_ms, all_late),
                "restore_estimate_s": restore_estimate_s(tasks, services),
            },
            "dead_letters": _sum(tasks, "dead_letters") if dead is None else dead,
            "compactions": sorted(compactions, key=lambda run: -run.get("started_at_ms", 0))[:COMPACTIONS_MAX],
        }


def _of_each_application(services: Sequence[ServiceSample]) -> list[Mapping[str, Any]]:
    """Return each application's state once. Every instance reports all instances; the most complete state is used."""
    found: dict[str, Mapping[str, Any]] = {}
    for sample in services:
        if sample.streams is not None:
            name = str(sample.streams.get("application_id", sample.name))
            if name not in found or _missing(sample.streams) < _missing(found[name]):
                found[name] = sample.streams
    return list(found.values())


def _tasks(streams: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an application's tasks, and a row with the reason for each partition that no instance reported."""
    tasks = [dict(task) for task in streams.get("tasks", ())]
    told = {task.get("partition") for task in tasks}
    lost = [one for one in streams.get("missing", ()) if one["partition"] not in told]
    return tasks + [{"partition": one["partition"], "state": "missing", "instance": one["reason"]} for one in lost]


def _missing(streams: Mapping[str, Any]) -> int:
    return len(streams.get("missing", ()))


def _service(sample: ServiceSample) -> ServiceRow:
    return {
        "name": sample.name,
        "url": sample.url,
        "status": sample.status,
        "detail": sample.detail,
        "checks": dict(sample.checks),
    }


def _total(services: Sequence[ServiceSample], wanted: Any) -> float | None:
    values = [value for service in services for name, value in service.metrics.items() if wanted(name)]
    return sum(values) if values else None


def _sum(tasks: Sequence[Mapping[str, Any]], key: str) -> int | None:
    values = [task[key] for task in tasks if task.get(key) is not None]
    return sum(values) if values else None
