"""Mutation tests with cosmic-ray: see `scripts/mutate`."""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import resource
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TOOL = "cosmic-ray==8.7.0"
TIMEOUT_S = 30.0
"""The time for the tests of one mutant, or TIMEOUT_FACTOR times that of the unchanged module if this is longer."""
TIMEOUT_FACTOR = 5
MEMORY_BYTES = 8 << 30
"""The address space of each process: a mutant may allocate without end."""
KILLED = "KILLED"
SURVIVED = "SURVIVED"
SHARE_MIN = 0.9
"""The share of a module's mutants that its tests must kill, explained survivors included."""
LEFT_OUT = "operator_name = 'core/RemoveDecorator' OR definition_name IS NULL"
"""Mutants of decorators, and of module level: names, constants, annotations.

Most of them change nothing that a test can notice: another limit, timeout or text. So the share is one of functions
alone.
"""


class Mutant(NamedTuple):
    """One change: the function or class it is in, its line, cosmic-ray's operator, and the outcome of the tests.

    The outcome is KILLED if a test noticed, SURVIVED if none did, and another if the mutant did not run.
    """

    definition: str
    line: int
    operator: str
    outcome: str
    diff: str

    @property
    def changed(self) -> str:
        """The lines of the change, as in a diff."""
        return "\n".join(self._lines("-") + self._lines("+"))

    def is_explained(self, explained: list[dict[str, str]]) -> bool:
        """Whether the list has a reason for it.

        An entry matches the same operator and, as far as it has them, the same definition, `code` in the lines before
        the change, and `mutant` in those after it.
        """
        before = "\n".join(self._lines("-"))
        after = "\n".join(self._lines("+"))
        return any(
            one["operator"] == self.operator
            and one.get("definition", self.definition) == self.definition
            and one.get("code", "") in before
            and one.get("mutant", "") in after
            for one in explained
        )

    def _lines(self, sign: str) -> list[str]:
        lines = self.diff.splitlines()
        return [line for line in lines if line.startswith(sign) and not line.startswith(3 * sign)]


@contextlib.contextmanager
def copy_of_the_checkout() -> Iterator[Path]:
    """A worktree of the last commit, with this checkout's environment."""
    with tempfile.TemporaryDirectory(prefix="penstock-mutate-") as folder:
        copy = Path(folder) / "checkout"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(copy), "HEAD"], cwd=ROOT, check=True)
        try:
            (copy / ".venv").symlink_to(ROOT / ".venv")
            yield copy
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(copy)], cwd=ROOT, check=True)


def unnoticeable(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The start and end (line, column) of every annotation, type that is cast to, and decorator."""
    found: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg() | ast.AnnAssign():
                found.append(node.annotation)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found += [node.returns, *node.decorator_list]
            case ast.ClassDef():
                found += node.decorator_list
            case ast.Call(func=ast.Name("cast"), args=[given_type, _]):
                found.append(given_type)
    nodes: list[Any] = [node for node in found if node is not None]
    return [((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes]


def operators(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The ranges (line, column) between the operands of every binary operation.

    cosmic-ray also changes the `*` of parameters and of unpacking, which makes another signature or no Python.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                found.append(((left.end_lineno or 0, left.end_col_offset or 0), (right.lineno, right.col_offset)))
    return found


def equal_to_none(source: str) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Each mutant of a comparison with NONE that changes nothing: its operator, and the range between the operands.

    NONE is -1, the lowest row or key: nothing is below it, so `> NONE` is `!= NONE`, and `<= NONE` is `== NONE`. `is`
    and `is not` ask where a number is stored, not which one it is.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() as op], comparators=[ast.Name("NONE") as right]):
                kinds = ("Eq_LtE", "Eq_Is") if isinstance(op, ast.Eq) else ("NotEq_Gt", "NotEq_IsNot")
                start = (left.end_lineno or 0, left.end_col_offset or 0)
                end = (right.lineno, right.col_offset)
                found += [(f"core/ReplaceComparisonOperator_{kind}", start, end) for kind in kinds]
    return found


def mutants_of(
    copy: Path, module: str, tests: list[str], definitions: list[str], sample: int | None, seed: int
) -> list[Mutant]:
    """Run a module's mutants, or a sample of them; with `definitions` only those of these functions."""
    config = copy.parent / "config.toml"
    session = copy.parent / "session.sqlite"
    session.unlink(missing_ok=True)
    command = [str(ROOT / ".venv/bin/python"), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    command += ["--doctest-modules", f"penstock/{module}"]  # the module's examples are tests too
    tool = [str(ROOT / ".venv/bin/python"), "-m", "uv", "tool", "run", "--quiet", "--from", TOOL, "cosmic-ray"]
    # Numba would compile a changed kernel, and all that use it, for each mutant.
    environment = {**os.environ, "PYTHONPATH": str(copy), "NUMBA_DISABLE_JIT": "1", "HYPOTHESIS_PROFILE": "mutation"}
    began = time.monotonic()
    subprocess.run(command, cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)  # they pass as it is
    timeout_s = max(TIMEOUT_S, TIMEOUT_FACTOR * (time.monotonic() - began))
    config.write_text(
        f'[cosmic-ray]\nmodule-path = "{module}"\ntimeout = {timeout_s}\nexcluded-modules = []\n'
        f'test-command = "{shlex.join(command)}"\n[cosmic-ray.distributor]\nname = "local"\n',
        encoding="utf-8",
    )
    subprocess.run([*tool, "init", str(config), str(session)], cwd=copy, check=True)
    with contextlib.closing(sqlite3.connect(session)) as database:
        every = {job for (job,) in database.execute("SELECT job_id FROM mutation_specs")}
        wanted = (
            "SELECT job_id, definition_name, operator_name, start_pos_row, start_pos_col "
            f"FROM mutation_specs WHERE NOT ({LEFT_OUT}) "
            "ORDER BY start_pos_row, start_pos_col, operator_name, occurrence, operator_args"
        )
        source = (copy / module).read_text(encoding="utf-8")
        ranges = unnoticeable(source)
        binary = operators(source)
        without_effect = equal_to_none(source)
        jobs = [
            job
            for job, definition, operator, line, column in database.execute(wanted)
            if (not definitions or definition in definitions)
            and not any(start <= (line, column) < end for start, end in ranges)
            and ("BinaryOperator" not in operator or any(start <= (line, column) < end for start, end in binary))
            and not any(one == operator and start <= (line, column) < end for one, start, end in without_effect)
        ]
        chosen = jobs if sample is None else random.Random(seed).sample(jobs, min(sample, len(jobs)))
        left_out = [(job,) for job in every.difference(chosen)]
        database.executemany("DELETE FROM mutation_specs WHERE job_id = ?", left_out)
        database.executemany("DELETE FROM work_items WHERE job_id = ?", left_out)
        database.commit()
    subprocess.run([*tool, "exec", str(config), str(session)], cwd=copy, env=environment, check=True)
    with contextlib.closing(sqlite3.connect(session)) as database:
        rows = database.execute(
            "SELECT definition_name, start_pos_row, operator_name, test_outcome, diff FROM mutation_specs "
            "LEFT JOIN work_results USING (job_id) ORDER BY start_pos_row"
        ).fetchall()
    return [
        Mutant(name or "", line, operator, str(outcome).upper(), diff or "")
        for name, line, operator, outcome, diff in rows
    ]


class Result(NamedTuple):
    """The result of a module: the survivors without a reason in the list, a line of figures, and why it fails."""

    survivors: list[Mutant]
    figures: str
    failures: list[str]


def result_of(mutants: list[Mutant], explained: list[dict[str, str]]) -> Result:
    """Return the result.

    It has no failures if every mutant ran, the tests killed SHARE_MIN of them, and every survivor is explained. The
    share counts explained survivors as well, so that a module cannot pass by explanations alone.
    """
    killed = sum(mutant.outcome == KILLED for mutant in mutants)
    alive = [mutant for mutant in mutants if mutant.outcome == SURVIVED]
    survivors = [mutant for mutant in alive if not mutant.is_explained(explained)]
    ran = killed + len(alive)
    idle = len(mutants) - ran
    failures = []
    if idle:
        failures.append(f"{idle} of {len(mutants)} mutants did not run")
    if not ran:
        failures.append("no mutant ran")
    elif killed / ran < SHARE_MIN:
        failures.append(f"less than {SHARE_MIN:.0%} of the mutants were killed")
    if survivors:
        failures.append(f"survivors that are not explained: {len(survivors)}")
    share = f" ({killed / ran:.0%})" if ran else ""
    figures = f"{killed} of {ran} mutants killed{share}, {len(alive) - len(survivors)} survivors explained"
    return Result(survivors, figures, failures)


def arguments_of(words: list[str], modules: list[str]) -> argparse.Namespace:
    """Parse the words of a command line. Without modules in it, all of `modules` are meant."""
    parser = argparse.ArgumentParser(prog="scripts/mutate")
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    parser.add_argument("--sample", type=int, help="so many mutants of each module, chosen at random")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    # With `choices`, argparse would reject an empty list.
    if unknown := set(given.modules) - set(modules):
        parser.error(f"not in scripts/mutants.toml: {', '.join(sorted(unknown))}")
    given.modules = given.modules or modules
    return given


def limit_memory() -> None:
    """Limit this process and those that it starts to MEMORY_BYTES, so that no mutant uses up the machine's memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))


def main() -> int:
    """Print each module's survivors and share; 1 if a module fails."""
    limit_memory()
    known = tomllib.loads((ROOT / "scripts/mutants.toml").read_text(encoding="utf-8"))
    given = arguments_of(sys.argv[1:], list(known["modules"]))
    has_failed = False
    with copy_of_the_checkout() as copy:
        for module in given.modules:
            definitions = known["definitions"].get(module, [])
            mutants = mutants_of(copy, module, known["modules"][module], definitions, given.sample, given.seed)
            explained = [one for one in known["explained"] if one.get("module", module) == module]
            result = result_of(mutants, explained)
            print(f"{module}: {result.figures}", flush=True)
            for mutant in result.survivors:
                print(f"  line {mutant.line}, {mutant.definition}, {mutant.operator}")
                print(textwrap.indent(mutant.changed, "    "), flush=True)
            for failure in result.failures:
                print(f"  failed: {failure}", flush=True)
            has_failed |= bool(result.failures)
    return has_failed


if __name__ == "__main__":
    sys.exit(main())
