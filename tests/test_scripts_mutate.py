"""The list of modules and explained mutants of scripts/mutate, and the figures that it prints."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = tomllib.loads((ROOT / "scripts" / "mutants.toml").read_text(encoding="utf-8"))
MUTATE = runpy.run_path(str(ROOT / "scripts" / "mutate.py"))


@cache
def sources_of(module: str) -> dict[str, list[str]]:
    """The sources of a module's functions, methods and classes, by name."""
    text = (ROOT / module).read_text(encoding="utf-8")
    lines, sources = text.splitlines(keepends=True), defaultdict(list)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            sources[node.name].append("".join(lines[node.lineno - 1 : node.end_lineno]))
    return dict(sources)


def source_of(module: str, definition: str | None) -> str:
    """The source of a module, or of its definitions with this name."""
    if definition is None:
        return (ROOT / module).read_text(encoding="utf-8")
    return "\n".join(sources_of(module).get(definition, ()))


def test_all_modules_are_the_default() -> None:
    """Without modules on the command line, all are mutated. A module that is not listed is rejected."""
    modules = list(LIST["modules"])
    assert MUTATE["arguments_of"](["--sample", "3"], modules).modules == modules
    assert MUTATE["arguments_of"](modules[1:2], modules).modules == modules[1:2]
    with pytest.raises(SystemExit):
        MUTATE["arguments_of"](["shared/other.py"], modules)


def test_a_mutant_cannot_use_up_the_memory() -> None:
    """A process that allocates without end gets an error from itself alone."""
    code = (
        "import runpy, subprocess, sys\n"
        f"mutate = runpy.run_path({str(ROOT / 'scripts' / 'mutate.py')!r})\n"
        "mutate['limit_memory']()\n"
        "sys.exit(subprocess.call([sys.executable, '-c', f'bytearray({mutate[\"MEMORY_BYTES\"]})']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "MemoryError" in ended.stderr


MUTATED = """\
@cache
def one(a: int, *b: str) -> list[int]:
    c: Final[int] = a - 1
    c += cast(float, a)
    return [c, *b]


@final
class Two:
    pass
"""


def texts(ranges: list[tuple[tuple[int, int], tuple[int, int]]]) -> set[str]:
    """The code of `MUTATED` at these ranges, each within one line."""
    lines = MUTATED.splitlines()
    assert all(start[0] == end[0] for start, end in ranges)
    return {lines[line - 1][start:end] for (line, start), (_, end) in ranges}


def test_mutants_that_no_test_can_notice_are_left_out() -> None:
    """Annotations, types that are cast to, and decorators are left out, and no other code."""
    left_out = {"cache", "int", "str", "list[int]", "Final[int]", "float", "final"}
    assert texts(MUTATE["unnoticeable"](MUTATED)) == left_out


def test_operators_are_those_between_operands() -> None:
    """The `*` of parameters and of unpacking is no operator."""
    assert texts(MUTATE["operators"](MUTATED)) == {" - ", " += "}


def test_mutants_of_comparisons_with_none_are_left_out() -> None:
    """`>` and `is not` instead of `!=`, and `<=` and `is` instead of `==`; no mutant of another comparison."""
    source = "a = b != NONE and c == NONE\nd = b == None and c > NONE and b != 1\n"
    prefix = "core/ReplaceComparisonOperator_"
    assert MUTATE["equal_to_none"](source) == [
        *((prefix + kind, (1, 5), (1, 9)) for kind in ("NotEq_Gt", "NotEq_IsNot")),
        *((prefix + kind, (1, 19), (1, 23)) for kind in ("Eq_LtE", "Eq_Is")),
    ]


@pytest.mark.parametrize("module", LIST["modules"])
def test_the_tests_of_a_module_exist(module: str) -> None:
    """The module exists, and so does every test file or test that must notice its mutants."""
    assert (ROOT / module).is_file()
    for test in LIST["modules"][module]:
        file, _, name = test.partition("::")
        assert not name or name in sources_of(file), test
        assert (ROOT / file).is_file(), test


def test_every_entry_is_about_existing_code() -> None:
    """An explanation names a module of the list, a definition in it and code of that definition, and so does a choice
    of definitions. An explanation for all modules names only an operator.
    """
    for one in LIST["explained"]:
        assert {"operator", "reason"} <= one.keys() <= {"module", "definition", "operator", "code", "mutant", "reason"}
        if "module" in one:
            assert one["module"] in LIST["modules"], one
            assert one["code"] in source_of(one["module"], one.get("definition")), one
        else:
            assert one.keys() == {"operator", "reason"}, one
    for module, names in LIST["definitions"].items():
        assert module in LIST["modules"]
        assert set(names) <= sources_of(module).keys()


def mutants_with(*outcomes: str) -> list[Any]:
    return [
        MUTATE["Mutant"]("f", line, "op", outcome, f"--- a\n+++ b\n-old {line}\n+new {line}")
        for line, outcome in enumerate(outcomes)
    ]


def test_an_explanation_is_about_what_it_names() -> None:
    """An explanation needs the same operator, definition, code before the change, and code after it."""
    (mutant,) = mutants_with("SURVIVED")
    named = {"definition": "f", "operator": "op", "code": "old 0", "mutant": "new 0"}
    assert mutant.is_explained([named])
    assert mutant.is_explained([{"operator": "op"}])
    assert mutant.changed == "-old 0\n+new 0"
    for name, value in (("definition", "g"), ("operator", "other"), ("code", "new 0"), ("mutant", "old 0")):
        assert not mutant.is_explained([named | {name: value}]), name


def test_a_module_passes_if_the_tests_kill_nine_tenths_and_the_others_are_explained() -> None:
    """The share is of all mutants that ran."""
    mutants = mutants_with("SURVIVED", *["KILLED"] * 9)
    assert MUTATE["result_of"](mutants[1:], []) == ([], "9 of 9 mutants killed (100%), 0 survivors explained", [])
    explained = [{"operator": "op", "code": "old 0"}]
    assert MUTATE["result_of"](mutants, explained) == ([], "9 of 10 mutants killed (90%), 1 survivors explained", [])


def test_a_module_fails_if_too_many_survivors_are_explained() -> None:
    """Four explained survivors of ten mutants fail the module."""
    mutants = mutants_with(*["KILLED"] * 6, *["SURVIVED"] * 4)
    assert MUTATE["result_of"](mutants, [{"operator": "op"}]) == (
        [],
        "6 of 10 mutants killed (60%), 4 survivors explained",
        ["less than 90% of the mutants were killed"],
    )


def test_a_module_fails_on_a_survivor_without_a_reason() -> None:
    """The module also fails if nine tenths are killed."""
    mutants = mutants_with("SURVIVED", *["KILLED"] * 9)
    assert MUTATE["result_of"](mutants, []) == (
        mutants[:1],
        "9 of 10 mutants killed (90%), 0 survivors explained",
        ["survivors that are not explained: 1"],
    )


def test_a_module_fails_if_a_mutant_did_not_run() -> None:
    """Mutants that did not run do not count in the share. If none ran, that is reported too."""
    result = MUTATE["result_of"](mutants_with("KILLED", "INCOMPETENT", "NONE"), [])
    assert result == ([], "1 of 1 mutants killed (100%), 0 survivors explained", ["2 of 3 mutants did not run"])
    idle = MUTATE["result_of"](mutants_with("INCOMPETENT", "NONE"), [])
    figures = "0 of 0 mutants killed, 0 survivors explained"
    assert idle == ([], figures, ["2 of 2 mutants did not run", "no mutant ran"])
    assert MUTATE["result_of"]([], []).failures == ["no mutant ran"]
