"""The examinations of `penstock doctor`: they collect facts about Kafka and this machine, and return the findings."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.services.local.broker_config import KAFKA_JARS
from penstock.services.local.doctor.findings import Finding, TopicFacts, all_topic_findings, disk_finding
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import ConfigError, PenstockError, UnknownTopicOrPartition
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import JarSet, cache_root, missing_jars
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import dead_letter_topic

# More attempts are hardly needed: an examination takes well under a second, and topics are rarely deleted.
ATTEMPTS_MAX = 5


async def examine_kafka(kafka: KafkaSettings, topics: Iterable[str], now_ms: int) -> list[Finding]:
    """Examine Kafka, and the named topics with their dead-letter topics; without names all topics except Kafka's own.

    If Kafka cannot be examined, the only finding is the error, and nothing is raised.
    """
    about = f"Kafka at {kafka.bootstrap_servers}"
    try:
        async with Admin(kafka, timeout_ms=kafka.request_timeout_ms) as admin:
            brokers = (await admin.cluster()).brokers
            if lacking := await admin.unsupported_requests():
                remedy = "an upgrade of the brokers to Kafka 2.8 or newer"
                return [Finding("problem", about, f"it does not support {', '.join(lacking)}", remedy)]
            reached = Finding("ok", about, f"{len(brokers)} brokers, which support all required requests")
            return [reached, *await examine_topics(admin, kafka, set(topics), now_ms)]
    except PenstockError as e:
        remedy = "penstock kafka (runs one on this machine), or --kafka.bootstrap-servers=HOST:PORT of yours"
        return [Finding("problem", about, f"{type(e).__name__}: {e}", remedy)]


async def examine_topics(admin: Admin, kafka: KafkaSettings, named: set[str], now_ms: int) -> list[Finding]:
    """Examine the named topics and their dead-letter topics; without names all topics except Kafka's own.

    If a topic is deleted during the examination, the examination starts again, at most ATTEMPTS_MAX times in all. A
    named topic that does not exist is a problem.
    """
    for _ in range(ATTEMPTS_MAX):
        # A named topic may be one of Kafka's own.
        existing = set(await admin.list_topics(internal=bool(named)))
        wanted = existing & (named | {dead_letter_topic(name) for name in named}) if named else existing
        try:
            facts = await _collect_topic_facts(admin, sorted(wanted), named, now_ms)
        except UnknownTopicOrPartition as e:
            # A topic was deleted after it was listed.
            deleted = e
            continue
        groups = [group.group_id for group in await admin.list_groups()]
        findings = all_topic_findings(facts, sorted(named - existing), groups, kafka.bootstrap_servers)
        shown = "topics" if named else "topics (all)"
        return findings or [Finding("ok", shown, f"{len(facts)} topics, which keep their records")]
    message = f"a topic was deleted during each of {ATTEMPTS_MAX} examinations, the last time: {deleted}"
    return [Finding("problem", "topics", message, "penstock doctor, once no more topics are being deleted")]


async def _collect_topic_facts(
    admin: Admin, topics: Sequence[str], named: set[str], now_ms: int
) -> dict[str, TopicFacts]:
    described = await admin.describe_topics(topics)
    configs = await admin.topic_configs(topics)
    bare = {
        name: TopicFacts(
            name,
            len(topic.partitions),
            {entry.name: entry.value for entry in configs[name]},
            leaderless=tuple(p.partition for p in topic.partitions if p.leader is None),
            named=name in named,
        )
        for name, topic in described.items()
    }
    partitions = {
        name: [TopicPartition(name, p.partition) for p in topic.partitions if p.leader is not None]
        for name, topic in described.items()
    }
    first = await admin.list_offsets({tp: "earliest" for tps in partitions.values() for tp in tps})
    limits = {name: topic.age_ms_max for name, topic in bare.items()}
    cut = {tp: max(0, now_ms - ms) for name, ms in limits.items() if ms is not None for tp in partitions[name]}
    due = dict.fromkeys(bare, 0)
    # The first offset with a record that is young enough: all records before it are older.
    for tp, offset in (await admin.list_offsets(cut)).items():
        due[tp.topic] += max(0, offset - first[tp])
    return {
        name: replace(topic, due=due[name], gone=sum(first[tp] for tp in partitions[name]))
        for name, topic in bare.items()
    }


def examine_machine(data_dir: Path) -> list[Finding]:
    """Examine Java, the jars that Kafka and Spark need, and the free space for the cache and for `data_dir`."""
    findings = [_examine_java(), _examine_jars(KAFKA_JARS, "penstock jars kafka")]
    try:
        # This imports pyspark, which takes a second.
        from penstock.services.spark.spark_session import SPARK_JARS
    except ModuleNotFoundError:
        findings.append(Finding("ok", "Spark", 'not installed; its jobs need: pip install "penstock[spark]"'))
    else:
        findings.append(_examine_jars(SPARK_JARS, "penstock jars spark"))
    disks = {
        str(folder): shutil.disk_usage(folder).free
        for folder in map(_nearest_existing_folder, (cache_root(), data_dir))
    }
    return [*findings, *(disk_finding(folder, free_bytes) for folder, free_bytes in disks.items())]


def _examine_java() -> Finding:
    try:
        java = find_java()
    except ConfigError as e:
        # The error names the command.
        return Finding("problem", "Java", str(e))
    return Finding("ok", "Java", f"{java.executable} is version {java.version}")


def _examine_jars(wanted: JarSet, command: str) -> Finding:
    folder = cache_root() / wanted.folder
    if missing := len(missing_jars(wanted)):
        why = f"{missing} of {len(wanted.jars)} jars are not in {folder}: the first start downloads them"
        return Finding("warning", wanted.title, why, command)
    return Finding("ok", wanted.title, f"its jars are in {folder}")


def _nearest_existing_folder(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
