"""Rules for a set-up: facts in, findings out.

Sans-IO. A finding states a fact and how to fix it. A `problem` loses records or stops a service; a
`warning` may be intended. Kafka does not record whether timestamps are event times. A topic is treated as one with
event times if the user named it, if its name ends in `-late`, or if it has records that are too old for timestamps of
the time of writing. Kafka deletes whole segments, and a segment is due when its last record is older than
`retention.ms`. So an ordinary record can become as old as `retention.ms` and `segment.ms` together.

>>> facts = TopicFacts("clicks", 1, {"retention.ms": "604800000"}, due=7)
>>> [finding.level for finding in topic_findings(facts, "localhost:9092")]
['problem']
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.shared.clients.admin import NewTopic, event_time_topic, max_message_bytes_with
from penstock.shared.clients.admin.types import topic_before_3_6
from penstock.shared.common.records import INT64_MAX
from penstock.shared.common.topic_names import CHANGELOG_SUFFIX, DEAD_LETTER_SUFFIX, LATE_SUFFIX, dead_letter_topic
from penstock.shared.streams.runtime.application_topics import (
    CHANGELOG_CONFIGS,
    CHANGELOG_CONFIGS_REQUIRED,
    RETENTION_CONFIGS,
)
from penstock.shared.streams.settings import DEAD_LETTER_OVERHEAD_MAX

Level = Literal["problem", "warning", "ok"]

DISK_FULL_BYTES = 64 << 20
"""With less free space neither Kafka nor Spark can work."""
DISK_SCARCE_BYTES = 1 << 30
RETENTION_CHECK_MS = 300_000
"""The default of Kafka's `log.retention.check.interval.ms`: a segment that is due is deleted within this time."""
TYPE_CONFIG = "message.timestamp.type"
AHEAD_CONFIG = "message.timestamp.after.max.ms"
BEHIND_CONFIG = "message.timestamp.before.max.ms"
DIFFERENCE_CONFIG = "message.timestamp.difference.max.ms"
"""The limit of Kafka before 3.6, in both directions. Kafka 3.6 to 3.9 use it where the newer config sets none."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a part of the set-up, and how to fix it: a command or advice (may be empty)."""

    level: Level
    about: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.about}: {self.message}" + (f"; fix it with: {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """The facts about one topic."""

    name: str
    partitions: int
    configs: Mapping[str, str | None]
    """The values in force, defaults included."""
    due: int = 0
    """The number of offsets before the first record that is younger than `age_ms_max`. The partitions are summed up."""
    gone: int = 0
    """The number of offsets before the earliest ones of the partitions: their records are deleted."""
    leaderless: tuple[int, ...] = ()
    """Partitions without a leader."""
    named: bool = False
    """True if the user named the topic."""

    def ms(self, config: str) -> int | None:
        """Return a config as a number; None if it sets no limit."""
        value = int(self.configs.get(config) or -1)
        return None if value < 0 or value == INT64_MAX else value

    @property
    def is_before_3_6(self) -> bool:
        """Whether the broker is Kafka before 3.6: it has only the older limit of timestamps."""
        return DIFFERENCE_CONFIG in self.configs and BEHIND_CONFIG not in self.configs

    @property
    def deletes(self) -> bool:
        return "delete" in (self.configs.get("cleanup.policy") or "delete")

    @property
    def age_ms_max(self) -> int | None:
        """The age from which on a record counts as due; None if no record does.

        In a topic that is known to have event times, this is `retention.ms`. In another topic, a record is due only if
        Kafka would have deleted it, had its timestamp been the time of writing.
        """
        retention_ms = self.ms("retention.ms") if self.deletes else None
        if retention_ms is None or self._is_of_event_times:
            return retention_ms
        segment_ms = self.ms("segment.ms")
        return None if segment_ms is None else retention_ms + segment_ms + RETENTION_CHECK_MS

    @property
    def _is_of_event_times(self) -> bool:
        return self.named or self.name.endswith(LATE_SUFFIX)

    @property
    def holds_event_times(self) -> bool:
        return self._is_of_event_times or self.due > 0


def topic_findings(topic: TopicFacts, bootstrap_servers: str) -> list[Finding]:
    """Return the findings on configs of a topic that do not suit event times; none if it seems to have no event times.

    Such configs replace event times, delete or reject records, or start many segments. The caller does not pass
    changelogs and dead-letter topics.
    """
    found: list[Finding] = []
    if not topic.holds_event_times:
        return found

    def add_finding(level: Level, message: str, **configs: str) -> None:
        fix = alter_topic_command(bootstrap_servers, topic.name, {k.replace("_", "."): v for k, v in configs.items()})
        found.append(Finding(level, f"topic {topic.name}", message, fix))

    # With LogAppendTime there are no event times, so the other rules do not apply.
    if topic.configs.get(TYPE_CONFIG) == "LogAppendTime":
        message = f"{TYPE_CONFIG}=LogAppendTime: Kafka replaces each event time by the time of writing"
        add_finding("problem" if topic.named else "warning", message, message_timestamp_type="CreateTime")
        return found
    if topic.deletes and (limits := [c for c in RETENTION_CONFIGS if topic.ms(c) is not None]):
        shown = ", ".join(f"{name}={topic.configs[name]}" for name in limits)
        if "retention.ms" in limits:
            reason = "Kafka deletes by record timestamp, so old event times are gone soon after they were written"
        else:
            reason = "Kafka deletes the first records of a partition that is larger"
        message = f"{shown}: {reason}"
        if topic.due:
            message += f"; {topic.due} records are due already"
        if topic.gone:
            message += f"; {topic.gone} offsets at the front have no records any more"
        add_finding("problem" if topic.due else "warning", message, **{name.replace(".", "_"): "-1" for name in limits})
    if not topic.deletes and topic.named:
        message = f"cleanup.policy={topic.configs['cleanup.policy']}: only the last record of each key is kept"
        add_finding("warning", message, cleanup_policy="delete")
    if (segment_ms := topic.ms("segment.ms")) is not None:
        message = f"segment.ms={segment_ms}: each jump of event time by more than that starts another segment"
        add_finding("warning", message, segment_ms=str(INT64_MAX))
    if (ahead_ms := topic.ms(AHEAD_CONFIG)) is not None:
        message = f"{AHEAD_CONFIG}={ahead_ms}: one record further ahead makes the broker reject its whole batch"
        add_finding("warning", message, message_timestamp_after_max_ms=str(INT64_MAX))
    behind = BEHIND_CONFIG if topic.ms(BEHIND_CONFIG) is not None else DIFFERENCE_CONFIG
    if (behind_ms := topic.ms(behind)) is not None:
        message = f"{behind}={behind_ms}: one record with an older event time makes the broker reject its batch"
        add_finding("problem", message, **{behind.replace(".", "_"): str(INT64_MAX)})
    return found


def changelog_findings(topic: TopicFacts, groups: Iterable[str], bootstrap_servers: str) -> list[Finding]:
    """Return the findings on whether a changelog keeps its records.

    A topic whose name ends in `-changelog` may belong to another system. The finding is a problem if the user named the
    topic, or if a consumer group has the topic's name without `-changelog`. Otherwise it is a warning.
    """
    wrong = [name for name in CHANGELOG_CONFIGS_REQUIRED if topic.configs.get(name) != CHANGELOG_CONFIGS[name]]
    if not wrong:
        return []
    ours = topic.named or topic.name.removesuffix(CHANGELOG_SUFFIX) in set(groups)
    shown = ", ".join(f"{name}={topic.configs.get(name)}" for name in wrong)
    message = f"{shown}: Kafka deletes state from it" + ("" if ours else ", if it is a changelog of Penstock's")
    fix = alter_topic_command(bootstrap_servers, topic.name, {name: CHANGELOG_CONFIGS[name] for name in wrong})
    return [Finding("problem" if ours else "warning", f"changelog {topic.name}", message, fix)]


def dead_letter_findings(source: TopicFacts, dead_letters: TopicFacts | None, bootstrap_servers: str) -> list[Finding]:
    """Return the findings on a source topic's dead-letter topic: it is missing, or the largest dead letters do not fit.

    A missing topic is a finding only if the user named the source topic.
    """
    name = dead_letter_topic(source.name)
    needed = max_message_bytes_with(source.configs, DEAD_LETTER_OVERHEAD_MAX)
    if dead_letters is None:
        if not source.named:
            return []
        configs = {"max.message.bytes": str(needed)}
        topic = event_time_topic(name, source.partitions)
        fix = create_topic_command(
            bootstrap_servers, topic_before_3_6(topic) if source.is_before_3_6 else topic, configs
        )
        message = "it does not exist; the aggregator and the consumer create it at start-up if they may"
        return [Finding("warning", f"dead-letter topic {name}", message, fix)]
    width = int(dead_letters.configs.get("max.message.bytes") or 0)
    if width >= needed:
        return []
    message = f"max.message.bytes={width}: the largest records of {source.name} do not fit with a dead letter's headers"
    fix = alter_topic_command(bootstrap_servers, name, {"max.message.bytes": str(needed)})
    return [Finding("problem" if source.named else "warning", f"dead-letter topic {name}", message, fix)]


def all_topic_findings(
    topics: Mapping[str, TopicFacts], missing: Iterable[str], groups: Iterable[str], bootstrap_servers: str
) -> list[Finding]:
    """Return the findings on all `topics`, and on the `missing` topics, which the user named and which do not exist."""
    found: list[Finding] = []
    groups = set(groups)
    before_3_6 = any(topic.is_before_3_6 for topic in topics.values())
    for name in missing:
        new = event_time_topic(name, 4)
        fix = create_topic_command(bootstrap_servers, topic_before_3_6(new) if before_3_6 else new, {})
        # Only the configs of a topic show whether the broker knows the newer limits.
        if not topics:
            limit = f"--config {DIFFERENCE_CONFIG}={INT64_MAX}"
            fix += f" (Kafka before 3.6: {limit} instead of {BEHIND_CONFIG} and {AHEAD_CONFIG})"
        found.append(Finding("problem", f"topic {name}", "it does not exist", fix))
    for name, topic in sorted(topics.items()):
        if topic.leaderless:
            numbers = ", ".join(map(str, topic.leaderless))
            message = f"partitions {numbers} have no leader: they can be neither read nor written"
            fix = (
                f"kafka-topics.sh --bootstrap-server {bootstrap_servers} --describe --topic {name} "
                "(and start the brokers of its replicas)"
            )
            found.append(Finding("problem", f"topic {name}", message, fix))
        if name.endswith(CHANGELOG_SUFFIX):
            found += changelog_findings(topic, groups, bootstrap_servers)
        elif not name.endswith(DEAD_LETTER_SUFFIX):
            found += topic_findings(topic, bootstrap_servers)
            found += dead_letter_findings(topic, topics.get(dead_letter_topic(name)), bootstrap_servers)
    return found


def disk_finding(folder: str, free_bytes: int) -> Finding:
    """Return the finding on the free space of a folder's disk."""
    about = f"disk of {folder}"
    message = f"{free_bytes >> 20} MiB are free"
    if free_bytes >= DISK_SCARCE_BYTES:
        return Finding("ok", about, message)
    level: Level = "problem" if free_bytes < DISK_FULL_BYTES else "warning"
    return Finding(level, about, message, f"du -xh -d 2 {folder} | sort -h | tail (and remove what is not needed)")


def alter_topic_command(bootstrap_servers: str, topic: str, configs: Mapping[str, str]) -> str:
    """Return the `kafka-configs.sh` command that fixes a finding by setting a topic's configs."""
    given = ",".join(f"{name}={value}" for name, value in configs.items())
    return (
        f"kafka-configs.sh --bootstrap-server {bootstrap_servers} --alter --entity-type topics --entity-name {topic} "
        f"--add-config {given}"
    )


def create_topic_command(bootstrap_servers: str, topic: NewTopic, configs: Mapping[str, str]) -> str:
    """Return the `kafka-topics.sh` command that fixes a finding by creating a topic."""
    given = "".join(f" --config {name}={value}" for name, value in {**topic.configs, **configs}.items())
    return (
        f"kafka-topics.sh --bootstrap-server {bootstrap_servers} --create --topic {topic.name} "
        f"--partitions {topic.partitions}{given}"
    )
