"""Functions over arrays that numba compiles, and that run as plain Python where it is not installed.

Compiled code is cached per user by numba (`NUMBA_CACHE_DIR`). With `NUMBA_DISABLE_JIT=1` the functions run slowly, and
a debugger can step through them. numba is loaded with the first module that has such a function, and not by this one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from penstock.shared.common.log import get_logger

IS_COMPILED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "") in {"", "0"}

REPORTED_AFTER_SECONDS = 1.0
"""What takes longer is compiled, and not read from the cache."""

Kernel = Callable[..., Any]

log = get_logger(__name__)

_compiled: set[Callable[[], None]] = set()


def compiled(function: Kernel) -> Kernel:
    """The function, compiled at its first call; it releases the GIL."""
    if not IS_COMPILED:
        return function
    import numba

    try:
        cached: Kernel = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder that can be written: compiled anew by each process
        plain: Kernel = numba.njit(nogil=True, error_model="numpy")(function)
        return plain
    return cached


async def compile_in_thread(compile_kernels: Callable[[], None], what: str) -> None:
    """Call `compile_kernels` beside the loop, once a process; log that `what` is compiled where that takes its time."""
    if compile_kernels in _compiled:
        return
    compiling = asyncio.create_task(asyncio.to_thread(compile_kernels))
    done, _ = await asyncio.wait({compiling}, timeout=REPORTED_AFTER_SECONDS)
    if not done:
        log.info(f"compiling {what}: some seconds, and only at the first start on a machine")
    await compiling
    _compiled.add(compile_kernels)
