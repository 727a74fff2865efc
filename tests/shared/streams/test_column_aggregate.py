"""Updates of single records over a store of columns."""

from __future__ import annotations

import pytest

from shared.streams.windowed_aggregate import WindowedAggregate
from tests.shared.streams.columns_beside_records import (
    RECORDS_ONLY,
    Piped,
    Windowed,
    hopping,
    pair_of,
    require_equal,
    sessions,
    topology,
)

KINDS: dict[str, Windowed] = {"session": sessions(10, 5), "tumbling": hopping(10, 10, 5), "hopping": hopping(10, 4, 5)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_store_alone_knows_what_has_changed(kind: str) -> None:
    """Also where records are taken one by one: nothing is kept beside it, and a commit forwards what it would have."""
    by_columns, by_records = pair_of(topology(KINDS[kind], "on_update"), columns_min=RECORDS_ONLY)
    for first in (0, 40):
        for driver in (by_columns, by_records):
            driver.pipe_columns("in", [Piped(b"a", b'{"n":1}', first + at) for at in (3, 9, 1, 30, 33)])
            (operator,) = driver.task.operators()
            assert isinstance(operator, WindowedAggregate)
            assert (operator._updates == {}) == (driver is by_columns)
            driver.commit()
        require_equal(by_columns, by_records)
