"""The location of the state of an instance's tasks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import ConfigError, IllegalState
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.runtime.stream_task_factory import CLEAN_INTERVAL_MS, StreamTaskFactory
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.persistent_stores import PersistentWindowStore
from penstock.shared.streams.windows.window_store import WindowStore
from penstock.shared.testing.manual_clock import ManualClock


def task_factory(clock: Clock = SYSTEM_CLOCK, result: str = "n", **given: str) -> StreamTaskFactory:
    settings, registry = StreamsSettings(**given), CollectorRegistry()  # type: ignore[arg-type]
    builder = StreamsBuilder()
    sessions = builder.stream("in").group_by_key().session_window(10)
    sessions.aggregate("s", **{result: Count()}).on_close().to("out")
    return StreamTaskFactory(settings, builder.build(), clock, registry)


def test_state_is_in_memory_unless_it_is_asked_for() -> None:
    """By default state is in memory, without a local folder."""
    made = task_factory()
    made.startup()
    assert made.open_state(0) is None
    assert type(made.task(0, None).stores["s"]) is WindowStore
    made.shutdown()


def test_state_on_disk_is_below_the_applications_folder(tmp_path: Path) -> None:
    """With rocksDB each partition has a folder, with the stores of its task."""
    made = task_factory(default_dsl_store="rocksDB", state_dir=str(tmp_path), application_id="app")
    made.startup()
    state = made.open_state(3)
    assert state is not None
    assert type(made.task(3, state).stores["s"]) is PersistentWindowStore
    assert (tmp_path / "app" / "3" / "CURRENT").is_file()
    state.close()
    made.shutdown()


def test_a_standby_is_counted_only_once_it_runs() -> None:
    """A standby task cannot schedule punctuations and has no metrics of the instance. Both begin when it becomes
    active."""
    made = task_factory()
    task = made.standby_task(3)
    with pytest.raises(IllegalState, match=r"partition 3.*schedule"):
        task.schedule(5, PunctuationType.WALL_CLOCK_TIME, print)
    labels = {"partition": "3"}
    assert made._registry.get_sample_value("penstock_streams_records_total", labels) is None
    made.start(task, {})
    task.schedule(5, PunctuationType.WALL_CLOCK_TIME, print)
    assert made._registry.get_sample_value("penstock_streams_records_total", labels) == 0


def test_state_of_partitions_elsewhere_is_deleted_now_and_then(tmp_path: Path) -> None:
    """State that no task has used for the delay is searched for once a minute."""
    clock = ManualClock(int(time.time() * 1000) + 3_600_000)
    made = task_factory(clock, default_dsl_store="rocksDB", state_dir=str(tmp_path), application_id="app")
    made.startup()
    state = made.open_state(3)
    assert state is not None
    state.close()
    made.clean()
    assert (tmp_path / "app" / "3").is_dir()
    clock.advance(CLEAN_INTERVAL_MS)
    made.clean()
    assert not (tmp_path / "app" / "3").exists()
    made.shutdown()


def test_names_that_a_lake_cannot_have_are_refused_where_there_is_one() -> None:
    """With a lake, a name that collides with a column of its tables is rejected at the start. Without a lake the name
    is valid."""
    assert task_factory(result="state").task(0, None).stores
    with pytest.raises(ConfigError, match=r"'s'.*'state'.*closed/s"):
        task_factory(result="state", lake="lake")
    assert task_factory(lake="lake").task(0, None).stores
