"""The command `penstock kafka`: runs an embedded Kafka in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from penstock.services.exit_status import ExitStatus, exit_status_of
from penstock.services.local.broker_config import DEFAULT_DATA_DIR, EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.log import configure
from penstock.shared.common.settings import PORT_MAX, LogSettings


async def run_in_foreground(data_dir: Path, settings: EmbeddedKafkaSettings) -> None:
    """Run an embedded Kafka until SIGINT or SIGTERM. Prints its address, the only line on standard output."""

    async def serve_broker() -> None:
        async with EmbeddedKafka(data_dir, settings) as kafka:
            print(kafka.bootstrap_servers, flush=True)
            await kafka.wait()

    work = asyncio.ensure_future(serve_broker())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


class _KafkaCommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print an invalid argument of `penstock kafka` as one line, without the usage before it, and exit."""
        self.exit(ExitStatus.WRONG_SETTING, f"{self.prog}: {message}\n")


def _parse_port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= PORT_MAX):
        raise argparse.ArgumentTypeError(f"must be a port from 0 to {PORT_MAX}, got {text!r}")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    """Run `penstock kafka`. Returns the exit status. A failure is one message on standard error."""
    parser = _KafkaCommandParser(prog="penstock kafka", description="Run a single-node Kafka.", allow_abbrev=False)
    parser.add_argument("--data-dir", type=Path, default=DEFAULT_DATA_DIR, help="default: %(default)s")
    parser.add_argument(
        "--port", type=_parse_port, default=0, help="port; 0: a free one, printed when the broker is up"
    )
    given = parser.parse_args(arguments)
    configure(LogSettings(), "kafka")
    try:
        asyncio.run(run_in_foreground(given.data_dir, EmbeddedKafkaSettings(port=given.port)))
    except PenstockError as e:
        print(f"penstock kafka: {e}", file=sys.stderr)
        return exit_status_of(e)
    return ExitStatus.OK
