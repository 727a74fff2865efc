"""A task's state on disk is never ahead of its confirmed commits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.state.local_state import RESTORE_BYTES_MAX, CommitOffsetUnknown, LocalState
from penstock.shared.streams.state.persistent_stores import PersistentWindowStore
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.stream_task import StreamTask


@pytest.fixture
def state(tmp_path: Path) -> Iterator[LocalState]:
    """One partition's state."""
    own = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0).state_of(0)
    yield own
    own.close()


def task_on(state: LocalState) -> StreamTask:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    task = StreamTask(builder.build(), 0, application="app", local=state)
    task.initialize(0)
    return task


def take(task: StreamTask, key: bytes, at: int) -> None:
    offset = task.sources.get("in", 0)
    task.process(Columns.of([ConsumerRecord("in", 0, offset, at, key, b"{}")]), 0)


def test_only_confirmed_commits_are_on_disk(state: LocalState) -> None:
    """Changes and prepared commits are written to disk only when the commit is confirmed."""
    task = task_on(state)
    take(task, b"a", 5)
    task.prepare_commit(0)
    take(task, b"b", 6)
    assert (state.db.count(0), state.checkpoint, len(task.stores["s"])) == (0, None, 2)
    task.commit_succeeded(CommitPosition("id", 7, 7))
    assert [(key, start) for key, start, _ in state.db.rows(0)] == [(b"a", 5)]
    assert state.checkpoint is not None
    assert (state.checkpoint.covered_offset, state.checkpoint.epoch, state.checkpoint.topic_id) == (7, 1, "id")
    assert state.checkpoint.progress is not None
    assert state.checkpoint.progress.sources == {"in": 1}
    assert [s.key for s in task.stores["s"].rows()] == ["b", "a"]  # what is not committed yet stays in memory


def test_a_commit_without_an_offset_is_restored_from_the_log(state: LocalState) -> None:
    """If the broker has not returned a commit's offset, nothing is written, and the state is restored from the log."""
    task = task_on(state)
    take(task, b"a", 5)
    task.prepare_commit(0)
    with pytest.raises(CommitOffsetUnknown):
        task.commit_succeeded(CommitPosition("id", 0, 0))
    assert state.checkpoint is None


def test_an_answer_after_the_end_changes_nothing(state: LocalState) -> None:
    """A commit that succeeds after the local state is closed leaves no checkpoint."""
    task = task_on(state)
    take(task, b"a", 5)
    task.prepare_commit(0)
    state.close()
    task.commit_succeeded(CommitPosition("id", 7, 7))
    assert state.checkpoint is None


def test_a_restore_is_written_in_parts(state: LocalState) -> None:
    """A restore is buffered up to a limit of bytes, and has no checkpoint until it is complete."""
    state.begin(task_on(state).topology.schemas())
    while not state.is_full:
        state.restore_raw("s", b"k%d" % len(state._buffered), 1, 2, bytes(50_000))
    assert len(state._buffered) <= RESTORE_BYTES_MAX / 50_000 + 1
    state.write(None)
    assert (state.is_full, state.checkpoint, state.db.count(0) > 10) == (False, None, True)


def test_memory_is_given_back_row_by_row(state: LocalState) -> None:
    """With a memory limit of zero a row leaves memory once its commit is confirmed, and is read from disk again."""
    task = task_on(state)
    for i in range(50):
        take(task, b"%d" % i, 5)
        task.prepare_commit(0)
        task.commit_succeeded(CommitPosition("id", i + 1, i + 1))
    store = task.stores["s"]
    assert (len(store), state._budget.bytes_used) == (50, 0)
    take(task, b"3", 7)
    assert [(s.start, s.end, s.states) for s in store.rows_of("3")] == [(5, 7, [2])]
    assert 0 < state._budget.bytes_used < 2_000
    state.close()
    assert state._budget.bytes_used == 0


def test_rows_in_memory_stay_within_their_limit(tmp_path: Path) -> None:
    """After each commit the rows in memory are within the limit, and the others are on disk, for any number of keys."""
    limit = 20_000
    own = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=limit)
    state = own.state_of(0)
    task = task_on(state)
    for i in range(300):
        take(task, b"%d" % i, 5)
        if i % 10 == 9:
            task.prepare_commit(0)
            task.commit_succeeded(CommitPosition("id", i + 1, i + 1))
            assert own.budget.bytes_used <= limit
    store = task.stores["s"]
    assert isinstance(store, PersistentWindowStore)
    assert (len(store), len(list(store.rows()))) == (300, 300)
    assert 0 < len(store._cache) < 50
    state.close()
