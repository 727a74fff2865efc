"""The audit over real topics and tables, as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.compactor.audit import Report, run_audit
from services.compactor.audit_report import as_object, print_report
from services.compactor.compact import Compaction
from services.compactor.settings import AuditSettings, CompactSettings
from services.local.kafka import EmbeddedKafka
from shared.common.settings import KafkaSettings


@pytest.fixture
def jobs(spark: Any, kafka: EmbeddedKafka, tmp_path: Path) -> tuple[Callable[..., Any], Callable[..., Report]]:
    """`compact(simulation)` and `audit(simulation, **settings)`."""
    common: dict[str, Any] = {
        "lake": str(tmp_path),
        "kafka": KafkaSettings(bootstrap_servers=kafka.bootstrap_servers),
    }
    return (
        lambda s: Compaction(spark, CompactSettings(application=s.name, **common), print).run(),
        lambda s, **more: run_audit(spark, AuditSettings(application=s.name, **common, **more), print),
    )


def test_lake_and_changelog_together_are_what_spark_makes_of_the_source(
    simulate: Any, topics: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream whose state lies in lake and changelog passes; a result too many or an unprocessed record does not."""
    compact, audit = jobs
    simulation = simulate()
    for seed in (1, 2):
        simulation.feed(150, seed)
        topics.write(simulation)
        compact(simulation)
    simulation.feed(150, seed=3)
    topics.write(simulation)
    report = audit(simulation, expect_records=450)
    print_report(report, as_json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == as_object(report)
    assert report.ok, told
    tasks = simulation.tasks
    assert (told["late"], told["dead_letters"]) == (sum(len(t.late) for t in tasks), sum(len(t.dead) for t in tasks))
    assert told["sessions_closed"] == sum(len(t.closed) for t in tasks)
    assert told["sessions_open"] == sum(len(own) for t in tasks for own in t.live.values())

    tasks[0].results.append(tasks[0].results[0])
    tasks[1].source.append((b"a", b"{}", 0, []))
    topics.write(simulation)
    differences = as_object(audit(simulation, expect_records=450))["differences"]
    assert {name: n for name, n in differences.items() if n} == {"records": 1, "processed": 1, "published": 1}
