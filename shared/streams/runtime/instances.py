"""The partitions of each instance of an application, from the registrations of all instances.

Each instance writes one record to the compacted topic `<application>-instances`, with its address as key. The value has
the partitions whose tasks run there, each with the task's owner epoch, and those that it is restoring. The instance
writes the record again when that changes, and from time to time when it does not. At shutdown it removes the record.
Every instance reads the whole topic.

A killed instance writes nothing more: its record stays until others have taken over its partitions. If two instances
claim a partition, the claim with the higher owner epoch counts, as for any reader of the changelog. A claim to restore
a partition counts from its record on, until a record with a higher epoch is read.

>>> table = Instances()
>>> table.apply(0, b"http://a", encode(Registration("a", {0: 4, 1: 4}, 2)), 0)
>>> table.apply(1, b"http://b", encode(Registration("b", {1: 5}, 2)), 0)
>>> {partition: claim.url for partition, claim in sorted(table.claims().items())}
{0: 'http://a', 1: 'http://b'}
>>> table.apply(2, b"http://b", encode(Registration("b", {1: 5}, 2, restoring=[0])), 0)
>>> table.claims()[0]
Claim(url='http://b', epoch=None)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

FORGET_MS = 600_000
"""The age at which a record without partitions is deleted: its instance was killed."""


class Registration(msgspec.Struct, frozen=True):
    """An instance's registration: running partitions with their owner epochs, and the number of all partitions."""

    instance: str
    running: dict[int, int] = {}
    partitions: int = 0
    restoring: list[int] = []


class Claim(NamedTuple):
    """The instance that has a partition; `epoch` is None while it is being restored there."""

    url: str
    epoch: int | None


def encode(registration: Registration) -> bytes:
    """Encode a record's value as a JSON object."""
    return msgspec.json.encode(registration)


class Parts(NamedTuple):
    """The partitions by the instance that has them: this one, others by address, and none, with the reason."""

    own: frozenset[int]
    others: dict[str, list[int]]
    missing: dict[int, str]


class _Known(NamedTuple):
    registration: Registration
    since: dict[tuple[int, int | None], int]
    seen_ms: int


class Instances:
    """The topic's content; `invalid_records` counts records that cannot be read."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self.invalid_records = 0

    def __repr__(self) -> str:
        return f"Instances({ {url: known.registration for url, known in self._known.items()} })"

    def apply(self, offset: int, key: bytes | None, value: bytes | None, now_ms: int) -> None:
        """Apply the record at `offset`; a record that cannot be read is counted and changes nothing."""
        try:
            url = (key or b"").decode()
            registration = None if value is None else msgspec.json.decode(value, type=Registration)
        except (UnicodeDecodeError, msgspec.DecodeError):
            self.invalid_records += 1
            return
        if registration is None:
            self._known.pop(url, None)
            return
        before = self._known[url].since if url in self._known else {}
        claims: list[tuple[int, int | None]] = [
            *registration.running.items(),
            *((p, None) for p in registration.restoring),
        ]
        self._known[url] = _Known(registration, {claim: before.get(claim, offset) for claim in claims}, now_ms)

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
            # A claim to restore that was registered later than the running one is of the next owner.
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
        """Return addresses whose records have no partitions and are older than `FORGET_MS`, without those of `own`."""
        held = {claim.url for claim in self.claims().values()} | set(own)
        return [url for url in self.urls() if url not in held and now_ms - self._known[url].seen_ms >= FORGET_MS]


def partition_owners(instances: Instances, url: str, own: Registration) -> Parts:
    """Return the instance to query for each partition, as seen by `url` with the registration `own`.

    This instance's registration is newer than the topic's content. There are four cases for a partition:
    1. It runs here. It is this instance's, unless the topic has a claim of another one to restore it, or
       to run it with the same or a higher epoch.
    2. It is being restored, here or elsewhere: it is missing.
    3. No instance claims it, or the topic has an outdated claim of this one: it is missing.
    4. Another instance runs it.

    >>> table = Instances()
    >>> table.apply(0, b"http://b", encode(Registration("b", {1: 5, 2: 3}, 4)), 0)
    >>> partition_owners(table, "http://a", Registration("a", {0: 1, 1: 4, 2: 4}, 4))
    Parts(own=frozenset({0, 2}), others={'http://b': [1]}, missing={3: 'no instance has it'})
    """
    claims = instances.claims()
    own_partitions = set()
    others: dict[str, list[int]] = {}
    missing: dict[int, str] = {}
    known = [own.partitions, *(instances.registration(each).partitions for each in instances.urls())]
    for partition in range(max(known)):
        claim = claims.get(partition)
        epoch = own.running.get(partition)
        # The topic lags behind: a claim of a lower epoch is of a former owner.
        if epoch is not None and (claim is None or claim.url == url or -1 < (claim.epoch or -1) < epoch):
            own_partitions.add(partition)
        elif partition in own.restoring or (claim is not None and claim.epoch is None):
            where = url if partition in own.restoring or claim is None else claim.url
            missing[partition] = f"being restored by {where}"
        elif claim is None or claim.url == url:
            missing[partition] = "no instance has it"
        else:
            others.setdefault(claim.url, []).append(partition)
    return Parts(frozenset(own_partitions), others, missing)
