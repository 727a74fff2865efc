"""Packed strings as compiled kernels take them, and a kernel that copies some of them.

>>> fetched = PackedBytes.of([b"ann", None, b"bob", b"eve"])
>>> some = copied(fetched.at(np.array([2, 1])))
>>> list(some), some.data.tobytes()
([b'bob', None], b'bob')
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.compiled import compiled, copy_bytes
from penstock.shared.common.packed_bytes import PackedBytes


def kernel_strings(strings: PackedBytes) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Buffer, offsets and lengths, as kernels take them."""
    return (
        kernel_array(strings.data, np.uint8),
        kernel_array(strings.offsets, np.int64),
        kernel_array(strings.lengths, np.int64),
    )


def kernel_array(array: NDArray[Any], of: Any) -> NDArray[Any]:
    """The array, contiguous and read-only: a kernel would be compiled for every other kind when that is first met."""
    view = np.ascontiguousarray(array, of).view()
    view.flags.writeable = False
    return view


@compiled
def _copy(data, offsets, lengths, out, out_offsets):
    at = 0
    for row in range(len(lengths)):
        out_offsets[row] = at
        if lengths[row] > 0:
            copy_bytes(out, at, data, offsets[row], lengths[row])
            at += lengths[row]


def copied(strings: PackedBytes) -> PackedBytes:
    """The same strings in a buffer of their own: what they were in is not kept for their sake."""
    out, offsets = np.empty(int(strings.sizes().sum()), np.uint8), np.empty(len(strings), np.int64)
    _copy(*kernel_strings(strings), out, offsets)
    return PackedBytes(out, offsets, strings.lengths)


def compile_kernels() -> None:
    """Have the kernel compiled, or read from where compiled code is kept."""
    copied(PackedBytes.of([b"a"]))
