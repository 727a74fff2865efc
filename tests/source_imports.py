"""The modules that the source code imports."""

from __future__ import annotations

import re
from pathlib import Path

_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+(\w+)[\w. \t]*|from[ \t]+(\w+)[\w.]*[ \t]+import\b.*)(?:#.*)?$", re.MULTILINE
)


def imported_modules(*folders: Path) -> set[str]:
    """The top-level modules that the code of these folders imports, also within functions.

    Ruff's rules E401, E701 and E702 make every import one statement on a line of its own, so that nothing is parsed.
    """
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    found = [match for path in paths for match in _IMPORT.findall(path.read_text(encoding="utf-8"))]
    return {plain or named for plain, named in found}
