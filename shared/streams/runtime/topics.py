"""The topics of an application: its sources must be there, what it writes to is created where it is not.

A topic that is there already is left as it is: its settings are its owner's. What would lose state is refused with the
command that mends it; what would lose results is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.shared.clients.admin import Admin, NewTopic, event_time_topic
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import ConfigError, UnknownTopicOrPartition
from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.settings import REFUSAL_BYTES_MAX, StreamsSettings
from penstock.shared.streams.topology import Topology

log = get_logger(__name__)

TOPIC_CHECK_INTERVAL_MS = 500

CHANGELOG_CONFIGS = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
}
CHANGELOG_CONFIGS_REQUIRED = ("cleanup.policy", "retention.ms", "retention.bytes")  # the others lose nothing
RETENTION_CONFIGS = ("retention.ms", "retention.bytes")

Configs = Mapping[str, str | None]


class Prepared(NamedTuple):
    """What is known of an application's topics once they are there."""

    partitions: int
    refusal_bytes_max: int
    """Bytes of the largest dead letter or late record that there may be: that of a source's largest record."""


async def prepare_topics(
    kafka: KafkaSettings,
    settings: StreamsSettings,
    topology: Topology,
    clock: Clock,
    on_missing: Callable[[list[str]], None] = lambda topics: None,
) -> Prepared:
    """Wait for the source topics, then create the application's own and all others with as many partitions.

    Those that are missing are logged at once, and whenever they change, and `on_missing` is told.
    Raises UnknownTopicOrPartition naming the source topics that did not appear within `topic_wait_ms`, and ConfigError
    where the assignor does not do for them, where their numbers of partitions differ, or where the changelog is there
    and would lose state; warns where a result or late topic would lose old event times.
    """
    require_one_assignment(settings.partition_assignment_strategy, topology.source_topics())
    internal = topology.internal_topics()
    sources = [topic for topic in topology.source_topics() if topic not in internal]
    others = [table.topic for table in topology.global_tables.values()]
    async with Admin(kafka) as admin:
        deadline, told = clock.monotonic_ms() + settings.topic_wait_ms, list[str]()
        while missing := sorted({*sources, *others} - set(await admin.list_topics())):
            if clock.monotonic_ms() > deadline:
                names = ", ".join(missing)
                raise UnknownTopicOrPartition(f"no topic {names} after {settings.topic_wait_ms} ms; create it first")
            if missing != told:
                told = missing
                log.warning("topics that the topology reads do not exist: waiting", topics=missing)
                on_missing(missing)
            await asyncio.sleep(TOPIC_CHECK_INTERVAL_MS / 1000)
        described = await admin.describe_topics(sources)
        partitions = require_same_partitions({name: len(topic.partitions) for name, topic in described.items()})
        replication = settings.replication_factor
        outputs = topology.output_topics()
        changelog = NewTopic(settings.changelog_topic, partitions, replication, CHANGELOG_CONFIGS)
        # A dead letter or late record is a source record with headers: it must fit where that one did.
        limits = [int((await admin.describe_configs(name)).get("max.message.bytes") or 0) for name in sources]
        refusal_bytes_max = max(limits) + REFUSAL_BYTES_MAX
        larger = {"max.message.bytes": str(refusal_bytes_max)}
        refusals = {name for source in topology.sources() for name in (source.dead_letters, source.late)}
        own = [event_time_topic(name, partitions, replication_factor=replication, **larger) for name in internal]
        new = [
            event_time_topic(name, partitions, replication_factor=replication, **larger if name in refusals else {})
            for name in outputs
        ]
        await admin.create_topics([*own, *new, changelog], exist_ok=True)
        found_own = {name: len(topic.partitions) for name, topic in (await admin.describe_topics(internal)).items()}
        require_same_partitions({sources[0]: partitions, **found_own})
        found = (await admin.describe_topics([changelog.name]))[changelog.name]
        configs = await admin.describe_configs(changelog.name)
        require_changelog(changelog, len(found.partitions), configs, kafka.bootstrap_servers)
        dead_letters = {source.dead_letters for source in topology.sources()}
        for name in outputs:
            # A dead letter carries the time of its writing; a retention deletes it when it is old, as is meant.
            if name not in dead_letters:
                warn_of_retention(name, await admin.describe_configs(name))
    return Prepared(partitions, refusal_bytes_max)


def require_one_assignment(strategy: str, sources: Sequence[str]) -> None:
    """Raise ConfigError where the assignor would give a partition's number to different instances, by topic.

    Of several topics `range` gives the same numbers to the same member; the sticky ones look at each partition alone.
    """
    if strategy != "range" and len(sources) > 1:
        raise ConfigError(
            f"streams.partition_assignment_strategy={strategy} is for one source topic, not for {', '.join(sources)}: "
            "a task takes the same partition of each"
        )


def require_same_partitions(counts: Mapping[str, int]) -> int:
    """How many partitions each source topic has; ConfigError, with all counts, where they differ.

    A task takes one partition of every source topic. The group's assignor deals out each topic by itself: only with
    equal counts does a partition's number come to the same instance from all of them.
    """
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name}: {number}" for name, number in sorted(counts.items()))
        raise ConfigError(
            f"the source topics have different numbers of partitions ({found}), and a task takes the same partition of "
            "each. Give them the same number, or run their streams as applications of their own."
        )
    return next(iter(counts.values()))


def require_changelog(wanted: NewTopic, partitions: int, configs: Configs, bootstrap_servers: str) -> None:
    """ConfigError, with the commands that mend it, where an existing changelog does not keep what it must."""
    name = wanted.name
    wrong = [key for key in CHANGELOG_CONFIGS_REQUIRED if configs.get(key) != wanted.configs[key]]
    if wrong:
        found = ", ".join(f"{key}={configs.get(key)}" for key in wrong)
        mended = ",".join(f"{key}={wanted.configs[key]}" for key in wrong)
        raise ConfigError(
            f"the changelog topic {name} has {found}: Kafka would delete state from it. Correct it with: "
            f"kafka-configs.sh --bootstrap-server {bootstrap_servers} --alter --entity-type topics "
            f"--entity-name {name} --add-config {mended}"
        )
    if partitions < wanted.partitions:
        raise ConfigError(
            f"the changelog topic {name} has {partitions} partitions, the source topics have {wanted.partitions}. "
            "Where the source got more partitions, keys have moved: a session that is open in the old partition will "
            f"not go on in the new one. To go on: kafka-topics.sh --bootstrap-server {bootstrap_servers} --alter "
            f"--topic {name} --partitions {wanted.partitions}"
        )
    if partitions > wanted.partitions:
        raise ConfigError(
            f"the changelog topic {name} has {partitions} partitions, the source topics have {wanted.partitions}: its "
            "state is that of other source topics. Give the application another application_id, or delete the "
            "changelog topic, the group's offsets and the tables in the lake to start afresh."
        )


def loses_old_times(configs: Configs) -> list[str]:
    """The retention settings, as `name=value`, with which a topic deletes records by age or size; none if it is kept.

    Kafka's retention compares record timestamps with the clock: a record with an event time from the past is gone
    minutes after it was written.
    """
    if "delete" not in (configs.get("cleanup.policy") or "delete"):
        return []
    return [f"{key}={configs[key]}" for key in RETENTION_CONFIGS if configs.get(key, "-1") != "-1"]


def warn_of_retention(name: str, configs: Configs) -> None:
    """Say that a topic of event times deletes by them."""
    if found := loses_old_times(configs):
        log.warning(
            "a topic of event times has a retention: Kafka deletes old event times soon after they were written",
            topic=name,
            configs=", ".join(found),
            correct_with="retention.ms=-1,retention.bytes=-1",
        )
