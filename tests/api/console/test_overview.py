"""The overview that is built from samples."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.console.overview import OverviewBuilder, Rate
from penstock.api.console.samples import KafkaSample, ServiceSample


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
    one = {"tasks": [{"partition": 1, "open_sessions": 3, "late_records": 1}], "compactions": [{"started_at_ms": 1}]}
    two = {"tasks": [{"partition": 0, "open_sessions": 4}], "compactions": [{"started_at_ms": 2}]}
    overview = build([ServiceSample("a", "", "ok", streams=one), ServiceSample("b", "", "ok", streams=two)])
    assert [t["partition"] for t in overview["streams"]["tasks"]] == [0, 1]
    assert (overview["streams"]["open_sessions"], overview["streams"]["late_records"]) == (7, 1)
    assert [c["started_at_ms"] for c in overview["compactions"]] == [2, 1]


def test_dead_letters_of_all_kinds_are_summed() -> None:
    """The dead letters of consumers and of tasks are added."""
    counted = {"penstock_streams_dead_letters_total": 2.0, "penstock_consumer_dead_letters_total": 3.0}
    assert build([ServiceSample("a", "", "ok", metrics=counted)])["dead_letters"] == 5


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
    rate, now_ms = Rate(), 0
    for step, value in steps:
        now_ms += step
        result = rate.add(now_ms, value)
        assert result is None or result >= 0


@given(st.integers(1, 500), st.integers(1, 100))
def test_a_steady_counter_has_its_own_rate(per_step: int, steps: int) -> None:
    """A counter that grows steadily has that rate over any number of samples."""
    rate = Rate()
    results = [rate.add(i * 1_000, i * per_step) for i in range(steps + 1)]
    assert results[-1] == per_step


def test_an_applications_tasks_are_counted_once() -> None:
    """If several instances describe an application, the most complete description is used once."""
    poor = {"application_id": "x", "tasks": [{"partition": 0}], "missing": [{"partition": 1}]}
    whole = {"application_id": "x", "tasks": [{"partition": 0}, {"partition": 1}], "missing": []}
    samples = [ServiceSample(str(i), "", "ok", streams=one) for i, one in enumerate((poor, whole, poor))]
    assert [task["partition"] for task in build(samples)["streams"]["tasks"]] == [0, 1]


def test_a_missing_partition_has_a_row() -> None:
    """A missing partition has a row with the reason, unless its restoring task has one."""
    lost = [{"partition": 0, "reason": "being restored by a"}, {"partition": 1, "reason": "no instance has it"}]
    state = {"application_id": "x", "tasks": [{"partition": 0, "state": "restoring", "instance": "a"}], "missing": lost}
    tasks = build([ServiceSample("a", "", "ok", streams=state)])["streams"]["tasks"]
    assert [(task["partition"], task["state"], task["instance"]) for task in tasks] == [
        (0, "restoring", "a"),
        (1, "missing", "no instance has it"),
    ]
