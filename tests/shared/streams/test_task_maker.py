"""Where an instance's tasks have their state."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from shared.common.clock import SYSTEM_CLOCK
from shared.common.errors import IllegalState
from shared.streams.aggregations import Count
from shared.streams.dsl import StreamsBuilder
from shared.streams.punctuation import PunctuationType
from shared.streams.settings import StreamsSettings
from shared.streams.state.column_store import ColumnSessionStore
from shared.streams.state.persistent_stores import PersistentSessionStore
from shared.streams.task_commits import TaskCommits
from shared.streams.task_maker import TaskMaker


def maker(**given: str) -> TaskMaker:
    settings, registry = StreamsSettings(**given), CollectorRegistry()  # type: ignore[arg-type]
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    return TaskMaker(settings, builder.build(), TaskCommits(settings, SYSTEM_CLOCK, registry), SYSTEM_CLOCK, registry)


def test_state_is_in_memory_unless_it_is_asked_for() -> None:
    """By default there is no folder, and nothing to let go of."""
    made = maker()
    made.startup()
    assert made.open_state(0) is None
    assert type(made.task(0, None).stores["s"]) is ColumnSessionStore
    made.shutdown()


def test_state_on_disk_is_below_the_applications_folder(tmp_path: Path) -> None:
    """With rocksDB each partition has its folder, and the task its stores there."""
    made = maker(default_dsl_store="rocksDB", state_dir=str(tmp_path), application_id="app")
    made.startup()
    state = made.open_state(3)
    assert state is not None
    assert type(made.task(3, state).stores["s"]) is PersistentSessionStore
    assert (tmp_path / "app" / "3" / "CURRENT").is_file()
    state.close()
    made.shutdown()


def test_a_standby_is_counted_only_once_it_runs() -> None:
    """A task that stands by refuses to schedule and has no metrics of the instance; it has both when it begins."""
    made = maker()
    task = made.standby_task(3)
    with pytest.raises(IllegalState, match="this instance stands by for partition 3: schedule"):
        task.schedule(5, PunctuationType.WALL_CLOCK_TIME, print)
    labels = {"partition": "3"}
    assert made._registry.get_sample_value("penstock_streams_records_total", labels) is None
    made.start(task, {})
    task.schedule(5, PunctuationType.WALL_CLOCK_TIME, print)
    assert made._registry.get_sample_value("penstock_streams_records_total", labels) == 0
