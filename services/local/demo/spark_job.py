"""Runs Spark jobs as children to their end. A job's result is the JSON object that it prints last (an edge)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.shared.common.child_process import ChildProcess
from penstock.shared.common.setting_names import ENV_PREFIX
from penstock.shared.common.settings import KafkaSettings

STOP_TIMEOUT_MS = 10_000


async def run_job(
    name: str,
    flags: Sequence[str],
    kafka: KafkaSettings,
    log_file: Path,
    result_key: str,
    module: str | None = None,
) -> tuple[int, dict[str, Any], ChildProcess]:
    """Run `penstock <name> <flags>`, or `python -m <module> <flags>`.

    Returns its exit status, its result ({} if it printed none) and the ended child. The result is the last JSON object
    in its output that has `result_key`. The job sees no PENSTOCK_ variable except the address of Kafka. Cancelling ends
    the job.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    environment |= {
        f"{ENV_PREFIX}CONFIG": os.devnull,
        f"{ENV_PREFIX}KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
    }
    command = [sys.executable, "-m", *((module,) if module else ("penstock.services.cli", name)), *flags]
    child = await ChildProcess.start(command, log_file=log_file, name=name, env=environment)
    try:
        status = await child.wait()
    finally:
        if child.returncode is None:
            await child.terminate(STOP_TIMEOUT_MS)
    return status, last_object(child.log_tail(), result_key), child


def last_object(lines: Sequence[str], key: str) -> dict[str, Any]:
    """Return the last line that is a JSON object with `key`, decoded. Log lines may be objects too.

    >>> last_object(["reading", '{"rows": 3}', '{"event": "bye"}'], "rows")
    {'rows': 3}
    """
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                found = msgspec.json.decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(found, dict) and key in found:
                return found
    return {}
