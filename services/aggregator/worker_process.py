"""One worker of `penstock aggregator --workers N`: the aggregator at a Unix socket, for the supervisor process.

`python -m penstock.services.aggregator.worker_process NUMBER SOCKET URL -- ARGUMENTS` has the command's settings for
those arguments. Settings that must be unique are changed: the group's instance id and Kafka's client id get the number,
and the address is the supervisor's. The worker ends with the supervisor, under a guard.
"""

from __future__ import annotations

import sys
from pathlib import Path

import structlog

from penstock.services import daemon
from penstock.services.aggregator.main import PROGRAM, Aggregator
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.workers import worker_settings


def main(arguments: list[str]) -> int:
    """Run one worker process of `penstock aggregator --workers N` until SIGTERM. Returns the exit status."""
    number, unix_socket, url, _, *rest = arguments
    structlog.contextvars.bind_contextvars(worker=int(number))

    def make_worker(settings: AggregatorSettings) -> Aggregator:
        return Aggregator(worker_settings(settings, int(number), url), Path(unix_socket))

    def limit_ms(settings: AggregatorSettings) -> int:
        return worker_settings(settings, int(number), url).shutdown_timeout_ms

    return daemon.serve(PROGRAM, AggregatorSettings, make_worker, rest, limit_ms=limit_ms)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
