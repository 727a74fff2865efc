"""The offsets that topics hold, read with Penstock's own client, within a timeout.

A topic's end is the last stable offset, because the jobs read committed records only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Literal, NamedTuple, TypeVar

from penstock.services.spark.settings import JobSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import KafkaTimeout, RetriableError, UnknownTopicOrPartition
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings

DECIDED_POLL_SECONDS = 0.05
T = TypeVar("T")
Offsets = dict[str, dict[int, int]]
"""By topic and partition."""


class Undecided(RetriableError):
    """A transaction stays open longer than the timeout, and hides the records that were committed after it began."""


class TopicOffsets(NamedTuple):
    """One topic: its id, and by partition its first offset and its last stable offset."""

    topic: str
    topic_id: str
    earliest: dict[int, int]
    latest: dict[int, int]


def run_with_timeout(coroutine: Awaitable[T], kafka: KafkaSettings, timeout_ms: int, about: str = "") -> T:
    """Run a Spark job's request to Kafka, for example for the offsets of topics, and return its result.

    Raises KafkaTimeout, which names `about`, after `timeout_ms`.
    """

    async def await_within_timeout() -> T:
        async with asyncio.timeout(timeout_ms / 1000):
            return await coroutine

    try:
        return asyncio.run(await_within_timeout())
    except TimeoutError:
        servers = f"kafka.bootstrap_servers={kafka.bootstrap_servers}"
        subject = f" about {about}" if about else ""
        raise KafkaTimeout(f"{servers}: no response{subject} within {timeout_ms} ms (kafka_timeout_ms)") from None


def topic_offsets(kafka: KafkaSettings, topics: Iterable[str], timeout_ms: int) -> dict[str, TopicOffsets]:
    """Return each topic's id, first offsets and last stable offsets.

    Raises UnknownTopicOrPartition, KafkaTimeout or another error of the client.
    """
    names = list(topics)

    async def fetch_topic_offsets() -> dict[str, TopicOffsets]:
        async with Admin(kafka) as admin:
            described = await admin.describe_topics(names)
            partitions = [TopicPartition(name, one.partition) for name in names for one in described[name].partitions]
            first = _offsets_by_topic(names, await admin.list_offsets(dict.fromkeys(partitions, "earliest")))
            end = _offsets_by_topic(
                names, await admin.list_offsets(dict.fromkeys(partitions, "latest"), "read_committed")
            )
        return {name: TopicOffsets(name, described[name].topic_id, first[name], end[name]) for name in names}

    return run_with_timeout(fetch_topic_offsets(), kafka, timeout_ms, ", ".join(names))


def changelog_offsets(settings: JobSettings) -> TopicOffsets:
    """Return the id, first offsets and last stable offsets of the application's changelog topic.

    Raises the errors of `topic_offsets`.
    """
    topic = settings.changelog_topic
    try:
        return topic_offsets(settings.kafka, [topic], settings.kafka_timeout_ms)[topic]
    except UnknownTopicOrPartition as e:
        raise UnknownTopicOrPartition(
            f"{e}: application must be the aggregator's, which makes the topic when it first starts"
        ) from None


def offsets_after_open_transactions(kafka: KafkaSettings, topic: str, timeout_ms: int) -> TopicOffsets:
    """Wait until each transaction that is open in `topic` at the call has ended, then return the topic's offsets. The
    ends are last stable offsets.

    A caller that compares topics reads the other topic before this call. Raises Undecided after `timeout_ms`, and the
    errors of `topic_offsets`.
    """
    found = topic_offsets(kafka, [topic], timeout_ms)[topic]
    ends: dict[TopicPartition, Literal["latest"]] = {TopicPartition(topic, p): "latest" for p in found.latest}
    open_: dict[TopicPartition, int] = {}

    async def wait_until_decided() -> dict[TopicPartition, int]:
        nonlocal open_
        async with Admin(kafka) as admin:
            written = await admin.list_offsets(ends)
            while True:
                latest = await admin.list_offsets(ends, "read_committed")
                # A last stable offset is not after the first open transaction. So without the wait, an open transaction
                # could hide records that another transaction had already committed. The caller may have seen that
                # transaction's records in another topic.
                if not (open_ := undecided(written, latest)):
                    return latest
                await asyncio.sleep(DECIDED_POLL_SECONDS)

    try:
        latest = run_with_timeout(wait_until_decided(), kafka, timeout_ms, topic)
    except KafkaTimeout:
        if not open_:
            raise
        which = ", ".join(f"{at} at offset {offset}" for at, offset in open_.items())
        raise Undecided(f"{which}: a transaction has been open for more than {timeout_ms} ms") from None
    return found._replace(latest=_offsets_by_topic([topic], latest)[topic])


def undecided(written: Mapping[TopicPartition, int], stable: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Return the last stable offset by partition, for the partitions in which it is before the end offset.

    >>> a, b = TopicPartition("t", 0), TopicPartition("t", 1)
    >>> undecided({a: 9, b: 4}, {a: 7, b: 6})
    {TopicPartition(topic='t', partition=0): 7}
    """
    return {at: stable[at] for at, end in sorted(written.items()) if stable[at] < end}


def offsets_at(kafka: KafkaSettings, held: Mapping[str, TopicOffsets], time_ms: int, timeout_ms: int) -> Offsets:
    """Return by topic and partition the offset of the first record at or after a time (ms since the epoch).

    The last stable offset in `held` is returned if it is lower, or if there is no such record.

    Raises the errors of `topic_offsets`.
    """
    times = {TopicPartition(topic, p): time_ms for topic, of in held.items() for p in of.latest}

    async def fetch_offsets_at() -> dict[TopicPartition, int]:
        async with Admin(kafka) as admin:
            return await admin.list_offsets(times)

    found = run_with_timeout(fetch_offsets_at(), kafka, timeout_ms, ", ".join(held))
    return _offsets_by_topic(
        held, {at: min(offset, held[at.topic].latest[at.partition]) for at, offset in found.items()}
    )


def _offsets_by_topic(names: Iterable[str], offsets: Mapping[TopicPartition, int]) -> Offsets:
    found: Offsets = {name: {} for name in names}
    for (topic, partition), offset in offsets.items():
        found[topic][partition] = offset
    return found
