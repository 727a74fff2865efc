"""Compiling kernels before they are needed: some seconds once on a machine, then half a second a start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from penstock.shared.common.log import get_logger

LOGGED_AFTER_SECONDS = 1.0
"""What takes longer is no cached code."""

T = TypeVar("T")

log = get_logger(__name__)


async def in_thread(load: Callable[[], T], kernels: str) -> T:
    """What `load` gives, beside the loop; logged where it takes its time."""
    loading = asyncio.create_task(asyncio.to_thread(load))
    done, _ = await asyncio.wait({loading}, timeout=LOGGED_AFTER_SECONDS)
    if not done:
        log.info(f"compiling {kernels}: some seconds, and only at the first start on a machine")
    return await loading
