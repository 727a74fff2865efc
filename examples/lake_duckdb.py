"""The lake in DuckDB: `python examples/lake_duckdb.py LAKE/APPLICATION STORE`.

deltalake opens the tables, and DuckDB reads only those of their files that a query needs.
"""

from __future__ import annotations

import argparse
import sys

import duckdb
from deltalake import DeltaTable


def connect(folder: str, store: str) -> duckdb.DuckDBPyConnection:
    """A database with the tables `state`, `closed` and `late` of a store, as far as they exist."""
    database = duckdb.connect()
    database.execute("SET TimeZone = 'UTC'")
    for name, path in (("state", "state"), ("closed", f"closed/{store}"), ("late", f"late/{store}")):
        if DeltaTable.is_deltatable(f"{folder}/{path}"):
            database.register(name, DeltaTable(f"{folder}/{path}").to_pyarrow_dataset())
    return database


def main(folder: str, store: str) -> None:
    """Print the days with the most closed windows, and the windows that have been open the longest."""
    if not DeltaTable.is_deltatable(f"{folder}/state"):
        sys.exit(f"{folder}/state: there is no such table: nothing was compacted yet, or the folder is another")
    database = connect(folder, store)
    if DeltaTable.is_deltatable(f"{folder}/closed/{store}"):
        busiest_days(database)
    elif store in database.table("state").columns:
        print(f"no window of {store} was closed yet")
    else:
        sys.exit(f"{folder}/closed/{store}: no such table, and no column of {store} in `state`: another store?")
    longest_open(database, store)


def busiest_days(database: duckdb.DuckDBPyConnection) -> None:
    """Closed windows and keys by day."""
    days = """
        SELECT CAST(window_end AS DATE) AS day, count(*) AS windows, count(DISTINCT columns('^key')) AS keys
        FROM closed GROUP BY day ORDER BY windows DESC"""
    for day, windows, keys in database.sql(days).fetchall():
        print(f"{day}: {windows} windows of {keys} keys")


def longest_open(database: duckdb.DuckDBPyConnection, store: str) -> None:
    """The three windows that have been open the longest. The newest row of a window counts; keys are bytes.

    `state` keeps a sliding window for a while after it was closed: it ends before the store's close time.
    """
    longest = """
        WITH newest AS (
            SELECT * FROM state WHERE row = 'window' AND store = $store
            QUALIFY row_number() OVER (PARTITION BY partition, key, start_ms ORDER BY changelog_offset DESC) = 1
        ), covered AS (
            SELECT partition, CAST(json_extract_string(progress, $path) AS BIGINT) AS close_ms
            FROM state WHERE row = 'progress'
            QUALIFY row_number() OVER (PARTITION BY partition ORDER BY changelog_offset DESC) = 1
        )
        SELECT key, end_ms - start_ms AS ms FROM newest LEFT JOIN covered USING (partition)
        WHERE live AND end_ms >= coalesce(close_ms, end_ms) ORDER BY ms DESC, key LIMIT 3"""
    parameters = {"store": store, "path": f'$.close_times_ms."{store}"'}
    for key, ms in database.execute(longest, parameters).fetchall():
        print(f"open: {key.decode(errors='backslashreplace')}, {ms} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="LAKE/APPLICATION", help="the folder that holds `state` and `closed`")
    parser.add_argument("store", metavar="STORE", help="the store whose windows are printed")
    main(**vars(parser.parse_args()))
