"""`penstock producer`: the producer service as a process."""

from __future__ import annotations

from penstock.services import daemon
from penstock.services.producer.daemon import ProducerDaemon
from penstock.services.producer.settings import ProducerServiceSettings


def main(arguments: list[str]) -> int:
    """Run `penstock producer` until SIGTERM. Returns the exit status: 2 for an invalid setting."""
    return daemon.serve("penstock producer", ProducerServiceSettings, ProducerDaemon, arguments)
