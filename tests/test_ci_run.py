"""The script of continuous integration, on a copy of it beside stand-ins for the scripts that it calls."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("scripts/install", "scripts/check", "scripts/test")


def run(folder: Path, *, failing: str = "", seconds: int = 0) -> tuple[int, str, str]:
    """Exit status, standard output and standard error, on a clock that begins at `seconds`."""
    (folder / ".ci").mkdir()
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    for name in PARTS:
        (folder / name).write_text(f"#!/bin/sh\necho ran {name}\nexit {int(name == failing)}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    # bash's own clock counts on from what it is set to.
    command = ["bash", "-c", f"SECONDS={seconds}; . .ci/run", ".ci/run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_each_part_is_timed(tmp_path: Path) -> None:
    """All parts are run in order, then the time of each and of the whole is printed."""
    status, said, warned = run(tmp_path)
    assert (status, warned) == (0, "")
    assert re.findall(r"^ran (\S+)$", said, re.MULTILINE) == list(PARTS)
    assert re.findall(r"^(\S.*?) +\d+ s$", said.partition("== time\n")[2], re.MULTILINE) == [*PARTS, "the whole"]


@pytest.mark.parametrize("failing", PARTS)
def test_a_part_that_fails_fails_the_whole(tmp_path: Path, failing: str) -> None:
    """The other parts are run nevertheless, the times are there, and the exit status is 1."""
    status, said, _ = run(tmp_path, failing=failing)
    assert status == 1
    assert re.findall(r"^ran (\S+)$", said, re.MULTILINE) == list(PARTS)
    assert "the whole" in said


@pytest.mark.parametrize(("seconds", "warns"), [(880, False), (901, True)])
def test_too_long_is_a_warning_alone(tmp_path: Path, seconds: int, warns: bool) -> None:
    """More than 15 minutes are told on standard error and leave the exit status as it is."""
    status, _, warned = run(tmp_path, seconds=seconds)
    assert status == 0
    assert ("warning: the whole took more than 15 minutes" in warned) is warns
