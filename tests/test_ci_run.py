"""The scripts of continuous integration, on copies of them with stand-ins for the scripts that they call."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("scripts/install", "scripts/check", "scripts/test")


def run(folder: Path, *, failing: str = "", seconds: int = 0, tests_seconds: int = 0) -> tuple[int, str, str]:
    """Run .ci/run on a clock that starts at `seconds`, and that scripts/test moves on by `tests_seconds`.

    Returns exit status, standard output and standard error.
    """
    (folder / ".ci").mkdir()
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    (folder / ".ci" / "tools").write_text(f"#!/bin/sh\necho {folder / 'tools'}\n", encoding="utf-8")
    (folder / ".ci" / "tools").chmod(0o755)
    for name in PARTS:
        script = f"#!/bin/sh\necho ran {name}\ncommand -v found-by-tests\nexit {int(name == failing)}\n"
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    # bash counts on from the value that SECONDS is set to. A function with the path as its name replaces the script.
    slow_tests = f"scripts/test() {{ bash ./scripts/test || return; SECONDS=$((SECONDS + {tests_seconds})); }}"
    command = ["bash", "-c", f"{slow_tests}; SECONDS={seconds}; . .ci/run", ".ci/run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_each_part_is_timed(tmp_path: Path) -> None:
    """All parts run in order, and then the time of each and the total are printed."""
    status, output, warned = run(tmp_path)
    assert (status, warned) == (0, "")
    assert re.findall(r"^ran (\S+)$", output, re.MULTILINE) == list(PARTS)
    assert re.findall(r"^(\S.*?) +\d+ s$", output.partition("== time\n")[2], re.MULTILINE) == [*PARTS, "the whole"]


@pytest.mark.parametrize("failing", PARTS)
def test_a_part_that_fails_fails_the_whole(tmp_path: Path, failing: str) -> None:
    """If a part fails, the others still run, the times are printed, and the exit status is 1."""
    status, output, _ = run(tmp_path, failing=failing)
    assert status == 1
    assert re.findall(r"^ran (\S+)$", output, re.MULTILINE) == list(PARTS)
    assert "the whole" in output


@pytest.mark.parametrize(("seconds", "warns"), [(880, False), (901, True)])
def test_exceeding_the_time_limit_is_a_warning(tmp_path: Path, seconds: int, warns: bool) -> None:
    """A run of more than 15 minutes prints a warning to standard error and does not change the exit status."""
    status, _, warned = run(tmp_path, seconds=seconds)
    assert status == 0
    assert ("15 minutes" in warned) is warns


@pytest.mark.parametrize(("seconds", "warns"), [(520, False), (541, True)])
def test_slow_tests_are_a_warning(tmp_path: Path, seconds: int, warns: bool) -> None:
    """Tests that take more than nine minutes print a warning and do not change the exit status."""
    status, _, warned = run(tmp_path, tests_seconds=seconds)
    assert status == 0
    assert ("the tests took more than 9 minutes" in warned) is warns


def test_tools_are_found_by_the_parts(tmp_path: Path) -> None:
    """Tools that .ci/tools fetched are on the PATH of each part."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "found-by-tests").touch(mode=0o755)
    status, output, _ = run(tmp_path)
    assert status == 0
    assert output.count(str(tmp_path / "tools" / "found-by-tests")) == len(PARTS)


def tools(folder: Path, commands: dict[str, str]) -> tuple[int, str, str]:
    """Run .ci/tools with these shell scripts as commands on PATH; return exit status, standard
    output and standard error.
    """
    (folder / "bin").mkdir()
    for name in ("bash", "chmod", "mktemp", "rm", "mkdir", "mv", "tar", "cat"):
        (folder / "bin" / name).symlink_to(shutil.which(name) or "")
    for name, script in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "tools"],
        env={"PATH": str(folder / "bin"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_tools_are_fetched_once(tmp_path: Path) -> None:
    """Chromium is installed, promtool is extracted into the printed folder, and a second run fetches nothing."""
    (tmp_path / "usr" / "bin").mkdir(parents=True)
    (tmp_path / "usr" / "bin" / "promtool").touch(mode=0o755)
    browser = tmp_path / "bin" / "chromium-headless-shell"
    apt = f"""echo "$1" >> {tmp_path}/calls
case $1 in
  update) exit 100 ;;
  install) echo '#!/bin/bash' > {browser}; chmod +x {browser} ;;
  download) : > prometheus_2.deb ;;
esac"""
    commands = {"apt-get": apt, "dpkg-deb": f"tar -c -C {tmp_path} ./usr/bin/promtool"}
    status, printed, _ = tools(tmp_path, commands)
    assert (status, printed) == (0, f"{tmp_path}/.cache/penstock/tools\n")
    assert (tmp_path / ".cache" / "penstock" / "tools" / "promtool").is_file()
    assert (tmp_path / "calls").read_text().split() == ["update", "install", "download"]
    shutil.rmtree(tmp_path / "bin")
    assert tools(tmp_path, commands | {"chromium": "exit 1"})[0] == 0
    assert (tmp_path / "calls").read_text().split() == ["update", "install", "download"]


NO_CHROMIUM = "warning: there is no Chromium: the page is not tested\n"
NO_PROMTOOL = "warning: there is no promtool: the pages of metrics are not linted\n"


@pytest.mark.parametrize(
    ("commands", "warnings"),
    [
        ({}, ""),
        ({"promtool": "exit 1", "google-chrome": "exit 1", "apt-get": "exit 1"}, ""),
        ({"promtool": "exit 1", "apt-get": "exit 100"}, NO_CHROMIUM),
        ({"apt-get": "exit 100"}, NO_CHROMIUM + NO_PROMTOOL),
    ],
)
def test_a_tool_that_cannot_be_fetched_is_a_warning(tmp_path: Path, commands: dict[str, str], warnings: str) -> None:
    """Without apt, or with the tools on PATH, nothing is fetched; a failing apt is a warning for each tool."""
    status, _, warned = tools(tmp_path, commands)
    assert (status, warned) == (0, warnings)
