"""The lake in Polars: `python examples/lake_polars.py LAKE/APPLICATION STORE`.

deltalake's query engine reads the tables, deletion vectors and all, and Polars takes them as Arrow.
"""

from __future__ import annotations

import argparse
import sys

import polars as pl
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder


def rows(path: str, sql: str) -> pl.DataFrame:
    """What `sql` says of the table, called t."""
    found = pl.from_arrow(pa.table(QueryBuilder().register("t", DeltaTable(path)).execute(sql).read_all()))
    assert isinstance(found, pl.DataFrame)
    return found


def main(folder: str, store: str) -> None:
    """The busiest days of what is closed, and the windows that are open the longest."""
    if not DeltaTable.is_deltatable(f"{folder}/state"):
        sys.exit(f"{folder}/state: there is no such table: nothing was compacted yet, or the folder is another")
    if DeltaTable.is_deltatable(f"{folder}/closed/{store}"):
        busiest_days(folder, store)
    elif store in rows(f"{folder}/state", "SELECT DISTINCT store FROM t WHERE row = 'window'")["store"]:
        print(f"no window of {store} was closed yet")
    else:
        sys.exit(f"{folder}/closed/{store}: there is no such table, and no window of {store} is open: another store?")
    longest_open(folder, store)


def busiest_days(folder: str, store: str) -> None:
    """Windows and keys by day, of what is closed."""
    closed = rows(f"{folder}/closed/{store}", "SELECT * FROM t")
    # Of a window that was corrected the highest revision counts; without a state it is no more.
    newest = closed.sort("revision").unique(["partition", "key", "start_ms", "end_ms"], keep="last")
    closed = newest.filter(pl.col("state").is_not_null())
    days = closed.group_by("day").agg(windows=pl.len(), keys=pl.col("key").n_unique()).sort("windows", descending=True)
    for day, windows, keys in days.iter_rows():
        print(f"{day}: {windows} windows of {keys} keys")


def longest_open(folder: str, store: str) -> None:
    """The three windows that are open the longest. Keys are bytes, and need not be text."""
    state = rows(f"{folder}/state", "SELECT store, key, start_ms, end_ms FROM t WHERE row = 'window'")
    lasting = state.filter(pl.col("store") == store).with_columns(ms=pl.col("end_ms") - pl.col("start_ms"))
    for key, ms in lasting.sort(["ms", "key"], descending=[True, False]).select("key", "ms").head(3).iter_rows():
        print(f"open: {key.decode(errors='backslashreplace')}, {ms} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="LAKE/APPLICATION", help="the folder that holds `state` and `closed`")
    parser.add_argument("store", metavar="STORE", help="the store whose windows are asked for")
    main(**vars(parser.parse_args()))
