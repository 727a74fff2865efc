"""Compiling the rules of windows before they are needed: some seconds once on a machine, then half a second a start.

`python -m penstock.shared.streams.windows.compilation` does it for an installation or an image.
"""

from __future__ import annotations

import asyncio

import numpy as np

from penstock.shared.common.log import get_logger
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.windows.kinds import NoWindows, SessionWindows, SlidingWindows, TimeWindows
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_store import WindowStore

SAID_AFTER_SECONDS = 1.0
"""What takes longer is no cached code."""

log = get_logger(__name__)


def compile_kernels() -> None:
    """Have every kernel compiled, or read from where compiled code is kept."""
    times = np.array([1, 100], np.int64)
    for windows in (SessionWindows(10, 0), TimeWindows(10, 10, 0), SlidingWindows(10, 0), NoWindows()):
        store = WindowStore("compiled", windows.rule, StateColumns([Count()]), text_keys=True)
        store.take(times, store.index.codes_of([b"a", b"b"]), *store.columns.take(None, times))
        store.load("c", 5, 15, [1])
        store.unload("c", 5)
        store.advance(1_000)
        list(store.rows_of("a"))
        store.index.release(np.zeros(1, np.int64), np.zeros(store.index.capacity, np.bool_))


async def compile_in_thread() -> None:
    """As `compile_kernels`, beside the loop; says so where it takes its time."""
    compiling = asyncio.create_task(asyncio.to_thread(compile_kernels))
    done, _ = await asyncio.wait({compiling}, timeout=SAID_AFTER_SECONDS)
    if not done:
        log.info("compiling the rules of windows: some seconds, and only at the first start on a machine")
    await compiling


if __name__ == "__main__":
    compile_kernels()
