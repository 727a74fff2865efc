"""Explains why a broker did not start, from its log.

One table has the known causes. The first match wins, so specific causes come before general ones. If no cause matches,
only the broker's own output is reported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

SHOWN_LINES = 8
# With less free space, the broker cannot write its next small file and its log line.
FULL_BELOW_BYTES = 65_536


class Cause(Enum):
    """A cause that kept the broker from running. The value is the message, with `{folder}` to be filled in."""

    PORT_TAKEN = "another process took its port"
    NO_SPACE = "no space left on the disk of {folder}: free some, or name another data folder"
    LOCKED = "the data folder {folder} is in use by another running broker"
    NOT_WRITABLE = "the data folder {folder} cannot be written by this user"
    NO_MEMORY = "there is not enough memory for its heap: lower heap_mb, or free some"
    CORRUPT = "the data in {folder} is damaged or from another Kafka: move the folder away to start with an empty one"
    WRONG_PROPERTY = "one of its properties, or of the JVM's options, is wrong"


_TABLE: tuple[tuple[Cause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(pattern))
    for cause, pattern in (
        (Cause.PORT_TAKEN, r"Address already in use|BindException"),
        (Cause.NO_SPACE, r"No space left on device|Disk quota exceeded"),
        (Cause.LOCKED, r"Failed to acquire lock on file \.lock"),
        (Cause.NOT_WRITABLE, r"AccessDeniedException|Permission denied|Read-only file system"),
        (
            Cause.NO_MEMORY,
            r"Could not reserve enough space|OutOfMemoryError|insufficient memory|Cannot allocate memory",
        ),
        (Cause.WRONG_PROPERTY, r"ConfigException|JAAS configuration|Unrecognized VM option|IllegalArgumentException"),
        (
            Cause.CORRUPT,
            r"node ID not found|Stored node id|meta\.properties|quorum-state|Malformed line in checkpoint|Corrupt"
            r"|InconsistentClusterId|Invalid cluster\.id|log dirs in .* have failed",
        ),
    )
)
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+) ")
_TROUBLE = re.compile(
    r"Exception|Error\b|^Caused by|Could not reserve enough space|insufficient memory|Unrecognized VM option"
)
_NOISE = re.compile(r"^\s+at |^\s*\.\.\. \d+ more")


def is_trouble(line: str) -> bool:
    """Return whether a line of a broker's output reports a failure.

    It is a log event at ERROR or FATAL, or a line outside log events that names an exception or has an error message of
    the JVM.
    """
    event = _LOG_LINE.match(line)
    return event.group(1) in ("ERROR", "FATAL") if event else bool(_TROUBLE.search(line))


def find_cause(lines: Sequence[str]) -> Cause | None:
    """Return the known cause in a broker's output, or None."""
    troubled = [line for line in lines if is_trouble(line)]
    for cause, pattern in _TABLE:
        if any(pattern.search(line) for line in troubled):
            return cause
    return None


def meaningful(lines: Sequence[str], count: int = SHOWN_LINES) -> list[str]:
    """Return the last `count` lines of a broker's output that report a failure, or its last lines if none does."""
    readable = [line.strip() for line in lines if line.strip() and not _NOISE.search(line)]
    troubled = list(dict.fromkeys(line for line in readable if is_trouble(line)))
    return (troubled or readable)[-count:]


def explain(lines: Sequence[str], folder: str, free_bytes: int) -> str:
    """Return the cause of a broker's failure, or that it is unknown, and up to SHOWN_LINES lines of its output.

    These are the last lines that report a failure, or the last lines if none does. A full disk is the cause even if no
    line reports it.
    """
    cause = Cause.NO_SPACE if free_bytes < FULL_BELOW_BYTES else find_cause(lines)
    output = meaningful(lines)
    reason = cause.value.format(folder=folder) if cause else "the reason is unknown"
    return reason + (". Its output:\n  " + "\n  ".join(output) if output else "; it had no output")
