"""The topics of an application. Topics that it only reads must exist. The others are created if they are missing.

An existing topic is left unchanged, because its settings belong to its owner. Settings of the changelog that would lose
state raise an error that names the corrective command. Settings of other topics that would lose results are logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from penstock.shared.clients.admin import (
    Admin,
    NewTopic,
    describe_configs_if_authorized,
    event_time_topic,
    max_message_bytes_with,
)
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import ConfigError, UnknownTopicOrPartition
from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import REPARTITION_SUFFIX
from penstock.shared.streams.settings import DEAD_LETTER_OVERHEAD_MAX, StreamsSettings
from penstock.shared.streams.topology import Topology

log = get_logger(__name__)

TOPIC_CHECK_INTERVAL_MS = 500

# Kafka Streams compacts its changelogs. This one must keep every record until a snapshot covers it: takeover and
# progress records have no key, and an entry counts only with the progress record after it.
CHANGELOG_CONFIGS = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
}
# With other values of these settings, Kafka could delete state.
CHANGELOG_CONFIGS_REQUIRED = ("cleanup.policy", "retention.ms", "retention.bytes")
RETENTION_CONFIGS = ("retention.ms", "retention.bytes")

Configs = Mapping[str, str | None]


async def prepare_topics(
    kafka: KafkaSettings,
    settings: StreamsSettings,
    topology: Topology,
    clock: Clock,
    on_missing: Callable[[list[str]], None] = lambda topics: None,
) -> int:
    """Wait for the topics that the application only reads, then create the topics that it writes to.

    Returns the number of partitions of the source topics, which the created topics have too. Missing topics are logged
    and passed to `on_missing`, again whenever the list changes. Raises UnknownTopicOrPartition, which names the topics
    that did not appear within `topic_wait_ms`.

    Raises ConfigError if the assignor does not suit several source topics (counting repartition topics), if the source
    topics, repartition topics and changelog differ in their number of partitions, or if an existing changelog's
    settings let Kafka delete its records. Raises AuthorizationFailed if the changelog's settings may not be read. For
    the limits of new topics, a source topic whose settings may not be read counts as one with Kafka's default of
    `max.message.bytes`.
    """
    require_assignor_of_source_topics(settings.partition_assignment_strategy, topology.source_topics())
    internal = topology.internal_topics()
    sources = [topic for topic in topology.source_topics() if topic not in internal]
    tables = [table.topic for table in topology.global_tables.values()]
    written = topology.output_topics()
    external = [name for name in sources if name not in written]
    # The topics of global tables are waited for too.
    required = {*external, *(name for name in tables if name not in written)}
    async with Admin(kafka) as admin:
        deadline = clock.monotonic_ms() + settings.topic_wait_ms
        reported = list[str]()
        while missing := sorted(required - set(await admin.list_topics())):
            if clock.monotonic_ms() > deadline:
                names = ", ".join(missing)
                raise UnknownTopicOrPartition(f"no topic {names} after {settings.topic_wait_ms} ms; create it first")
            if missing != reported:
                reported = missing
                log.warning("topics that the topology reads do not exist: waiting", topics=missing)
                on_missing(missing)
            await asyncio.sleep(TOPIC_CHECK_INTERVAL_MS / 1000)
        replication = settings.replication_factor
        partitions = await _common_partitions(admin, external)
        rejected_bytes_max = await _rejected_bytes_max(admin, external)
        outputs = new_output_topics(topology, partitions, replication, rejected_bytes_max)
        # Those that the application also reads come first, because a source topic limits the size of dead letters.
        if also_read := [topic for topic in outputs if topic.name in (*sources, *tables)]:
            await admin.create_topics(also_read, exist_ok=True)
            await _common_partitions(admin, sources)
            rejected_bytes_max = await _rejected_bytes_max(admin, sources)
            outputs = new_output_topics(topology, partitions, replication, rejected_bytes_max)
        larger = {"max.message.bytes": str(rejected_bytes_max)}
        own = [event_time_topic(name, partitions, replication_factor=replication, **larger) for name in internal]
        changelog = NewTopic(settings.changelog_topic, partitions, replication, CHANGELOG_CONFIGS)
        await admin.create_topics([*own, *outputs, changelog], exist_ok=True)
        found_own = {name: len(topic.partitions) for name, topic in (await admin.describe_topics(internal)).items()}
        require_same_partitions({sources[0]: partitions, **found_own})
        found = (await admin.describe_topics([changelog.name]))[changelog.name]
        configs = await admin.describe_configs(changelog.name)
        require_changelog(changelog, len(found.partitions), configs, kafka.bootstrap_servers)
        dead_letters = {source.dead_letters for source in topology.sources()}
        for name in written:
            # A dead letter's timestamp is that of its writing, so a retention deletes it by age, as intended.
            if name not in dead_letters:
                warn_of_retention(name, await describe_configs_if_authorized(admin, name))
    return partitions


async def _common_partitions(admin: Admin, topics: Sequence[str]) -> int:
    """Return the topics' number of partitions. Raises ConfigError with all numbers if they differ."""
    described = await admin.describe_topics(topics)
    return require_same_partitions({name: len(topic.partitions) for name, topic in described.items()})


async def _rejected_bytes_max(admin: Admin, sources: Sequence[str]) -> int:
    """Return the bytes of the largest dead letter or late record: a source's largest record with added headers.

    A source record that its topic accepts only compressed may be larger.
    """
    configs = [await describe_configs_if_authorized(admin, name) for name in sources]
    return max(max_message_bytes_with(each, DEAD_LETTER_OVERHEAD_MAX) for each in configs)


def new_output_topics(
    topology: Topology, partitions: int, replication_factor: int, rejected_bytes_max: int
) -> list[NewTopic]:
    """Return the topics that the topology writes to, except repartition topics, as they are created.

    Topics of dead letters and late records accept records of `rejected_bytes_max`.
    """
    rejection_topics = {name for source in topology.sources() for name in (source.dead_letters, source.late)}
    larger = {"max.message.bytes": str(rejected_bytes_max)}
    return [
        event_time_topic(
            name, partitions, replication_factor=replication_factor, **larger if name in rejection_topics else {}
        )
        for name in topology.output_topics()
    ]


def require_assignor_of_source_topics(strategy: str, sources: Sequence[str]) -> None:
    """Raise ConfigError if there are several source topics, counting repartition topics, and `strategy` is not `range`.

    A task needs the same partition number of each source topic. The assignor `range` assigns equal partition numbers to
    one member. The sticky assignors assign each partition separately.
    """
    if strategy != "range" and len(sources) > 1:
        raise ConfigError(
            f"streams.partition_assignment_strategy={strategy} is for one source topic, not for {', '.join(sources)}: "
            "a task takes the same partition of each"
        )


def require_same_partitions(counts: Mapping[str, int]) -> int:
    """Return the topics' common number of partitions. Raises ConfigError with all counts if they differ.

    A task needs the same partition number of every topic. The group's assignor assigns each topic separately. It
    assigns equal partition numbers to one instance only if all topics have equally many partitions.
    """
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name}: {number}" for name, number in sorted(counts.items()))
        remedy = "Give them the same number, or run their streams as applications of their own."
        if any(name.endswith(REPARTITION_SUFFIX) for name in counts):
            remedy = (
                "A repartition topic has the number that the sources had at the application's first start. Partitions "
                "that are added to it move keys away from their state. To start again, give the application another "
                "application_id, or stop all instances and run `penstock streams reset`."
            )
        raise ConfigError(
            f"the source topics have different numbers of partitions ({found}), and a task takes the same partition of "
            f"each. {remedy}"
        )
    return next(iter(counts.values()))


def require_changelog(wanted: NewTopic, partitions: int, configs: Configs, bootstrap_servers: str) -> None:
    """Raise ConfigError if Kafka would delete state from a changelog, or if its number of partitions is wrong.

    The message says what to do.
    """
    name = wanted.name
    wrong = [key for key in CHANGELOG_CONFIGS_REQUIRED if configs.get(key) != wanted.configs[key]]
    if wrong:
        found = ", ".join(f"{key}={configs.get(key)}" for key in wrong)
        correction = ",".join(f"{key}={wanted.configs[key]}" for key in wrong)
        raise ConfigError(
            f"the changelog topic {name} has {found}: Kafka would delete state from it. Correct it with: "
            f"kafka-configs.sh --bootstrap-server {bootstrap_servers} --alter --entity-type topics "
            f"--entity-name {name} --add-config {correction}"
        )
    if partitions < wanted.partitions:
        raise ConfigError(
            f"the changelog topic {name} has {partitions} partitions, the source topics have {wanted.partitions}. "
            "If partitions were added to the source, keys have moved. Open windows, totals and rows of a moved key "
            "stay in its old partition, and begin again in the new one: the key then has two rows, and its total stays "
            "wrong. To keep results right, give the application another application_id, or stop all instances and run "
            "`penstock streams reset`. To continue with split keys: kafka-topics.sh --bootstrap-server "
            f"{bootstrap_servers} --alter --topic {name} --partitions {wanted.partitions}"
        )
    if partitions > wanted.partitions:
        raise ConfigError(
            f"the changelog topic {name} has {partitions} partitions, the source topics have {wanted.partitions}: its "
            "state belongs to other source topics. Give the application another application_id, or delete the "
            "changelog topic, the group's offsets and the tables in the lake to start afresh."
        )


def retention_of_topic(configs: Configs) -> list[str]:
    """Return the retention settings of a topic, as `name=value`; empty if no retention deletes records.

    Kafka's `retention.ms` compares record timestamps with the clock. So a record whose event time is older than the
    retention is deleted minutes after it was written.
    """
    if "delete" not in (configs.get("cleanup.policy") or "delete"):
        return []
    return [f"{key}={configs[key]}" for key in RETENTION_CONFIGS if configs.get(key, "-1") != "-1"]


def warn_of_retention(name: str, configs: Configs) -> None:
    """Log a warning if a topic of event times deletes records by their times, or by its size."""
    if found := retention_of_topic(configs):
        log.warning(
            "a topic of event times has a retention: Kafka deletes its records by their times, or by its size",
            topic=name,
            configs=", ".join(found),
            correct_with="retention.ms=-1,retention.bytes=-1",
        )
