"""Runs a topology without a broker: the same task as in production, for one partition, with its topics in memory.

Everything that a commit would write to Kafka is kept in lists. A test can read results, late records and dead letters.
It can call `crash()`, which loses uncommitted work, and then `restore()`, which restores from the changelog as a new
owner of the partition does.

>>> from penstock.shared.streams.aggregations.aggregation import Count
>>> from penstock.shared.streams.dsl.builder import StreamsBuilder
>>> builder = StreamsBuilder()
>>> builder.stream("clicks").group_by_key().session_window(gap=10).aggregate("s", n=Count()).on_close().to("sessions")
>>> driver = TopologyTestDriver(builder.build())
>>> for at in (0, 8, 25):
...     driver.pipe("clicks", key=b"ann", value=b"{}", timestamp=at)
>>> [record.value for record in driver.read("sessions")]
[b'{"key":"ann","start":0,"end":8,"n":2}']
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.shared.common.errors import ConfigError, IllegalState, ProcessingFailed
from penstock.shared.common.records import (
    INT64_MAX,
    AnyHeaders,
    Columns,
    ConsumerRecord,
    ProducerRecord,
    header_pairs,
)
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader
from penstock.shared.streams.changelog.format import Takeover, encode_takeover
from penstock.shared.streams.error_handlers import ErrorHandlers, ExceptionHandler
from penstock.shared.streams.runtime.global_tables import GlobalTableRows
from penstock.shared.streams.settings import MAX_FUTURE_MS
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.state.local_restore import continue_from_local_state, write_restored_rows
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.idleness import Idleness, advance_idle_time
from penstock.shared.streams.task.inputs import TaskInputs
from penstock.shared.streams.task.restore import restore_changes, restore_progress
from penstock.shared.streams.task.stream_task import RECORD_BYTES_MAX, StreamTask
from penstock.shared.streams.task.task_context import Guarantee
from penstock.shared.streams.task.vectorized_executor import COLUMNS_MIN
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.manual_clock import ManualClock

if TYPE_CHECKING:
    from penstock.shared.streams.state.local_state import LocalState

APPLICATION = "test-driver"


class _Raise(ErrorHandlers):
    """The error handlers under `errors="raise"`: every error that they get ends the task.

    This includes a node's DataError, for which an application's handler `fail` writes a dead letter.
    """

    def of(self, stage: str, error: Exception) -> tuple[ExceptionHandler, str]:
        return "fail", "errors is raise; errors=ErrorHandlers() handles it as an application does"


class TopologyTestDriver:
    """Drives the task of one partition.

    - `now_ms`: the time at which the wall clock starts. If it is None, the clock starts at 0.
    - `commit_each`: whether to commit after each `pipe`, `pipe_columns` and `advance_wall_clock`.
    - `guarantee`: as the application's setting `streams.processing_guarantee`.
    - `partition`: the partition of the task and of its source records.
    - `deduplicate_updates`: if False, every update of a result is forwarded, as in Kafka Streams with caching off. If
      True, a commit forwards the last update of each result: with `commit_each` that is after each `pipe`.
    - `errors`: if "raise", a record that cannot be processed raises ProcessingFailed. The message names the node and
      the record, or the global table. Its `__cause__` is the original error. Do not use the driver afterwards. If it is
      `ErrorHandlers(...)`, these handlers decide what happens to the record. It may become a dead letter.
    - `max_future_ms`: a record that is further ahead of the wall clock cannot be processed. The default is a day, as in
      production, or no limit if `now_ms` is None. None means no limit.
    - `idle_timeout_ms`: as the application's setting `streams.idle_timeout_ms`. None turns it off.
    - `columns_min`: if `pipe_columns` gets at least this many records and the topology allows it, the records are
      processed as columns.
    - `max_request_size`: the limit of results and states, as the application's setting of that name.
    - `state`: if it is given, the stores are on disk. They keep their rows at a `crash`, and `restore` reads only the
      changelog after their position. Rows that another driver has left there are deleted. Call `close` at the end of
      the test. If it is None, the stores are in memory, and `restore` reads the whole changelog.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        now_ms: int | None = None,
        commit_each: bool = True,
        guarantee: Guarantee = "exactly_once",
        partition: int = 0,
        deduplicate_updates: bool = False,
        errors: Literal["raise"] | ErrorHandlers = "raise",
        max_future_ms: int | Literal["as_in_production"] | None = "as_in_production",
        idle_timeout_ms: int | None = None,
        columns_min: int = COLUMNS_MIN,
        max_request_size: int = RECORD_BYTES_MAX,
        state: StateDirectory | None = None,
    ) -> None:
        topology = topology.of_application(APPLICATION)
        self.topology = topology
        self.guarantee = guarantee
        self.partition = partition
        self.commit_each = commit_each
        self.deduplicate_updates = deduplicate_updates
        if max_future_ms == "as_in_production":
            max_future_ms = None if now_ms is None else MAX_FUTURE_MS
        if not (errors == "raise" or isinstance(errors, ErrorHandlers)):
            raise ConfigError(f'TopologyTestDriver: errors must be "raise" or ErrorHandlers(...), got {errors!r}')
        self._raises = not isinstance(errors, ErrorHandlers)
        self.handlers = errors if isinstance(errors, ErrorHandlers) else _Raise()
        self.max_future_ms = max_future_ms
        self.idle_timeout_ms = idle_timeout_ms
        self.columns_min = columns_min
        self.max_request_size = max_request_size
        self.state = state
        self._local: LocalState | None = None
        self.restored_entries = 0
        """Number of changelog records that the last restore read."""
        self.clock = ManualClock(now_ms or 0)
        self.changelog: list[tuple[bytes | None, bytes]] = []
        self.source_log: dict[str, list[ConsumerRecord]] = {topic: [] for topic in topology.source_topics()}
        self.outputs: dict[str, list[ProducerRecord]] = {}
        self.global_tables = {name: GlobalTableRows(node) for name, node in topology.global_tables.items()}
        self._task: StreamTask | None = None
        """None after a `crash`."""
        self._inputs: TaskInputs
        self.restore()

    def pipe(
        self, topic: str, *, value: bytes | None, key: bytes | None = None, timestamp: int = 0, headers: AnyHeaders = ()
    ) -> None:
        """Append one record to a source topic or a global table's topic, and process it.

        Raises ProcessingFailed for a record that cannot be processed, unless `errors` handles it. Raises ConfigError
        for any other topic. Raises TypeError or ValueError for values that no record can hold.
        """
        self._require_topic(topic)
        pairs = header_pairs(headers)
        _require_record(topic, key, value, timestamp, pairs)
        # A consumer always returns tuples.
        pairs = tuple((name, content) for name, content in pairs)
        self._append_records([ProducerRecord(topic, value, key, pairs, timestamp=timestamp)])

    def pipe_columns(self, topic: str, records: Iterable[tuple[bytes | None, bytes | None, int]]) -> None:
        """Append (key, value, timestamp) records to a topic as `pipe` does, and process them as one poll's records.

        Raises as `pipe` does.
        """
        self._require_topic(topic)
        piped: list[ProducerRecord] = []
        for key, value, timestamp in records:
            _require_record(topic, key, value, timestamp, ())
            piped.append(ProducerRecord(topic, value, key, timestamp=timestamp))
        self._append_records(piped)

    @property
    def task(self) -> StreamTask:
        """The task. Raises IllegalState after a `crash`."""
        if self._task is None:
            raise IllegalState("the driver has no task after crash(): call restore() first")
        return self._task

    def advance_wall_clock(self, ms: int) -> None:
        """Move the wall clock, advance the time of idle topics, and evaluate WALL_CLOCK_TIME schedules.

        After a `crash` only the clock moves.
        """
        self.clock.advance(ms)
        if self._task is None:
            return
        self._advance_idle_time()
        self.task.punctuate_wall_clock(self.clock.now_ms())
        if self.commit_each:
            self.commit()

    def commit(self) -> None:
        """Commit, if there is anything to commit, and process the records for topics that the topology reads itself.

        With `commit_each` off, the results of these records can be read only after a further `commit`.
        """
        if not self.task.needs_commit:
            return
        commit = self.task.prepare_commit(self.clock.now_ms())
        outputs = commit.outputs
        internal = self.topology.internal_topics()
        for record in outputs:
            if record.topic not in internal:
                self.outputs.setdefault(record.topic, []).append(record)
        self.changelog += commit.changelog
        self.task.commit_succeeded(CommitPosition(None, len(self.changelog)))
        self._append_records(outputs)

    def read(self, topic: str) -> list[ProducerRecord]:
        """Remove and return the records written to a topic; an empty list if there are none.

        Raises ConfigError for an internal topic, and for a topic that the topology never writes to.
        """
        known = dict.fromkeys(self.topology.output_topics())
        known |= dict.fromkeys(t for s in self.topology.sources() for t in (s.dead_letters, s.late))
        if topic not in self.outputs and topic not in known:
            raise ConfigError(f"nothing is written to the topic {topic!r}; the topology writes to {', '.join(known)}")
        return self.outputs.pop(topic, [])

    def store(self, name: str) -> Any:
        """A global table, or a store of the task with its uncommitted changes.

        For a table, an aggregation without windows or a custom store, `get(key)` returns a row's value. `rows()` of any
        store but a global table returns its rows or live windows. For an unknown name, raises ConfigError, which names
        the existing stores.
        """
        stores: dict[str, Any] = {**self.task.stores, **self.global_tables}
        if name not in stores:
            raise ConfigError(f"there is no store {name!r}; the topology has {', '.join(stores) or 'none'}")
        return stores[name]

    def metrics(self) -> dict[str, int]:
        """The task's counters since it was created or restored. A closed window is counted when it is committed."""
        counted = self.task.metrics
        return {
            "records": counted.records_total,
            "closed_windows": counted.closed_total,
            "late_records": counted.late_total,
            "missed_windows": counted.missed_windows_total,
            "dead_letters": counted.dead_letters_total,
            "skipped_records": counted.skipped_total,
        }

    def crash(self, torn_entries: int = 0) -> None:
        """Lose the task and its uncommitted work. Records that are piped before the next `restore` wait for it.

        With `torn_entries`, the crash happens within a commit: up to that many of its entries reach the changelog, but
        not the progress record that would confirm them.
        """
        task = self.task
        if torn_entries:
            self.changelog += task.prepare_commit(self.clock.now_ms()).changelog[:-1][:torn_entries]
        self._task = None
        self.close()

    def close(self) -> None:
        """Close the processors, and the stores on disk. Uncommitted work is not written. A second `close` does nothing.

        Raises ProcessingFailed, once everything is closed, if `close` of a processor raised.
        """
        local = self._local
        self._local = None
        try:
            # After a crash there is no task, and nothing has called its processors.
            if self._task is not None and self._task.not_running_reason is None:
                self._task.close()
        finally:
            if local is not None:
                local.close()

    def restore(self) -> None:
        """Take the partition over: restore the state from the changelog, then process the records that are not
        committed, in the order of timestamps between topics that are read together.

        Raises ProcessingFailed, once the new task runs, if `close` of a processor of the former task raised.
        """
        try:
            # A former owner that runs closes its task when it notices that it has lost the partition.
            self.close()
        finally:
            # An error of `close` does not keep the partition from its next owner.
            self._take_over()

    def _take_over(self) -> None:
        if self.state is not None:
            self._local = self.state.state_of(self.partition)
        task = StreamTask(
            self.topology,
            self.partition,
            application=APPLICATION,
            guarantee=self.guarantee,
            deduplicate_updates=self.deduplicate_updates,
            handlers=self.handlers,
            record_bytes_max=self.max_request_size,
            columns_min=self.columns_min,
            max_future_ms=self.max_future_ms,
            local=self._local,
        )
        task.global_tables = self.global_tables
        schemas = self.topology.schemas()
        reader = ChangelogReader(partial(restore_changes, task), stores=schemas)
        start = 0
        if self._local is not None:
            found = continue_from_local_state(reader, self._local, schemas, None, 0, len(self.changelog))
            start = 0 if found is None else found.covered_offset
        keys = [key for key, _ in self.changelog[start:]]
        values = [value for _, value in self.changelog[start:]]
        reader.feed(np.arange(start, len(self.changelog)), keys, values)
        self.restored_entries = len(self.changelog) - start
        task.epoch = reader.next_epoch
        if reader.progress is not None:
            restore_progress(task, reader.progress)
        takeover = Takeover(APPLICATION, "driver", self.clock.now_ms())
        self.changelog.append((None, encode_takeover(task.epoch, takeover)))
        if self._local is not None:
            reader.feed_record(len(self.changelog) - 1, *self.changelog[-1])
            write_restored_rows(reader, self._local, None, schemas)
        task.initialize(self.clock.now_ms())
        self._task = task
        self._inputs = TaskInputs(task)
        self._idle = None if self.idle_timeout_ms is None else Idleness(self.idle_timeout_ms)
        if any(self.source_log.values()):
            self._process_records()

    def _require_topic(self, topic: str) -> None:
        if not isinstance(topic, str):
            raise TypeError(f"pipe: the topic must be a str, got {topic!r}")
        known = [*self.source_log, *(table.topic for table in self.global_tables.values())]
        if topic not in known:
            raise ConfigError(f"no source reads the topic {topic!r}; the topology reads {', '.join(known)}")

    def _advance_idle_time(self) -> None:
        if self._idle is None:
            return
        advance_idle_time(self._idle, self.task, self.clock.monotonic_ms(), at_end=True, tasks=1)

    def _append_records(self, records: Iterable[ProducerRecord]) -> None:
        """Append the records whose topics the topology reads, and process them.

        Records of global tables are applied before the first of the others is processed, as in a turn of a worker.
        """
        tables = {table.topic: table for table in self.global_tables.values()}
        is_new = False
        for record in records:
            if (table := tables.get(record.topic)) is not None:
                error = table.apply(record.key, record.value)
                if error is not None and self._raises:
                    raise ProcessingFailed(f"global table {table.name!r}: {error}") from error
            elif (log := self.source_log.get(record.topic)) is not None:
                # A dead letter has no timestamp yet: the producer sets the time of its writing.
                timestamp = self.clock.now_ms() if record.timestamp is None else record.timestamp
                log.append(
                    ConsumerRecord(
                        record.topic, self.partition, len(log), timestamp, record.key, record.value, record.headers
                    )
                )
                is_new = True
        if is_new:
            self._process_records()

    def _process_records(self) -> None:
        """Process the records from the task's positions on, as a worker that has fetched all of them in one poll.

        After a crash there is no task, and `restore` processes them.
        """
        if self._task is None:
            return
        for topic, log in self.source_log.items():
            if records := log[self.task.sources.get(topic, 0) :]:
                self._inputs.add(Columns.of(records))
        self._inputs.process(self.clock.now_ms(), lags=dict.fromkeys(self.source_log, 0))
        self._advance_idle_time()
        self.task.punctuate_wall_clock(self.clock.now_ms())
        if self.commit_each:
            self.commit()


def _require_record(topic: str, key: object, value: object, timestamp: object, headers: object) -> None:
    """Raise TypeError or ValueError, with the value, for a record that a consumer never reads from a topic."""
    for name, given in (("key", key), ("value", value)):
        if not isinstance(given, bytes | None):
            hint = ""
            if isinstance(given, str):
                hint = "; encode it"
            elif given is not None and not isinstance(given, bytearray | memoryview):
                hint = "; serialize it as its producer does"
            raise TypeError(f"pipe: the {name} for {topic!r} must be bytes or None, got {given!r}{hint}")
    if not isinstance(timestamp, int) or isinstance(timestamp, bool):
        raise TypeError(f"pipe: the timestamp for {topic!r} must be an int, ms since the epoch, got {timestamp!r}")
    if not -1 <= timestamp <= INT64_MAX:
        raise ValueError(
            f"pipe: the timestamp for {topic!r} must be from 0 to 2^63 - 1 ms, or -1 for none, got {timestamp}"
        )
    pairs = headers if isinstance(headers, list | tuple) else [headers]
    for pair in pairs:
        match pair:
            case (str(), bytes() | None):
                pass
            case _:
                raise TypeError(
                    f"pipe: the headers for {topic!r} must be a dict, or pairs, of str and bytes or None, got {pair!r}"
                )
