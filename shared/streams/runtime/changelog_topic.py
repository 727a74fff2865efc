"""Access to an application's changelog topic: a consumer of its partitions, and its id."""

from __future__ import annotations

from typing import Literal

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.settings import KafkaSettings

Isolation = Literal["read_uncommitted", "read_committed"]


def changelog_consumer(kafka: KafkaSettings, isolation_level: Isolation = "read_committed") -> Consumer:
    """Return a consumer for a changelog partition. The caller opens it, assigns the partition and seeks."""
    settings = ConsumerSettings(
        isolation_level=isolation_level, auto_offset_reset="none", commit_strategy="none", max_poll_records=None
    )
    return Consumer(kafka, settings)


async def fetch_changelog_topic_id(kafka: KafkaSettings, topic: str) -> str | None:
    """Return the current id of the changelog topic; None if the broker has no topic ids."""
    async with Admin(kafka) as admin:
        return (await admin.describe_topics([topic]))[topic].topic_id
