"""`penstock sessions`: windows by key and time, open and closed, as of the newest commit, with or without a running
aggregator.

The lake has the compacted windows. Later changes are in the changelog's tail, which is read by the reader's rule from
the covered offsets. If the tail changes or closes a live window of the snapshot, the tail counts. Partitions need not
be known: the key is looked up in all of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.services.aggregator.changelog_tail import ChangelogLocation, CheckProgress, LogOffsets, read_tail
from penstock.services.aggregator.continuations import window_pages
from penstock.services.aggregator.key_filter import key_text
from penstock.services.aggregator.settings import SessionsSettings
from penstock.services.aggregator.stored_windows import FoundWindow, TailChanges, closed_of_lake, merged, position_of
from penstock.services.terminal_tables import console_for, plain
from penstock.shared.clients.admin import Admin, TopicDescription
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.continuation_codec import WrongContinuation
from penstock.shared.common.errors import (
    ConfigError,
    KafkaTimeout,
    PenstockError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.lake import state_snapshot, window_queries
from penstock.shared.common.lake.location import table_uri
from penstock.shared.common.log import configure
from penstock.shared.common.row_positions import WindowPosition
from penstock.shared.common.time_text import time_ms, utc_text
from penstock.shared.common.topic_names import changelog_topic
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, apply_one_by_one
from penstock.shared.streams.changelog.format import Progress, StoreSchema, decode_progress


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowQueryOptions:
    """What a query looks for: windows of `keys` that touch `reach` (ms, both inclusive).

    `store` None is the only store. `timeout_name` is the setting that `timeout_ms` comes from.
    """

    location: ChangelogLocation
    store: str | None
    keys: KeyRange
    reach: tuple[int, int]
    status: Literal["open", "closed", "all"] = "all"
    rows_max: int
    timeout_ms: int
    timeout_name: str


COLUMN_WIDTH_MAX = 40  # for a key, and for an aggregation's result
PROGRAM = "penstock sessions"
ONLY_OPEN = "lake: unset: these are only the open windows"
NO_TABLES = "lake: {} has no tables"
FROM_CHANGELOG = (
    "{}: the changelog alone answers. Before the first compaction that is all there is; after it, lake and application "
    "must be those of the aggregator"
)


class SessionsQuery:
    """One query to changelog and lake, for the first windows or those after a position.

    `position` has the source offsets that the answer reflects, by partition. `missing` is set if the named lake has no
    tables of the application: before the first compaction, or if it is the wrong lake. The answer has the windows that
    begin first, at most `rows_max`. `last` is the position after which there may be more.
    """

    def __init__(self, options: WindowQueryOptions, after: WindowPosition | None = None) -> None:
        self.position: dict[int, dict[str, int]] = {}
        self.last: WindowPosition | None = None
        self.missing: str | None = None
        self._options = options
        self._after = after
        location = options.location
        self._topic = changelog_topic(location.application)
        self._where = (location.lake or "", location.application)
        self._lake_options = location.lake_options or None

    async def run(self) -> tuple[StoreSchema, list[FoundWindow]]:
        """Return the store, and the keys' windows in order of their positions.

        Raises ConfigError, ChangelogHole, CorruptRecord (naming topic, partition and offset) or LakeUnavailable.
        """
        options = self._options
        async with Admin(options.location.kafka) as admin:
            description = (await admin.describe_topics([self._topic]))[self._topic]
        snapshot, tails = await self._snapshot_and_tails(description)
        covered = {} if snapshot is None else snapshot.partitions
        progress = {p: decode_progress(one.progress) for p, one in covered.items()}
        known = [*progress.values()]
        progress |= {p: newest for p, (_, newest) in tails.items() if newest is not None}
        self.position = {p: dict(newest.sources) for p, newest in sorted(progress.items())}
        store = chosen([*progress.values(), *known], options.store)
        after = self._after
        while True:
            live, closed, all_to = await self._windows_of_lake(store, snapshot, after)
            found = [closed_of_lake(store, row) for row in closed if _is_window_covered(row, covered)]
            for partition, (changes, _) in tails.items():
                found += merged(partition, store, live, changes, options.reach)
            positioned = [(position_of(one), one) for one in found if options.status in ("all", one.status)]
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
            after = self.last  # no window of the lake up to here exists any more

    async def _windows_of_lake(
        self,
        store: StoreSchema,
        snapshot: state_snapshot.Snapshot | None,
        after: WindowPosition | None,
    ) -> tuple[list[dict[str, Any]], list[window_queries.ClosedWindow], WindowPosition | None]:
        """Return the next live windows of the snapshot, the next closed ones, and the position up to which all are."""
        options = self._options
        if snapshot is None:
            return [], [], None
        where = (*self._where, store.name)
        most = options.rows_max + 1
        live: list[dict[str, Any]] = []
        closed: list[window_queries.ClosedWindow] = []
        ends: list[WindowPosition] = []
        if options.status != "closed":
            arguments = (*where, snapshot.version, options.keys, options.reach, most, self._lake_options, after)
            live = await asyncio.to_thread(window_queries.find_live_windows, *arguments)
            ends += [window_queries.window_position(live[-1])] if len(live) == most else []
        if options.status != "open":
            keys: Any = options.keys.texts() if store.key == "string" else options.keys
            of_closed = (*where, keys, options.reach, most, self._lake_options, after)
            closed = await asyncio.to_thread(window_queries.find_closed_windows, *of_closed)
            ends += [window_queries.window_position(closed[-1])] if len(closed) == most else []
        return live, closed, min(ends, default=None)

    async def _snapshot_and_tails(
        self, topic: TopicDescription
    ) -> tuple[state_snapshot.Snapshot | None, dict[int, tuple[TailChanges, Progress | None]]]:
        """Return a snapshot, and by partition the confirmed changes and the newest progress after it."""
        options = self._options
        changes = dict[int, TailChanges]()

        def make_reader(partition: int, covered: state_snapshot.PartitionSnapshot | None) -> ChangelogReader:
            changes[partition] = TailChanges(options.keys, options.reach, options.store)
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


def chosen(progress: Sequence[Progress], name: str | None) -> StoreSchema:
    """Return the store of that name, or the only one. ConfigError names the existing stores."""
    stores = max((p.stores for p in progress), key=lambda of: sum(len(s.aggregations) for s in of), default=())
    found = [s for s in stores if name in (None, s.name)]
    if not stores:
        raise ConfigError("the application has no commit yet: there is nothing to show")
    if len(found) != 1:
        raise ConfigError(f"store: {name or 'unset'}: the application has {', '.join(s.name for s in stores)}")
    return found[0]


def show(store: StoreSchema, found: Sequence[FoundWindow], console: Console | None = None) -> None:
    """Print the windows as a table, with times in the format of `--from`."""
    table = Table(title=f"{store.name}: {len(found)} windows")
    names = [a.name for a in store.shown_aggregations()]
    table.add_column("key", overflow="fold", max_width=COLUMN_WIDTH_MAX)
    for name in ("start (UTC)", "end (UTC)", "status"):
        table.add_column(name, no_wrap=True)
    for name in names:
        table.add_column(name, overflow="fold", max_width=COLUMN_WIDTH_MAX)
    for one in found:
        times = map(utc_text, one[1:3])
        values = (json.dumps(one.results.get(name)) for name in names)
        row = (key_text(one.key), *times, one.status, *values)
        table.add_row(*map(plain, row))
    (console or console_for(table)).print(table)


def _is_window_covered(row: window_queries.ClosedWindow, covered: dict[int, state_snapshot.PartitionSnapshot]) -> bool:
    """Return whether the snapshot covers the window. A crashed compaction may have appended windows of the tail."""
    own = covered.get(row.partition)
    return own is not None and (row.topic_id != own.topic_id or row.changelog_offset < own.covered_offset)


def query_options(settings: SessionsSettings) -> WindowQueryOptions:
    """Return the query of a command line."""
    return WindowQueryOptions(
        location=ChangelogLocation(
            settings.kafka, settings.application, settings.lake, settings.lake_options, lake_name="lake"
        ),
        store=settings.store,
        keys=settings.keys,
        reach=(time_ms(settings.from_), time_ms(settings.to)),
        status=settings.status,
        rows_max=settings.rows_max,
        timeout_ms=settings.kafka_timeout_ms,
        timeout_name="kafka_timeout_ms",
    )


def _key_and_time_filter(settings: SessionsSettings) -> dict[str, Any]:
    key_range = dict(zip(("key_from", "key_to"), settings.keys, strict=True))
    return {"key": None, **key_range, "from_ms": time_ms(settings.from_), "to_ms": time_ms(settings.to)}


def main(arguments: list[str]) -> int:
    """Print the windows. Returns the exit status: 0 even without windows, 1 if reading fails, 2 for a wrong setting."""
    given = ["--json-line" if argument == "--json" else argument for argument in arguments]
    try:
        settings = SessionsSettings.load(given, program=PROGRAM)
        configure(settings.log, "sessions")
        pages = window_pages(
            settings.application, settings.store or "", settings.status, _key_and_time_filter(settings)
        )
        # No request may take longer than the answer.
        limit_ms = min(settings.kafka.request_timeout_ms, settings.kafka_timeout_ms)
        quick = settings.kafka.model_copy(update={"request_timeout_ms": limit_ms})
        options = query_options(settings.model_copy(update={"kafka": quick}))
        query = SessionsQuery(options, pages.decode(settings.continuation))
        store, found = asyncio.run(query.run())
    except (ConfigError, WrongContinuation) as e:
        print(str(e), file=sys.stderr)
        return 2
    except UnknownTopicOrPartition as e:
        message = "application must be the aggregator's, which makes the topic when it first starts"
        print(f"{type(e).__name__}: {e}: {message}", file=sys.stderr)
        return 1
    except PenstockError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    if settings.lake is None:
        print(ONLY_OPEN, file=sys.stderr)
    if query.missing is not None:
        print(FROM_CHANGELOG.format(query.missing), file=sys.stderr)
    if settings.json_line:
        for one in found:
            print(msgspec.json.encode(one._asdict()).decode())
    else:
        show(store, found)
    if query.last is not None:
        print(f"there are more: --continuation {pages.encode(query.last)}", file=sys.stderr)
    return 0
