"""The benchmark of compaction: what it measures, and what it calls missed."""

from __future__ import annotations

import asyncio

import pytest

from bench import compaction
from bench._asked import missed, show
from bench.compaction import ASKED


def test_what_is_missed() -> None:
    """A rate that is too low, a time that is too long; figures that nothing is asked of are never missed."""
    for name, (limit, which) in ASKED.items():
        low, high = missed({name: limit * 0.9}, ASKED), missed({name: limit * 1.1}, ASKED)
        assert (bool(low), bool(high)) == (which == "least", which == "most")
    assert missed({"Spark's start, s": 99.0}, ASKED) == []


def test_the_table_names_what_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each figure on a line, with what is asked for."""
    show({"rewrite, rows/s": 5.0, "Spark's start, s": 4.0}, ASKED)
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["rewrite,", "rows/s", "5.00", "250,000", "at", "least", "MISSED"]
    assert second.split() == ["Spark's", "start,", "s", "4.00"]


@pytest.mark.soak
def test_all_parts_in_small() -> None:
    """On a real broker and Spark; the bench asserts by itself what each compaction and restore did."""
    found = asyncio.run(compaction.run(12_000, 1_000))
    assert ASKED.keys() <= found.keys()
