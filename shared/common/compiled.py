"""Functions over arrays that numba compiles, and that run as plain Python where it is not installed.

Compiled code is cached per user by numba (`NUMBA_CACHE_DIR`). With `NUMBA_DISABLE_JIT=1` the functions run slowly, and a
debugger can step through them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

try:
    import numba
except ImportError:
    IS_COMPILED = False
else:
    IS_COMPILED = not numba.config.DISABLE_JIT


def compiled(function: Function) -> Function:
    """The function, compiled at its first call; it releases the GIL."""
    if not IS_COMPILED:
        return function
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def inlined(function: Function) -> Function:
    """As `compiled`, for a small function that only compiled ones call."""
    if not IS_COMPILED:
        return function
    return numba.njit(cache=True, nogil=True, error_model="numpy", inline="never")(function)
