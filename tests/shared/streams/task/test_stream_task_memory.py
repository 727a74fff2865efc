"""A soak test of a stream task's memory with very many short-lived keys.

`PENSTOCK_TEST_RECORDS` sets the number of records (default 100 million, which takes minutes).
"""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest

from penstock.shared.common.records import Columns
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.task.stream_task import StreamTask

RECORDS = int(os.environ.get("PENSTOCK_TEST_RECORDS", "100_000_000"))
BATCH, BATCHES_A_COMMIT = 12_000, 10
RECORDS_A_KEY, KEYS_AT_ONCE = 3, 1_000
RECORDS_A_MS = 10
GAP_MS, GRACE_MS = 10_000, 1_000
START_MS = 1_700_000_000_000
GROWTH_MAX = 0.05
"""The share by which memory may grow after the first tenth. One leaked byte per record would exceed half."""


def keys_of(first: int, count: int) -> list[bytes | None]:
    """Return keys that occur three times within 3,000 records, and never again."""
    rows = np.arange(first, first + count)
    numbers = rows // (RECORDS_A_KEY * KEYS_AT_ONCE) * KEYS_AT_ONCE + rows % KEYS_AT_ONCE
    return [b"visitor-%012d" % number for number in numbers.tolist()]


def anonymous_kib() -> int:
    """The anonymous memory of this process in KiB, as the kernel reports it."""
    gc.collect()
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.soak
def test_memory_is_flat_while_keys_come_and_go() -> None:
    """Memory follows the open sessions, not the keys seen: each session is closed once, and memory at the end is that
    after a tenth of all records."""
    builder = StreamsBuilder()
    sessions = builder.stream("visits", value=bytes).group_by_key().session_window(GAP_MS, GRACE_MS)
    sessions.aggregate("sessions", n=Count()).on_close().to("closed")
    task = StreamTask(builder.build(), 0, application="soak")
    task.initialize(START_MS)
    batches = RECORDS // BATCH
    after_a_tenth = written = 0
    for number in range(batches):
        first = number * BATCH
        offsets = np.arange(first, first + BATCH)
        times = START_MS + offsets // RECORDS_A_MS
        task.process(Columns("visits", 0, keys_of(first, BATCH), [b"{}"] * BATCH, times, offsets), START_MS)
        if number % BATCHES_A_COMMIT == BATCHES_A_COMMIT - 1 or number == batches - 1:
            written += len(task.prepare_commit(START_MS).outputs)
            task.commit_succeeded()
            if after_a_tenth == 0 and number >= batches // 10:
                after_a_tenth = anonymous_kib()
    at_the_end = anonymous_kib()

    keys, live = batches * BATCH // RECORDS_A_KEY, len(task.stores["sessions"])
    assert (task.metrics.closed_total, task.metrics.late_total) == (keys - live, 0)
    assert written == keys - live
    assert 0 < live <= (GAP_MS + GRACE_MS) * RECORDS_A_MS // RECORDS_A_KEY + 2 * KEYS_AT_ONCE
    print(f"{batches * BATCH:,} records: {after_a_tenth:,} KiB after a tenth, {at_the_end:,} KiB at the end")
    assert at_the_end <= after_a_tenth * (1 + GROWTH_MAX)
