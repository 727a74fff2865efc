"""The figures of an application's Delta tables in the lake. Everything here blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.common.lake.column_names import STATE_COLUMNS
from penstock.shared.common.lake.compaction_history import compactions_of_table
from penstock.shared.common.lake.delta_tables import count_rows, fields_of_table, open_table, require_columns
from penstock.shared.common.lake.location import table_uri
from penstock.shared.common.lake.state_snapshot import QUERIED_COLUMNS, WINDOWS
from penstock.shared.common.lake.window_queries import newest_rows_query


def describe_tables(lake: str, application: str, storage_options: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the figures of an application's lake tables. Raises LakeUnavailable or NotASnapshot.

    - `live_rows`: the number of live rows of all stores. A live row is the newest row in `state` of its window, if its
      `live` is true. A closed sliding window has a live row for a while.
    - `closed_rows` and `closed_versions`: by store, the number of rows of `closed/<store>`, and its Delta version.
    - `state_version`: the Delta version of `state`. The version of a missing table is -1.
    - `compacted_at_ms`: the time when the newest compaction ended; None without a compaction.

    If `state` is missing, `closed_rows` and `closed_versions` are empty.
    """
    state = open_table(table_uri(lake, application, "state"), storage_options)
    fields: dict[str, Any] = {"live_rows": 0, "closed_rows": {}, "state_version": -1, "closed_versions": {}}
    fields["compacted_at_ms"] = None
    if state is None:
        return fields
    require_columns(state, QUERIED_COLUMNS)
    fields["state_version"] = int(state.version())
    fields["live_rows"] = count_rows(state, f"{newest_rows_query(WINDOWS)} AND live")
    fields["compacted_at_ms"] = next((one.ended_at_ms for one in compactions_of_table(state, 1)), None)
    for store in sorted(fields_of_table(state).keys() - {*STATE_COLUMNS}):
        closed = open_table(table_uri(lake, application, "closed", store), storage_options)
        fields["closed_rows"][store] = 0 if closed is None else count_rows(closed, "t")
        fields["closed_versions"][store] = -1 if closed is None else int(closed.version())
    return fields
