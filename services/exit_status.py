"""The exit statuses that Penstock's commands share. A command may have further statuses."""

from __future__ import annotations

from enum import IntEnum

from penstock.shared.common.errors import ConfigError


class ExitStatus(IntEnum):
    """The statuses that several commands share."""

    OK = 0
    FAILED = 1
    """An error, or a check that failed."""
    WRONG_SETTING = 2
    """An invalid argument or setting: another start with the same settings ends in the same way."""
    COMMIT_CONFLICT = 3
    """Of `penstock compact`: another job committed first, which is not an error."""
    INTERRUPTED = 130
    """Ended by Ctrl-C, or by a second signal during the shutdown."""


def exit_status_of(error: Exception) -> ExitStatus:
    """Return the exit status of a command that ends with this error.

    >>> exit_status_of(ConfigError("no such file")).name, exit_status_of(ValueError()).name
    ('WRONG_SETTING', 'FAILED')
    """
    return ExitStatus.WRONG_SETTING if isinstance(error, ConfigError) else ExitStatus.FAILED
