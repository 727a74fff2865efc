"""Queries a store's windows by key and time, open and closed, in the lake and in the changelog's tail past it.

The lake has the windows as of the last compaction. Later changes are in the changelog's tail, which is read from the
covered offsets on. If an open window of the snapshot is changed or closed in the tail, the tail is used. The keys are
looked up in all partitions, so a query need not name the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import datasketches

from penstock.services.aggregator.changelog_tail import (
    ChangelogLocation,
    CheckProgress,
    LogOffsets,
    TailChange,
    TailChanges,
    read_tail,
)
from penstock.shared.clients.admin import Admin, TopicDescription
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError, DataError, KafkaTimeout
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.key_range import KeyRange, raw_key
from penstock.shared.common.lake import state_snapshot, window_queries
from penstock.shared.common.lake.location import table_uri
from penstock.shared.common.lake.window_queries import ClosedWindow
from penstock.shared.common.row_positions import WindowPosition
from penstock.shared.common.topic_names import changelog_topic
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, apply_one_by_one
from penstock.shared.streams.changelog.format import DELETED, FINAL, Progress, decode_progress
from penstock.shared.streams.changelog.store_schema import WINDOWED, AggregationSchema, StoreSchema
from penstock.shared.streams.state_store import NEVER

NO_TABLES = "lake: {} has no tables"


class StoredWindow(NamedTuple):
    """One window, from the lake or the tail. `status` is open or closed; `results` are by name."""

    partition: int
    start_ms: int
    end_ms: int
    status: str
    results: dict[str, Any]
    key: str | bytes

    @property
    def position(self) -> WindowPosition:
        """The position of this stored window in the order of all windows."""
        return WindowPosition(self.start_ms, self.end_ms, self.partition, raw_key(self.key))


def stored_windows_of_partition(
    partition: int,
    store: StoreSchema,
    live: Sequence[dict[str, Any]],
    changes: Iterable[TailChange],
    time_range: tuple[int, int],
    open_from_ms: int,
) -> list[StoredWindow]:
    """Return the stored windows of a partition that overlap `time_range`: open ones, and those that the tail closes.

    `live` are the snapshot's live rows of all partitions, `changes` the partition's changes in the tail, in log order.
    A live row or live change that ends before `open_from_ms` is of a closed window, and is left out.
    """
    open_ = {
        (row["key"], row["start_ms"]): (row["end_ms"], row["state"]) for row in live if row["partition"] == partition
    }
    found = []
    for change in changes:
        if change.store != store.name:
            continue
        if change.operation in (DELETED, FINAL):
            open_.pop((change.key, change.start), None)
        else:
            open_[change.key, change.start] = change.end, change.state
        if change.operation == FINAL:
            found.append((change.key, change.start, change.end, "closed", change.state))
    # See `Progress.open_from_ms`.
    found += [(*at, end, "open", state) for at, (end, state) in open_.items() if end >= open_from_ms]
    is_text = store.key == "string"
    return [
        StoredWindow(
            partition, start, end, status, stored_window_results(store, state), key.decode() if is_text else key
        )
        for key, start, end, status, state in found
        if end >= time_range[0] and start <= time_range[1]
    ]


def stored_window_results(store: StoreSchema, state: dict[str, Any]) -> dict[str, Any]:
    """Return the named results of a stored window, from its state by column name.

    The result of an aggregation without columns in the state is None. Raises DataError if a result cannot be decoded.
    """
    return {
        a.name: _aggregation_result(a, {name: state.get(f"{a.name}_{name}") for name, _ in a.state})
        for a in store.shown_aggregations()
    }


def _aggregation_result(aggregation: AggregationSchema, state: dict[str, Any]) -> Any:
    if None in state.values():
        return None
    match aggregation.function:
        case "count":
            return state["n"]
        case "sum" | "min" | "max" as function:
            return state[function] if state["n"] else None
        case "mean":
            return state["sum"] / state["n"] if state["n"] else None
        case "first" | "last" if aggregation.result != "json":
            return state["value"] if state["at_ms"] >= 0 else None
        case "count_distinct":
            return _estimate_distinct_count(aggregation.name, state["hll"])
    text = state.get("json")
    return _decode_json_result(aggregation.name, text) if text else None


def _estimate_distinct_count(name: str, sketch: bytes) -> int:
    """Return the aggregation's result. Raises DataError, which names the aggregation, if `sketch` is not an HLL."""
    try:
        estimate: float = datasketches.hll_sketch.deserialize(sketch).get_estimate()
    except (IndexError, RuntimeError, ValueError) as e:
        # datasketches raises these errors for bytes that are not a sketch.
        raise DataError(f"a stored window's result {name!r} cannot be decoded: {e}") from None
    return round(estimate)


def _decode_json_result(name: str, text: str | bytes) -> Any:
    """Return the aggregation's result. Raises DataError, which names the aggregation, if it is not JSON."""
    try:
        return decode_json(text)
    except InvalidJson as e:
        raise DataError(f"a stored window's result {name!r} cannot be decoded: {e}") from None


def closed_window_of_lake(store: StoreSchema, row: ClosedWindow) -> StoredWindow:
    """Return a row of the lake's table `closed` as a stored window. Raises DataError if a result cannot be decoded."""
    values = {a.name: row.results.get(a.name) for a in store.shown_aggregations()}
    for a in store.shown_aggregations():
        text = values[a.name]
        if a.result == "json" and isinstance(text, str):
            values[a.name] = _decode_json_result(a.name, text)
    return StoredWindow(row.partition, row.start_ms, row.end_ms, "closed", values, row.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowQueryOptions:
    """A query for windows of `keys` that overlap `time_range` (two times in ms, both inclusive).

    If `store` is None, the application must have exactly one windowed store. `timeout_name` is the name of the setting
    that has `timeout_ms`, for the error message.
    """

    location: ChangelogLocation
    store: str | None
    keys: KeyRange
    time_range: tuple[int, int]
    status: Literal["open", "closed", "all"] = "all"
    rows_max: int
    timeout_ms: int
    timeout_name: str


class StoredWindowsQuery:
    """One query of windows in lake and changelog. It finds at most `rows_max` windows, those that start first, after
    the position `after`. `run` sets the query's other attributes, which describe the result.
    """

    def __init__(self, options: WindowQueryOptions, after: WindowPosition | None = None) -> None:
        self.position: dict[int, dict[str, int]] = {}
        """By partition, the source offsets that the response reflects."""
        self.last: WindowPosition | None = None
        """The position after which there may be more windows; None if there are no more."""
        self.missing: str | None = None
        """A text if a lake is set that has no tables of the application: before the first compaction, or if the
        settings name the wrong lake.
        """
        self._options = options
        self._after = after
        location = options.location
        self._topic = changelog_topic(location.application)
        self._where = (location.lake or "", location.application)
        self._lake_options = location.lake_options or None

    async def run(self) -> tuple[StoreSchema, list[StoredWindow]]:
        """Return the store, and the keys' windows in order of their positions.

        1. Read the snapshot of the lake, and the changelog's tail behind it. The newest progress of each partition
           names the store and the time from which windows are open.
        2. Read the next open and closed windows of the lake.
        3. Replace the open ones by what the tail says, partition by partition.
        4. Keep the windows with the wanted status, up to the position to which both tables were read.
        5. If none is left although the lake has more, continue with 2. from that position.

        Raises UnknownTopicOrPartition without a changelog topic, KafkaTimeout if the tail is not read within
        `timeout_ms`, DataError if a result cannot be decoded, and the errors of `choose_store`, `TailChanges.keep` and
        `read_tail`.
        """
        options = self._options
        # 1.
        async with Admin(options.location.kafka) as admin:
            description = (await admin.describe_topics([self._topic]))[self._topic]
        snapshot, tails = await self._snapshot_and_tails(description)
        covered = {} if snapshot is None else snapshot.partitions
        progress = {p: decode_progress(one.progress) for p, one in covered.items()}
        known = [*progress.values()]
        progress |= {p: newest for p, (_, newest) in tails.items() if newest is not None}
        self.position = {p: dict(newest.sources) for p, newest in sorted(progress.items())}
        store = choose_store([*progress.values(), *known], options.store)
        open_from_ms = {p: newest.open_from_ms(store) for p, newest in progress.items()}
        after = self._after
        while True:
            # 2.
            live, closed, all_to = await self._windows_of_lake(store, snapshot, open_from_ms, after)
            found = [closed_window_of_lake(store, row) for row in closed if _is_window_covered(row, covered)]
            # 3.
            for partition, (changes, _) in tails.items():
                open_from = open_from_ms.get(partition, NEVER)
                found += stored_windows_of_partition(partition, store, live, changes, options.time_range, open_from)
            # 4.
            positioned = [(one.position, one) for one in found if options.status in ("all", one.status)]
            positioned = [
                (position, one)
                for position, one in positioned
                if (after is None or position > after) and (all_to is None or position <= all_to)
            ]
            positioned.sort(key=itemgetter(0))
            page = positioned[: options.rows_max]
            self.last = page[-1][0] if len(page) < len(positioned) else all_to
            if page or self.last is None:
                return store, [one for _, one in page]
            # 5. No window of the lake up to here exists any more.
            after = self.last

    async def _windows_of_lake(
        self,
        store: StoreSchema,
        snapshot: state_snapshot.Snapshot | None,
        open_from_ms: Mapping[int, int],
        after: WindowPosition | None,
    ) -> tuple[list[dict[str, Any]], list[window_queries.ClosedWindow], WindowPosition | None]:
        """Return the next open and the next closed windows, and the position up to which both are complete.

        The position is None if both are complete to the end.
        """
        options = self._options
        if snapshot is None:
            return [], [], None
        where = (*self._where, store.name)
        most = options.rows_max + 1
        live: list[dict[str, Any]] = []
        closed: list[window_queries.ClosedWindow] = []
        ends: list[WindowPosition] = []
        if options.status != "closed":
            live = await asyncio.to_thread(
                window_queries.find_open_windows,
                *where,
                version=snapshot.version,
                keys=options.keys,
                time_range=options.time_range,
                open_from_ms=open_from_ms,
                rows_max=most,
                storage_options=self._lake_options,
                after=after,
            )
            ends += [window_queries.window_position(live[-1])] if len(live) == most else []
        if options.status != "open":
            keys: Any = options.keys.texts() if store.key == "string" else options.keys
            closed = await asyncio.to_thread(
                window_queries.find_closed_windows,
                *where,
                keys=keys,
                time_range=options.time_range,
                rows_max=most,
                storage_options=self._lake_options,
                after=after,
            )
            ends += [window_queries.window_position(closed[-1])] if len(closed) == most else []
        return live, closed, min(ends, default=None)

    async def _snapshot_and_tails(
        self, topic: TopicDescription
    ) -> tuple[state_snapshot.Snapshot | None, dict[int, tuple[TailChanges, Progress | None]]]:
        """Return a snapshot, and by partition the confirmed changes and the newest progress after it."""
        options = self._options
        changes = dict[int, TailChanges]()

        def make_reader(partition: int, covered: state_snapshot.PartitionSnapshot | None) -> ChangelogReader:
            changes[partition] = TailChanges(options.keys, options.time_range, options.store)
            return ChangelogReader(
                apply_one_by_one(changes[partition].keep), epoch=0 if covered is None else covered.epoch
            )

        snapshot, readers = await read_tail(options.location, topic, make_reader, self._check_deadline)
        if options.location.lake is not None and snapshot is None:
            self.missing = NO_TABLES.format(table_uri(*self._where))
        return snapshot, {p: (changes[p], reader.progress) for p, reader in readers.items()}

    def _check_deadline(self, records: int) -> CheckProgress:
        deadline = SYSTEM_CLOCK.monotonic_ms() + self._options.timeout_ms

        def check(_positions: LogOffsets, _ends: LogOffsets) -> None:
            if SYSTEM_CLOCK.monotonic_ms() > deadline:
                raise KafkaTimeout(self._changelog_timeout_message(records))

        return check

    def _changelog_timeout_message(self, records: int) -> str:
        name = self._options.timeout_name
        timeout = f"{name}={self._options.timeout_ms}"
        location = self._options.location
        cause = (
            "are past the newest compaction: run a compaction"
            if location.lake is not None
            else f"are in no lake: set {location.lake_name}, which saves reading compacted records"
        )
        return f"{self._topic}: not read within {timeout}. {records} records {cause}; or raise {name}"


def choose_store(progress: Sequence[Progress], name: str | None) -> StoreSchema:
    """Return the windowed store `name`, or the only windowed store if `name` is None.

    Raises ConfigError if no windowed store has the name, or if `name` is None and there is not exactly one windowed
    store. Also raises ConfigError if the application has committed nothing to its changelog yet.
    """
    stores = max((p.stores for p in progress), key=lambda of: sum(len(s.aggregations) for s in of), default=())
    windowed = [s for s in stores if s.kind in WINDOWED]
    found = [s for s in windowed if name in (None, s.name)]
    if not progress:
        raise ConfigError("the application has no commit yet: there is nothing to show")
    if len(found) != 1:
        names = ", ".join(s.name for s in windowed) or "none"
        raise ConfigError(f"store: {name or 'unset'}: the application has the windowed stores {names}")
    return found[0]


def _is_window_covered(row: window_queries.ClosedWindow, covered: dict[int, state_snapshot.PartitionSnapshot]) -> bool:
    """Return whether the snapshot covers a closed window in the lake.

    If not, the compaction that appended the window is not in this snapshot. The window is then read from the snapshot
    and the tail.
    """
    own = covered.get(row.partition)
    return own is not None and (row.topic_id != own.topic_id or row.changelog_offset < own.covered_offset)
