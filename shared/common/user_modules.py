"""Imports of the user's modules, such as handlers, topologies and connectors."""

from __future__ import annotations

import sys
from pathlib import Path


def add_to_search_path(folder: str | None = None) -> str:
    """Let modules of a folder be imported, by default of the current one. Returns the folder.

    Python's search path has the current folder for `python -m penstock`, but not for the command `penstock`.
    """
    added = folder or str(Path.cwd())
    if added not in sys.path:
        sys.path.insert(0, added)
    return added


def lacks_module(error: BaseException, module: str) -> bool:
    """Return whether the error of a module's import means that there is no such module.

    Otherwise the module itself raised the error.

    >>> lacks_module(ModuleNotFoundError(name="shop"), "shop.handlers")
    True
    >>> lacks_module(ModuleNotFoundError(name="asyncpg"), "shop.handlers")
    False
    """
    return isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
