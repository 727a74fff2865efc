"""Functions over arrays that numba compiles. If numba is not installed they run as plain Python.

Numba caches compiled code on disk: in `NUMBA_CACHE_DIR`, or in numba's default folder. It compiles a function again if
anything that its code may contain has changed (`_stamp_of_cached_code`). With `NUMBA_DISABLE_JIT=1` the functions run
slowly, and a debugger can step through them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import numpy as np

from penstock.shared.common.kernel_loading import IS_COMPILED

Kernel = Callable[..., Any]

_NUMBERS = (int, float, np.number)

if IS_COMPILED:
    from numba.core import types

    def _widened_kernel_argument(argument: Any) -> Any:
        """The type for which a kernel is compiled if another kernel passes it an argument of the type `argument`.

        It is int64 for int32, and the plain type of a constant. Any other type stays the same.
        """
        plain: Any = types.unliteral(argument)  # type: ignore[no-untyped-call]
        return types.int64 if plain == types.int32 else plain


def _stamp_of_cached_code(module: dict[str, Any]) -> bytes:
    """Return a digest of all that the code of a module's kernels may contain, from the module's globals.

    Numba's own stamp covers only the file of the kernel. But the code also contains the numbers that the module
    imports, and the code of the kernels and intrinsics that it imports.
    """
    digest = hashlib.sha256()
    seen = {module["__name__"]}
    modules = [module]
    for one in modules:
        digest.update(one["__loader__"].get_data(one["__file__"]))
        for name, value in one.items():
            if isinstance(value, _NUMBERS):
                digest.update(f"{name}={value!r};".encode())
                continue
            function = getattr(value, "__wrapped__", None)
            if isinstance(function, FunctionType) and function.__module__ not in seen:
                seen.add(function.__module__)
                modules.append(function.__globals__)
    return digest.digest()


def compiled(function: Kernel) -> Kernel:
    """Return the function (a kernel), compiled at its first call. It releases the GIL.

    A kernel must not create arrays or copy one slice into another: it runs without numba's runtime, which counts
    references to arrays. If kernels call each other, this counting would take most of their time.
    """
    if not IS_COMPILED:
        # A hash overflows 64 bits on purpose.
        return np.errstate(over="ignore")(function)
    import numba

    options: Any = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
    try:
        kernel: Any = numba.njit(cache=True, **options)(function)
        kernel._cache._cache_file._source_stamp = _stamp_of_cached_code(function.__globals__)
    except RuntimeError:
        # No cache folder is writable, so each process compiles the function again.
        kernel = numba.njit(**options)(function)
    template = kernel.get_call_template
    kernel.get_call_template = lambda arguments, names: template(tuple(map(_widened_kernel_argument, arguments)), names)
    return cast(Kernel, kernel)
