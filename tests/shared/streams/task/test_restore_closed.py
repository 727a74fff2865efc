"""Closed windows stay closed after a restore under another grace. The stream time alone does not determine them."""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.shared.streams.task.test_restore import (
    KINDS,
    LONG_MS,
    SHORT_MS,
    closed,
    cut,
    directory_of,
    gone_on_with,
    kinds_driver,
    pipe_columns,
    pipe_singly,
    progress_of,
)

Pipe = Callable[..., None]
BEFORE = ((b"a", 4_500), (b"b", 5_000))
AFTER = ((b"b", 5_001), (b"a", 4_505), (b"b", 9_000))
PIPES = pytest.mark.parametrize("pipe", [pipe_singly, pipe_columns])


def no_record(driver: TopologyTestDriver) -> None:
    """A commit without a record, as a punctuation makes one."""
    driver.task.needs_commit = True
    driver.commit()


def no_key(driver: TopologyTestDriver) -> None:
    driver.pipe("in", key=None, value=b"{}", timestamp=4_000)


def no_value(driver: TopologyTestDriver) -> None:
    """A dead letter."""
    driver.pipe("in", key=b"a", value=b"{", timestamp=4_000)


def begun(kind: str, pipe: Pipe) -> TopologyTestDriver:
    """Return a driver with a long grace, and with a window that a short grace would close."""
    driver = kinds_driver(kind, LONG_MS)
    pipe(driver, *BEFORE)
    return driver


def ended(driver: TopologyTestDriver, pipe: Pipe) -> tuple[Any, Any]:
    """The windows that the last records close, and which of those records are late."""
    pipe(driver, *AFTER)
    return closed(driver), [(record.key, record.timestamp) for record in driver.read("late")]


@pytest.mark.parametrize("kind", KINDS)
@PIPES
@pytest.mark.parametrize("commit", [no_record, no_key, no_value])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_shorter_grace_that_is_reverted_closes_no_window(
    kind: str, pipe: Pipe, commit: Callable[[TopologyTestDriver], None], on_disk: bool
) -> None:
    """If only commits without a keyed record were made under a shorter grace, later records are in time and in the same
    windows as if it had never applied, in memory and on disk."""
    expected, late = ended(begun(kind, pipe), pipe)
    assert expected
    assert late == []
    with TemporaryDirectory() as folder, directory_of(folder) as directory:
        state: StateDirectory | None = directory if on_disk else None
        driver = gone_on_with(begun(kind, pipe), cut(kind, SHORT_MS), state)
        commit(driver)
        driver = gone_on_with(driver, cut(kind, 0), state)
        commit(driver)
        driver = gone_on_with(driver, cut(kind, LONG_MS), state)
        assert ended(driver, pipe) == (expected, [])
        driver.close()


@pytest.mark.parametrize("kind", KINDS)
@PIPES
@pytest.mark.parametrize("record_ms", [4_999, 4_400, None])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_window_due_under_a_shorter_grace_closes_with_the_next_record(
    kind: str, pipe: Pipe, record_ms: int | None, on_disk: bool
) -> None:
    """A window that is due under a shorter grace is closed by the first keyed record, even if that is late, or by an
    advance. It stays closed when the grace is changed back. This holds in memory and on disk."""
    with TemporaryDirectory() as folder, directory_of(folder) as directory:
        state: StateDirectory | None = directory if on_disk else None
        driver = gone_on_with(begun(kind, pipe), cut(kind, SHORT_MS), state)
        no_record(driver)
        assert closed(driver) == []
        if record_ms is not None:
            pipe(driver, (b"b", record_ms))
        else:
            for ms in (0, 1):  # it is quiet from the first look on
                driver.advance_wall_clock(ms)
        found = closed(driver)
        assert {row[0] for row in found} == {"a"}
        driver = gone_on_with(driver, cut(kind, LONG_MS), state)
        windows, late = ended(driver, pipe)
        assert late == [(b"a", 4_505)]
        assert {row[0] for row in windows} == {"b"}
        driver.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_close_time_never_goes_back(kind: str) -> None:
    """Progress records the close time beside the operator's time. Only closing windows advances it, whatever the grace
    is."""
    driver = begun(kind, pipe_singly)
    closed_ms = 5_000 - driver.topology.schemas()[0].close_delay_ms
    for grace_ms in (SHORT_MS, LONG_MS, 2 * LONG_MS):
        driver = gone_on_with(driver, cut(kind, grace_ms))
        assert progress_of(driver).close_times_ms == {"s": closed_ms}
        assert progress_of(driver).operator_times_ms == {"s": 5_000}
    driver.pipe("in", key=b"b", value=b"{}", timestamp=5_001)
    assert progress_of(driver).close_times_ms == {"s": closed_ms}
    driver = gone_on_with(driver, cut(kind, SHORT_MS))
    driver.pipe("in", key=b"b", value=b"{}", timestamp=5_001)
    assert progress_of(driver).close_times_ms == {"s": 5_001 - driver.topology.schemas()[0].close_delay_ms}
