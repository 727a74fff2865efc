"""The lake in Polars: `python examples/lake_polars.py LAKE/APPLICATION STORE`."""

from __future__ import annotations

import argparse
import sys

import polars as pl
from deltalake import DeltaTable


def main(folder: str, store: str) -> None:
    """Print the days with the most closed windows, and the windows that have been open the longest."""
    if not DeltaTable.is_deltatable(f"{folder}/state"):
        sys.exit(f"{folder}/state: there is no such table: nothing was compacted yet, or the folder is another")
    state = pl.scan_delta(f"{folder}/state")
    if DeltaTable.is_deltatable(f"{folder}/closed/{store}"):
        busiest_days(pl.scan_delta(f"{folder}/closed/{store}"))
    elif store in state.collect_schema():
        print(f"no window of {store} was closed yet")
    else:
        sys.exit(f"{folder}/closed/{store}: no such table, and no column of {store} in `state`: another store?")
    longest_open(state, store)


def busiest_days(closed: pl.LazyFrame) -> None:
    """Closed windows and keys by day."""
    key = "key" if "key" in closed.collect_schema() else "key_bytes"
    days = closed.group_by(day=pl.col("window_end").dt.date()).agg(windows=pl.len(), keys=pl.col(key).n_unique())
    for day, windows, keys in days.sort("windows", descending=True).collect().iter_rows():
        print(f"{day}: {windows} windows of {keys} keys")


def longest_open(state: pl.LazyFrame, store: str) -> None:
    """The three windows that have been open the longest. The newest row of a window counts; keys are bytes.

    `state` keeps a sliding window for a while after it was closed: it ends before the store's close time.
    """
    own = state.filter((pl.col("row") == "window") & (pl.col("store") == store))
    own = own.select("partition", "key", "start_ms", "end_ms", "live", "changelog_offset").sort("changelog_offset")
    newest = own.unique(["partition", "key", "start_ms"], keep="last").filter("live")
    covered = state.filter(pl.col("row") == "progress").sort("changelog_offset").unique("partition", keep="last")
    close_ms = pl.col("progress").str.json_path_match(f'$.close_times_ms["{store}"]').cast(pl.Int64)
    newest = newest.join(covered.select("partition", close_ms=close_ms), on="partition", how="left")
    is_open = pl.col("close_ms").is_null() | (pl.col("end_ms") >= pl.col("close_ms"))
    lasting = newest.filter(is_open).select("key", ms=pl.col("end_ms") - pl.col("start_ms"))
    for key, ms in lasting.sort(["ms", "key"], descending=[True, False]).head(3).collect().iter_rows():
        print(f"open: {key.decode(errors='backslashreplace')}, {ms} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="LAKE/APPLICATION", help="the folder that holds `state` and `closed`")
    parser.add_argument("store", metavar="STORE", help="the store whose windows are printed")
    main(**vars(parser.parse_args()))
