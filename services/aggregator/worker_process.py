"""One worker of `penstock aggregator --workers N`: the aggregator at a Unix socket, for the supervisor process.

The supervisor runs `python -m penstock.services.aggregator.worker_process NUMBER SOCKET URL -- ARGUMENTS`, where
ARGUMENTS are those of `penstock aggregator`. Settings that must differ between workers are changed: the worker's number
is added to `state_dir`, `group_instance_id` and `client_id`. Other instances reach the worker at URL, which is below
the supervisor's address. The worker ends when the supervisor ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import structlog

from penstock.services import service_lifecycle
from penstock.services.aggregator.main import PROGRAM, Aggregator
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.workers import worker_settings


def main(arguments: list[str]) -> int:
    """Run one worker process of `penstock aggregator --workers N` until SIGTERM or SIGINT. Returns the exit status."""
    number, unix_socket, url, _, *rest = arguments
    structlog.contextvars.bind_contextvars(worker=int(number))

    def make_worker(settings: AggregatorSettings) -> Aggregator:
        return Aggregator(worker_settings(settings, int(number), url), Path(unix_socket))

    def limit_ms(settings: AggregatorSettings) -> int:
        return worker_settings(settings, int(number), url).shutdown_timeout_ms

    return service_lifecycle.serve(PROGRAM, AggregatorSettings, make_worker, rest, limit_ms=limit_ms)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
