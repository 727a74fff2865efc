"""What mypy and pyright say of a user's programs, against the package as it is installed.

The programs are checked in a folder of their own, without this checkout's configuration and without pydantic's plugin.
A line of mistakes.py that is wrong ends with the rule of each checker: `# mypy call-arg, pyright reportCallIssue`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from penstock.errors import ConfigError
from penstock.services.consumer.handlers import load_handler
from tests.documents import DOCS, README, ROOT, blocks

HERE = Path(__file__).parent
MISTAKES = HERE / "mistakes.py"
PROGRAMS = (HERE / "accepted.py", HERE / "accepted_streams.py", MISTAKES)
EXAMPLES = ("load_average.py", "orders.py", "testing_without_a_broker.py")
"""The others import libraries that have no types."""
DOCUMENTS = ("connect", "consumer", "fake-broker", "producer", "streams")
EXPECTED = re.compile(r"# mypy ([\w-]+), pyright ([\w-]+)$")
FOUND_AT_LEAST = 10
NOT_FOUND = "-"

Found = dict[tuple[str, int], set[str]]
"""The rules that were broken, by file and line."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's project: our programs, the examples, and the Python of the documents."""
    folder = tmp_path_factory.mktemp("project")
    for program in (*PROGRAMS, *(ROOT / "examples" / name for name in EXAMPLES)):
        shutil.copy(program, folder)
    for number, block in enumerate(blocks(README)):
        named = re.match(r"# (\w+\.py)\n", block)
        (folder / (named[1] if named else f"readme_{number}.py")).write_text(block, encoding="utf-8")
    for name in DOCUMENTS:
        shown = "\n\n".join(blocks(DOCS / f"{name}.md"))
        (folder / f"docs_{name.replace('-', '_')}.py").write_text(shown, encoding="utf-8")
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    return folder


def planted() -> list[tuple[int, str, str]]:
    """The mistakes: their line, mypy's rule and pyright's."""
    lines = enumerate(MISTAKES.read_text(encoding="utf-8").splitlines(), start=1)
    return [(number, match[1], match[2]) for number, line in lines if (match := EXPECTED.search(line)) is not None]


def expected(checker: Callable[[tuple[int, str, str]], str]) -> Found:
    return {(MISTAKES.name, one[0]): {checker(one)} for one in planted() if checker(one) != NOT_FOUND}


def run(folder: Path, *command: str) -> str:
    programs = sorted(path.name for path in folder.glob("*.py"))
    assert len(programs) > len(PROGRAMS)
    ran = subprocess.run(
        [sys.executable, "-m", *command, *programs], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


def test_mypy_finds_the_mistakes_and_nothing_else(folder: Path, pytestconfig: pytest.Config) -> None:
    """Each mistake is found in its line, by its rule; the programs without a mistake are accepted."""
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("mypy")  # stays between runs, since it has what mypy knows of all packages
    options = ("--strict", "--config-file=", "--output=json", f"--cache-dir={cache}")
    found: Found = {}
    for line in run(folder, "mypy", *options).splitlines():
        if line.startswith("{") and (one := json.loads(line))["severity"] == "error":
            found.setdefault((one["file"], one["line"]), set()).add(one["code"])
    assert found == expected(lambda one: one[1])
    assert len(found) >= FOUND_AT_LEAST


def test_pyright_finds_the_mistakes_and_nothing_else(folder: Path) -> None:
    """The same, in the other checker's words."""
    found: Found = {}
    report = json.loads(run(folder, "basedpyright", "--pythonpath", sys.executable, "--outputjson"))
    for one in report["generalDiagnostics"]:
        if one["severity"] == "error":
            line = one["range"]["start"]["line"] + 1
            found.setdefault((Path(one["file"]).name, line), set()).add(one["rule"])
    assert found == expected(lambda one: one[2])
    assert len(found) >= FOUND_AT_LEAST


def test_mistakes_that_no_type_checker_finds_fail_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field and a handler are named by text; both are rejected before the first record."""
    mistakes = loaded()
    monkeypatch.setitem(sys.modules, mistakes.__name__, mistakes)
    assert len([one for one in planted() if one[1:] == (NOT_FOUND, NOT_FOUND)]) == 2
    with pytest.raises(ConfigError, match="mss"):
        mistakes.an_aggregation_of_a_field_that_there_is_not()
    with pytest.raises(ConfigError, match="async"):
        load_handler(f"{mistakes.__name__}:a_handler_that_is_not_async")


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("planted_mistakes", MISTAKES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
