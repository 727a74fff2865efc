"""The list of modules and explained mutants of scripts/mutate, and the figures that it prints."""

from __future__ import annotations

import ast
import runpy
import tomllib
from pathlib import Path
from typing import Any

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


def mutants_with(*outcomes: str) -> list[Any]:
    return [MUTATE["Mutant"]("f", line, "op", outcome, f"+ {line}") for line, outcome in enumerate(outcomes)]


def test_a_module_passes_if_every_noticeable_mutant_is_killed() -> None:
    """An explained survivor is not part of the share."""
    explained = [{"definition": "f", "code": "+ 2"}]
    mutants = mutants_with("KILLED", "KILLED", "SURVIVED")
    assert MUTATE["result_of"](mutants[:2], []) == (
        [],
        "2 of 2 noticeable mutants killed (100%); explained survivors, which do not count: 0",
        [],
    )
    assert MUTATE["result_of"](mutants, explained) == (
        [],
        "2 of 2 noticeable mutants killed (100%); explained survivors, which do not count: 1",
        [],
    )


def test_a_module_fails_on_a_survivor_without_a_reason() -> None:
    """The module also fails if nine tenths are killed. Below that share a second line reports the share."""
    unexplained = "survivors that are not explained: 1"
    mutants = mutants_with("SURVIVED", *["KILLED"] * 9)
    assert MUTATE["result_of"](mutants, []) == (
        mutants[:1],
        "9 of 10 noticeable mutants killed (90%); explained survivors, which do not count: 0",
        [unexplained],
    )
    result = MUTATE["result_of"](mutants[:-1], [])
    assert result.failures == ["less than 90% of the noticeable mutants were killed", unexplained]


def test_a_module_fails_if_a_mutant_did_not_run() -> None:
    """Mutants that did not run count neither as killed nor as noticeable. If none ran, that is reported too."""
    result = MUTATE["result_of"](mutants_with("KILLED", "INCOMPETENT", "NONE"), [])
    assert result == (
        [],
        "1 of 1 noticeable mutants killed (100%); explained survivors, which do not count: 0",
        ["2 of 3 mutants did not run"],
    )
    idle = MUTATE["result_of"](mutants_with("INCOMPETENT", "NONE"), [])
    assert idle == (
        [],
        "0 of 0 noticeable mutants killed; explained survivors, which do not count: 0",
        ["2 of 2 mutants did not run", "no noticeable mutant ran"],
    )
    assert MUTATE["result_of"]([], []).failures == ["no noticeable mutant ran"]
