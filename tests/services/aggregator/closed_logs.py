"""Changelogs with closed windows, for tests of their readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.shared.common.records import Columns, RecordColumns
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import (
    Progress,
    Takeover,
    encode_final,
    encode_live,
    encode_progress,
    encode_takeover,
)
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema

TOPIC = "app-changelog"
STORE = StoreSchema(
    *("s", "session", "string", 10, 5, "on_close", "in", None, None, None),
    (AggregationSchema.of("n", Count()),),
)
CODEC = StateCodec(STORE.state_columns())
Entries = list[tuple[bytes | None, bytes]]


class Log(NamedTuple):
    """The entries of a partition's changelog, and the committed closed windows (key, start, end) in log order."""

    entries: Entries
    closed: list[tuple[str, int, int]]

    @classmethod
    def of(cls, commits: Sequence[Sequence[tuple[str, int]]], guarantee: Any = "exactly_once") -> Log:
        """Build a log of commits that close windows (key, end).

        Each window is 3 ms long and is followed by two live ones.
        """
        log = cls([(None, encode_takeover(1, Takeover("app", "x", 0)))], [])
        for number, windows in enumerate(commits, start=1):
            log.entries.extend(final(key, end, 1, number) for key, end in windows)
            log.entries.extend([(b"live", encode_live(0, 1, number, number, number, CODEC.pack([1])))] * 2)
            time_ms = max((end for _, end in windows), default=0) + 6
            log.entries.append(progress(1, number, time_ms, guarantee))
            log.closed.extend((key, end - 3, end) for key, end in windows)
        return log

    def columns(self, start: int = 0, count: int | None = None) -> Columns:
        """The log's records from an offset."""
        rows = self.entries[start:][:count]
        offsets = np.arange(start, start + len(rows))
        return Columns(TOPIC, 0, [k for k, _ in rows], [v for _, v in rows], offsets * 0, offsets)


def final(key: str, end: int, epoch: int, commit: int) -> tuple[bytes, bytes]:
    return key.encode(), encode_final(0, epoch, commit, end - 3, end, end, CODEC.pack([1]))


def progress(
    epoch: int, commit: int, time_ms: int, guarantee: Any = "exactly_once", store: StoreSchema = STORE
) -> tuple[None, bytes]:
    closed = {"s": time_ms - store.close_delay_ms}
    body = Progress(
        "app", guarantee, {"in": commit}, {"s": time_ms}, {"in": time_ms}, {}, (store,), 0, close_times_ms=closed
    )
    return None, encode_progress(epoch, commit, body)


def records(entries: Iterable[tuple[bytes | None, bytes]], partition: int, topic: str = TOPIC) -> RecordColumns:
    rows = list(entries)
    return RecordColumns(topic, [k for k, _ in rows], [v for _, v in rows], None, partition)
