"""The overview that is built from samples, and its history, which the charts show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.console.history import History, point
from penstock.api.console.overview import (
    CounterRate,
    GroupWatch,
    IngestLatency,
    KafkaSample,
    OverviewBuilder,
    ServiceSample,
    restore_estimate_s,
)


def build(services: list[ServiceSample], kafka: KafkaSample | None = None) -> dict:
    return OverviewBuilder().build(services, kafka or KafkaSample(), now_ms=5, monotonic_ms=0)


def test_unknown_values_are_none() -> None:
    """Values that were not measured are None and not zero."""
    overview = build([ServiceSample("producer", "http://p", "unreachable", "refused")])
    assert set(overview["ingest"].values()) == {None}
    assert overview["streams"].pop("tasks") == []
    assert set(overview["streams"].values()) == {None}
    assert overview["dead_letters"] is None
    assert overview["services"][0]["status"] == "unreachable"


def test_tasks_of_all_services_are_summed() -> None:
    """Tasks of several aggregators are listed by partition, and their counts are added."""
    one = {"tasks": [{"partition": 1, "state_rows": 3, "late_records": 1}], "compactions": [{"started_at_ms": 1}]}
    two = {"tasks": [{"partition": 0, "state_rows": 4}], "compactions": [{"started_at_ms": 2}]}
    overview = build([ServiceSample("a", "", "ok", streams=one), ServiceSample("b", "", "ok", streams=two)])
    assert [t["partition"] for t in overview["streams"]["tasks"]] == [0, 1]
    assert (overview["streams"]["state_rows"], overview["streams"]["late_records"]) == (7, 1)
    assert [c["started_at_ms"] for c in overview["compactions"]] == [2, 1]


def test_dead_letters_of_all_kinds_are_summed() -> None:
    """The dead letters of consumers and of tasks are added."""
    counted = {"penstock_streams_dead_letters_total": 2.0, "penstock_consumer_dead_letters_total": 3.0}
    dead_letters = build([ServiceSample("a", "", "ok", metrics=counted)])["dead_letters"]
    assert (dead_letters, type(dead_letters)) == (5, int)


def test_the_ingest_rate_needs_two_samples() -> None:
    """The ingest rate is per second, between two overviews."""
    builder = OverviewBuilder()
    name = "penstock_ingest_stored_records_total"
    rates = [
        builder.build([ServiceSample("p", "", "ok", metrics={name: n})], KafkaSample(), now_ms=0, monotonic_ms=at)
        for at, n in ((0, 10.0), (500, 60.0))
    ]
    assert [o["ingest"]["records_per_second"] for o in rates] == [None, 100.0]


@given(st.lists(st.tuples(st.integers(1, 3_000), st.one_of(st.none(), st.integers(0, 1_000))), max_size=50))
def test_a_rate_is_never_negative(steps: list[tuple[int, int | None]]) -> None:
    """A rate is never negative, even if counters fall or are missing."""
    rate, now_ms = CounterRate(), 0
    for step, value in steps:
        now_ms += step
        result = rate.add(now_ms, {} if value is None else {"a": value})
        assert result is None or result >= 0


@given(st.integers(1, 500), st.integers(1, 100))
def test_a_steady_counter_has_its_own_rate(per_step: int, steps: int) -> None:
    """A counter that grows steadily has that rate over any number of samples."""
    rate = CounterRate()
    results = [rate.add(i * 1_000, {"a": i * per_step}) for i in range(steps + 1)]
    assert results[-1] == per_step


def test_an_unreachable_service_makes_no_rate() -> None:
    """A service that is unreachable in one sample, and one that appears, add only their own later increases."""
    rate = CounterRate()
    samples = [{"a": 1e6, "b": 1e6}, {"a": 1e6}, {"a": 1e6, "b": 1e6}, {"a": 1e6 + 10, "b": 1e6 + 30, "c": 5e6}]
    assert [rate.add(i * 1_000, values) for i, values in enumerate(samples)] == [None, 0, 0, 40 / 3]


def test_late_records_of_a_task_that_moves_make_no_rate() -> None:
    """The rate of late records is that of each task: one that is missing for a while adds no increase."""
    builder = OverviewBuilder()
    rates = []
    for at, tasks in enumerate([{0: 100, 1: 900}, {0: 100}, {0: 100, 1: 900}, {0: 101, 1: 2}]):
        rows = [{"partition": partition, "late_records": late} for partition, late in tasks.items()]
        services = [ServiceSample("a", "", "ok", streams={"application_id": "x", "tasks": rows})]
        overview = builder.build(services, KafkaSample(), now_ms=0, monotonic_ms=at * 1_000)
        rates.append(overview["streams"]["late_per_second"])
    assert rates == [None, 0, 0, 1]


def test_an_applications_tasks_are_counted_once() -> None:
    """If several instances describe an application, each partition counts once."""
    poor = {"application_id": "x", "tasks": [{"partition": 0}], "missing": [{"partition": 1}]}
    whole = {"application_id": "x", "tasks": [{"partition": 0}, {"partition": 1}], "missing": []}
    samples = [ServiceSample(str(i), "", "ok", streams=one) for i, one in enumerate((poor, whole, poor))]
    assert [task["partition"] for task in build(samples)["streams"]["tasks"]] == [0, 1]


def test_an_applications_tasks_are_those_that_any_instance_reports() -> None:
    """An instance that has just started knows none of the others, and an instance may report only its own tasks."""
    lost = [{"partition": 2, "reason": "no instance has it"}]
    started = {"application_id": "x", "tasks": [], "missing": [], "compactions": []}
    whole = {"application_id": "x", "tasks": [{"partition": 0}, {"partition": 1}], "missing": lost}
    whole["compactions"] = [{"started_at_ms": 7}]
    overview = build([ServiceSample(str(i), "", "ok", streams=one) for i, one in enumerate((started, whole, started))])
    assert [task["partition"] for task in overview["streams"]["tasks"]] == [0, 1, 2]
    assert [compaction["started_at_ms"] for compaction in overview["compactions"]] == [7]
    apart = [{"application_id": "x", "tasks": [{"partition": partition}]} for partition in (1, 0)]
    overview = build([ServiceSample(str(i), "", "ok", streams=one) for i, one in enumerate(apart)])
    assert [task["partition"] for task in overview["streams"]["tasks"]] == [0, 1]


def test_a_missing_partition_has_a_row() -> None:
    """A missing partition has a row with the reason, unless its restoring task has one."""
    lost = [{"partition": 0, "reason": "being restored by a"}, {"partition": 1, "reason": "no instance has it"}]
    state = {"application_id": "x", "tasks": [{"partition": 0, "state": "restoring", "instance": "a"}], "missing": lost}
    tasks = build([ServiceSample("a", "", "ok", streams=state)])["streams"]["tasks"]
    assert [(task["partition"], task["state"], task["instance"]) for task in tasks] == [
        (0, "restoring", "a"),
        (1, "missing", "no instance has it"),
    ]


def group(lag: int | None, **other: object) -> dict[str, object]:
    return {"group": "banks", "state": "Stable", "members": 1, "lag": lag, **other}


def test_a_group_that_falls_behind_has_no_time_to_catch_up() -> None:
    """A group whose lag grows has no catch-up time, and a group without lag has zero."""
    watch = GroupWatch()
    watch.observe([group(10)], now_ms=0, monotonic_ms=0)
    (row,) = watch.observe([group(30)], now_ms=1_000, monotonic_ms=1_000)
    assert (row["lag_per_second"], row["catch_up_s"]) == (20.0, None)
    assert watch.observe([group(0)], now_ms=2_000, monotonic_ms=2_000)[0]["catch_up_s"] == 0.0


def test_an_unknown_lag_has_no_rate_and_is_no_point_of_later_rates() -> None:
    """While a group's lag is unknown, its rate and its time to catch up are unknown. Later rates skip this time."""
    watch = GroupWatch()
    watch.observe([group(10)], now_ms=0, monotonic_ms=0)
    (row,) = watch.observe([group(None)], now_ms=1_000, monotonic_ms=1_000)
    assert (row["lag"], row["lag_per_second"], row["catch_up_s"]) == (None, None, None)
    (row,) = watch.observe([group(30)], now_ms=2_000, monotonic_ms=2_000)
    assert (row["lag"], row["lag_per_second"]) == (30, 10.0)


def test_rebalances_are_events_newest_first() -> None:
    """A change of a group's state or members is an event; a new group is none."""
    watch = GroupWatch()
    watch.observe([group(0)], now_ms=1, monotonic_ms=1)
    watch.observe([group(0, state="PreparingRebalance")], now_ms=2, monotonic_ms=2)
    watch.observe([group(0, members=3)], now_ms=3, monotonic_ms=3)
    assert [e["at_ms"] for e in watch.events] == [3, 2]
    assert watch.events[0]["what"] == "state PreparingRebalance to Stable, members 1 to 3"


def sample(counts: dict[float, float], name: str = "producer") -> list[ServiceSample]:
    metrics = {f"penstock_ingest_request_seconds_bucket|{bound}": n for bound, n in counts.items()}
    return [ServiceSample(name, "", "ok", metrics=metrics)]


def test_latency_is_that_of_the_last_seconds() -> None:
    """Latency covers the last seconds. A restarted service's counters begin at zero."""
    latency = IngestLatency()
    latency.observe(sample({0.01: 100, 1.0: 100}), 0)
    assert latency.observe(sample({0.01: 100, 1.0: 200}), 1_000)["p50_ms"] == pytest.approx(505.0)
    latency.observe(sample({0.01: 100, 1.0: 200}), 30_000)
    assert latency.observe(sample({0.01: 110, 1.0: 210}), 31_000)["p99_ms"] == pytest.approx(9.9)
    assert latency.observe(sample({0.01: 0, 1.0: 1}), 32_000)["p50_ms"] == pytest.approx(5.5)
    assert latency.observe(sample({0.01: 0, 1.0: 1}), 50_000) == {"p50_ms": None, "p99_ms": None}


def test_latency_of_a_service_counts_from_its_second_sample() -> None:
    """The requests before the first sample of a service are not recent, also if it was unreachable in between."""
    latency = IngestLatency()
    one, old = sample({0.01: 10, 1.0: 10}), sample({0.01: 0, 1.0: 9_000}, "old")
    nothing = {"p50_ms": None, "p99_ms": None}
    assert [latency.observe(each, at) for at, each in enumerate([[], one + old, one, one + old])] == [nothing] * 4
    assert latency.observe(sample({0.01: 20, 1.0: 20}) + old, 4)["p99_ms"] == pytest.approx(9.9)


def test_restore_estimates_use_the_last_restores_rate() -> None:
    """The estimate uses the last restores' rate for open windows and changelog records, and is
    None without a restore.
    """
    large = {"restore_ms": 100, "restored_windows": 9_000, "restored_changelog_records": 1_000, "state_rows": 20_000}
    small = {"restore_ms": 30, "restored_windows": 0, "restored_changelog_records": 2, "state_rows": 10_000}
    aggregator = ServiceSample("aggregator", "", "ok", checks={"compaction": {"changelog_records": 20_000}})
    assert restore_estimate_s([large, small], [aggregator]) == 0.5
    workers = {"worker-1": {"changelog_records": None}, "worker-2": {"changelog_records": 20_000}}
    assert restore_estimate_s([large, small], [ServiceSample("aggregator", "", "ok", checks=workers)]) == 0.5
    assert restore_estimate_s([], [aggregator]) is None
    assert restore_estimate_s([{"state_rows": 5}], [aggregator]) is None


def test_small_restores_do_not_determine_the_rate() -> None:
    """A restore of a few records mostly measures connecting, so it does not determine the rate."""
    first = {"restore_ms": 30, "restored_windows": 0, "restored_changelog_records": 2, "state_rows": 50_000}
    aggregator = ServiceSample("aggregator", "", "ok", checks={"compaction": {"changelog_records": 50_000}})
    assert restore_estimate_s([first, {**first, "restore_ms": 40, "state_rows": 0}], [aggregator]) == 1.03


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(2, 20))
def test_the_history_is_bounded_in_order_and_keeps_its_beginning(steps: list[int], points_max: int) -> None:
    """The history never exceeds its limit of points, is ordered by time and keeps its first point."""
    history, at_ms = History(every_ms=100, points_max=points_max), 0
    for step in steps:
        at_ms += step
        history.add({"now_ms": at_ms})
        times = [p["at_ms"] for p in history.points]
        assert len(times) <= points_max
        assert times == sorted(set(times))
        assert times[0] == steps[0]


def test_the_history_goes_on_if_the_clock_is_set_back() -> None:
    """Points after the new time are dropped, so the charts go on at once and are ordered by time."""
    history = History(every_ms=100)
    for now_ms in (0, 100, 200, 300, 150, 200, 250):
        history.add({"now_ms": now_ms})
    assert [p["at_ms"] for p in history.points] == [0, 100, 200]


def test_a_point_summarizes_an_overview() -> None:
    """A point has the lag of all groups, and None for unknown values."""
    overview = {"now_ms": 7, "ingest": {"records_per_second": 2.0}, "groups": [{"lag": 3}, {"lag": 4}]}
    taken = point(overview)
    assert (taken["at_ms"], taken["records_per_second"], taken["lag"], taken["state_rows"]) == (7, 2.0, 7, None)
    assert point(build([], KafkaSample(error="no broker")))["lag"] is None
    assert point({"now_ms": 7, "groups": [{"lag": 3}, {"lag": None}]})["lag"] is None
