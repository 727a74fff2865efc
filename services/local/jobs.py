"""Spark jobs as children: run to their end, with the JSON object that they print last as their result (an edge)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.local.child import ChildProcess
from shared.common.settings import ENV_PREFIX, KafkaSettings

STOP_TIMEOUT_MS = 10_000


async def run_job(
    name: str, flags: Sequence[str], kafka: KafkaSettings, log_file: Path
) -> tuple[int, dict[str, Any], ChildProcess]:
    """Run `penstock <name> <flags>`: its exit status, its result ({} where it printed none) and the ended child.

    The job sees no PENSTOCK_ variable but the address of Kafka. Cancelling ends it.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    environment |= {
        f"{ENV_PREFIX}CONFIG": os.devnull,
        f"{ENV_PREFIX}KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
    }
    command = [sys.executable, "-m", "services.cli", name, *flags]
    child = await ChildProcess.start(command, log_file=log_file, name=name, env=environment)
    try:
        status = await child.wait()
    finally:
        if child.returncode is None:
            await child.terminate(STOP_TIMEOUT_MS)
    return status, last_object(child.log_tail()), child


def last_object(lines: Sequence[str]) -> dict[str, Any]:
    """The last line that is a JSON object, decoded.

    >>> last_object(["reading", '{"rows": 3}', "bye"])
    {'rows': 3}
    """
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                found = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(found, dict):
                return found
    return {}
