"""Finds the settings of all commands, so that a misspelled name is told from another command's setting."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def settings_of_all_commands() -> Iterator[Any]:
    """Yield the subclasses of CommandSettings in all modules `settings`, with repetitions.

    Each of these modules is imported when its turn comes.
    """
    from penstock.shared.common.settings import CommandSettings

    for module in pkgutil.walk_packages([str(Path(__file__).parent)], f"{__package__}."):
        if module.name.endswith(".settings"):
            for one in vars(importlib.import_module(module.name)).values():
                if isinstance(one, type) and issubclass(one, CommandSettings):
                    yield one
