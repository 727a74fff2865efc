"""The lake in DuckDB: `python examples/lake_duckdb.py LAKE/APPLICATION STORE`.

deltalake's query engine reads the tables, deletion vectors and all, and DuckDB takes them as Arrow.
"""

from __future__ import annotations

import argparse
import sys

import duckdb
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder


def rows(path: str, sql: str) -> pa.Table:
    """What `sql` says of the table, called t."""
    return pa.table(QueryBuilder().register("t", DeltaTable(path)).execute(sql).read_all())


def main(folder: str, store: str) -> None:
    """The busiest days of what is closed, and the windows that are open the longest."""
    if not DeltaTable.is_deltatable(f"{folder}/state"):
        sys.exit(f"{folder}/state: there is no such table: nothing was compacted yet, or the folder is another")
    if DeltaTable.is_deltatable(f"{folder}/closed/{store}"):
        busiest_days(folder, store)
    elif store in rows(f"{folder}/state", "SELECT DISTINCT store FROM t WHERE row = 'window'")["store"].to_pylist():
        print(f"no window of {store} was closed yet")
    else:
        sys.exit(f"{folder}/closed/{store}: there is no such table, and no window of {store} is open: another store?")
    longest_open(folder, store)


def busiest_days(folder: str, store: str) -> None:
    """Windows and keys by day, of what is closed."""
    database = duckdb.connect()
    database.register("closed", rows(f"{folder}/closed/{store}", "SELECT * FROM t"))
    # Of a window that was corrected the highest revision counts; without a state it is no more.
    order = "PARTITION BY partition, key, start_ms, end_ms ORDER BY revision DESC"
    newest = database.table("closed").project(f"*, row_number() OVER ({order}) AS place")
    newest.filter("place = 1 AND state IS NOT NULL").create_view("windows")
    days = (
        "SELECT day, count(*) AS windows, count(DISTINCT key) AS keys FROM windows GROUP BY day ORDER BY windows DESC"
    )
    for day, windows, keys in database.sql(days).fetchall():
        print(f"{day}: {windows} windows of {keys} keys")


def longest_open(folder: str, store: str) -> None:
    """The three windows that are open the longest. Keys are bytes, and need not be text."""
    database = duckdb.connect()
    state = rows(f"{folder}/state", "SELECT store, key, start_ms, end_ms FROM t WHERE row = 'window'")
    database.register("state", state)
    longest = "SELECT key, end_ms - start_ms AS ms FROM state WHERE store = ? ORDER BY ms DESC, key LIMIT 3"
    for key, ms in database.execute(longest, [store]).fetchall():
        print(f"open: {key.decode(errors='backslashreplace')}, {ms} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="LAKE/APPLICATION", help="the folder that holds `state` and `closed`")
    parser.add_argument("store", metavar="STORE", help="the store whose windows are asked for")
    main(**vars(parser.parse_args()))
