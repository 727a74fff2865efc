"""The columns of an application's Delta tables: `state`, `closed/<store>` and `late/<store>`.

All are only appended to. `state` is a log-structured snapshot: of the rows of one window (partition, store, key and
start) the one with the highest changelog offset counts; `live` is false where the window is gone. Each run appends one
progress row a partition as well, so that what is live and how far it goes change in one commit.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from penstock.services.spark.arrow_columns import TIMESTAMP
from penstock.services.spark.results import RESULT_TYPES
from penstock.shared.common.arrow_arrays import ARROW_TYPES
from penstock.shared.streams.aggregations.latest import shown
from penstock.shared.streams.changelog.format import StoreSchema

STATE, CLOSED, LATE = "state", "closed", "late"
INDEXED = {
    STATE: ("start_ms", "changelog_offset"),
    CLOSED: ("window_start", "window_end", "partition", "changelog_offset"),
    LATE: ("event_time", "partition", "changelog_offset"),
}
"""The columns whose bounds are kept for each file: what readers prune by."""
PROGRESS = pa.schema(
    [
        *(("row", pa.string()), ("partition", pa.int32()), ("changelog_offset", pa.int64()), ("epoch", pa.int32())),
        *(("progress", pa.string()), ("topic_id", pa.string()), ("previous_offset", pa.int64())),
        *(("appended", pa.string()), ("rewritten_rows", pa.int64()), ("added_rows", pa.int64())),
        *(("added_files", pa.int32()), ("expired_ms", pa.int64())),
    ]
)
"""What a progress row has: `changelog_offset` is the covered offset, the next one to read, `previous_offset` that of
the run before. `appended` is JSON: by table its last changelog offset of this partition. `rewritten_rows` is how many
rows the partition had when it was last rewritten, `added_rows` and `added_files` are what came since. Closed windows
that end before the highest `expired_ms` of all partitions are deleted, or about to be."""


def state_type(store: StoreSchema) -> pa.DataType:
    """The struct of a store's state columns."""
    return pa.struct([(column.name, ARROW_TYPES[column.type]) for column in store.state_columns()])


def state_schema(stores: Iterable[StoreSchema]) -> pa.Schema:
    """The columns of `state`."""
    head = [("row", pa.string()), ("partition", pa.int32()), ("store", pa.string()), ("key", pa.binary())]
    head += [("start_ms", pa.int64()), ("end_ms", pa.int64())]
    own = [(store.name, state_type(store)) for store in stores]
    tail = [("live", pa.bool_()), *((f.name, f.type) for f in PROGRESS if f.name not in ("row", "partition"))]
    return pa.schema([*head, *own, *tail])


def rows_schema(kind: str, store: StoreSchema) -> pa.Schema:
    """The columns of `closed/<store>` or `late/<store>`."""
    key = ("key", pa.string()) if store.key == "string" else ("key_bytes", pa.binary())
    own = [(a.name, RESULT_TYPES[a.result]) for a in shown(store)]
    tail = [("partition", pa.int32()), ("changelog_offset", pa.int64()), ("topic_id", pa.string())]
    state = ("state", state_type(store))
    if kind == CLOSED:
        times = [("window_start", TIMESTAMP), ("window_end", TIMESTAMP)]
        return pa.schema([key, *times, *own, ("closed_at", TIMESTAMP), state, *tail])
    times = [("event_time", TIMESTAMP), ("missed", pa.list_(TIMESTAMP))]
    return pa.schema([key, *times, *own, state, ("source_offset", pa.int64()), *tail])
