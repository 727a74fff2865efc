"""Closed windows stay closed after a restore under another grace. The stream time alone does not determine them."""

from __future__ import annotations

import random
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.changelog_reader import Change, ChangelogReader, apply_one_by_one
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.state_store import is_open
from penstock.shared.streams.topology import Topology
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


def sliding(grace_ms: int) -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().sliding_window(20, grace_ms).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("on_disk", [False, True])
def test_the_close_time_tells_which_live_entries_are_closed(seed: int, on_disk: bool) -> None:
    """At every commit, under every grace, the live entries that also have a final entry are those that end before
    `open_from_ms`. The rows of the store that are not open are the same."""
    chance = random.Random(seed)
    live: dict[tuple[bytes, int], int] = {}
    final: set[tuple[bytes, int, int]] = set()

    def apply(change: Change) -> None:
        if change.operation == fmt.LIVE:
            live[change.key, change.start] = change.end
        else:
            live.pop((change.key, change.start), None)
        if change.operation == fmt.FINAL:
            final.add((change.key, change.start, change.end))

    with TemporaryDirectory() as folder, directory_of(folder) as directory:
        state: StateDirectory | None = directory if on_disk else None
        driver = gone_on_with(TopologyTestDriver(sliding(30)), sliding(30), state)
        reader, read, both = ChangelogReader(apply_one_by_one(apply)), 0, 0
        for at in range(0, 400, 4):
            if chance.random() < 0.1:
                driver = gone_on_with(driver, sliding(chance.choice([0, 30, 60])), state)
            pipe_singly(driver, (chance.choice([b"a", b"b"]), max(0, at - chance.choice([0, 0, 5, 40, 90]))))
            open_from_ms = progress_of(driver).open_from_ms(driver.topology.schemas()[0])
            for offset, (key, value) in enumerate(driver.changelog[read:], read):
                reader.feed_record(offset, key, value)
            read = len(driver.changelog)
            closed_entries = {(*window, end) for window, end in live.items()} & final
            assert closed_entries == {(*window, end) for window, end in live.items() if end < open_from_ms}
            rows = [row for row in driver.task.stores["s"].rows() if not is_open(row)]
            assert {(row.key.encode(), row.start, row.end) for row in rows} == closed_entries
            both += len(closed_entries)
        assert both
        driver.close()
