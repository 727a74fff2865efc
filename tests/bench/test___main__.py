"""The benchmark command: its list of benchmarks, its arguments and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import USAGE_ERROR

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the command and two made-up benchmarks."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__main__.py").write_bytes((ROOT / "bench/__main__.py").read_bytes())
    (tmp_path / "bench/met.py").write_text('"""Always met."""\nimport sys\nprint(sys.argv)\n', encoding="utf-8")
    (tmp_path / "bench/missed.py").write_text('"""Never met."""\nraise SystemExit(1)\n', encoding="utf-8")
    (tmp_path / "bench/_shared.py").write_text('"""No benchmark."""\n', encoding="utf-8")
    return tmp_path


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("--list",), ("--help",)])
def test_lists_benchmarks_with_their_first_line(folder: Path, arguments: tuple[str, ...]) -> None:
    """Without a name, or with --list or --help, the command lists each benchmark with its first line, and no helper
    module."""
    done = bench(folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]] == [
        ["met", "Always met."],
        ["missed", "Never met."],
    ]


def test_passes_arguments_on(folder: Path) -> None:
    """Arguments after the name are passed to the benchmark."""
    done = bench(folder, "met", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith("'--json']")


def test_missed_ratio_is_status_one(folder: Path) -> None:
    """The command has the exit status of the benchmark."""
    assert bench(folder, "missed").returncode == 1


def test_unknown_name_is_rejected(folder: Path) -> None:
    """An unknown name is a usage error that lists the benchmarks."""
    done = bench(folder, "nothing")
    assert done.returncode == USAGE_ERROR
    assert "met, missed" in done.stderr
