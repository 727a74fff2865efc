"""The admin's calls about topics: what they wait for beside the answer has the caller's time."""

from __future__ import annotations

import time

import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.errors import KafkaTimeout
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, Drop, FakeCluster


async def test_leaders_are_waited_for_in_the_callers_time() -> None:
    """A broker that makes the topic and then does not answer: the call ends after its `timeout_ms`."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=5_000)
        async with Admin(kafka) as admin:
            await admin.list_topics()
            cluster.control(Api.METADATA, Drop())
            started = time.monotonic()
            with pytest.raises(KafkaTimeout):
                await admin.create_topics([NewTopic("new", 1)], timeout_ms=300)
            assert time.monotonic() - started < 2
