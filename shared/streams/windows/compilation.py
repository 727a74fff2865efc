"""Compiling the rules of windows before they are needed.

`python -m penstock.shared.streams.windows.compilation` compiles all kernels, the producer's as well, for an
installation or an image.
"""

from __future__ import annotations

import numpy as np

from penstock.shared.clients.producer import column_slices
from penstock.shared.common.compilation import in_thread
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.windows.kinds import SessionWindows, SlidingWindows, TimeWindows
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_store import WindowStore


def compile_kernels() -> None:
    """Have every kernel compiled, or read from where compiled code is kept."""
    column_slices.compile_kernels()
    times = np.array([1, 100], np.int64)
    for windows in (SessionWindows(10, 0), TimeWindows(10, 10, 0), SlidingWindows(10, 0)):
        store = WindowStore("compiled", windows.rule, StateColumns([Count()]), text_keys=True)
        store.take(times, store.index.codes_of([b"a", b"b"]), *store.columns.take(None, times))
        store.load("c", 5, 15, [1])
        store.unload("c", 5)
        store.advance(1_000)
        list(store.rows_of("a"))
        store.index.release(np.zeros(1, np.int64), np.zeros(store.index.capacity, np.bool_))


async def compile_in_thread() -> None:
    """As `compile_kernels`, beside the loop; logged where it takes its time."""
    await in_thread(compile_kernels, "the rules of windows")


if __name__ == "__main__":
    compile_kernels()
