"""The list of modules and explained mutants of scripts/mutate, and the figures that it prints."""

from __future__ import annotations

import ast
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text(encoding="utf-8"))
MUTATE = runpy.run_path(str(ROOT / "scripts" / "mutate.py"))


def definitions_of(module: str) -> set[str]:
    """The names of a module's functions, methods and classes."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


@pytest.mark.parametrize("module", LIST["modules"])
def test_the_tests_of_a_module_exist(module: str) -> None:
    """The module exists, and so does every test file or test that must notice its mutants."""
    assert (ROOT / module).is_file()
    for test in LIST["modules"][module]:
        file, _, name = test.partition("::")
        assert not name or name in definitions_of(file), test
        assert (ROOT / file).is_file(), test


def test_every_entry_is_about_existing_code() -> None:
    """An explanation names modules of the list and definitions in them, and so does a choice of definitions."""
    entries = [(one.get("module"), one.get("definition")) for one in LIST["explained"]]
    entries += [(module, name) for module, names in LIST["definitions"].items() for name in names]
    assert {module for module, _ in entries if module is not None} <= set(LIST["modules"])
    known = {module: definitions_of(module) for module in LIST["modules"]}
    known[None] = set[str]().union(*known.values())
    assert [(module, name) for module, name in entries if name is not None and name not in known[module]] == []


def test_only_mutants_that_ran_count() -> None:
    """A mutant that did not run is neither killed nor part of the share. An explained one is not part of it either."""
    outcomes = ["KILLED", "KILLED", "KILLED", "SURVIVED", "SURVIVED", "INCOMPETENT", "NONE"]
    mutants = [MUTATE["Mutant"]("f", line, "op", outcome, f"+ {line}") for line, outcome in enumerate(outcomes)]
    explained = [{"definition": "f", "code": "+ 4"}]
    survivors, figures = MUTATE["survivors_of"](mutants, explained)
    assert [mutant.line for mutant in survivors] == [3]
    assert figures == "3 killed and 1 explained of 7 mutants (75%); 2 did not run"
    assert MUTATE["survivors_of"](mutants[:3], []) == ([], "3 killed and 0 explained of 3 mutants (100%)")
    assert MUTATE["survivors_of"](mutants[5:], []) == (
        [],
        "0 killed and 0 explained of 2 mutants (100%); 2 did not run",
    )
