"""Whether kernels are compiled, and compiling them before they are needed: some seconds once on a machine, then half a
second a start. This module does not load numba; `compiled` does, and with it every module that has kernels.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from penstock.shared.common.log import get_logger

IS_COMPILED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "") in {"", "0"}

LOGGED_AFTER_SECONDS = 1.0
"""What takes longer is no cached code."""

T = TypeVar("T")

log = get_logger(__name__)


async def loaded(load: Callable[[], T], kernels: str) -> T:
    """What `load` gives, beside the loop; logged where it takes its time."""
    loading = asyncio.create_task(asyncio.to_thread(load))
    done, _ = await asyncio.wait({loading}, timeout=LOGGED_AFTER_SECONDS)
    if not done:
        log.info(f"compiling {kernels}: some seconds, and only at the first start on a machine")
    return await loading
