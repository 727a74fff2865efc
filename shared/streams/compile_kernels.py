"""Compiles the kernels (functions over arrays, compiled by numba) before they are needed.

`python -m penstock.shared.streams.compile_kernels` compiles all kernels, including those of the clients. An
installation or an image runs this command once.
"""

from __future__ import annotations

import numpy as np

from penstock.shared.clients.producer import column_slices
from penstock.shared.clients.protocol import packed_headers
from penstock.shared.clients.protocol.completed_fetch import compile_decoding
from penstock.shared.common import byte_copies
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.changelog_reader import compile_changelog_reader
from penstock.shared.streams.task.json_fields import compile_json_fields
from penstock.shared.streams.windows.json_rows import compile_json_rows
from penstock.shared.streams.windows.key_index import are_ascii, compile_key_index
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_rule import WindowRule
from penstock.shared.streams.windows.window_store import WindowStore


def compile_kernels() -> None:
    """Compile every kernel, or load it from numba's cache."""
    compile_decoding()
    column_slices.compile_kernels()
    compile_changelog_reader()
    times = np.array([1, 100], np.int64)
    for rule in (
        WindowRule("session", 10),
        WindowRule("tumbling", 10, 0, 10),
        WindowRule("sliding", 10),
        WindowRule("table"),
    ):
        store = WindowStore("compiled", rule, StateColumns([Count()]), text_keys=True)
        store.take(times, store.index.codes_of([b"a", b"b"]), *store.columns.take([None, None], times))
        store.load("c", 5, 15, [1])
        key = PackedBytes.of([b"c"]).at(times[:1] - 1)
        starts = times[:1]
        store.replay(key, starts + 4, starts + 14, np.zeros(1, np.bool_), lambda indexes: [indexes])
        store.unload("c", 5)
        store.advance(1_000)
        list(store.rows_of("a"))
        are_ascii(store.finals().keys)
        store.table.sweep()
        store.index.release(np.zeros(1, np.int64), np.zeros(store.index.capacity, np.bool_))
    compile_key_index()
    byte_copies.compile_kernels()
    packed_headers.compile_kernels()
    compile_json_rows()
    compile_json_fields()


if __name__ == "__main__":
    compile_kernels()
