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
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.services.aggregator.continuations import window_pages
from penstock.services.aggregator.key_search import key_text
from penstock.services.aggregator.settings import SessionsSettings
from penstock.services.aggregator.stored_windows import FoundWindow, TailChanges, closed_of_lake, merged, position_of
from penstock.services.terminal_tables import console_for, plain
from penstock.shared.clients.admin import Admin, TopicDescription
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    ChangelogHole,
    ConfigError,
    CorruptRecord,
    KafkaTimeout,
    OffsetOutOfRange,
    PenstockError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.lake import delta_tables
from penstock.shared.common.log import configure
from penstock.shared.common.pagination import WindowPosition, WrongContinuation
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.time_text import time_ms, utc_text
from penstock.shared.common.topic_names import changelog_topic
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, CorruptEntry, apply_one_by_one
from penstock.shared.streams.changelog.format import WAYS_OUT, Progress, StoreSchema, decode_progress


class WindowQuery(Protocol):
    """A query to changelog and lake, from the command line or HTTP. `SessionsSettings` describes each property."""

    @property
    def kafka(self) -> KafkaSettings: ...
    @property
    def application(self) -> str: ...
    @property
    def lake(self) -> str | None: ...
    @property
    def lake_options(self) -> dict[str, str]: ...
    @property
    def store(self) -> str | None: ...
    @property
    def keys(self) -> KeyRange: ...
    @property
    def from_(self) -> str: ...
    @property
    def to(self) -> str: ...
    @property
    def kafka_timeout_ms(self) -> int: ...
    @property
    def timeout_name(self) -> str: ...
    @property
    def lake_name(self) -> str: ...
    @property
    def rows_max(self) -> int: ...
    @property
    def status(self) -> Literal["open", "closed", "all"]: ...


class WindowQueryOptions(NamedTuple):
    """A query that does not come from a command line.

    `timeout_name` and `lake_name` are the settings that `kafka_timeout_ms` and `lake` come from.
    """

    kafka: KafkaSettings
    application: str
    lake: str | None
    lake_options: dict[str, str]
    store: str | None
    keys: KeyRange
    from_: str
    to: str
    kafka_timeout_ms: int
    rows_max: int
    status: Literal["open", "closed", "all"] = "all"
    timeout_name: str = "queries.changelog_timeout_ms"
    lake_name: str = "streams.lake"


POLL_MS = 500
COLUMN_WIDTH_MAX = 40  # for a key, and for an aggregation's result
PROGRAM = "penstock sessions"
ONLY_OPEN = "lake: unset: these are only the open windows"
NO_TABLES = "lake: {} has no tables"
FROM_CHANGELOG = (
    "{}: the changelog alone answers. Before the first compaction that is all there is; after it, lake and application "
    "must be those of the aggregator"
)


class ChangelogTail(NamedTuple):
    """A partition's changelog past the snapshot: the keys' confirmed changes, and the newest progress."""

    changes: TailChanges
    progress: Progress | None


class SessionsQuery:
    """One query to changelog and lake, for the first windows or those after a position.

    `position` has the source offsets that the answer reflects, by partition. `missing` is set if the named lake has no
    tables of the application: before the first compaction, or if it is the wrong lake. The answer has the windows that
    begin first, at most `rows_max`. `last` is the position after which there may be more.
    """

    def __init__(self, settings: WindowQuery, after: WindowPosition | None = None) -> None:
        self.position: dict[int, dict[str, int]] = {}
        self.last: WindowPosition | None = None
        self.missing: str | None = None
        self._settings = settings
        self._after = after
        self._topic = changelog_topic(settings.application)
        self._where = (settings.lake or "", settings.application)
        self._options = settings.lake_options or None

    async def run(self) -> tuple[StoreSchema, list[FoundWindow]]:
        """Return the store, and the keys' windows in order of their positions.

        Raises ConfigError, ChangelogHole, CorruptRecord (naming topic, partition and offset) or LakeUnavailable.
        """
        settings = self._settings
        reach = (time_ms(settings.from_), time_ms(settings.to))
        async with Admin(settings.kafka) as admin:
            description = (await admin.describe_topics([self._topic]))[self._topic]
        snapshot, tails = await self._snapshot_and_tails(description)
        covered = {} if snapshot is None else snapshot.partitions
        progress = {p: decode_progress(one.progress) for p, one in covered.items()}
        known = [*progress.values()]
        progress |= {p: tail.progress for p, tail in tails.items() if tail.progress is not None}
        self.position = {p: dict(newest.sources) for p, newest in sorted(progress.items())}
        store = chosen([*progress.values(), *known], settings.store)
        after = self._after
        while True:
            live, closed, all_to = await self._windows_of_lake(store, snapshot, reach, after)
            found = [closed_of_lake(store, row) for row in closed if _is_window_covered(row, covered)]
            for partition, tail in tails.items():
                found += merged(partition, store, live, tail.changes, reach)
            positioned = [(position_of(one), one) for one in found if settings.status in ("all", one.status)]
            positioned = [
                (position, one)
                for position, one in positioned
                if (after is None or position > after) and (all_to is None or position <= all_to)
            ]
            positioned.sort(key=itemgetter(0))
            page = positioned[: settings.rows_max]
            self.last = page[-1][0] if len(page) < len(positioned) else all_to
            if page or self.last is None:
                return store, [one for _, one in page]
            after = self.last  # no window of the lake up to here exists any more

    async def _windows_of_lake(
        self,
        store: StoreSchema,
        snapshot: delta_tables.Snapshot | None,
        reach: tuple[int, int],
        after: WindowPosition | None,
    ) -> tuple[list[dict[str, Any]], list[delta_tables.ClosedWindow], WindowPosition | None]:
        """Return the next live windows of the snapshot, the next closed ones, and the position up to which all are."""
        settings = self._settings
        if snapshot is None:
            return [], [], None
        where = (*self._where, store.name)
        most = settings.rows_max + 1
        live: list[dict[str, Any]] = []
        closed: list[delta_tables.ClosedWindow] = []
        ends: list[WindowPosition] = []
        if settings.status != "closed":
            arguments = (*where, snapshot.version, settings.keys, reach, most, self._options, after)
            live = await asyncio.to_thread(delta_tables.find_windows, *arguments)
            ends += [delta_tables.window_position(live[-1])] if len(live) == most else []
        if settings.status != "open":
            keys: Any = settings.keys.texts() if store.key == "string" else settings.keys
            of_closed = (*where, keys, reach, most, self._options, after)
            closed = await asyncio.to_thread(delta_tables.find_closed, *of_closed)
            ends += [delta_tables.window_position(closed[-1])] if len(closed) == most else []
        return live, closed, min(ends, default=None)

    async def _snapshot_and_tails(
        self, topic: TopicDescription
    ) -> tuple[delta_tables.Snapshot | None, dict[int, ChangelogTail]]:
        """Return a snapshot and the tails after it. Reads a newer snapshot if a compaction ends meanwhile."""
        partitions = [p.partition for p in topic.partitions]
        snapshot = await self._read_lake_snapshot(topic, partitions)
        while True:
            covered = {} if snapshot is None else snapshot.partitions
            try:
                return snapshot, await self._read_changelog_tails(partitions, covered)
            except (ChangelogHole, OffsetOutOfRange):
                before = covered
                snapshot = await self._read_lake_snapshot(topic, partitions)
                if snapshot is None or snapshot.partitions == before:
                    raise

    async def _read_lake_snapshot(
        self, topic: TopicDescription, partitions: Sequence[int]
    ) -> delta_tables.Snapshot | None:
        if self._settings.lake is None:
            return None
        snapshot = await asyncio.to_thread(delta_tables.read_snapshot, *self._where, partitions, self._options)
        if snapshot is None:
            self.missing = NO_TABLES.format(delta_tables.table_uri(*self._where))
        for one in () if snapshot is None else snapshot.partitions.values():
            if one.topic_id not in (None, topic.topic_id):
                raise ChangelogHole(f"{self._topic} was deleted and created again: the lake is of another topic")
        return snapshot

    async def _read_changelog_tails(
        self, partitions: Sequence[int], covered: dict[int, delta_tables.PartitionSnapshot]
    ) -> dict[int, ChangelogTail]:
        settings = ConsumerSettings(
            isolation_level="read_committed", auto_offset_reset="none", commit_strategy="none", max_poll_records=None
        )
        reach = (time_ms(self._settings.from_), time_ms(self._settings.to))
        tails = dict[int, ChangelogTail]()
        readers = dict[int, ChangelogReader]()
        for p in partitions:
            changes = TailChanges(self._settings.keys, reach, self._settings.store)
            readers[p] = ChangelogReader(apply_one_by_one(changes.keep), epoch=covered[p].epoch if p in covered else 0)
            tails[p] = ChangelogTail(changes, None)
        by_partition = {p: TopicPartition(self._topic, p) for p in partitions}
        async with Consumer(self._settings.kafka, settings) as consumer:
            consumer.assign(list(by_partition.values()))
            first = await consumer.beginning_offsets(list(by_partition.values()))
            ends = await consumer.end_offsets(list(by_partition.values()))
            for p, at in by_partition.items():
                start = covered[p].covered_offset if p in covered else 0
                if first[at] > start:
                    gone = f"{at}: offsets {start} to {first[at] - 1} are gone, and no snapshot covers them"
                    raise ChangelogHole(gone + (f" ({self.missing})" if self.missing else ""))
                consumer.seek(at, start)
            records = sum([ends[at] - await consumer.position(at) for at in by_partition.values()])
            deadline = SYSTEM_CLOCK.monotonic_ms() + self._settings.kafka_timeout_ms
            while any([await consumer.position(at) < ends[at] for at in by_partition.values()]):
                if SYSTEM_CLOCK.monotonic_ms() > deadline:
                    raise KafkaTimeout(self._changelog_timeout_message(records))
                for at, columns in (await consumer.poll(POLL_MS)).items():
                    feed(readers[at.partition], columns)
        return {p: tail._replace(progress=readers[p].progress) for p, tail in tails.items()}

    def _changelog_timeout_message(self, records: int) -> str:
        name = self._settings.timeout_name
        ms = self._settings.kafka_timeout_ms
        lake_name = self._settings.lake_name
        cause = (
            "are past the newest compaction: run a compaction"
            if self._settings.lake is not None
            else f"are in no lake: set {lake_name}, which saves reading compacted records"
        )
        return f"{self._topic}: not read within {name}={ms}. {records} records {cause}; or raise {name}"


def feed(reader: ChangelogReader, columns: Columns) -> None:
    """Feed records to a reader. CorruptRecord names the record that cannot be decoded, and the ways out."""
    try:
        reader.feed(columns.offsets, columns.keys, columns.values)
    except CorruptEntry as e:
        at = columns.topic_partition
        raise CorruptRecord(f"{at} at offset {e.offset}: {e.reason}. {WAYS_OUT}") from e


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


def _is_window_covered(row: delta_tables.ClosedWindow, covered: dict[int, delta_tables.PartitionSnapshot]) -> bool:
    """Return whether the snapshot covers the window. A crashed compaction may have appended windows of the tail."""
    own = covered.get(row.partition)
    return own is not None and (row.topic_id != own.topic_id or row.changelog_offset < own.covered_offset)


def _key_and_time_filter(settings: SessionsSettings) -> dict[str, Any]:
    asked = dict(zip(("key_from", "key_to"), settings.keys, strict=True))
    return {"key": None, **asked, "from_ms": time_ms(settings.from_), "to_ms": time_ms(settings.to)}


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
        query = SessionsQuery(settings.model_copy(update={"kafka": quick}), pages.position(settings.continuation))
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
        print(f"there are more: --continuation {pages.text(query.last)}", file=sys.stderr)
    return 0
