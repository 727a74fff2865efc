"""Builds the dashboard's overview from samples of the services and of Kafka.

Sans-IO. Samples go in, and a dict that is the JSON of `GET /v1/overview` comes out. Unknown values are None. A rate is
the increase of a counter per second, over the last seconds. If a counter falls, its service was restarted and the
counter began at zero again:

>>> rate = CounterRate()
>>> rate.add(0, {"a": 100}), rate.add(1_000, {"a": 600}), rate.add(2_000, {"a": 200})
(None, 500.0, 350.0)

The time until a group has caught up is estimated from the rate at which its lag fell over the last seconds:

>>> watch = GroupWatch()
>>> banks = {"group": "banks", "state": "Stable", "members": 1, "lag": 100}
>>> watch.observe([banks], now_ms=0, monotonic_ms=0)[0]["catch_up_s"]
>>> watch.observe([banks | {"lag": 80}], now_ms=2_000, monotonic_ms=2_000)[0]["catch_up_s"]
8.0
>>> _ = watch.observe([banks | {"lag": 80, "members": 2}], now_ms=3_000, monotonic_ms=3_000)
>>> [(event["at_ms"], event["what"]) for event in watch.events]
[(3000, 'members 1 to 2')]
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.console.history import Point
from penstock.api.http import field_types as of
from penstock.api.streams.task_views import CompactionState, MissingPartition, TaskState

RATE_WINDOW_MS = 5_000
COMPACTIONS_MAX = 10

LAG_WINDOW_MS = 30_000
LATENCY_WINDOW_MS = 10_000
EVENTS_MAX = 200
RESTORE_RATE_RECORDS_MIN = 10_000
"""The duration of a restore of fewer records is the fixed cost of connections, not a rate."""
RESTORE_RECORDS_PER_MS = 100
"""The assumed rate if no restore had RESTORE_RATE_RECORDS_MIN records. A store on disk is a little slower, one in
memory faster."""

STORED = "penstock_ingest_stored_records_total"
REJECTED = "penstock_ingest_rejected_records_total"
REJECTED_REQUESTS = "penstock_ingest_rejected_requests_total"
LATE = "penstock_streams_late_records_total"
DEAD_LETTERS_SUFFIX = "_dead_letters_total"

LATENCY_BUCKET = "penstock_ingest_request_seconds_bucket|"


Metrics = Mapping[str, float]
"""Maps a metric's name to its value, summed over its labels. Buckets of the ingest latency have the name
`<name>_bucket|<bound>`."""


@dataclass(frozen=True, slots=True)
class ServiceSample:
    """The response of one service, or the reason why there is none."""

    name: str
    url: str
    status: str
    """ok, failing or unreachable."""
    detail: str = ""
    checks: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    streams: Mapping[str, Any] | None = None


class GroupSample(TypedDict):
    """The state of a group, its number of members and its total lag. The lag is None if Kafka does not return it."""

    group: of.Group
    state: Annotated[str, Field(examples=["Stable"])]
    members: of.Count
    lag: of.Lag | None


@dataclass(frozen=True, slots=True)
class KafkaSample:
    """The response of Kafka: brokers and groups."""

    cluster_id: str | None = None
    brokers: int | None = None
    groups: Sequence[GroupSample] = ()
    groups_omitted: int = 0
    """The number of groups left out of the sample: there are too many, or the principal may not describe them."""
    error: str = ""


class ServiceRow(TypedDict):
    """The last sample of a service."""

    name: Annotated[str, Field(examples=["producer"])]
    url: of.Text
    status: Annotated[str, Field(examples=["ok"])]
    detail: of.Text
    checks: Annotated[dict[str, Any], Field(examples=[{"kafka": {"status": "ok"}}])]


class KafkaState(TypedDict):
    """The last sample of Kafka. If it failed, `error` has the reason, and the other fields are None."""

    cluster_id: of.ClusterId | None
    brokers: of.Count | None
    error: of.Text


class GroupState(GroupSample):
    """A group with the change of its lag per second (negative: catching up), and the estimated time until it has caught
    up.
    """

    lag_per_second: of.Rate | None
    catch_up_s: of.Seconds | None


class GroupEvent(TypedDict):
    """A change of a group's state or number of members."""

    at_ms: of.TimeMs
    group: of.Group
    what: Annotated[str, Field(examples=["members 1 to 2"])]


class LatencyQuantiles(TypedDict):
    """Quantiles of the ingest latency over the last seconds."""

    p50_ms: of.Milliseconds | None
    p99_ms: of.Milliseconds | None


class IngestState(LatencyQuantiles):
    """The ingest of all services together.

    `stored`, `rejected` and `rejected_requests` count from the start of each service. The other values cover the last
    seconds.
    """

    stored: of.Count | None
    records_per_second: of.Rate | None
    rejected: of.Count | None
    rejected_requests: of.Count | None


class MissingTask(TypedDict):
    """A partition that no instance reports a task of."""

    partition: of.Partition
    state: Literal["missing"]
    instance: Annotated[str, Field(examples=["no instance has it"])]
    """The reason."""


class StreamsOverview(TypedDict):
    """The tasks of all applications by partition, and the totals of all tasks."""

    tasks: list[TaskState | MissingTask]
    state_rows: of.Count | None
    closed_windows: of.Count | None
    late_records: of.Count | None
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
    dead_letters: of.Count | None
    compactions: list[CompactionState]
    """The newest compactions of all applications, newest first."""


class OverviewProvider(Protocol):
    """Provides the overview and its history to the routes of the dashboard."""

    async def overview(self) -> Overview:
        """Return the newest overview (see `OverviewBuilder.build`)."""
        ...

    def history(self) -> list[Point]:
        """Return the points of the overviews so far, oldest first, for the charts."""
        ...


def _drop_points_until(points: deque[tuple[int, Any]], ms: int) -> None:
    """Drop the points of a sliding window up to a time, except the last of them: increases are measured from it."""
    while len(points) > 2 and points[1][0] <= ms:
        points.popleft()


def _rate(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the increase per second from the first point of a sliding window to the last; None if no time passed."""
    first_ms, first = points[0]
    last_ms, last = points[-1]
    return (last - first) * 1_000 / (last_ms - first_ms) if last_ms > first_ms else None


class CounterRate:
    """The increase per second of a counter that several sources report, over the last RATE_WINDOW_MS."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float]] = deque()
        self._last: Mapping[str, float] = {}
        self._total = 0.0

    def add(self, monotonic_ms: int, values: Mapping[str, float]) -> float | None:
        """Add the counter's value of each source when an overview is built. Returns the rate for the overview.

        A source that the sample before lacked adds nothing: its next increase is measured from this value. The rate is
        None without a source, and in the first sample that has one.
        """
        for source, value in values.items():
            if (last := self._last.get(source)) is not None:
                self._total += value - last if value >= last else value
        self._last = values
        if not values:
            return None
        self._points.append((monotonic_ms, self._total))
        _drop_points_until(self._points, monotonic_ms - RATE_WINDOW_MS)
        return _rate(self._points)


class GroupWatch:
    """Derives the overview's lag rates and rebalances from samples of the groups.

    `events` are the rebalances, newest first.
    """

    def __init__(self) -> None:
        self.events: deque[GroupEvent] = deque(maxlen=EVENTS_MAX)
        self._lags: dict[str, deque[tuple[int, int]]] = {}
        self._last: dict[str, GroupSample] = {}

    def observe(self, groups: Sequence[GroupSample], *, now_ms: int, monotonic_ms: int) -> list[GroupState]:
        """Add a sample of the groups. Returns the overview's groups, each with `lag_per_second` and `catch_up_s`.

        `lag_per_second` is negative if the group catches up, and None for the group's first sample. `catch_up_s` is 0
        without lag, and None if the lag does not fall. Both are None if the lag is unknown.
        """
        rows: list[GroupState] = []
        for group in groups:
            name = group["group"]
            self._add_rebalance(name, group, now_ms)
            lag = group["lag"]
            rate = None if lag is None else self._lag_rate(name, lag, monotonic_ms)
            catch_up_s: float | None = None
            if lag == 0:
                catch_up_s = 0.0
            elif lag is not None and rate is not None and rate < 0:
                catch_up_s = -lag / rate
            rows.append({**group, "lag_per_second": rate, "catch_up_s": catch_up_s})
        # A sample without groups usually means that Kafka did not answer. So the groups are kept for the next sample.
        if groups:
            for name in self._last.keys() - {str(group["group"]) for group in groups}:
                del self._last[name]
                self._lags.pop(name, None)
        return rows

    def _add_rebalance(self, name: str, group: GroupSample, now_ms: int) -> None:
        """Add a rebalance to the overview if the group's state or number of members changed since the last sample."""
        before = self._last.get(name)
        self._last[name] = group
        if before is None:
            return
        changes = [
            f"{field} {before.get(field)} to {group.get(field)}"
            for field in ("state", "members")
            if before.get(field) != group.get(field)
        ]
        if changes:
            self.events.appendleft({"at_ms": now_ms, "group": name, "what": ", ".join(changes)})

    def _lag_rate(self, name: str, lag: int, monotonic_ms: int) -> float | None:
        """Return by how much a group's lag in the overview changed per second over LAG_WINDOW_MS.

        Returns None for the first sample.
        """
        points = self._lags.setdefault(name, deque())
        points.append((monotonic_ms, lag))
        _drop_points_until(points, monotonic_ms - LAG_WINDOW_MS)
        return _rate(points)


class IngestLatency:
    """Quantiles of the ingest latency in the overview, over the last seconds, from histograms that only grow."""

    def __init__(self) -> None:
        self._last: dict[str, dict[float, float]] = {}
        self._increases: Counter[float] = Counter()
        self._points: deque[tuple[int, Counter[float]]] = deque()

    def observe(self, services: Sequence[ServiceSample], monotonic_ms: int) -> LatencyQuantiles:
        """Add a sample of the services. Returns the overview's `p50_ms` and `p99_ms`.

        Both are None for the first sample, and without a request in the last LATENCY_WINDOW_MS. As in `CounterRate`, a
        service counts from its second sample in a row.
        """
        histograms = {service.name: _latency_histogram(service) for service in services}
        for name, counts in histograms.items():
            if (last := self._last.get(name)) is not None:
                # A service that was restarted began at zero again.
                before = {} if any(count < last.get(bound, 0.0) for bound, count in counts.items()) else last
                self._increases.update({bound: count - before.get(bound, 0.0) for bound, count in counts.items()})
        self._last = {name: counts for name, counts in histograms.items() if counts}
        self._points.append((monotonic_ms, self._increases.copy()))
        _drop_points_until(self._points, monotonic_ms - LATENCY_WINDOW_MS)
        first = self._points[0][1]
        recent = {bound: count - first[bound] for bound, count in self._increases.items()}
        return {"p50_ms": latency_quantile_ms(recent, 0.5), "p99_ms": latency_quantile_ms(recent, 0.99)}


def _latency_histogram(service: ServiceSample) -> dict[float, float]:
    """Return a service's cumulative counts of requests by upper bound in seconds; empty if it did not report them."""
    return {
        float(name.removeprefix(LATENCY_BUCKET)): value
        for name, value in service.metrics.items()
        if name.startswith(LATENCY_BUCKET)
    }


def latency_quantile_ms(counts: Mapping[float, float], quantile: float) -> float | None:
    """Return a quantile in ms of the overview's ingest latency, interpolated between the bounds of a histogram.

    `counts` are cumulative, by upper bound in seconds. Returns None without a request.

    >>> latency_quantile_ms({0.01: 50, 0.1: 100, float("inf"): 100}, 0.5)
    10.0
    >>> latency_quantile_ms({0.01: 50, 0.1: 100}, 0.75)
    55.0
    """
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    rank = counts[bounds[-1]] * quantile
    low = 0.0
    below = 0.0
    for bound in bounds:
        if counts[bound] >= rank:
            if bound == float("inf"):
                return low * 1_000
            within = (rank - below) / (counts[bound] - below) if counts[bound] > below else 1.0
            return round((low + (bound - low) * within) * 1_000, 3)
        low = bound
        below = counts[bound]
    return None


class OverviewBuilder:
    """Builds overviews from samples. Keeps only the state that rates, latency and group events need."""

    def __init__(self) -> None:
        self._ingest_rate = CounterRate()
        self._late_rate = CounterRate()
        self._latency = IngestLatency()
        self._groups = GroupWatch()

    def build(
        self, services: Sequence[ServiceSample], kafka: KafkaSample, *, now_ms: int, monotonic_ms: int
    ) -> Overview:
        """Return the overview."""
        stored = _values_of_metric(services, STORED)
        streams = _state_by_application(services)
        tasks_by_application = {application: _task_rows(state) for application, state in streams.items()}
        tasks = [task for rows in tasks_by_application.values() for task in rows]
        # If no task reports its late records, the services' metrics count.
        late = _values_of_tasks(tasks_by_application, "late_records") or _values_of_metric(services, LATE)
        dead_letters = _sum_of_dead_letter_metrics(services)
        if dead_letters is None:
            dead_letters = _sum_of_values(_values_of_tasks(tasks_by_application, "dead_letters"))
        compactions: list[CompactionState] = [
            compaction for state in streams.values() for compaction in state.get("compactions", ())
        ]
        return {
            "now_ms": now_ms,
            "services": [_service_row(sample) for sample in services],
            "kafka": {"cluster_id": kafka.cluster_id, "brokers": kafka.brokers, "error": kafka.error},
            "groups": self._groups.observe(kafka.groups, now_ms=now_ms, monotonic_ms=monotonic_ms),
            "groups_omitted": kafka.groups_omitted,
            "rebalances": list(self._groups.events),
            "ingest": {
                **self._latency.observe(services, monotonic_ms),
                "stored": _sum_of_values(stored),
                "records_per_second": self._ingest_rate.add(monotonic_ms, stored),
                "rejected": _sum_of_values(_values_of_metric(services, REJECTED)),
                "rejected_requests": _sum_of_values(_values_of_metric(services, REJECTED_REQUESTS)),
            },
            "streams": {
                "tasks": sorted(tasks, key=lambda task: task.get("partition", -1)),
                "state_rows": _sum_of_values(_values_of_tasks(tasks_by_application, "state_rows")),
                "closed_windows": _sum_of_values(_values_of_tasks(tasks_by_application, "closed_windows")),
                "late_records": _sum_of_values(late),
                "late_per_second": self._late_rate.add(monotonic_ms, late),
                "restore_estimate_s": restore_estimate_s(tasks, services),
            },
            "dead_letters": dead_letters,
            "compactions": sorted(compactions, key=lambda row: -row.get("started_at_ms", 0))[:COMPACTIONS_MAX],
        }


def _state_by_application(services: Sequence[ServiceSample]) -> dict[str, Mapping[str, Any]]:
    """Return the merged state of each application, by its id.

    A task counts if any instance reports it: an instance may report the tasks of other instances, too. The compactions
    are those of the first report with a task of partition 0, whose owner runs them. Without such a report they are
    those of the first report.
    """
    reports: dict[str, list[Mapping[str, Any]]] = {}
    for sample in services:
        if sample.streams is not None:
            name = str(sample.streams.get("application_id", sample.name))
            reports.setdefault(name, []).append(sample.streams)
    return {name: _merge_reports(own) for name, own in reports.items()}


def _merge_reports(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the instances' reports of one application. For each partition, the first report counts."""
    tasks: dict[int | None, Mapping[str, Any]] = {}
    missing: dict[int, Mapping[str, Any]] = {}
    compactions: Sequence[Mapping[str, Any]] = reports[0].get("compactions", ())
    for report in reports:
        own = {task.get("partition"): task for task in report.get("tasks", ())}
        if 0 in own and 0 not in tasks:
            compactions = report.get("compactions", ())
        tasks = own | tasks
        missing = {row["partition"]: row for row in report.get("missing", ())} | missing
    return {"tasks": list(tasks.values()), "missing": list(missing.values()), "compactions": compactions}


def _task_rows(streams: Mapping[str, Any]) -> list[TaskState | MissingTask]:
    """Return an application's tasks, and a row with the reason for each missing partition that none of them has."""
    tasks: list[TaskState] = list(streams.get("tasks", ()))
    reported = {task.get("partition") for task in tasks}
    missing: list[MissingPartition] = [row for row in streams.get("missing", ()) if row["partition"] not in reported]
    rows = [MissingTask(partition=row["partition"], state="missing", instance=row["reason"]) for row in missing]
    return [*tasks, *rows]


def _service_row(sample: ServiceSample) -> ServiceRow:
    return {
        "name": sample.name,
        "url": sample.url,
        "status": sample.status,
        "detail": sample.detail,
        "checks": dict(sample.checks),
    }


def _values_of_metric(services: Sequence[ServiceSample], name: str) -> dict[str, float]:
    """Return a metric's value by the name of the service."""
    return {service.name: service.metrics[name] for service in services if name in service.metrics}


def _values_of_tasks(tasks: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> dict[str, float]:
    """Return a value of all tasks that report it, by application and partition."""
    return {
        f"{application}/{task.get('partition')}": task[key]
        for application, rows in tasks.items()
        for task in rows
        if task.get(key) is not None
    }


def _sum_of_values(values: Mapping[str, float]) -> int | None:
    """Return the sum of the values of all sources; None if no source reports one."""
    return int(sum(values.values())) if values else None


def _sum_of_dead_letter_metrics(services: Sequence[ServiceSample]) -> int | None:
    """Return the dead letters of all services; None if no service has such a metric.

    Consumers and tasks each have one.
    """
    values = [
        value
        for service in services
        for name, value in service.metrics.items()
        if name.startswith("penstock_") and name.endswith(DEAD_LETTERS_SUFFIX)
    ]
    return int(sum(values)) if values else None


def restore_estimate_s(tasks: Sequence[Mapping[str, Any]], services: Sequence[ServiceSample]) -> float | None:
    """Return the estimated seconds that a restore of all `tasks` would take now, from the restores that they report.

    A restore reads the live rows in the snapshot, and the changelog records after it. Returns None if no task has
    been restored, or if no service reports the number of these changelog records.
    """
    restores = [
        (task["restore_ms"], (task.get("restored_windows") or 0) + (task.get("restored_changelog_records") or 0))
        for task in tasks
        if task.get("restore_ms") is not None
    ]
    checks = [check for service in services for check in service.checks.values()]
    counts = [check.get("changelog_records") for check in checks]
    changelog_records = [count for count in counts if isinstance(count, int)]
    if not restores or not changelog_records:
        return None
    large = [(ms, restored) for ms, restored in restores if restored >= RESTORE_RATE_RECORDS_MIN]
    # The windows and records that a restore would read.
    records = sum(task.get("state_rows") or 0 for task in tasks) + sum(changelog_records)
    # 1. No restore has read enough for a rate: the duration of the shortest restore, plus the time that `records` take
    # at RESTORE_RECORDS_PER_MS.
    if not large:
        return float(min(ms for ms, _ in restores) + records / RESTORE_RECORDS_PER_MS) / 1_000
    # 2. Otherwise: at the rate of the restores that each read at least RESTORE_RATE_RECORDS_MIN windows and records.
    return float(records * sum(ms for ms, _ in large) / sum(restored for _, restored in large)) / 1_000
