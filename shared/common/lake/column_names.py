"""The columns of the lake's tables, except those of an application's stores and aggregations.

In `state` every store is a column; in `closed/<store>` and `late/<store>` every aggregation is one. These two
have either `key` or `key_bytes`: `key` if the store's keys are text. In `state`, `key` is always bytes.
"""

from __future__ import annotations

STATE_COLUMNS = (
    *("row", "partition", "store", "key", "start_ms", "end_ms", "live", "changelog_offset"),
    *("epoch", "progress", "topic_id", "appended"),
    *("rewritten_rows", "added_rows", "added_files", "expired_ms"),
)
CLOSED_COLUMNS = (
    *("key", "key_bytes", "window_start", "window_end", "closed_at", "state"),
    *("partition", "changelog_offset", "topic_id"),
)
LATE_COLUMNS = (
    *("key", "key_bytes", "event_time", "missed", "state", "source_offset"),
    *("partition", "changelog_offset", "topic_id"),
)
