"""History through the aggregator's own task, in Spark's Python workers: the same sans-IO code, another source.

A task of Spark's has whole source partitions, each in order, and runs one StreamTask for each. What the task would
have written to its changelog comes out as changelog records (`topic` null), so that what reads a changelog reads this
too: a takeover of epoch 1, commits, progress records. Their offsets lie below zero, before the changelog's beginning.
What it would have written to other topics comes out with the topic's name. What it counted comes out last (COUNTED).

The progress record that ends a partition says where the aggregator goes on. The clock stands still at the job's start:
WALL_CLOCK schedules do not fire in history, STREAM_TIME ones fire as ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.records import Columns, ProducerRecord
from penstock.shared.streams.changelog.format import Takeover, encode_takeover
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.stream_task import Guarantee, StreamTask
from penstock.shared.streams.task_inputs import process_in_time
from penstock.shared.streams.topology_loading import load_topology

FIRST_OFFSET = -(2**50)
"""The first synthetic changelog offset of a partition: room for a quadrillion entries before offset 0."""
EPOCH = 1
INSTANCE = "backfill"
FAILED = "the backfill stopped"
COUNTED = ""
"""In place of a topic's name: the value is a partition's Totals, as JSON."""

_HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])
HEADERS_SQL = "headers array<struct<key: string, value: binary>>"
OUT = pa.schema(
    [
        *(("partition", pa.int32()), ("offset", pa.int64()), ("timestamp_ms", pa.int64())),
        *(("key", pa.binary()), ("value", pa.binary()), ("topic", pa.string()), ("headers", pa.list_(_HEADER))),
        ("source_key", pa.binary()),  # chooses the partition where the key does not
    ]
)
OUT_SQL = (
    "partition int, offset bigint, timestamp_ms bigint, key binary, value binary, topic string, "
    f"{HEADERS_SQL}, source_key binary"
)


class ReplayJob(NamedTuple):
    """What every task is told. `ends` are the offsets, by source topic and partition, at which the aggregator goes on.

    `folder` is where the topology's module lies; `now_ms` is the wall clock's one reading.
    """

    topology: str
    topology_options: Mapping[str, str]
    folder: str
    application: str
    guarantee: Guarantee
    handlers: ErrorHandlers
    max_future_ms: int | None
    record_bytes_max: int
    key_bytes_max: int | None
    commit_records: int
    ends: Mapping[str, Mapping[int, int]]
    source_ids: Mapping[str, str]
    changelog_id: str
    now_ms: int


class PartitionReplay:
    """One source partition from its first record to its hand-over. Its methods give what the task wrote."""

    def __init__(self, job: ReplayJob, partition: int) -> None:
        topology = load_topology(job.topology, job.topology_options, job.folder)
        self._job, self._partition = job, partition
        self._task = StreamTask(
            topology,
            partition,
            application=job.application,
            guarantee=job.guarantee,
            epoch=EPOCH,
            handlers=job.handlers,
            record_bytes_max=job.record_bytes_max,
            key_bytes_max=job.key_bytes_max,
        )
        self._task.max_future_ms = job.max_future_ms
        self._task.source_ids, self._task.changelog_id = dict(job.source_ids), job.changelog_id
        self._task.initialize(job.now_ms)
        self._next = FIRST_OFFSET
        self._since_commit = self._read = 0

    def begin(self) -> pa.RecordBatch:
        """The takeover record, as which every owner begins."""
        takeover = Takeover(self._job.application, INSTANCE, self._job.now_ms)
        return self._batch([(None, encode_takeover(EPOCH, takeover))], [], [])

    def take(self, columns: Columns) -> Iterator[pa.RecordBatch]:
        """Process records, and commit wherever so many have gone by."""
        at = 0
        self._read += len(columns)
        while at < len(columns):
            room = self._job.commit_records - self._since_commit
            part = columns[at : at + room]
            process_in_time(self._task, part, self._job.now_ms)
            at += len(part)
            self._since_commit += len(part)
            if self._since_commit >= self._job.commit_records:
                yield self._commit()

    def end(self) -> pa.RecordBatch:
        """The last commit: its progress is where the aggregator goes on."""
        for topic, ends in self._job.ends.items():
            self._task.sources[topic] = ends[self._partition]
        batch = self._commit()
        self._task.close()
        return batch

    def counted(self) -> pa.RecordBatch:
        """What the task did, in one row (COUNTED); its records are all, also those refused before it took them."""
        totals = msgspec.json.encode(self._task.metrics.totals()._replace(records=self._read))
        return self._batch([], [ProducerRecord(COUNTED, totals, None, (), self._partition, self._job.now_ms)], [None])

    def _commit(self) -> pa.RecordBatch:
        commit = self._task.prepare_commit(self._job.now_ms)
        batch = self._batch(commit.changelog, commit.outputs, commit.source_keys)
        self._task.commit_succeeded()
        self._since_commit = 0
        return batch

    def _batch(
        self,
        changelog: Sequence[tuple[bytes | None, bytes]],
        outputs: list[ProducerRecord],
        source_keys: Sequence[bytes | None],
    ) -> pa.RecordBatch:
        entries, others = len(changelog), len(outputs)
        first, self._next = self._next, self._next + entries
        offsets = np.arange(first, self._next, dtype=np.int64)
        headers = [[{"key": k, "value": v} for k, v in record.headers] for record in outputs]
        partitions = [self._partition] * entries + [record.partition for record in outputs]
        return pa.record_batch(
            [
                pa.array(partitions, pa.int32()),
                pa.concat_arrays([pa.array(offsets), pa.nulls(others, pa.int64())]),
                pa.array([self._job.now_ms] * entries + [record.timestamp for record in outputs], pa.int64()),
                pa.array([key for key, _ in changelog] + [record.key for record in outputs], pa.binary()),
                pa.array([value for _, value in changelog] + [record.value for record in outputs], pa.binary()),
                pa.array([None] * entries + [record.topic for record in outputs], pa.string()),
                pa.array([[]] * entries + headers, OUT.field("headers").type),
                pa.array([None] * entries + list(source_keys), pa.binary()),
            ],
            schema=OUT,
        )


def replay(job: ReplayJob) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: source records in order (partition, topic, offset, timestamp_ms, key, value, headers) to OUT.

    Records of one partition lie together. A null offset stands for the row's place in its partition, from 0.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        current: PartitionReplay | None = None
        at, rows = -1, 0
        try:
            for part in (part for batch in batches for part in cut(batch)):
                partition = part.column("partition")[0].as_py()
                if current is None or partition != at:
                    if current is not None:
                        yield from (current.end(), current.counted())
                    current, at, rows = PartitionReplay(job, partition), partition, 0
                    yield current.begin()
                yield from current.take(columns_of(part, rows))
                rows += part.num_rows
            if current is not None:
                yield from (current.end(), current.counted())
        except PenstockError as e:
            raise ValueError(f"{FAILED}: {type(e).__name__}: {e}") from None

    return run


def nothing(job: ReplayJob, partition: int) -> list[tuple[Any, ...]]:
    """The rows of a partition without a record."""
    task = PartitionReplay(job, partition)
    return [tuple(row.values()) for batch in (task.begin(), task.end()) for row in batch.to_pylist()]


def cut(batch: Any) -> Iterator[Any]:
    """Slices of one topic and partition each, in the batch's order."""
    if not batch.num_rows:
        return
    partitions = np.asarray(batch.column("partition"))
    topics = np.asarray(batch.column("topic").dictionary_encode().indices)
    edges = np.flatnonzero((np.diff(partitions) != 0) | (np.diff(topics) != 0)) + 1
    bounds = [0, *edges.tolist(), batch.num_rows]
    for start, end in itertools.pairwise(bounds):
        yield batch.slice(start, end - start)


def columns_of(part: Any, first: int) -> Columns:
    """A slice as columns; rows without an offset are counted from `first`."""
    offsets, headers = part.column("offset"), part.column("headers")
    counted = np.arange(first, first + part.num_rows, dtype=np.int64)
    given = None if headers.null_count == len(headers) else headers.to_pylist()
    return Columns(
        part.column("topic")[0].as_py(),
        part.column("partition")[0].as_py(),
        part.column("key").to_pylist(),
        part.column("value").to_pylist(),
        np.array(part.column("timestamp_ms"), np.int64),
        counted if offsets.null_count else np.array(offsets, np.int64),
        None if given is None else [tuple((h["key"], h["value"]) for h in of or ()) for of in given],
    )


def partitioned(partitions: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: rows with a `partition` by their `key`, as a producer would have chosen it; 0 without a key."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            keys = batch.column("key").dictionary_encode()
            of = np.array([for_key(key, partitions) for key in keys.dictionary.to_pylist()] or [0], np.int32)
            indices = keys.indices.fill_null(0)
            chosen = np.where(np.asarray(keys.is_valid()), of[np.asarray(indices)], 0).astype(np.int32)
            place = batch.schema.get_field_index("partition")
            yield batch.set_column(place, "partition", pa.array(chosen))

    return run
