"""The worker's metrics under Kafka Connect's names, changed to follow Prometheus' naming rules.

The attribute `sink-record-send-total` of the JMX name `kafka.connect:type=sink-task-metrics,connector=…,task=…` is
`kafka_connect_sink_task_metrics_sink_record_send_total{connector="…",task="…"}`. If that name would break a rule of
Prometheus, `in_prometheus` changes it further. Metrics are computed when they are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.shared.connect.herder import views
from penstock.shared.connect.herder.base_herder import BaseHerder
from penstock.shared.connect.runtime.states import State
from penstock.shared.connect.runtime.task_metrics import ERROR_METRICS, SINK_METRICS, SOURCE_METRICS

PREFIX = "kafka_connect"
COUNTED = frozenset(name for name in ERROR_METRICS if name.startswith(("total_", "deadletterqueue_")))
"""Kafka Connect's totals since the task's start whose names do not end in `_total`."""
CHANGED = (
    ("_ms", "_seconds", 0.001),
    ("_timestamp", "_timestamp_seconds", 0.001),  # in milliseconds, as Kafka Connect has it
    ("_percentage", "_ratio", 1.0),  # from 0 to 1, as Kafka Connect has it
    ("_record_active_count", "_record_active", 1.0),
    ("_count", "s", 1.0),  # the suffix _count belongs to histograms
)
"""Suffixes of Kafka Connect's names that are changed, with the new suffix and the factor for values."""
Rows = dict[tuple[str, ...], float]

STATES = (State.RUNNING, State.PAUSED, State.FAILED, State.UNASSIGNED, State.RESTARTING)


class ConnectMetrics(Collector):
    """The metrics of one worker. The constructor registers them."""

    def __init__(self, herder: BaseHerder, registry: CollectorRegistry) -> None:
        self._herder = herder
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Return the current values of all metrics."""
        yield from self._worker_metrics()
        yield from self._connector_metrics()
        yield from self._task_metrics()
        group = "connect_worker_rebalance_metrics"
        for name, value in self._herder.rebalance_metrics().items():
            yield _metric_family(group, name, {(): value}, ())
        for name, text in self._herder.rebalance_texts().items():
            yield _metric_family(group, name, {(text,): 1.0}, (name,))

    def _worker_metrics(self) -> Iterable[Metric]:
        worker = self._herder.worker
        group = "connect_worker_metrics"
        counts = {"connector_count": len(worker.connector_names()), "task_count": len(worker.task_ids())}
        for name, value in {**counts, **self._herder.startup_metrics()}.items():
            yield _metric_family(group, name, {(): float(value)}, ())
        states: Counter[tuple[str, State | None]] = Counter(
            (task.connector, worker.state(task)) for task in worker.task_ids()
        )
        for state in STATES:
            rows: Rows = {(name,): float(states[name, state]) for name in worker.connector_names()}
            yield _metric_family(group, f"connector_{state.value.lower()}_task_count", rows, ("connector",))
        totals = Counter(task.connector for task in worker.task_ids())
        sums: Rows = {(name,): float(totals[name]) for name in worker.connector_names()}
        yield _metric_family(group, "connector_total_task_count", sums, ("connector",))

    def _connector_metrics(self) -> Iterable[Metric]:
        worker = self._herder.worker
        snapshot = self._herder.snapshot()
        rows: dict[tuple[str, ...], float] = {}
        for name in worker.connector_names():
            config = snapshot.configs.get(name, {})
            kind = views.kind_of_connector(self._herder.plugins, config)
            state = worker.state(name)
            rows[name, kind, config.get("connector.class", ""), "" if state is None else state.value.lower()] = 1.0
        yield _metric_family(
            "connector_metrics", "status", rows, ("connector", "connector_type", "connector_class", "status")
        )

    def _task_metrics(self) -> Iterable[Metric]:
        found: dict[tuple[str, str], dict[tuple[str, ...], float]] = {}
        for task, state, values in self._herder.worker.task_metrics():
            own = (task.connector, str(task.task))
            found.setdefault(("connector_task_metrics", "status"), {})[(*own, state.value.lower())] = 1.0
            for name, value in values.items():
                found.setdefault((_group_of_task_metric(name), name), {})[own] = value
        for (group, name), rows in sorted(found.items()):
            labels = ("connector", "task", "status") if name == "status" else ("connector", "task")
            yield _metric_family(group, name, rows, labels)


def _group_of_task_metric(name: str) -> str:
    """Return the group of a task's metric, as in Kafka Connect: the JMX type with underscores.

    >>> [_group_of_task_metric(name) for name in ("put_batch_avg_time_ms", "source_record_poll_rate", "total_retries")]
    ['sink_task_metrics', 'source_task_metrics', 'task_error_metrics']
    """
    if name in ERROR_METRICS:
        return "task_error_metrics"
    base = f"{name.removesuffix('_rate')}_total"
    if name in SINK_METRICS or base in SINK_METRICS or name.startswith("put_batch"):
        return "sink_task_metrics"
    if name in SOURCE_METRICS or base in SOURCE_METRICS or name.startswith("poll_batch"):
        return "source_task_metrics"
    return "connector_task_metrics"


def in_prometheus(name: str) -> tuple[str, float]:
    """Return the Prometheus name of one of Kafka Connect's metrics, and the factor to its base unit.

    >>> in_prometheus("put_batch_avg_time_ms"), in_prometheus("last_error_timestamp")
    (('put_batch_avg_time_seconds', 0.001), ('last_error_timestamp_seconds', 0.001))
    >>> in_prometheus("total_retries"), in_prometheus("deadletterqueue_produce_requests")
    (('retries_total', 1.0), ('deadletterqueue_produce_requests_total', 1.0))
    >>> in_prometheus("connector_running_task_count"), in_prometheus("sink_record_active_count")
    (('connector_running_tasks', 1.0), ('sink_record_active', 1.0))
    """
    if name in COUNTED:
        return f"{name.removeprefix('total_')}_total", 1.0
    for end, changed, factor in CHANGED:
        if name.endswith(end):
            return f"{name.removesuffix(end)}{changed}", factor
    return name, 1.0


def _metric_family(group: str, name: str, rows: Mapping[tuple[str, ...], float], labels: tuple[str, ...]) -> Metric:
    """Return a metric with its rows: a counter if it is a total, else a gauge."""
    named, factor = in_prometheus(name)
    owner = "Penstock" if name in ("call_duration_ms", "stalled", "source_send_blocked_ms") else "Kafka Connect"
    help_text = f"{owner}'s {name.replace('_', '-')} of {group.replace('_', '-')}"
    help_text += "." if factor == 1 else ", in seconds."
    kind = CounterMetricFamily if named.endswith("_total") else GaugeMetricFamily
    family: CounterMetricFamily | GaugeMetricFamily = kind(f"{PREFIX}_{group}_{named}", help_text, labels=labels)
    for values, value in sorted(rows.items()):
        family.add_metric(values, value * factor)
    return family
