"""A log's waits, with a slow Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.shared.common.errors import KafkaTimeout
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.storage.kafka_based_log import KafkaBasedLog, LogTopic
from tests import virtual_time

TP = TopicPartition("t", 0)


class SlowAdmin:
    """Returns an end offset after 750 ms."""

    async def list_offsets(self, *_args: object, **_more: object) -> Mapping[TopicPartition, int]:
        await virtual_time.let_pass(0.75)
        return {TP: 1}


class StuckConsumer:
    """Reads nothing."""

    def known_position(self, _tp: TopicPartition) -> int:
        return 0


def test_read_to_end_takes_no_longer_than_its_timeout() -> None:
    """The lookup of the end offsets and the wait for the records share one timeout."""

    async def scenario() -> float:
        admin: Any = SlowAdmin()
        producer: Any = None
        consumer: Any = StuckConsumer()
        log = KafkaBasedLog(KafkaSettings(), admin, producer, LogTopic("t", 1), lambda _record: None)
        log._consumer = consumer
        with pytest.raises(KafkaTimeout):
            await log.read_to_end(timeout_ms=1_000)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(scenario()) == pytest.approx(1.0)
