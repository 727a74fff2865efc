"""The bench's table of growing partitions: what it compares with what."""

from __future__ import annotations

import pytest

from bench._compaction_partitions import Line, show

ONE = Line(partitions=1, records=1_100, first=10.0, delta=5.0, live=1_000, restore=0.5)


def test_the_worst_is_told_over_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever number of partitions took longest; rates are of what was read."""
    show(
        [ONE, ONE._replace(partitions=8, delta=15.0), ONE._replace(partitions=64, first=11.0, delta=12.5, restore=2.0)]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[2:5]] == [
        ["1", "1,100", "10.0", "110", "5.0"],
        ["8", "1,100", "10.0", "110", "15.0"],
        ["64", "1,100", "11.0", "100", "12.5"],
    ]
    assert [line.split()[-1] for line in lines[2:5]] == ["2,000", "2,000", "500"]
    assert [line.split()[0] + " " + line.split()[-1] for line in lines[5:]] == [
        "first 1.10",
        "delta 3.00",
        "restore 4.00",
    ]


def test_one_number_of_partitions_is_compared_with_none(capsys: pytest.CaptureFixture[str]) -> None:
    """There is its line and nothing after it."""
    show([ONE])
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "1"
