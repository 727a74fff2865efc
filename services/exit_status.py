"""The exit statuses that Penstock's commands share. A command may have further statuses."""

from __future__ import annotations

from enum import IntEnum

from penstock.shared.common.errors import ConfigError, PenstockError


class ExitStatus(IntEnum):
    """The statuses that several commands share, and COMMIT_CONFLICT, which the aggregator reads too."""

    OK = 0
    FAILED = 1
    """An error, or a check that failed."""
    WRONG_SETTING = 2
    """An argument or setting is invalid, or what it names cannot be used. `keep_running` does not restart it."""
    COMMIT_CONFLICT = 3
    """Of `penstock compact`: another job committed first, which is not an error."""
    INTERRUPTED = 130
    """Ended by Ctrl-C; of a service: by a second one, during the shutdown."""


class StartFailed(PenstockError):
    """A service cannot start. `exit_status` is the exit status of its process."""

    def __init__(self, exit_status: int, reason: BaseException) -> None:
        super().__init__(str(reason) or type(reason).__name__)
        self.exit_status = exit_status


def exit_status_of(error: Exception) -> int:
    """Return the exit status of a command that ends with this error.

    >>> [exit_status_of(e) for e in (ConfigError("no such file"), ValueError(), StartFailed(4, ValueError()))]
    [<ExitStatus.WRONG_SETTING: 2>, <ExitStatus.FAILED: 1>, 4]
    """
    if isinstance(error, StartFailed):
        return error.exit_status
    return ExitStatus.WRONG_SETTING if isinstance(error, ConfigError) else ExitStatus.FAILED
