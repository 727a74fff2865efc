"""Retries the first connection of a service to Kafka, which may start after the service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.shared.common.errors import RetriableError
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

T = TypeVar("T")

RETRY_MS = 1_000


async def first_connection(connect: Callable[[], Awaitable[T]]) -> T:
    """Call `connect` until it succeeds, and return its result. After a RetriableError, try again RETRY_MS later.

    Log the error if its reason differs from that of the previous attempt. Any other error is raised.
    """
    logged_reason = ""
    while True:
        try:
            return await connect()
        except RetriableError as e:
            if str(e) != logged_reason:
                log.warning("waiting for Kafka", error=type(e).__name__, reason=str(e))
            logged_reason = str(e)
        await asyncio.sleep(RETRY_MS / 1000)
