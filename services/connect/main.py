"""`penstock connect standalone|distributed`: a Connect worker as a process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from penstock.services import daemon
from penstock.services.connect.daemon import EXIT_STATUSES, WRONG_SETTING, ConnectDaemon
from penstock.services.connect.settings import CommandLine, Mode, read_command_line
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import configure

SHUTDOWN_TIMEOUT_MS = 60_000
"""Added to the tasks' time (`task.shutdown.graceful.timeout.ms`), for commits, the group and the topics."""

USAGE = """\
penstock connect standalone WORKER.properties [CONNECTOR.properties …] [--NAME=VALUE …]
penstock connect distributed WORKER.properties [--NAME=VALUE …]

Run a Connect worker with Kafka Connect's settings and REST. --NAME=VALUE goes before the file, for every setting of a
worker; --log.level and --log.format are the log's. Exit statuses:
"""


def main(arguments: Sequence[str]) -> int:
    """Runs until SIGTERM. Returns the exit status: one of `EXIT_STATUSES`, or 0 after a requested shutdown."""
    if not arguments or arguments[0] not in ("standalone", "distributed"):
        asked_for_help = not arguments or arguments[0] in ("--help", "-h", "help")
        statuses = "\n".join(f"  {status}  {what}" for status, what in EXIT_STATUSES.items())
        print(USAGE + statuses, file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else WRONG_SETTING
    mode: Mode = "standalone" if arguments[0] == "standalone" else "distributed"
    try:
        asked = read_command_line(mode, arguments[1:])
        configure(asked.log, "connect")
        return asyncio.run(_drive(asked))
    except ConfigError as e:
        print(f"penstock connect: {e}", file=sys.stderr)
        return WRONG_SETTING


async def _drive(asked: CommandLine) -> int:
    worker = ConnectDaemon(asked)
    status = await daemon.run(worker, asked.config["task.shutdown.graceful.timeout.ms"] + SHUTDOWN_TIMEOUT_MS)
    return worker.exit_status if status else status
