"""Audits of a part of the source over real topics, at many edges, before and after they are tampered with."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark import audit_inputs
from penstock.services.spark.audit import Report, run_audit
from penstock.services.spark.audit_report import as_object, print_report
from penstock.services.spark.compact import Compaction
from penstock.services.spark.settings import AuditSettings, CompactSettings
from penstock.shared.common.settings import KafkaSettings
from tests.integration.spark.conftest import GAP_MS

RECORDS = 400


@pytest.fixture(autouse=True)
def _short_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read hardly more than is needed, so that it is seen if that is not enough."""
    monkeypatch.setattr(audit_inputs, "TAIL_RECORDS", 1)


@pytest.fixture
def stream(
    spark: Any, kafka: EmbeddedKafka, simulate: Callable[..., Any], topics: Any, tmp_path: Path
) -> tuple[Any, Callable[..., Report]]:
    """A simulation, and its audit by start and end; `written()` before the first one, half of it compacted."""
    simulation = simulate()
    common: dict[str, Any] = {
        "application": simulation.name,
        "lake": str(tmp_path),
        "kafka": KafkaSettings(bootstrap_servers=kafka.bootstrap_servers),
    }

    def audit(start: int | None, end: int | None, **more: Any) -> Report:
        topics.write(simulation)
        told: dict[str, Any] = {"start": start, "end": end}
        told = {name: str(ms) for name, ms in told.items() if ms is not None}
        return run_audit(spark, AuditSettings(**common, **told, **more), print)

    simulation.feed(RECORDS // 2, seed=31)
    topics.write(simulation)
    Compaction(spark, CompactSettings(**common), print).run()
    simulation.feed(RECORDS // 2, seed=32)
    return simulation, audit


def overlapping(simulation: Any, start: int | None, end: int | None) -> int:
    """How many sessions of the stream, closed and live, have to do with a part."""
    first, last = (-1 if start is None else start), (10**15 if end is None else end)
    sessions = [(a, b) for t in simulation.tasks for _, a, b, _, _ in t.closed]
    sessions += [(a, b) for t in simulation.tasks for own in t.live.values() for a, b, _ in own]
    return sum(b >= first and a < last for a, b in sessions)


def require_ok(report: Report, simulation: Any, start: int | None, end: int | None) -> None:
    """No difference, all that was read is in one place, and every session of the part is compared or counted."""
    assert report.ok, (as_object(report), report.checks)
    assert report.unaccounted == 0
    compared = report.sessions_closed + report.sessions_open
    assert compared > 0
    assert compared + report.edges.stream == overlapping(simulation, start, end)


def test_a_part_is_compared_up_to_its_edges(stream: Any) -> None:
    """Fewer records are read, what lies within is compared, and the report says what was left out."""
    simulation, audit = stream
    newest = min(task.time for task in simulation.tasks)
    start, end = newest // 3, newest * 2 // 3
    report = audit(start, end)
    require_ok(report, simulation, start, end)
    assert report.records < RECORDS * 2 // 3
    assert report.edges.stream > 0
    assert report.edges.batch > 0
    text = io.StringIO()
    print_report(report, as_json=False, console=Console(file=text, width=250))
    assert (
        f"a part, from {start} ms to {end} ms. Left out at its edges: {report.edges.stream} sessions" in text.getvalue()
    )
    told = as_object(report)
    assert (told["start_ms"], told["end_ms"], told["left_out"]) == (start, end, report.left_out)


@pytest.mark.soak
def test_every_cut_is_sound(stream: Any) -> None:
    """Wherever the edges lie, late records and sessions that were cut among them: no difference in a good stream."""
    simulation, audit = stream
    newest = min(task.time for task in simulation.tasks)
    late = 0
    for nth in range(1, 9, 2):
        start = newest * nth // 11 + nth
        end = None if nth == 5 else start + 3 * GAP_MS + 90 * nth
        report = audit(start, end)
        require_ok(report, simulation, start, end)
        late += report.late_left_out
    require_ok(audit(None, newest // 2), simulation, None, newest // 2)
    assert late > 0


@pytest.mark.soak
def test_what_is_wrong_in_a_part_is_found_there_alone(stream: Any, spark: Any, tmp_path: Path) -> None:
    """A closed session that is gone is a difference of the part that it lies in, and of no other."""
    simulation, audit = stream
    newest = min(task.time for task in simulation.tasks)
    path = str(tmp_path / simulation.name / "closed" / "banks")
    within = f"start_ms > {newest * 0.2} AND end_ms < {newest * 0.3}"
    row = spark.read.format("delta").load(path).filter(within).orderBy("start_ms").first()
    spark.sql(f"DELETE FROM delta.`{path}` WHERE key = '{row.key}' AND start_ms = {row.start_ms}")
    wrong = audit(newest // 10, newest * 4 // 10)
    assert {check.name for check in wrong.checks if check.differences} >= {"conserved", "windows", "published"}
    assert audit(newest // 2, newest * 8 // 10).ok


@pytest.mark.soak
def test_a_part_of_a_topic_whose_beginning_is_gone(stream: Any, topics: Any) -> None:
    """What is older than the part is not needed; that nothing newer is gone is said to be taken for granted."""
    simulation, audit = stream
    newest = min(task.time for task in simulation.tasks)
    start = newest // 2
    before = audit(start, None)
    topics.delete_before(simulation.name, {0: 20, 1: 15})
    report = audit(start, None)
    require_ok(report, simulation, start, None)
    assert report.sessions_closed == before.sessions_closed
    taken = "whether records of partitions 0, 1 that are gone were from --start on (none is taken to be)"
    assert taken in report.not_compared
    began = audit(None, None, began_at="0:20,1:15")
    assert began.records == RECORDS - 35


@pytest.mark.soak
def test_a_sample_of_a_part(stream: Any) -> None:
    """Some keys of some time: fewer sessions, and no difference."""
    simulation, audit = stream
    newest = min(task.time for task in simulation.tasks)
    whole = audit(newest // 4, newest * 3 // 4)
    some = audit(newest // 4, newest * 3 // 4, sample=0.5)
    assert some.ok, some.checks
    assert some.unaccounted == 0
    assert 0 < some.sessions_closed < whole.sessions_closed
