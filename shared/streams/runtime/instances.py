"""The partitions of each instance of an application, from the registrations of all instances.

Each instance registers itself by a record in the compacted topic `<application>-instances`, with its address as key.
The value lists the partitions whose tasks run on the instance, each with the task's owner epoch, and the partitions
that it is restoring. The instance writes the record again when the lists change, and also at intervals. At shutdown it
writes a tombstone. Every instance reads the whole topic.

A killed instance leaves its record in the topic. Other instances delete it when they have taken over its partitions and
have read it at least `FORGET_MS` ago. If two records claim a partition, the claim with the higher owner epoch counts,
as for a reader of the changelog. A claim to restore a partition counts if it was registered later than the claim to run
it.

>>> table = Instances()
>>> table.apply(0, b"http://a", encode_registration(Registration("a", {0: 4, 1: 4}, 2)), 0)
>>> table.apply(1, b"http://b", encode_registration(Registration("b", {1: 5}, 2)), 0)
>>> {partition: claim.url for partition, claim in sorted(table.claims().items())}
{0: 'http://a', 1: 'http://b'}
>>> table.apply(2, b"http://b", encode_registration(Registration("b", {1: 5}, 2, restoring=[0])), 0)
>>> table.claims()[0]
Claim(url='http://b', epoch=None)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import DeliveryTimeout, PenstockError, RetriableError
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings

log = get_logger(__name__)

LOOK_MS = 200
"""The interval at which an instance compares its partitions with its registration, which may be outdated that long."""
REGISTER_MS = 60_000
"""The interval at which an unchanged registration is written again."""
RETRY_MS = 2_000
FORGET_MS = 600_000
"""A record is deleted this long after it was read if none of its claims counts: its instance was killed."""
GOODBYE_MS = 2_000
"""The time limit for removing the registration at shutdown."""
TOPIC_CONFIGS = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1", "segment.ms": "3600000"}


class Registration(msgspec.Struct, frozen=True):
    """An instance's registration: the partitions that it runs, with their owner epochs, and those that it restores.

    `partitions` is the number of all partitions of the application.
    """

    instance: str
    running: dict[int, int] = {}
    partitions: int = 0
    restoring: list[int] = []


class Claim(NamedTuple):
    """The instance that has a partition; `epoch` is None while it is being restored there."""

    url: str
    epoch: int | None


def encode_registration(registration: Registration) -> bytes:
    """Encode a record's value as a JSON object."""
    return msgspec.json.encode(registration)


class PartitionOwners(NamedTuple):
    """The partitions by the instance that runs them: this one, others by address, and none, with the reason.

    `restoring` has those of the missing partitions that are being restored, by the address of the restoring instance,
    which may be this one.
    """

    own: frozenset[int]
    others: dict[str, list[int]]
    missing: dict[int, str]
    restoring: dict[str, list[int]]


class _RegisteredInstance(NamedTuple):
    registration: Registration
    since: dict[tuple[int, int | None], int]
    seen_ms: int


class Instances:
    """The last registration of each instance, as read from the topic of instances."""

    def __init__(self) -> None:
        self._known: dict[str, _RegisteredInstance] = {}

    def __repr__(self) -> str:
        return f"Instances({ {url: known.registration for url, known in self._known.items()} })"

    def apply(self, offset: int, key: bytes | None, value: bytes | None, now_ms: int) -> None:
        """Apply the record at `offset`; a record that cannot be read changes nothing."""
        try:
            url = (key or b"").decode()
            registration = None if value is None else decode_json(value, Registration)
        except (UnicodeDecodeError, InvalidJson):
            return
        if registration is None:
            self._known.pop(url, None)
            return
        before = self._known[url].since if url in self._known else {}
        claims: list[tuple[int, int | None]] = [
            *registration.running.items(),
            *((p, None) for p in registration.restoring),
        ]
        self._known[url] = _RegisteredInstance(
            registration, {claim: before.get(claim, offset) for claim in claims}, now_ms
        )

    def claims(self) -> dict[int, Claim]:
        """Return the claim that counts for each claimed partition."""
        running: dict[int, tuple[int, int, str]] = {}
        restoring: dict[int, tuple[int, str]] = {}
        for url, known in self._known.items():
            for (partition, epoch), since in known.since.items():
                if epoch is None:
                    restoring[partition] = max(restoring.get(partition, (-1, "")), (since, url))
                else:
                    running[partition] = max(running.get(partition, (-1, -1, "")), (epoch, since, url))
        found = {partition: Claim(url, epoch) for partition, (epoch, _, url) in running.items()}
        for partition, (since, url) in restoring.items():
            # The later claim is that of the next owner, which restores the partition.
            if partition not in running or since > running[partition][1]:
                found[partition] = Claim(url, None)
        return found

    def urls(self) -> list[str]:
        """Return every address that has a record."""
        return sorted(self._known)

    def registration(self, url: str) -> Registration:
        """Return the last registration of the instance at an address."""
        return self._known[url].registration

    def expired(self, now_ms: int, own: Iterable[str]) -> list[str]:
        """Return addresses whose last record was read at least FORGET_MS ago and has no claim that counts.

        Addresses in `own` are left out.
        """
        held = {claim.url for claim in self.claims().values()} | set(own)
        return [url for url in self.urls() if url not in held and now_ms - self._known[url].seen_ms >= FORGET_MS]


def partition_owners(instances: Instances, url: str, own: Registration) -> PartitionOwners:
    """Return the instance to query for each partition, as seen by the instance `url`.

    `own` is that instance's registration; it is newer than the content of the topic in `instances`. A partition that is
    being restored, or that no instance has, is in `missing` with the reason.

    >>> table = Instances()
    >>> table.apply(0, b"http://b", encode_registration(Registration("b", {1: 5, 2: 3}, 4)), 0)
    >>> partition_owners(table, "http://a", Registration("a", {0: 1, 1: 4, 2: 4}, 4))
    PartitionOwners(own=frozenset({0, 2}), others={'http://b': [1]}, missing={3: 'no instance has it'}, restoring={})
    """
    claims = instances.claims()
    own_partitions = set()
    others: dict[str, list[int]] = {}
    missing: dict[int, str] = {}
    restoring: dict[str, list[int]] = {}
    known = [own.partitions, *(instances.registration(each).partitions for each in instances.urls())]
    for partition in range(max(known)):
        claim = claims.get(partition)
        epoch = own.running.get(partition)
        # The first case that applies counts.
        # 1. The partition runs on this instance, and no other instance claims to restore it, or to run it with the same
        # or a higher epoch. The topic lags behind: a claim of a lower epoch is of a former owner.
        if epoch is not None and (claim is None or claim.url == url or -1 < (claim.epoch or -1) < epoch):
            own_partitions.add(partition)
        # 2. The partition is being restored, by any instance.
        elif partition in own.restoring or (claim is not None and claim.epoch is None):
            where = url if partition in own.restoring or claim is None else claim.url
            missing[partition] = f"being restored by {where}"
            restoring.setdefault(where, []).append(partition)
        # 3. No instance claims the partition, or only an outdated record of this instance does.
        elif claim is None or claim.url == url:
            missing[partition] = "no instance has it"
        # 4. Another instance runs the partition.
        else:
            others.setdefault(claim.url, []).append(partition)
    return PartitionOwners(frozenset(own_partitions), others, missing, restoring)


class InstanceRegistry:
    """Registers this instance's partitions in the topic, and reads the registrations of all instances.

    The worker does not depend on it. After an error it logs the error and tries again: after RETRY_MS if the error is
    retriable or a DeliveryTimeout, otherwise (for example without a permission) after REGISTER_MS.
    """

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
        self._new = NewTopic(topic, 1, replication_factor, TOPIC_CONFIGS)
        self._url = ""
        self.instances = Instances()
        self.failed = ""
        self._published: Registration | None = None
        self._published_at_ms = 0
        self._published_offset = 0
        self._logged_instance = ""

    def __repr__(self) -> str:
        return f"InstanceRegistry({self._new.name} as {self._url}, {self.instances})"

    async def run(self, url: str) -> None:
        """Register the partitions of `url` and read the others' until cancelled; then try to remove the record."""
        self._url = url
        while True:
            try:
                await self._run_once()
            # A record that expires in an outage fails with DeliveryTimeout, which is not retriable.
            except (RetriableError, DeliveryTimeout) as e:
                log.warning("the topic of instances cannot be used, trying again", reason=str(e))
                self.failed = str(e)
                await asyncio.sleep(RETRY_MS / 1000)
            except PenstockError as e:
                log.error("other instances are not known, trying again", topic=self._new.name, reason=str(e))
                self.failed = str(e)
                await asyncio.sleep(REGISTER_MS / 1000)

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
                # The exit of `async with` would wait for the record until `delivery_timeout_ms`.
                await producer.close(0)
                raise

    def _log_address_conflict(self, offset: int) -> None:
        """Log if another instance has registered the same address. Then neither of the two finds the other."""
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
            self._published_offset = await self._write_registration(producer, self._url, encode_registration(own))
            self._published = own
            self._published_at_ms = now_ms
            for url in self.instances.expired(now_ms, [self._url]):
                await self._write_registration(producer, url, None)

    async def _write_registration(self, producer: Producer, url: str, value: bytes | None) -> int:
        return (await (await producer.send(self._new.name, value, key=url.encode()))).offset
