"""The services, the jobs and the command line.

Importing any of them registers all commands' settings, so that each command tells a misspelled name from another
command's setting.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from penstock.shared.common import setting_names


def settings_of_all_commands() -> Iterator[Any]:
    """Yield the settings of each command. Each module `settings` is imported when its turn comes."""
    from penstock.shared.common.settings import CommandSettings

    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if module.name.endswith(".settings"):
            for one in vars(importlib.import_module(module.name)).values():
                if isinstance(one, type) and issubclass(one, CommandSettings):
                    yield one


setting_names.register_commands(settings_of_all_commands)
