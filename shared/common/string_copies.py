"""Packed strings copied out of the buffer that they are in, by a kernel.

>>> fetched = PackedBytes.of([b"ann", None, b"bob", b"eve"])
>>> some = copied(fetched.at(np.array([2, 1])))
>>> list(some), some.data.tobytes()
([b'bob', None], b'bob')
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import numpy as np

from penstock.shared.common.compiled import compiled, copy_bytes
from penstock.shared.common.packed_bytes import PackedBytes


@compiled
def _copy_strings_kernel(data, offsets, lengths, out, out_offsets):
    at = 0
    for row in range(len(lengths)):
        out_offsets[row] = at
        if lengths[row] > 0:
            copy_bytes(out, at, data, offsets[row], lengths[row])
            at += lengths[row]


def copied(strings: PackedBytes) -> PackedBytes:
    """The same strings in a new buffer, so that the old buffer can be freed."""
    out = np.empty(int(strings.sizes().sum()), np.uint8)
    offsets = np.empty(len(strings), np.int64)
    _copy_strings_kernel(*strings.arrays, out, offsets)
    return PackedBytes(out, offsets, strings.lengths)


def compile_kernels() -> None:
    """Compile the kernel, or load it from the cache of compiled code."""
    copied(PackedBytes.of([b"a"]))
