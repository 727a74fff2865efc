"""Putting a task's state back."""

from __future__ import annotations

import pytest

from shared.common.errors import CorruptRecord
from shared.streams.aggregations import Aggregate, Count
from shared.streams.changelog_format import DELETED, LIVE, StateCodec
from shared.streams.changelog_reader import Change
from shared.streams.dsl import StreamsBuilder
from shared.streams.restore import restore_change
from shared.streams.stream_task import StreamTask


def new_task() -> StreamTask:
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10, 5)
    windows.aggregate("s", n=Count(), last=Aggregate(lambda: None, lambda s, v: v, lambda a, b: b)).on_close().to("out")
    return StreamTask(builder.build(), 0, application="app")


def pack(task: StreamTask, n: int, last: bytes) -> bytes:
    return StateCodec(task.topology.schemas()[0].state_columns()).pack([n, last])


def test_a_live_window_comes_and_goes() -> None:
    """A live entry puts the window back, a deletion takes it out again."""
    task = new_task()
    restore_change(task, Change(LIVE, "s", b"k", 1, 2, pack(task, 3, b'"x"')))
    assert [(s.key, s.start, s.end, s.states) for s in task.stores["s"].sessions()] == [("k", 1, 2, [3, "x"])]
    restore_change(task, Change(DELETED, "s", b"k", 1))
    assert not list(task.stores["s"].sessions())


@pytest.mark.parametrize(
    ("operation", "key", "last"),
    [(LIVE, b"\xff", b'"x"'), (DELETED, b"\xff", b""), (LIVE, b"k", b"{")],
    ids=["a live window's key", "a deletion's key", "an aggregation's state"],
)
def test_what_cannot_be_read_is_corrupt(operation: bytes, key: bytes, last: bytes) -> None:
    """A key that is no text, or a state that its aggregation does not know, is a corrupt record of a named store."""
    task = new_task()
    with pytest.raises(CorruptRecord, match="an entry of store 's' cannot be read"):
        restore_change(task, Change(operation, "s", key, 1, 2, pack(task, 3, last)))
