"""The bench with a fault on a small scale: its windows end, and every ratio is there."""

from __future__ import annotations

import pytest

from bench import producer_fault


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("senders", ["one each", "none for the first", "one for all"])
async def test_a_window(senders: producer_fault.Senders, fault: bool) -> None:
    """The healthy partitions get records through; the window itself checks that none is lost, doubled or disordered."""
    assert await producer_fault.window(0.5, senders, fault=fault) > 0


async def test_ratios() -> None:
    """Each window is measured, and each ratio is of two of them."""
    figures = await producer_fault.measure(0.5, rounds=1)
    assert {f"{name}_per_second" for name in producer_fault.WINDOWS} < set(figures)
    for name, (over, under) in producer_fault.RATIOS.items():
        assert figures[name] == figures[f"{over}_per_second"] / figures[f"{under}_per_second"]
