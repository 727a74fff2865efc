"""Functions over arrays that numba compiles, and that run as plain Python where it is not installed.

Compiled code is cached per user by numba (`NUMBA_CACHE_DIR`). With `NUMBA_DISABLE_JIT=1` the functions run slowly, and
a debugger can step through them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

try:
    import numba
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = not getattr(numba.config, "DISABLE_JIT", 0)

Kernel = Callable[..., Any]


def compiled(function: Kernel) -> Kernel:
    """The function, compiled at its first call; it releases the GIL."""
    if not IS_COMPILED:
        return function
    try:
        cached: Kernel = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # there is no folder that can be written: compiled anew by each process
        plain: Kernel = numba.njit(nogil=True, error_model="numpy")(function)
        return plain
    return cached


@cache
def has_compiler() -> bool:
    """Whether kernels are compiled: what `IS_COMPILED` says, found without loading numba."""
    return find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") in {"", "0"}
