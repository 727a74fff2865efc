"""The services, the jobs and the command line.

Importing this package registers the settings of all commands. A command then rejects a misspelled name, and ignores a
setting of another command.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

from penstock.shared.common import setting_names


def settings_of_all_commands() -> Iterator[Any]:
    """Yield the subclasses of CommandSettings in all modules `settings`, with repetitions.

    Each of these modules is imported when its turn comes.
    """
    from penstock.shared.common.settings import CommandSettings

    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if module.name.endswith(".settings"):
            for one in vars(importlib.import_module(module.name)).values():
                if isinstance(one, type) and issubclass(one, CommandSettings):
                    yield one


setting_names.register_commands(settings_of_all_commands)
