"""`penstock connect standalone|distributed`: a Connect worker as a process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.services import service_lifecycle
from penstock.services.connect.daemon import EXIT_STATUSES, ConnectDaemon
from penstock.services.connect.worker_command_line import CommandLine, Mode, read_command_line
from penstock.services.exit_status import ExitStatus
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import configure

SHUTDOWN_TIMEOUT_MS = 60_000
"""The time of a shutdown in addition to `task.shutdown.graceful.timeout.ms`: for offset commits, leaving the group, and
flushing the topics."""

USAGE = """\
penstock connect standalone WORKER.properties [CONNECTOR.properties …] [--NAME=VALUE …]
penstock connect distributed WORKER.properties [--NAME=VALUE …]

Run a Connect worker with Kafka Connect's settings and REST API. --NAME=VALUE overrides a setting of the worker's file.
--log.level and --log.format set the log. Exit statuses:
"""


def main(arguments: Sequence[str]) -> int:
    """Run `penstock connect` until SIGTERM, SIGINT or an error.

    Returns the exit status: 0 after a requested shutdown that succeeded and for help, otherwise one of `EXIT_STATUSES`.
    """
    is_help = not arguments or arguments[0] == "help" or not {"--help", "-h"}.isdisjoint(arguments)
    if is_help or arguments[0] not in ("standalone", "distributed"):
        statuses = "\n".join(f"  {status}  {reason}" for status, reason in EXIT_STATUSES.items())
        print(USAGE + statuses, file=sys.stdout if is_help else sys.stderr)
        return ExitStatus.OK if is_help else ExitStatus.WRONG_SETTING
    mode: Mode = "standalone" if arguments[0] == "standalone" else "distributed"
    try:
        command_line = read_command_line(mode, arguments[1:])
        configure(command_line.log, "connect")
        return service_lifecycle.run_process(_run_connect_daemon(command_line))
    except ConfigError as e:
        print(f"penstock connect: {e}", file=sys.stderr)
        return ExitStatus.WRONG_SETTING


async def _run_connect_daemon(command_line: CommandLine) -> int:
    timeout_ms = command_line.config["task.shutdown.graceful.timeout.ms"] + SHUTDOWN_TIMEOUT_MS
    return await service_lifecycle.run(ConnectDaemon(command_line), timeout_ms)
