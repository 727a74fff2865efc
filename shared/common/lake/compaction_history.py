"""The compactions of an application in the lake, from the history of its Delta table `state`.

Everything here blocks: call it with `asyncio.to_thread`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.shared.common.errors import LakeUnavailable
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.lake.delta_tables import DELTA_ERRORS, one_line, open_table
from penstock.shared.common.lake.location import table_uri

COMPACTION = "compaction"
"""The kind of a compaction's commit of `state`."""
APPEND = "WRITE"
"""The operation of a compaction's commit of `state`."""
HISTORY_VERSIONS = (20, 400, 8_000)
"""The newest versions that are searched for compactions; more if all of those are rewrites and table maintenance."""


class Compaction(NamedTuple):
    """A compaction as its commit describes it. A value that the commit lacks is None."""

    version: int
    ended_at_ms: int
    job: str | None
    started_at_ms: int | None
    seconds: float | None
    rows: int | None
    entries: int | None


class _CompactionMetadata(msgspec.Struct):
    """The metadata that a job writes into the commits of `state`."""

    kind: str
    job: str | None = None
    started_at_ms: int | None = None
    seconds: float | None = None
    rows: int | None = None
    entries: int | None = None


def read_compactions(
    lake: str, application: str, limit: int, storage_options: Mapping[str, str] | None = None
) -> list[Compaction]:
    """Read the last compactions of an application, newest first.

    At most `limit` compactions are returned. There may be fewer, since only a limited number of commits is read, and
    other commits may lie between the compactions. Raises LakeUnavailable.
    """
    state = open_table(table_uri(lake, application, "state"), storage_options)
    if state is None:
        return []
    found: list[Compaction] = []
    for versions in HISTORY_VERSIONS:
        try:
            history = state.history(limit=max(versions, limit))
        except DELTA_ERRORS as e:
            raise LakeUnavailable(f"{state.table_uri} cannot be read: {one_line(e)}") from e
        found = [one for entry in history if (one := _parse_compaction(entry)) is not None]
        if found or len(history) < versions:
            break
    return found[:limit]


def _parse_compaction(entry: Mapping[str, Any]) -> Compaction | None:
    """Parse a commit in the history of `state` as a compaction.

    Returns None for any other commit: of a job that rewrites files of `state` or maintains the table, or of another
    program.
    """
    if entry.get("operation") != APPEND:
        return None
    try:
        metadata = decode_json(entry.get("userMetadata") or "", _CompactionMetadata)
    except InvalidJson:
        return None
    if metadata.kind != COMPACTION:
        return None
    return Compaction(
        version=int(entry["version"]),
        ended_at_ms=int(entry["timestamp"]),
        job=metadata.job,
        started_at_ms=metadata.started_at_ms,
        seconds=metadata.seconds,
        rows=metadata.rows,
        entries=metadata.entries,
    )
