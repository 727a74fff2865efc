"""The benchmark of compaction: its figures and their limits."""

from __future__ import annotations

import asyncio

import pytest

from bench import compaction
from bench._targets import missed, show
from bench.compaction import TARGETS


def test_figures_beyond_their_limits_are_missed() -> None:
    """A rate below its limit or a time above it is missed. A figure without a limit is never missed."""
    for name, (limit, which) in TARGETS.items():
        low, high = missed({name: limit * 0.9}, TARGETS), missed({name: limit * 1.1}, TARGETS)
        assert (bool(low), bool(high)) == (which == "least", which == "most")
    assert missed({"Spark's start, s": 99.0}, TARGETS) == []


def test_the_table_names_what_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a line for each figure, with its limit and a mark if it is missed."""
    show({"rewrite, rows/s": 5.0, "Spark's start, s": 4.0}, TARGETS)
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["rewrite,", "rows/s", "5.00", "250,000", "at", "least", "MISSED"]
    assert second.split() == ["Spark's", "start,", "s", "4.00"]


@pytest.mark.soak
def test_all_parts_in_small() -> None:
    """The benchmark runs at a small scale and measures every figure that has a limit."""
    found = asyncio.run(compaction.run(12_000, 1_000))
    assert TARGETS.keys() <= found.keys()
