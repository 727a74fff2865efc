"""The list of modules and explained mutants of scripts/mutate."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text(encoding="utf-8"))


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
    """An explanation names a module of the list and a definition in it, and so does a choice of definitions."""
    named = [(one["module"], one["definition"]) for one in LIST["explained"] if "definition" in one]
    named += [(module, name) for module, names in LIST["definitions"].items() for name in names]
    assert [(module, name) for module, name in named if name not in definitions_of(module)] == []
    assert {module for module, _ in named} <= set(LIST["modules"])
