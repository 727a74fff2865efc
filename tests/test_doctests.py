"""The examples in docstrings have the shown results."""

from __future__ import annotations

import doctest
import importlib
import linecache
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)
FOLDERS = ("shared", "services", "api", "penstock", "tests")


def modules_with_examples() -> list[str]:
    """The names of the modules that have examples. The package `penstock` contains the other folders as links."""
    names = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if path.name.startswith("test_") or not EXAMPLE.search(path.read_text(encoding="utf-8")):
                continue
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            package = [] if folder in {"penstock", "tests"} else ["penstock"]
            names.append(".".join([*package, *(parts[:-1] if parts[-1] == "__init__" else parts)]))
    return sorted(names)


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module(name: str) -> None:
    """Each example of the module's docstrings has the result that it shows."""
    module = importlib.import_module(name)
    # For each docstring, doctest checks every file in this cache on disk.
    linecache.clearcache()
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted > 0
