"""`penstock doctor` against a real Kafka: it finds problems, and the commands that it prints fix them."""

from __future__ import annotations

import re
import time

from penstock.services.local.doctor.examinations import examine_kafka
from penstock.shared.clients.admin import Admin, NewTopic, event_time_topic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.application_topics import CHANGELOG_CONFIGS
from tests.shared_broker import Broker

NOW_MS = int(time.time() * 1000)
WEEK_MS = 7 * 86_400_000
ADDED_CONFIG = re.compile(r"--add-config (\S+)")


async def test_problems_are_found_and_fixed(kafka: Broker, topic_name: str) -> None:
    """Old event times under a retention, a compacted changelog and a dead-letter topic with too small a limit are
    found. Topics with the configs that the commands set have no finding.
    """
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    source, dead_letters, changelog = topic_name, f"{topic_name}-dlq", f"{topic_name}-changelog"
    # Default segments: the broker would delete the old records within minutes, not within this test.
    trap = NewTopic(source, 2, configs={"retention.ms": str(WEEK_MS)})
    compacted = NewTopic(changelog, 2, configs={"cleanup.policy": "compact"})
    async with Admin(settings) as admin:
        await admin.create_topics([trap, NewTopic(dead_letters, 2), compacted])
        async with Producer(settings) as producer:
            for age_ms, partition in ((8 * WEEK_MS, 0), (2 * WEEK_MS, 1), (0, 1)):
                await (await producer.send(source, b"x", partition=partition, timestamp=NOW_MS - age_ms))
        findings = await examine_kafka(settings, [source, changelog], NOW_MS)
        assert findings[0].level == "ok"
        problems = {finding.about: finding for finding in findings if finding.level == "problem"}
        assert set(problems) == {f"topic {source}", f"changelog {changelog}", f"dead-letter topic {dead_letters}"}
        assert "2 records are due already" in problems[f"topic {source}"].message

        changed: dict[str, dict[str, str]] = {source: {}, dead_letters: {}, changelog: {}}
        for finding in findings[1:]:
            given = ADDED_CONFIG.search(finding.fix)
            assert given is not None, finding
            changed[finding.about.split()[-1]] |= dict(pair.split("=", 1) for pair in given.group(1).split(","))
        fixed = {name.replace(topic_name, f"{topic_name}-fixed"): given for name, given in changed.items()}
        await admin.create_topics([NewTopic(name, 2, configs=given) for name, given in fixed.items()])
        names = [name for name in fixed if not name.endswith("-dlq")]
        assert [finding.level for finding in await examine_kafka(settings, names, NOW_MS)] == ["ok", "ok"]


async def test_topics_that_penstock_creates_have_no_findings(kafka: Broker, topic_name: str) -> None:
    """An event-time topic with old records, its DLQ and a changelog, as Penstock creates them, have no finding."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    made = [
        event_time_topic(topic_name, 1),
        event_time_topic(f"{topic_name}-dlq", 1, max_message_bytes="2000000"),
        NewTopic(f"{topic_name}-changelog", 1, configs=CHANGELOG_CONFIGS),
    ]
    async with Admin(settings) as admin, Producer(settings) as producer:
        await admin.create_topics(made)
        await (await producer.send(topic_name, b"x", timestamp=1_000))
    findings = await examine_kafka(settings, [topic_name, f"{topic_name}-changelog"], NOW_MS)
    assert [finding.level for finding in findings] == ["ok", "ok"]


async def test_all_topics_are_examined_by_default(kafka: Broker, topic_name: str) -> None:
    """Without topics all are examined, and old records mark a topic of event times; a missing topic is a problem."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with Admin(settings) as admin, Producer(settings) as producer:
        await admin.create_topics([NewTopic(topic_name, 1, configs={"retention.ms": str(WEEK_MS)})])
        await (await producer.send(topic_name, b"x", timestamp=NOW_MS - 3 * WEEK_MS))
    about = f"topic {topic_name}"
    assert "problem" in [f.level for f in await examine_kafka(settings, [], NOW_MS) if f.about == about]
    missing = f"{topic_name}-no"
    (problem,) = [f for f in await examine_kafka(settings, [missing], NOW_MS) if f.level == "problem"]
    assert (problem.about, "--create --topic" in problem.fix) == (f"topic {missing}", True)
