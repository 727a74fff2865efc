"""Which sessions late records make one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.spark.session_joins import Window, clusters, placed

GAPS = st.integers(0, 12)


@st.composite
def late(draw: Any) -> Window:
    at = draw(st.integers(0, 80))
    return Window(at, at, draw(GAPS), is_late=True)


@st.composite
def session(draw: Any) -> Window:
    start, length = draw(st.integers(0, 80)), draw(st.integers(0, 30))
    kind = draw(st.sampled_from(({}, {"is_new": True}, {"reach_ms": draw(GAPS)})))
    return Window(start, start + length, **kind)


def joins(one: Window, other: Window) -> bool:
    """Whether `one` takes in the other: the rule, as it is told."""
    if one.reach_ms is None or not (one.is_late or other.is_new):
        return False
    return one.start_ms - one.reach_ms <= other.end_ms and other.start_ms <= one.end_ms + one.reach_ms


@given(st.lists(st.one_of(late(), session()), max_size=14))
def test_windows_are_one_where_a_chain_of_joins_leads_from_one_to_the_other(windows: list[Window]) -> None:
    """Also where sessions of a key overlap, which the stream cut at other times."""
    found = list(range(len(windows)))
    for _ in windows:
        for at, one in enumerate(windows):
            for nth, other in enumerate(windows):
                if joins(one, other):
                    found[at] = found[nth] = min(found[at], found[nth])
    assert clusters(windows) == found


def test_only_late_records_and_joined_windows_are_placed() -> None:
    """Closed sessions that nothing comes near are left out, by key."""
    windows = [Window(0, 8), Window(12, 15), Window(16, 16, 3, is_late=True), Window(50, 60, 10), Window(65, 70)]
    keys = [windows, [Window(30, 30, 3, is_late=True)], [Window(0, 1), Window(2, 3, None, is_new=True)]]
    columns = {
        "partition": pa.array([0, 0, 1], pa.int32()),
        "key": pa.array([b"a", b"b", b"a"], pa.binary()),
        "windows": pa.array([[w._asdict() for w in own] for own in keys]),
    }
    (rows,) = placed(iter([pa.RecordBatch.from_pydict(columns)]))
    assert [tuple(row.values())[1:] for row in rows.to_pylist()] == [
        (b"a", 12, 15, False, 1),
        (b"a", 16, 16, True, 1),
        (b"b", 30, 30, True, 0),
    ]
