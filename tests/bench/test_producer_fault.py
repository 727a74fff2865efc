"""The bench with a fault on a small scale: its windows end and have all figures."""

from __future__ import annotations

import pytest

from bench import producer_fault


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("senders", ["one each", "none for the first", "one for all"])
async def test_a_window(senders: producer_fault.Senders, fault: bool) -> None:
    """The healthy partitions acknowledge records. The window itself checks that none is lost, duplicated or out of
    order."""
    measured = await producer_fault.window(0.1, senders, fault=fault)
    assert measured.per_second > 0
    assert measured.p99_ms > 0


async def test_a_window_lasts_until_every_healthy_partition_has_records() -> None:
    """A window whose time is up before the first acknowledgement continues until each healthy partition has one."""
    assert (await producer_fault.window(0.0001, "one each", fault=True)).per_second > 0


async def test_a_load_with_headroom() -> None:
    """With a fixed rate, no more records are acknowledged than were offered."""
    measured = await producer_fault.window(0.3, "one each", fault=True, rate=1_000)
    assert 0 < measured.per_second <= 4_000


async def test_ratios() -> None:
    """All figures are present, and a counted ratio compares the shares of its two windows."""
    figures = await producer_fault.measure(0.1, rounds=1)
    assert {f"{name}_per_second" for name in producer_fault.FREE} < set(figures)
    assert {f"{name}_{what}" for name in producer_fault.WINDOWS for what in ("share", "p99_ms")} < set(figures)
    assert {"buffer_mib", "with_fault_taken_mib", "with_fault_waiting"} < set(figures)
    assert set(producer_fault.COUNTED) < set(producer_fault.RATIOS) < set(figures)
    for name, (over, under) in producer_fault.COUNTED.items():
        assert figures[name] == pytest.approx(figures[f"{over}_share"] / figures[f"{under}_share"])
