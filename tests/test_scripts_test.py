"""scripts/test, on a copy beside a project of a few tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STEADY = "def test_steady():\n    pass\n"
BROKEN = "def test_broken():\n    raise AssertionError('broken')\n"
UNSTEADY = """
from pathlib import Path

def test_unsteady():
    before = Path(__file__).with_suffix(".ran")
    again = before.exists()
    before.touch()
    assert again
"""
HANGING = f"""
import time

{UNSTEADY.replace("assert again", "time.sleep(0 if again else 60)").replace("unsteady", "hanging")}
def test_after_it():
    pass
"""
FEW_PROCESSES = """
import pytest
from by_file import ByFile

def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)

@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if config.option.numprocesses:
        config.option.numprocesses = 1
"""
"""Processes start slowly, and these tests do not depend on their number."""
INI = """
[pytest]
markers =
  soak: long
addopts = -ra
faulthandler_timeout = 2
faulthandler_exit_on_timeout = true
"""
SOAK = "import pytest\n\n@pytest.mark.soak\ndef test_long():\n    print('ran the long one')\n"


def run(folder: Path, *arguments: str, is_first: bool = False, **files: str) -> tuple[int, str]:
    """Run `scripts/test` in a project with these tests; return its exit status and output."""
    for name in ("scripts", ".venv/bin", "tests" if is_first else "tests/__pycache__"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", folder / "scripts" / "test")
    shutil.copy(ROOT / "tests" / "by_file.py", folder)
    stand_ins = {"scripts/install": "#!/bin/sh\n", ".venv/bin/python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}
    for name, text in stand_ins.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / ".venv" / "java.env").touch()
    (folder / "pytest.ini").write_text(INI, encoding="utf-8")
    (folder / "conftest.py").write_text(FEW_PROCESSES, encoding="utf-8")
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text, encoding="utf-8")
    command = [str(folder / "scripts" / "test"), *arguments]
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin",
    }  # starts faster
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout


def test_all_pass(tmp_path: Path) -> None:
    """If all tests pass, none is run again. Soak tests and the rules of scripts/check are skipped; also in the first
    run, which compiles first.
    """
    status, output = run(tmp_path, is_first=True, steady=STEADY, soak=SOAK, tidy=BROKEN)
    assert status == 0, output
    assert "1 passed" in output
    assert "once more" not in output


def test_an_unsteady_test_is_listed(tmp_path: Path) -> None:
    """A test that fails beside others but passes alone does not fail the run, and is listed at the end."""
    status, output = run(tmp_path, steady=STEADY, unsteady=UNSTEADY)
    assert status == 0, output
    assert output.rstrip().endswith("alone\ntests/test_unsteady.py::test_unsteady")


def test_a_test_that_hangs_ends_after_its_time(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """It fails like any other. The tests after it run."""
    status, output = run(tmp_path, hanging=HANGING)
    assert status == 0, output
    assert "1 failed, 1 passed" in output
    assert output.rstrip().endswith("alone\ntests/test_hanging.py::test_hanging")
    assert 0 < float(pytestconfig.getini("faulthandler_timeout")) <= 300
    assert pytestconfig.getini("faulthandler_exit_on_timeout")


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    """A test that fails both times fails the run, even if others were only unsteady."""
    status, output = run(tmp_path, broken=BROKEN, unsteady=UNSTEADY)
    assert status == 1, output
    assert "FAILED tests/test_broken.py::test_broken" in output.partition("== once more")[2]


def test_many_failures_are_not_retried(tmp_path: Path) -> None:
    """More failures than the limit are not run again."""
    one = UNSTEADY.replace("test_unsteady", "test_{0}").replace(".ran", ".{0}")
    status, output = run(tmp_path, many="".join(one.format(number) for number in range(11)))
    assert status == 1, output
    assert "once more" not in output


def test_pytest_that_cannot_run_fails_the_run(tmp_path: Path) -> None:
    """A test file with a syntax error fails the run with pytest's exit status."""
    status, output = run(tmp_path, steady=STEADY, unreadable="def test_(:\n")
    assert status != 0, output
    assert "== unsteady" not in output


@pytest.mark.parametrize(("arguments", "status"), [(("--soak",), 0), (("tests/test_broken.py",), 1)])
def test_a_selection_is_run_once(tmp_path: Path, arguments: tuple[str, ...], status: int) -> None:
    """With arguments or `--soak` there is one run, and its exit status is the script's."""
    seen, output = run(tmp_path, *arguments, broken=BROKEN, soak=SOAK)
    assert seen == status, output
    assert "once more" not in output
