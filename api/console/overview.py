"""Builds the dashboard's overview from the samples of each service.

Sans-IO. Samples go in, and one plain value comes out. Unknown values are None. A rate is the increase of a counter over
the last seconds. A counter that fell was reset by a restart of its service, and counts from zero again:

>>> rate = Rate(window_ms=5_000)
>>> rate.add(0, 100), rate.add(1_000, 600), rate.add(2_000, 200)
(None, 500.0, 350.0)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
REJECTED = "penstock_ingest_rejected_records_total"
REJECTED_REQUESTS = "penstock_ingest_rejected_requests_total"
LATE = "penstock_streams_late_records_total"
DEAD_LETTERS_SUFFIX = "_dead_letters_total"


class ServiceRow(TypedDict):
    """The last sample of a service."""

    name: Annotated[str, Field(examples=["producer"])]
    url: of.Text
    status: Annotated[str, Field(examples=["ok"])]
    detail: of.Text
    checks: Annotated[dict[str, Any], Field(examples=[{"kafka": {"status": "ok"}}])]


class KafkaState(TypedDict):
    """The last sample of Kafka. `error` is empty if Kafka answered."""

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
    """The ingest of all services together. Rates are per second, quantiles in ms."""

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
    """The data of the dashboard's routes."""

    async def overview(self) -> dict[str, Any]:
        """Return the newest overview as plain values (see `build`)."""
        ...

    def history(self) -> list[Point]:
        """Return the points so far, oldest first (see `penstock.api.console.history`)."""
        ...


class Rate:
    """The increase of a counter per second over a sliding window."""

    def __init__(self, window_ms: int = RATE_WINDOW_MS) -> None:
        self._window_ms = window_ms
        self._points: deque[tuple[int, float]] = deque()
        self._last: float | None = None
        self._total = 0.0

    def add(self, monotonic_ms: int, value: float | None) -> float | None:
        """Add a sample, which is None if the counter could not be read. Returns the rate; None for too few samples."""
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
        stored = _sum_of_metrics(services, lambda name: name == STORED)
        streams = _state_by_application(services)
        tasks = [task for stream in streams for task in _task_rows(stream)]
        late_records: float | None = _sum_of_tasks(tasks, "late_records")
        if late_records is None:
            late_records = _sum_of_metrics(services, lambda name: name == LATE)
        dead_letters = _sum_of_metrics(services, _counts_dead_letters)
        if dead_letters is None:
            dead_letters = _sum_of_tasks(tasks, "dead_letters")
        compactions = [dict(compaction) for stream in streams for compaction in stream.get("compactions", ())]
        return {
            "now_ms": now_ms,
            "services": [_service_row(sample) for sample in services],
            "kafka": {"cluster_id": kafka.cluster_id, "brokers": kafka.brokers, "error": kafka.error},
            "groups": self._groups.observe(kafka.groups, now_ms=now_ms, monotonic_ms=monotonic_ms),
            "groups_omitted": kafka.groups_omitted,
            "rebalances": list(self._groups.events),
            "ingest": {
                **self._latency.observe(services, monotonic_ms),
                "stored": stored,
                "records_per_second": self._ingest_rate.add(monotonic_ms, stored),
                "rejected": _sum_of_metrics(services, lambda name: name == REJECTED),
                "rejected_requests": _sum_of_metrics(services, lambda name: name == REJECTED_REQUESTS),
            },
            "streams": {
                "tasks": sorted(tasks, key=lambda task: task.get("partition", -1)),
                "open_sessions": _sum_of_tasks(tasks, "open_sessions"),
                "closed_sessions": _sum_of_tasks(tasks, "closed_sessions"),
                "late_records": late_records,
                "late_per_second": self._late_rate.add(monotonic_ms, late_records),
                "restore_estimate_s": restore_estimate_s(tasks, services),
            },
            "dead_letters": dead_letters,
            "compactions": sorted(compactions, key=lambda row: -row.get("started_at_ms", 0))[:COMPACTIONS_MAX],
        }


def _state_by_application(services: Sequence[ServiceSample]) -> list[Mapping[str, Any]]:
    """Return each application's state once. Every instance reports all instances; the most complete state is used."""
    states: dict[str, Mapping[str, Any]] = {}
    for sample in services:
        if sample.streams is not None:
            name = str(sample.streams.get("application_id", sample.name))
            if name not in states or _missing_count(sample.streams) < _missing_count(states[name]):
                states[name] = sample.streams
    return list(states.values())


def _task_rows(streams: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an application's tasks, and a row with the reason for each partition that no instance reported."""
    tasks = [dict(task) for task in streams.get("tasks", ())]
    reported = {task.get("partition") for task in tasks}
    missing = [row for row in streams.get("missing", ()) if row["partition"] not in reported]
    return tasks + [{"partition": row["partition"], "state": "missing", "instance": row["reason"]} for row in missing]


def _missing_count(streams: Mapping[str, Any]) -> int:
    """Return the number of partitions that the state of an application lacks."""
    return len(streams.get("missing", ()))


def _counts_dead_letters(name: str) -> bool:
    """Return whether a metric counts dead letters: consumers and tasks each have one."""
    return name.startswith("penstock_") and name.endswith(DEAD_LETTERS_SUFFIX)


def _service_row(sample: ServiceSample) -> ServiceRow:
    return {
        "name": sample.name,
        "url": sample.url,
        "status": sample.status,
        "detail": sample.detail,
        "checks": dict(sample.checks),
    }


def _sum_of_metrics(services: Sequence[ServiceSample], selects: Callable[[str], bool]) -> float | None:
    """Return the sum of the selected metrics of all services; None if there are none."""
    values = [value for service in services for name, value in service.metrics.items() if selects(name)]
    return sum(values) if values else None


def _sum_of_tasks(tasks: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """Return the sum of a value of all tasks; None if no task reports it."""
    values = [task[key] for task in tasks if task.get(key) is not None]
    return sum(values) if values else None
