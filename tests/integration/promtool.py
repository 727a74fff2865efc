"""Checks the page at `/metrics` with `promtool check metrics`, the linter of Prometheus."""

from __future__ import annotations

import re
import shutil
import subprocess

PROMTOOL = shutil.which("promtool")
"""The linter's path; None if it is not installed."""


def with_samples(page: str) -> str:
    """A page with one sample for each metric that has none: promtool ignores metrics without samples.

    >>> print(with_samples("# HELP a_total A.\\n# TYPE a_total counter\\n# HELP b B.\\n# TYPE b gauge\\nb 1.0\\n"))
    # HELP a_total A.
    # TYPE a_total counter
    a_total 0
    # HELP b B.
    # TYPE b gauge
    b 1.0
    """
    lines = []
    for block in re.split(r"(?m)^(?=# HELP )", page):
        found = re.search(r"^# TYPE (\w+) (\w+)$", block, re.MULTILINE)
        if found is not None and not re.search(r"^[^#\n]", block, re.MULTILINE):
            name, kind = found.groups()
            added = {"histogram": f'{name}_bucket{{le="+Inf"}} 0\n{name}_sum 0\n{name}_count 0\n'}
            block += added.get(kind, f"{name} 0\n")
        lines.append(block)
    return "".join(lines).rstrip("\n")


def complaints(page: str) -> str:
    """The problems that promtool reports for a page; empty if there are none."""
    assert PROMTOOL is not None
    command = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(command, input=f"{with_samples(page)}\n", capture_output=True, text=True, check=False)
    return done.stdout + done.stderr + (f"status {done.returncode}" if done.returncode else "")


def assert_clean(page: str) -> None:
    """Assert that the page has no `_created` series, and that promtool, if installed, reports no problem."""
    assert not re.findall(r"^\w+_created\b.*$", page, re.MULTILINE)
    if PROMTOOL is not None:
        problems = complaints(page)
        assert not problems, problems
