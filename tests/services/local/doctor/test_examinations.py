"""The doctor's examination of topics by the age of their records, and of topics that are deleted meanwhile, on the
fake broker.
"""

from __future__ import annotations

from penstock.services.local.doctor.examinations import ATTEMPTS_MAX, examine_topics
from penstock.services.local.doctor.findings import Finding
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import INT64_MAX
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker.cluster import FakeCluster
from penstock.shared.testing.fake_broker.protocol import Api
from penstock.shared.testing.fake_broker.request import Request

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


async def examined(cluster: FakeCluster, *named: str) -> list[Finding]:
    settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    async with Admin(settings) as admin:
        return await examine_topics(admin, settings, set(named), NOW_MS)


async def test_records_in_a_segment_that_kafka_still_keeps_are_not_due() -> None:
    """Kafka deletes a segment when its last record is older than `retention.ms`. So a topic with timestamps of the time
    of writing has records as old as `retention.ms` and `segment.ms` together, and only older ones are due. Other old
    records are no finding: those of a topic without limit of time, of a compacted topic, and of unlimited segments.
    """
    topics: dict[str, tuple[int, dict[str, str]]] = {
        "ordinary": (13, {}),
        "endless": (100, {"retention.ms": "-1"}),
        "compacted": (100, {"cleanup.policy": "compact"}),
        "one-segment": (100, {"segment.ms": str(INT64_MAX)}),
        "event-times": (15, {}),
    }
    async with FakeCluster() as cluster:
        async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
            for name, (age_days, configs) in topics.items():
                cluster.create_topic(name, configs=configs)
                await (await producer.send(name, b"x", key=b"k", timestamp=NOW_MS - age_days * DAY_MS))
        findings = await examined(cluster)
        (named, *_) = await examined(cluster, "ordinary")
    assert {finding.about for finding in findings} == {"topic event-times"}
    assert "1 records are due already" in findings[0].message
    # In a topic that the user names, timestamps are event times.
    assert "1 records are due already" in named.message


async def test_a_topic_that_is_deleted_meanwhile_is_left_out() -> None:
    """If a topic is deleted after it was listed, the examination reports on the other topics."""
    async with FakeCluster() as cluster:
        cluster.create_topic("kept")
        cluster.create_topic("deleted")

        def delete_topic(_: Request) -> None:
            deletion.remove()
            cluster.delete_topic("deleted")

        deletion = cluster.control(Api.DESCRIBE_CONFIGS, delete_topic)
        assert await examined(cluster) == [Finding("ok", "topics (all)", "1 topics, which keep their records")]
    assert not deletion.is_on


async def test_a_named_internal_topic_is_examined() -> None:
    """Kafka's own topics are examined only if they are named. A named one that exists is not reported as missing."""
    async with FakeCluster() as cluster:
        cluster.create_topic("__consumer_offsets")
        assert await examined(cluster) == [Finding("ok", "topics (all)", "0 topics, which keep their records")]
        named = await examined(cluster, "__consumer_offsets")
    missing = [finding.about for finding in named if "does not exist" in finding.message]
    assert missing == ["dead-letter topic __consumer_offsets-dlq"]


async def test_deletions_at_every_attempt_are_a_problem() -> None:
    """If a topic is deleted during each attempt, the only finding names the last of these topics."""
    async with FakeCluster() as cluster:
        names = [f"deleted-{number}" for number in range(ATTEMPTS_MAX)]
        for name in names:
            cluster.create_topic(name)
        cluster.control(Api.DESCRIBE_CONFIGS, lambda _: cluster.delete_topic(names.pop()))
        (problem,) = await examined(cluster)
    assert (problem.level, problem.about, names) == ("problem", "topics", [])
    assert "deleted-0" in problem.message
