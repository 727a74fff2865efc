"""The demo's consumer handler: keeps the notable sessions, one JSON line each, in the file that an environment
variable names. A session is notable if it has many events or a large mean delay.

Each line is appended in one write. Delivery is at least once, and a record that is handled again writes the same line
again. Readers count equal lines once.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from penstock.shared.common.errors import DataError
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.records import ConsumerRecord

FILE_VARIABLE = "NOTABLE_FILE"
EVENTS_MIN = 40
# A session with at least this mean delay, in minutes, is notable.
MEAN_DELAY_MIN = 90.0


def is_notable(session: dict[str, object]) -> bool:
    """Return whether a closed session is notable.

    >>> is_notable({"flights": 50, "mean_delay": 3.0}), is_notable({"flights": 3, "mean_delay": 12.5})
    (True, False)
    """
    count = session.get("flights", session.get("events", 0))
    delay = session.get("mean_delay")
    many = isinstance(count, int) and count >= EVENTS_MIN
    return many or (isinstance(delay, int | float) and delay >= MEAN_DELAY_MIN)


async def store(record: ConsumerRecord) -> None:
    """Handle a session: append its line to the file if it is notable.

    Raises DataError if the record's value is not a JSON object.
    """
    try:
        session = decode_json(record.value or b"")
    except InvalidJson as e:
        raise DataError(f"not a session: {e}") from e
    if not isinstance(session, dict):
        raise DataError("not a session: not a JSON object")
    if is_notable(session):
        _append_line(Path(os.environ[FILE_VARIABLE]), msgspec.json.encode(session) + b"\n")


def count_notable_sessions(path: Path) -> int:
    """Return the number of different notable sessions in the file that the handler writes."""
    if not path.exists():
        return 0
    return len(set(path.read_bytes().splitlines()))


def _append_line(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        # One short write in append mode is atomic on a local disk.
        os.write(fd, line)
    finally:
        os.close(fd)
