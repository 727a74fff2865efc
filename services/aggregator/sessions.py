"""`penstock sessions`: windows by key and time, open and closed, as of the newest commit, if an aggregator runs or not.

The lake has what was compacted; what came since is in the changelog's tail, which is read by the reader's rule from the
covered offsets. Together they are what the aggregator holds and held: a live window of the snapshot that the tail
changes or closes is the tail's. A record's partition is not asked for: the key is looked up in all of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import datasketches
import msgspec
from rich.console import Console
from rich.table import Table

from services.aggregator.live_state import key_text
from services.aggregator.questions import Question
from services.aggregator.settings import SessionsSettings
from shared.clients.admin import Admin, TopicDescription
from shared.clients.consumer import Consumer, ConsumerSettings
from shared.common import lake
from shared.common.clock import SYSTEM_CLOCK
from shared.common.errors import (
    ChangelogHole,
    ConfigError,
    CorruptRecord,
    KafkaTimeout,
    OffsetOutOfRange,
    PenstockError,
)
from shared.common.key_range import KeyRange
from shared.common.log import configure
from shared.common.records import TopicPartition
from shared.common.topic_names import changelog_topic
from shared.streams.changelog_format import (
    DELETED,
    FINAL,
    AggregationSchema,
    Progress,
    StateCodec,
    StoreSchema,
    decode_progress,
    parse_places,
    way_out,
)
from shared.streams.changelog_reader import Change, ChangelogReader, CorruptEntry

POLL_MS = 500
CHANGES_MAX = 200_000
"""Of one partition's tail, of the keys that are asked for: they are kept until the answer is made."""
REVISIONS_EXPECTED = 2
PROGRAM = "penstock sessions"


class Found(NamedTuple):
    """One window: `status` is open or closed; `results` by name, `revision` above 0 where late records corrected it."""

    partition: int
    start_ms: int
    end_ms: int
    status: str
    revision: int
    results: dict[str, Any]
    key: str | bytes = ""


class Told(NamedTuple):
    """A confirmed change of the key, as the tail has it: its state by columns, those it was written with."""

    operation: bytes
    store: str
    key: bytes
    start: int
    end: int
    state: dict[str, Any]


class Tail(NamedTuple):
    """What a partition's changelog says past the snapshot: the key's confirmed changes, and the newest progress."""

    changes: list[Told]
    progress: Progress | None


def told(change: Change) -> Told:
    """A change with its state decoded as what it was written; CorruptRecord where that cannot be read."""
    assert change.written_as is not None  # by a reader without a topology
    state = {} if change.operation == DELETED else _codec(change.written_as)(change.state)
    return Told(change.operation, change.store, change.key, change.start, change.end, state)


@lru_cache
def _codec(written: StoreSchema) -> Callable[[bytes], dict[str, Any]]:
    columns = written.state_columns()
    codec, names = StateCodec(columns), [column.name for column in columns]
    return lambda state: dict(zip(names, codec.unpack(state), strict=True))


def merge(
    partition: int,
    store: StoreSchema,
    live: Sequence[dict[str, Any]],
    changes: Sequence[Told],
    reach: tuple[int, int],
) -> list[Found]:
    """A partition's open windows, and those that were closed past the snapshot.

    `live` are the snapshot's windows of the key; `changes` are the key's in the tail, in log order.
    """
    open_ = {row["start_ms"]: (row["end_ms"], row["state"]) for row in live if row["partition"] == partition}
    found = []
    for change in changes:
        if change.operation == DELETED:
            open_.pop(change.start, None)
            continue
        if change.operation == FINAL:
            open_.pop(change.start, None)
            found.append(Found(partition, change.start, change.end, "closed", 0, results(store, change.state)))
        else:
            open_[change.start] = (change.end, change.state)
    closed = {(one.start_ms, one.end_ms) for one in found}  # a sliding window that was closed is kept for a while
    found += [
        Found(partition, start, end, "open", 0, results(store, state))
        for start, (end, state) in open_.items()
        if (start, end) not in closed
    ]
    return [one for one in found if one.end_ms >= reach[0] and one.start_ms <= reach[1]]


def merged(
    partition: int,
    store: StoreSchema,
    live: Sequence[dict[str, Any]],
    changes: Sequence[Told],
    reach: tuple[int, int],
) -> list[Found]:
    """As `merge`, of the store's windows of many keys, each with its key."""
    lives, told_of = defaultdict[bytes, list[dict[str, Any]]](list), defaultdict[bytes, list[Told]](list)
    for row in live:
        lives[row["key"]].append(row)
    for change in changes:
        if change.store == store.name:
            told_of[change.key].append(change)
    found = []
    for raw in {**lives, **told_of}:
        key: str | bytes = raw.decode() if store.key == "string" else raw
        own = merge(partition, store, lives.get(raw, ()), told_of.get(raw, ()), reach)
        found += [one._replace(key=key) for one in own]
    return found


def results(store: StoreSchema, state: dict[str, Any]) -> dict[str, Any]:
    """The named results of a state, by its columns' names; an aggregation that it has no columns for is None."""
    return {
        a.name: _result(a, {name: state.get(f"{a.name}_{name}") for name, _ in a.state}) for a in store.aggregations
    }


def _result(aggregation: AggregationSchema, state: dict[str, Any]) -> Any:
    if None in state.values():
        return None
    match aggregation.function:
        case "count":
            return state["n"]
        case "latest":
            return state["ms"]
        case "sum" | "min" | "max" as function:
            return state[function] if state["n"] else None
        case "mean":
            return state["sum"] / state["n"] if state["n"] else None
        case "count_distinct":
            return round(datasketches.hll_sketch.deserialize(state["hll"]).get_estimate())
    text = state.get("json")
    return msgspec.json.decode(text) if text else None


class Query:
    """One question to changelog and lake; `position` has the source offsets that the answer reflects, by partition.

    `is_cut` says that there are more windows than `rows_max`; the answer has those that begin first.
    """

    def __init__(self, settings: Question) -> None:
        self.position: dict[int, dict[str, int]] = {}
        self.is_cut = False
        self._settings = settings
        self._topic = changelog_topic(settings.application)
        self._where = (settings.lake or "", settings.application)
        self._options = settings.lake_options or None

    async def run(self) -> tuple[StoreSchema, list[Found]]:
        """The store, and the keys' windows in order of start.

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
        keys: Any = settings.keys.texts() if store.key == "string" else settings.keys
        live: list[dict[str, Any]] = []
        found: list[Found] = []
        more_from: list[int] = []
        if snapshot is not None:
            where, most = (*self._where, store.name), settings.rows_max + 1
            arguments = (*where, snapshot.version, settings.keys, reach, most, self._options)
            live = await asyncio.to_thread(lake.find_windows, *arguments)
            if len(live) == most:
                more_from.append(live[-1]["start_ms"])
            closed, more = await asyncio.to_thread(
                lake.find_closed_of, *where, keys, reach, most * REVISIONS_EXPECTED, self._options
            )
            found = [_closed(store, row) for row in closed if _is_covered(row, covered)]
            more_from += [] if more is None else [more]
        for partition, tail in tails.items():
            found += merged(partition, store, live, tail.changes, reach)
        found = [one for one in found if all(one.start_ms < limit for limit in more_from)]
        self.is_cut = bool(more_from) or len(found) > settings.rows_max
        found.sort(key=lambda one: (one.start_ms, one.end_ms, one.partition))
        return store, found[: settings.rows_max]

    async def _snapshot_and_tails(self, topic: TopicDescription) -> tuple[lake.Snapshot | None, dict[int, Tail]]:
        """A snapshot and what came after it: the newer one, where compactions end while the first is read on from."""
        partitions = [p.partition for p in topic.partitions]
        snapshot = await self._snapshot(topic, partitions)
        while True:
            covered = {} if snapshot is None else snapshot.partitions
            try:
                return snapshot, await self._tails(partitions, covered)
            except (ChangelogHole, OffsetOutOfRange):
                before, snapshot = covered, await self._snapshot(topic, partitions)
                if snapshot is None or snapshot.partitions == before:
                    raise

    async def _snapshot(self, topic: TopicDescription, partitions: Sequence[int]) -> lake.Snapshot | None:
        if self._settings.lake is None:
            return None
        snapshot = await asyncio.to_thread(lake.read_snapshot, *self._where, partitions, self._options)
        for one in () if snapshot is None else snapshot.partitions.values():
            if one.topic_id not in (None, topic.topic_id):
                raise ChangelogHole(f"{self._topic} was deleted and made again: the lake is that of another topic")
        return snapshot

    async def _tails(self, partitions: Sequence[int], covered: dict[int, lake.PartitionSnapshot]) -> dict[int, Tail]:
        settings = ConsumerSettings(
            isolation_level="read_committed", auto_offset_reset="none", commit_strategy="none", max_poll_records=None
        )
        skipped = parse_places(self._settings.skip_changelog_records)
        tails, readers = dict[int, Tail](), dict[int, ChangelogReader]()
        for p in partitions:
            changes: list[Told] = []
            readers[p] = ChangelogReader(
                _keeper(changes, self._settings.keys),
                epoch=covered[p].epoch if p in covered else 0,
                skip=frozenset(offset for own, offset in skipped if own == p),
            )
            tails[p] = Tail(changes, None)
        places = {p: TopicPartition(self._topic, p) for p in partitions}
        async with Consumer(self._settings.kafka, settings) as consumer:
            consumer.assign(list(places.values()))
            first = await consumer.beginning_offsets(list(places.values()))
            ends = await consumer.end_offsets(list(places.values()))
            for p, at in places.items():
                start = covered[p].covered_offset if p in covered else 0
                if first[at] > start:
                    raise ChangelogHole(
                        f"{at}: offsets {start} to {first[at] - 1} are gone, and no snapshot covers them"
                    )
                consumer.seek(at, start)
            limit_ms = self._settings.kafka_timeout_ms
            deadline = SYSTEM_CLOCK.monotonic_ms() + limit_ms
            while any([await consumer.position(at) < ends[at] for at in places.values()]):
                if SYSTEM_CLOCK.monotonic_ms() > deadline:
                    raise KafkaTimeout(
                        f"{self._topic}: reading its tail took over {self._settings.kafka_timeout_ms} ms"
                    )
                for at, columns in (await consumer.poll(POLL_MS)).items():
                    for offset, k, value in zip(columns.offsets.tolist(), columns.keys, columns.values, strict=True):
                        feed(readers[at.partition], at, offset, k, value)
        return {p: tail._replace(progress=readers[p].progress) for p, tail in tails.items()}


def feed(reader: ChangelogReader, at: TopicPartition, offset: int, key: bytes | None, value: bytes | None) -> None:
    """Have a reader take a record; CorruptRecord says which one cannot be read, and what to do about it."""
    try:
        reader.feed(offset, key, value)
    except CorruptEntry as e:
        raise CorruptRecord(f"{at} at offset {e.offset}: {e.reason}. {way_out(at.partition, e.offset)}") from e


def _keeper(changes: list[Told], keys: KeyRange) -> Callable[[Change], None]:
    def keep(change: Change) -> None:
        if keys.has(change.key):
            if len(changes) == CHANGES_MAX:
                raise ConfigError(
                    f"a partition's changelog has over {CHANGES_MAX} changes of these keys: ask for fewer"
                )
            changes.append(told(change))

    return keep


def chosen(progress: Sequence[Progress], name: str | None) -> StoreSchema:
    """The store of that name, or the only one; ConfigError names those that there are."""
    stores = max((p.stores for p in progress), key=lambda of: sum(len(s.aggregations) for s in of), default=())
    found = [s for s in stores if name in (None, s.name)]
    if len(found) != 1:
        raise ConfigError(
            f"store: {name or 'unset'}: the application has {', '.join(s.name for s in stores) or 'none'}"
        )
    return found[0]


def time_ms(text: str) -> int:
    """Milliseconds since the epoch, of a number or an ISO 8601 time (UTC where it does not say otherwise).

    >>> time_ms("2013-01-01"), time_ms("-5"), time_ms("2013-01-01T01:00+01:00")
    (1356998400000, -5, 1356998400000)
    """
    if text.removeprefix("-").isdecimal():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as e:
        raise ConfigError(f"{text}: {e}") from None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


def show(store: StoreSchema, found: Sequence[Found], console: Console) -> None:
    """The windows as a table."""
    table = Table(title=f"{store.name}: {len(found)} windows")
    names = [a.name for a in store.aggregations]
    for name in ("key", "start", "end", "status", "revision", *names):
        table.add_column(name)
    for one in found:
        times = (datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds") for ms in one[1:3])
        shown = (json.dumps(one.results.get(name)) for name in names)
        table.add_row(key_text(one.key), *times, one.status, str(one.revision), *shown)
    console.print(table)


def _closed(store: StoreSchema, row: dict[str, Any]) -> Found:
    values = {a.name: row.get(a.name) for a in store.aggregations}
    for a in store.aggregations:
        text = values[a.name]
        if a.result == "json" and isinstance(text, str):
            values[a.name] = msgspec.json.decode(text)
    return Found(row["partition"], row["start_ms"], row["end_ms"], "closed", row["revision"], values, row["key"])


def _is_covered(row: dict[str, Any], covered: dict[int, lake.PartitionSnapshot]) -> bool:
    """Whether the snapshot covers it: a compaction that crashed may have appended what the tail has as well."""
    own = covered.get(row["partition"])
    return own is not None and row["changelog_offset"] < own.covered_offset


def main(arguments: list[str]) -> int:
    """Print the windows: status 0, also where there are none; 1 where they cannot be read, 2 for a wrong setting."""
    given = ["--json-line" if argument == "--json" else argument for argument in arguments]
    try:
        settings = SessionsSettings.load(given, program=PROGRAM)
        configure(settings.log, "sessions")
        store, found = asyncio.run(Query(settings).run())
    except ConfigError as e:
        print(str(e), file=sys.stderr)
        return 2
    except PenstockError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    if settings.json_line:
        for one in found:
            print(msgspec.json.encode(one._asdict()).decode())
    else:
        show(store, found, Console())
    return 0
