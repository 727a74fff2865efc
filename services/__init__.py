"""The services, the jobs and the command line.

Importing any of them registers all commands' settings, so that each command tells a misspelled name from another
command's setting.
"""

from __future__ import annotations

from penstock.services.command_settings import settings_of_all_commands
from penstock.shared.common import setting_names

setting_names.register_commands(settings_of_all_commands)
