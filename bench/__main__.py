"""`python -m bench NAME [--json]`: run one benchmark, or list them.

A benchmark is a module of this folder that runs as `python -m bench.NAME`. The list shows the first line of its
docstring. It prints its figures (with `--json` as one JSON object in the last line). It exits with status 1 if a ratio
misses its target. Its exit status is this command's.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

USAGE_ERROR = 2


def benchmarks() -> dict[str, str]:
    """The name of each benchmark and the first line of its docstring, without importing any."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if not path.stem.startswith("_"):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found[path.stem] = docstring.partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Run the benchmark named first, with the rest as its arguments; without a name, list them."""
    known = benchmarks()
    if not arguments or arguments[0] in {"-h", "--help", "--list"}:
        print("usage: scripts/bench NAME [--json]; NAME is one of")
        for name, what in known.items():
            print(f"  {name:<20} {what}")
        return 0
    name = arguments[0]
    if name not in known:
        print(f"bench: no benchmark {name!r}; there are: {', '.join(known) or 'none'}", file=sys.stderr)
        return USAGE_ERROR
    sys.argv = [f"bench.{name}", *arguments[1:]]
    runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
