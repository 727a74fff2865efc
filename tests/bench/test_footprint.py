"""The figures of the benchmark of imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.footprint import CONTESTANTS, PRODUCER, imported, installed_bytes, ratio, table


def figures(cpu: float, of_dependencies: float) -> dict[str, dict[str, float]]:
    rest = {"resident_bytes": 30 << 20, "installed_bytes": 90 << 20}
    return {
        PRODUCER: {"cpu_seconds": cpu, **rest},
        "the dependencies of Producer alone": {"cpu_seconds": of_dependencies, **rest},
    }


def test_the_ratio_is_of_cpu_time() -> None:
    """The ratio is the CPU time of importing Producer over that of its dependencies. Both are rows of the benchmark."""
    assert ratio(figures(0.3, 0.25)) == pytest.approx(1.2)
    assert {*figures(1, 1)} <= {each.name for each in CONTESTANTS}


def test_the_table_is_markdown() -> None:
    """The table has a row for each import, in milliseconds and MiB."""
    assert table(figures(0.3, 0.25)).splitlines()[2] == f"| {PRODUCER} | 300 ms | 30 MiB | 90 MiB |"


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    """A hard link adds nothing to the installed size."""
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert installed_bytes(tmp_path) == 100


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from Linux's /proc")
def test_an_import_is_measured_in_its_own_process() -> None:
    """An import is measured in CPU seconds and resident bytes of its own process."""
    cpu, resident = imported(Path(sys.executable), "pass")
    assert 0 <= cpu < 1
    assert resident > 1 << 20
