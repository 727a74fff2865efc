"""Fencing the producers of tasks that must not write any more, by taking their transactional ids over (an edge)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.settings import KafkaSettings

AT_ONCE_MAX = 10
"""Ids taken over at a time: each is a connection."""


async def fence_producers(kafka: KafkaSettings, transactional_ids: Iterable[str]) -> None:
    """Return when no producer that had one of these ids can write any more, nor has a transaction open.

    Raises what taking over raises: KafkaTimeout, AuthorizationFailed.
    """
    limit = asyncio.Semaphore(AT_ONCE_MAX)

    async def fence(transactional_id: str) -> None:
        async with limit, Producer(kafka, ProducerSettings(transactional_id=transactional_id)) as producer:
            await producer.init_transactions()

    async with asyncio.TaskGroup() as tasks:
        for transactional_id in transactional_ids:
            tasks.create_task(fence(transactional_id))
