"""One instance's use of the topic of instances: registers its partitions, and reads the others' (an edge).

It runs beside the worker, which does not depend on it. If Kafka cannot be reached, it tries again. If it lacks the
right to create or write the topic, it logs that, and this instance knows of no other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import PenstockError, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.instances import Instances, Registration, encode

log = get_logger(__name__)

LOOK_MS = 200
"""The interval at which an instance compares its partitions with its registration, which may be outdated that long."""
REGISTER_MS = 60_000
"""The interval at which an unchanged registration is written again."""
RETRY_MS = 2_000
GOODBYE_MS = 2_000
"""The time limit for removing the registration at shutdown."""
CONFIGS = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1", "segment.ms": "3600000"}


class InstanceRegistry:
    """The topic of one application; `instances` is its content."""

    def __init__(
        self,
        kafka: KafkaSettings,
        topic: str,
        replication_factor: int,
        own: Callable[[], Registration],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._kafka = kafka
        self._clock = clock
        self._own = own
        self._new = NewTopic(topic, 1, replication_factor, CONFIGS)
        self._url = ""
        self.instances = Instances()
        self.failed = ""
        self._published: Registration | None = None
        self._published_at_ms = self._published_offset = 0
        self._logged_instance = ""

    def __repr__(self) -> str:
        return f"InstanceRegistry({self._new.name} as {self._url}, {self.instances})"

    async def run(self, url: str) -> None:
        """Register the partitions of `url` and read the others' until cancelled; then remove the registration."""
        self._url = url
        while True:
            try:
                await self._run_once()
            except RetriableError as e:
                log.warning("the topic of instances cannot be used, trying again", reason=str(e))
                self.failed = str(e)
                await asyncio.sleep(RETRY_MS / 1000)
            except PenstockError as e:
                log.error("other instances are not known", topic=self._new.name, reason=str(e))
                self.failed = str(e)
                # Not an end: the worker does not depend on it, and the caller cancels this at shutdown.
                await asyncio.Event().wait()

    async def _run_once(self) -> None:
        async with Admin(self._kafka) as admin:
            await admin.create_topics([self._new], exist_ok=True)
        at = TopicPartition(self._new.name, 0)
        consuming = Consumer(self._kafka, ConsumerSettings(auto_offset_reset="earliest", commit_strategy="none"))
        async with consuming as consumer, Producer(self._kafka, ProducerSettings(linger_ms=0)) as producer:
            consumer.assign([at])
            await consumer.seek_to_beginning(at)
            self._published = None
            self.failed = ""
            try:
                while True:
                    await self._publish_registration(producer)
                    for columns in (await consumer.poll(LOOK_MS)).values():
                        now_ms = self._clock.monotonic_ms()
                        for offset, key, value in zip(
                            columns.offsets.tolist(), columns.keys, columns.values, strict=True
                        ):
                            self.instances.apply(offset, key, value, now_ms)
                            self._log_address_conflict(offset)
            except asyncio.CancelledError:
                with contextlib.suppress(TimeoutError, PenstockError):
                    async with asyncio.timeout(GOODBYE_MS / 1000):
                        await self._write_registration(producer, self._url, None)
                raise

    def _log_address_conflict(self, offset: int) -> None:
        """Log once that another instance has registered this instance's address, so that neither finds the other."""
        if self._published is None or offset <= self._published_offset or self._url not in self.instances.urls():
            return
        other = self.instances.registration(self._url).instance
        if other not in (self._published.instance, self._logged_instance):
            self._logged_instance = other
            log.warning(
                "another instance has the same address: set queries.application_server", url=self._url, instance=other
            )

    async def _publish_registration(self, producer: Producer) -> None:
        own = self._own()
        now_ms = self._clock.monotonic_ms()
        if own != self._published or now_ms - self._published_at_ms >= REGISTER_MS:
            self._published_offset = await self._write_registration(producer, self._url, encode(own))
            self._published = own
            self._published_at_ms = now_ms
            for url in self.instances.expired(now_ms, [self._url]):
                await self._write_registration(producer, url, None)

    async def _write_registration(self, producer: Producer, url: str, value: bytes | None) -> int:
        return (await (await producer.send(self._new.name, value, key=url.encode()))).offset
