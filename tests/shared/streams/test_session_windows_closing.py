"""Sessions of which one record, or one advance of time, closes many: what comes of it is what comes of them singly."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams import column_aggregate
from penstock.shared.streams.aggregations import Count, Sum
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.stream_task import StreamTask
from penstock.shared.streams.task_outputs import ResultColumns
from penstock.shared.streams.windowed_aggregate import Emit

SINGLY = 1 << 30


def closed(monkeypatch: pytest.MonkeyPatch, at_once_min: int, how: str, emit: Emit, seed: int) -> tuple[Any, ...]:
    """All that a commit writes after many sessions were closed, one by one or at once, and what is left of them."""
    monkeypatch.setattr(column_aggregate, "CLOSE_AT_ONCE_MIN", at_once_min)
    draw = random.Random(seed)
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(1000, 500).aggregate("s", n=Count(), total=Sum("n"))
    (windows.on_close() if emit == "on_close" else windows.on_update()).to("out")
    task = StreamTask(builder.build(), 0, application="app", columns_min=SINGLY)
    task.initialize(0)
    offset, made = 0, []

    def process(key: int, at: int) -> None:
        nonlocal offset
        task.process(Columns.of([ConsumerRecord("in", 0, offset, at, b"k%03d" % key, b'{"n":%d}' % offset)]), 0)
        offset += 1

    for _ in range(2):
        start = task.stream_time_ms + 1
        for _ in range(150):  # new sessions, some of which grow, are merged or die in the midst of their bucket
            process(draw.randrange(100), start + draw.choice([0, 0, 1, 3, 1100, 1107, 1200]))
        made.append(task.prepare_commit(0))
        task.commit_succeeded()
        if how == "record":
            process(999, start + 2604)
            process(998, start + 20_000)
        else:
            task.advance_time(1407)
            task.advance_time(20_000)
    last = task.prepare_commit(0)
    outputs = [(r.key, r.value, r.timestamp, r.headers, last.source_of(r)) for r in last.outputs]
    left = sorted((s.key, s.start, s.end, s.states) for s in task.stores["s"].rows())
    in_columns = any(isinstance(item, ResultColumns) for item in (*made[1].produced.items, *last.produced.items))
    changes = [sorted(commit.changelog, key=repr) for commit in (*made, last)]
    return outputs, changes, left, task.metrics.closed_total, in_columns


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("emit", ["on_close", "on_update"])
@pytest.mark.parametrize("how", ["record", "advance"])
def test_many_at_once(monkeypatch: pytest.MonkeyPatch, how: str, emit: Emit, seed: int) -> None:
    """Results, their order and origins, and the changelog are the same; with on_close() they go out as columns."""
    *at_once, in_columns = closed(monkeypatch, 32, how, emit, seed)
    *singly, in_columns_singly = closed(monkeypatch, SINGLY, how, emit, seed)
    assert at_once == singly
    assert at_once[3] > 2 * 32
    if emit == "on_close":
        assert (in_columns, in_columns_singly) == (True, False)
