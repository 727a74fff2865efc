"""What mypy and pyright say of a user's programs, against the package as it is installed.

The programs are checked in a folder of their own, without this checkout's configuration and without pydantic's plugin.
A line of mistakes.py that is wrong ends with the rule of each checker: `# mypy call-arg, pyright reportCallIssue`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = ("accepted.py", "mistakes.py")
EXPECTED = re.compile(r"# mypy ([\w-]+), pyright (\w+)$")
FOUND_AT_LEAST = 10

Found = dict[tuple[str, int], set[str]]
"""The rules that were broken, by file and line."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's project."""
    folder = tmp_path_factory.mktemp("project")
    for name in PROGRAMS:
        shutil.copy(Path(__file__).with_name(name), folder)
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    return folder


def expected(checker: int) -> Found:
    found: Found = {}
    for name in PROGRAMS:
        for number, line in enumerate(Path(__file__).with_name(name).read_text().splitlines(), start=1):
            if (match := EXPECTED.search(line)) is not None:
                found[name, number] = {match[checker]}
    return found


def run(folder: Path, *command: str) -> str:
    ran = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


def test_mypy_finds_the_mistakes_and_nothing_else(folder: Path) -> None:
    """Each mistake is found in its line, by its rule; the programs without a mistake are accepted."""
    options = ("--strict", "--config-file=", "--output=json", f"--cache-dir={folder / 'cache'}")
    found: Found = {}
    for line in run(folder, "mypy", *options, *PROGRAMS).splitlines():
        if line.startswith("{") and (one := json.loads(line))["severity"] == "error":
            found.setdefault((one["file"], one["line"]), set()).add(one["code"])
    assert found == expected(1)
    assert len(found) >= FOUND_AT_LEAST


def test_pyright_finds_the_mistakes_and_nothing_else(folder: Path) -> None:
    """The same, in the other checker's words."""
    found: Found = {}
    report = json.loads(run(folder, "basedpyright", "--pythonpath", sys.executable, "--outputjson", *PROGRAMS))
    for one in report["generalDiagnostics"]:
        if one["severity"] == "error":
            line = one["range"]["start"]["line"] + 1
            found.setdefault((Path(one["file"]).name, line), set()).add(one["rule"])
    assert found == expected(2)
    assert len(found) >= FOUND_AT_LEAST
