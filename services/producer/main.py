"""`penstock producer`: the producer service as a process."""

from __future__ import annotations

from penstock.services import service_lifecycle
from penstock.services.producer.daemon import ProducerDaemon
from penstock.services.producer.settings import ProducerServiceSettings


def main(arguments: list[str]) -> int:
    """Run `penstock producer` until SIGTERM or SIGINT. The exit status is 2 if a setting is invalid."""
    return service_lifecycle.serve("penstock producer", ProducerServiceSettings, ProducerDaemon, arguments)
