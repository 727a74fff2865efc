"""One broker for all tests of a run, in however many processes.

A broker costs CPU time while it is idle too, and each one compiles the same code again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from anyio.from_thread import start_blocking_portal

from penstock.services.local.broker_config import QUICK_START, EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka

PROPERTIES = {
    "group.min.session.timeout.ms": "100",
    "log.cleaner.backoff.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}
SETTINGS = EmbeddedKafkaSettings(properties=PROPERTIES, jvm_options=QUICK_START)
"""Short timeouts. With the quick compiler alone, a broker's start takes half the CPU time."""


class Broker(Protocol):
    """A broker to connect to."""

    @property
    def bootstrap_servers(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SharedBroker:
    """A broker that other tests use at the same time, possibly from other processes."""

    bootstrap_servers: str


@contextmanager
def running_broker(folder: Path) -> Iterator[SharedBroker]:
    """Run a broker, with its data in `folder`, on an event loop in another thread.

    It is killed at the end: a clean stop of a broker with thousands of partitions takes seconds.
    """
    broker = EmbeddedKafka(folder, SETTINGS)
    with start_blocking_portal("asyncio") as portal:
        portal.call(broker.start)
        try:
            yield SharedBroker(broker.bootstrap_servers)
        finally:
            portal.call(broker.kill)
