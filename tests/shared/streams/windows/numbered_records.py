"""Records whose values are their offsets, and the windows of the store `w` that collect them."""

from __future__ import annotations

import msgspec

from penstock.shared.testing.topology_test_driver import TopologyTestDriver

Window = tuple[str, int, int]


class Value(msgspec.Struct):
    """An input value: a number that identifies its record."""

    id: int


def pipe(driver: TopologyTestDriver, *records: tuple[str | None, int]) -> None:
    """Pipe (key, timestamp) records; each record's id is its offset."""
    for key, timestamp in records:
        value = msgspec.json.encode({"id": len(driver.source_log["in"])})
        driver.pipe("in", key=None if key is None else key.encode(), value=value, timestamp=timestamp)


def rows(driver: TopologyTestDriver) -> dict[Window, list[int]]:
    """The ids of each window of the store."""
    return {(w.key, w.start, w.end): w.states[1] for w in driver.task.stores["w"].rows()}
