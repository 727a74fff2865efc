"""The doctor's examination of topics that are deleted meanwhile, on the fake broker."""

from __future__ import annotations

from penstock.services.local.doctor.examinations import ATTEMPTS_MAX, examine_topics
from penstock.services.local.doctor.findings import Finding
from penstock.shared.clients.admin import Admin
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker.cluster import FakeCluster
from penstock.shared.testing.fake_broker.protocol import Api
from penstock.shared.testing.fake_broker.request import Request

NOW_MS = 1_700_000_000_000


async def examined(cluster: FakeCluster, *named: str) -> list[Finding]:
    settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    async with Admin(settings) as admin:
        return await examine_topics(admin, settings, set(named), NOW_MS)


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
