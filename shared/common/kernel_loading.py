"""Compiles kernels (functions over arrays) before they are needed.

Compiling takes some seconds once on each machine; then loading takes half a second at each start. `IS_COMPILED` is
false if numba is not installed or is switched off. This module does not import numba; the modules with kernels do.
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
"""A load that takes longer is logged. A load from the cache usually takes half of this, but more on a busy machine."""

T = TypeVar("T")

log = get_logger(__name__)


async def loaded(load: Callable[[], T], kernels: str) -> T:
    """Call `load` in a thread and return its result. A load of `kernels` that takes long is logged."""
    loading = asyncio.create_task(asyncio.to_thread(load))
    done, _ = await asyncio.wait({loading}, timeout=LOGGED_AFTER_SECONDS)
    if not done:
        log.info("a load takes long: the first start on a machine compiles code for some seconds", what=kernels)
    return await loading
