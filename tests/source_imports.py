"""The modules that the source code imports."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def imported_modules(*folders: Path) -> set[str]:
    """The top-level modules that the code of these folders imports, also within functions.

    The garbage collector would traverse all trees repeatedly, which takes four times as long.
    """
    gc.disable()
    try:
        paths = [path for folder in folders for path in folder.rglob("*.py")]
        nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    finally:
        gc.enable()
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}
