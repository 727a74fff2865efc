"""The close wheel against a list that is looked through."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.state.close_wheel import CloseWheel

steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add_many", "add_each", "grow", "due", "due_many"]),
        st.integers(0, 60),
        st.integers(1, 40),
    ),
    max_size=60,
)


@given(st.integers(1, 20), steps)
def test_every_row_comes_out_when_its_end_is_passed(width: int, plan: list[tuple[str, int, int]]) -> None:
    """Rows come out once, not before the end that they were put in with, and all that end below the time."""
    ends: dict[int, int] = {}
    put: dict[int, int] = {}
    wheel, now, rows = CloseWheel(width, lambda due: np.array([ends[row] for row in due.tolist()], np.int64)), 0, 0
    for what, number, many in plan:
        if what in ("add", "add_many", "add_each"):
            new = list(range(rows, rows + (many if what != "add" else 1)))
            rows += len(new)
            for row in new:
                ends[row] = put[row] = now + number + row % 5
            if what == "add":
                wheel.add(new[0], ends[new[0]])
            else:
                take = wheel.add_many if what == "add_many" else wheel.add_each
                take(np.array(new), np.array([ends[row] for row in new]))
        elif what == "grow" and put:
            row = sorted(put)[number % len(put)]
            ends[row] += many
        else:
            now += number
            due = wheel.due(now) if what == "due" else wheel.due_many(now).tolist()
            assert len(set(due)) == len(due)
            assert {row for row in put if ends[row] < now} <= set(due) <= set(put)
            if what == "due":
                assert all(put[row] < now for row in due)
            for row in due:
                del put[row]
        assert len(wheel) == len(put)
