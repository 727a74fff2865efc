"""promtool's check of a Connect worker's metrics, and of pages with known problems.

The pages of the other services are checked where they are started: in test_image.py and in the tests of each.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from penstock.shared.common.metrics import render
from penstock.shared.connect.herder.metrics import ConnectMetrics
from tests.integration.promtool import PROMTOOL, assert_clean, complaints, with_samples
from tests.shared.connect.harness import RecordingSink, RecordingSource, running
from tests.shared.connect.herder.test_metrics import FakeHerder


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool (Debian's package: prometheus): no page of metrics is linted")
@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("# HELP a_ms A.\n# TYPE a_ms gauge\n", "a_ms"),
        ("# HELP a A.\n# TYPE a counter\n", "_total"),
        ("# HELP a_count A.\n# TYPE a_count gauge\na_count 1\n", "_count"),
        ("# TYPE a gauge\na 1\n", "help"),
    ],
)
def test_the_linter_finds_problems(page: str, message: str) -> None:
    """promtool finds a unit that is no base unit, a counter without `_total`, a histogram's suffix and a missing help
    text, also for metrics without a sample.
    """
    assert message in complaints(page)


def test_metrics_without_samples_are_linted_too() -> None:
    """A declared histogram without a series becomes one that promtool can read."""
    page = with_samples("# HELP a_seconds A.\n# TYPE a_seconds histogram\n").splitlines()
    assert page[2:] == ['a_seconds_bucket{le="+Inf"} 0', "a_seconds_sum 0", "a_seconds_count 0"]


@pytest.mark.parametrize(("connector", "props"), [(RecordingSink, {"topics": "t"}), (RecordingSource, {})])
async def test_connect_worker_has_clean_metrics(connector: type, props: dict[str, str]) -> None:
    """The metrics of a worker with a running sink or source task pass promtool's check."""
    async with running() as run:
        await run.run(connector, **props)
        registry = CollectorRegistry()
        ConnectMetrics(cast(Any, FakeHerder(run)), registry)
        page = render(registry).decode()
        assert "kafka_connect_connector_task_metrics_running_ratio{" in page
        assert_clean(page)
