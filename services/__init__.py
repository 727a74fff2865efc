"""The services, the jobs and the command line.

Importing this package registers the settings of all commands. A command then rejects a misspelled name, and ignores a
setting of another command.
"""

from __future__ import annotations

from penstock.services.settings_discovery import settings_of_all_commands
from penstock.shared.common import setting_names

setting_names.register_commands(settings_of_all_commands)
