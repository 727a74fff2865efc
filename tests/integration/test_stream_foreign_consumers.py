"""Foreign consumers (librdkafka) that use an application's group id, on a real broker, under both group protocols."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import confluent_kafka
import pytest

from penstock.services.aggregator.streams_command import main
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import InconsistentGroupProtocol
from penstock.shared.streams.runtime.source_positions import GroupAhead
from penstock.shared.streams.runtime.standby_assignor import PREFIX
from tests.integration.test_stream_worker import Chain, chain_of, offline, running, until, wait_or_raise
from tests.integration.test_stream_worker_losses import run_until_error, work
from tests.shared_broker import Broker

POLL_S = 0.2
PROTOCOLS = ["classic", "consumer"]


class Stray:
    """A consumer of librdkafka in its own thread, with auto-commit; `close` stops it."""

    def __init__(self, chain: Chain, protocol: str) -> None:
        config = {
            "bootstrap.servers": chain.kafka.bootstrap_servers,
            "group.id": chain.topic,
            "group.protocol": protocol,
            "client.id": "stray",
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 50,
        }
        self.errors: set[str] = set()
        self.read = 0
        self.assigned = 0
        self._consumer = confluent_kafka.Consumer(config)
        self._consumer.subscribe([chain.topic])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self) -> None:
        while not self._over.is_set():
            message = self._consumer.poll(POLL_S)
            if message is None:
                pass
            elif (error := message.error()) is not None:
                self.errors.add(str(error))
            else:
                self.read += 1
            with contextlib.suppress(RuntimeError):
                self.assigned = max(self.assigned, len(self._consumer.assignment()))
        self._consumer.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join()


@contextlib.contextmanager
def stray_of(chain: Chain, protocol: str) -> Iterator[Stray]:
    stray = Stray(chain, protocol)
    try:
        yield stray
    finally:
        stray.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_foreign_consumer_is_rejected(kafka: Broker, topic_name: str, protocol: str) -> None:
    """The broker rejects a foreign consumer, also one of KIP-848; it gets no partition, and the application keeps
    running.
    """
    async with chain_of(kafka, topic_name) as chain:
        worker = chain.worker()
        async with running(worker) as loop:
            await chain.send(100)
            await wait_or_raise(loop, chain.wait_processed(worker))
            with stray_of(chain, protocol) as stray:

                async def is_rejected() -> bool:
                    return bool(stray.errors)

                await wait_or_raise(loop, until(is_rejected))
            await chain.send(100)
            await wait_or_raise(loop, chain.wait_processed(worker))
            async with Admin(chain.kafka) as admin:
                group = await admin.describe_group(topic_name)
        assert (stray.read, stray.assigned) == (0, 0)
        assert (group.protocol, len(group.members)) == (f"{PREFIX}range", 1)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_foreign_consumer_that_joined_first_is_named(kafka: Broker, topic_name: str, protocol: str) -> None:
    """A start fails with the foreign consumer's client id while it is in the group.

    After that, the error reports its commits, and `restore-offsets` fixes the offsets, so that all records are
    processed.
    """
    async with chain_of(kafka, topic_name) as chain:
        await work(chain, 100)
        await chain.send(100)
        with stray_of(chain, protocol) as stray:

            async def has_read() -> bool:
                return stray.read == 100

            await until(has_read)
            with pytest.raises(InconsistentGroupProtocol, match="client 'stray'"):
                await run_until_error(chain.worker())
        with pytest.raises(GroupAhead, match="not lost state") as raised:
            await run_until_error(chain.worker())
        assert [(one.committed, one.known) for one in raised.value.ahead] == [(100, 50), (100, 50)]
        restarts = asyncio.create_task(_restart(chain))
        arguments = ["--application-id", topic_name, "--bootstrap-servers", kafka.bootstrap_servers, "--execute"]
        assert await asyncio.to_thread(main, ["restore-offsets", *arguments]) == 0

        async def is_processed() -> bool:
            return [(await chain.confirmed(p)).progress.sources[topic_name] for p in (0, 1)] == [100, 100]  # type: ignore[union-attr]

        await wait_or_raise(restarts, until(is_processed))
        restarts.cancel()
        await asyncio.wait([restarts])
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


async def _restart(chain: Chain) -> None:
    while True:
        with contextlib.suppress(GroupAhead):
            await run_until_error(chain.worker())
