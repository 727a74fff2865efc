"""The garbage collector's configuration for a service."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.shared.common.gc_tuning import YOUNG_OBJECTS_MAX, spare_the_collector


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_existing_objects_are_frozen() -> None:
    """Existing objects are not examined again, and later cycles are still collected."""

    class Own:
        found = 0

        def __del__(self) -> None:
            Own.found += 1

    spare_the_collector()
    assert gc.get_freeze_count() > 1_000
    assert gc.get_threshold()[0] == YOUNG_OBJECTS_MAX
    cycle = [Own()]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    gc.collect()
    assert Own.found == 1
