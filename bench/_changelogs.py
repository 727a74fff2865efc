"""Changelogs for the benchmark of compaction, written in the engine's format without an engine.

Open sessions each have their own key and follow each other by `STEP_MS`. Before them there are closed sessions of keys
that do not occur again, over `CLOSED_DAYS` days. A change closes a given number of the oldest open sessions (a final,
which removes the live row) and opens as many new ones, so the number of open sessions stays the same. It also changes
some of the others, spread evenly over them. With several partitions, keys choose theirs as in a producer, and all
partitions commit together.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import datasketches
import msgspec

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct, Sum
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.application_topics import CHANGELOG_CONFIGS
from penstock.shared.streams.topology import Topology

COMMIT_ENTRIES = 50_000
DAY_MS = 86_400_000
CLOSED_DAYS = 30
STEP_MS = 2_000
PAGES = ("harbour", "market", "mill")
Entry = tuple[bytes | None, bytes]


class Kind(NamedTuple):
    """A kind of session: its aggregations, and the state columns of session i after a number of commits."""

    name: str
    aggregations: dict[str, Any]
    state: Callable[[int, int], list[Any]]

    def topology(self) -> Topology:
        """A topology that has such sessions in the store `s`."""
        builder = StreamsBuilder()
        windows = builder.stream("source").group_by_key().session_window(1_800_000)
        windows.aggregate("s", **self.aggregations).on_close().to("out")
        return builder.build()


def _sketch() -> bytes:
    sketch = datasketches.hll_sketch(12)
    for page in PAGES:
        sketch.update(page)
    return bytes(CountDistinct("place").to_columns(sketch)[0])  # type: ignore[arg-type]


_SKETCH, _JSON = _sketch(), msgspec.json.encode(PAGES)
NUMBERS = Kind("numbers", {"n": Count(), "total": Sum("x")}, lambda i, commit: [commit + 1, 0.5 * i, commit + 1])
SKETCHES = Kind("sketches", {"n": Count(), "places": CountDistinct("place")}, lambda i, commit: [3, _SKETCH])
OBJECTS = Kind(
    "JSON",
    {"n": Count(), "visits": Aggregate(list, lambda of, value: [*of, value["place"]], lambda a, b: a + b)},
    lambda i, commit: [3, _JSON],
)


class ChangelogWriter:
    """Writes one application's changelog, commit by commit. `live` has the numbers of the open sessions."""

    def __init__(self, kafka: KafkaSettings, application: str, kind: Kind, partitions: int = 1) -> None:
        self.kafka = kafka
        self.application = application
        self.kind = kind
        self.partitions = partitions
        self.topic = f"{application}-changelog"
        self._schemas = kind.topology().schemas()
        self._codec = StateCodec(self._schemas[0].state_columns())
        self._commit = 0
        self.live = range(0)
        self._positions = [0] * partitions

    async def create(self) -> None:
        """Create the topic. Each partition begins with the takeover record of an owner."""
        async with Admin(self.kafka) as admin:
            await admin.create_topics([NewTopic(self.topic, self.partitions, 1, CHANGELOG_CONFIGS)])
        takeover = log.encode_takeover(1, log.Takeover(self.application, "bench", 0))
        async with self._producer() as producer:
            await self._write_commit(producer, [[(None, takeover)] for _ in range(self.partitions)])

    async def delete(self) -> None:
        """Delete the topic."""
        async with Admin(self.kafka) as admin:
            await admin.delete_topics([self.topic])

    async def fill(self, live: int, closed: int) -> int:
        """Write live and closed sessions; return the number of entries."""
        self.live = range(live)
        return await self._write(self._fill(closed))

    async def change(self, each: int, changed: int | None = None) -> int:
        """Close and open `each` sessions, and change `changed` of the others (default `each`); return the entries."""
        changed = each if changed is None else changed
        assert len(self.live) >= each + changed
        return await self._write(self._change(each, changed))

    def live_by_partition(self) -> list[int]:
        """The number of open sessions in each partition."""
        found = Counter(self.partition_of(b"live-%d" % i) for i in self.live)
        return [found[partition] for partition in range(self.partitions)]

    def partition_of(self, key: bytes) -> int:
        """The partition of a key's entries."""
        return for_key(key, self.partitions)

    def spread(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """The entries of each partition, in order."""
        found: list[list[Entry]] = [[] for _ in range(self.partitions)]
        for key, value in entries:
            assert key is not None
            found[self.partition_of(key)].append((key, value))
        return found

    def _fill(self, closed: int) -> Iterator[Entry]:
        for i in self.live:
            yield self._live(i)
        for i in range(closed):
            yield self._final(b"closed-%d" % i, i * 7919 % (CLOSED_DAYS * DAY_MS), i)

    def _change(self, each: int, count: int) -> Iterator[Entry]:
        left, new = self.live[each:], range(self.live.stop, self.live.stop + each)
        changed = left[:: len(left) // count][:count]
        for i in self.live[:each]:
            yield self._final(b"live-%d" % i, _start(i), i)
        for i in itertools.chain(changed, new):
            yield self._live(i)
        self.live = range(left.start, new.stop)

    def _live(self, i: int) -> Entry:
        state = self._codec.pack(self.kind.state(i, self._commit))
        return b"live-%d" % i, log.encode_live(0, 1, self._commit, _start(i), _start(i) + 1_000, state)

    def _final(self, key: bytes, start: int, i: int) -> Entry:
        state = self._codec.pack(self.kind.state(i, self._commit))
        return key, log.encode_final(0, 1, self._commit, start, start + 1_000, start + 9, state)

    async def _write(self, entries: Iterator[Entry]) -> int:
        done = 0
        async with self._producer() as producer:
            while part := list(itertools.islice(entries, COMMIT_ENTRIES)):
                done += len(part)
                await self._write_commit(producer, self.spread(part))
        return done

    def _producer(self) -> Producer:
        return Producer(self.kafka, ProducerSettings(linger_ms=0, batch_size=256 * 1024))

    async def _write_commit(self, producer: Producer, by_partition: Sequence[Sequence[Entry]]) -> None:
        """Write each partition's entries, and the progress record that confirms them."""
        records = []
        for partition, entries in enumerate(by_partition):
            self._positions[partition] += len(entries)
            progress = log.Progress(
                self.application,
                "exactly_once",
                {"source": self._positions[partition]},
                {"s": 0},
                {},
                {},
                self._schemas,
                0,
            )
            confirmed = (*entries, (None, log.encode_progress(1, self._commit, progress)))
            records += [ProducerRecord(self.topic, v, k, (), partition, None) for k, v in confirmed]
        await (await producer.send_many(records))
        self._commit += 1


def _start(i: int) -> int:
    return CLOSED_DAYS * DAY_MS + i * STEP_MS
