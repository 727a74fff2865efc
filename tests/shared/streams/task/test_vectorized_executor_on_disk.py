"""The vectorized executor with windows on disk: any record of a batch loads the windows that its time closes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.windows.window_rule import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples
from tests.shared.streams.batches_beside_records import (
    Piped,
    Windowed,
    batches,
    emits,
    hopping,
    live,
    odd,
    path_of,
    rejected_records,
    results,
    sessions,
    sliding,
    state,
    topology,
)

KINDS: dict[str, Windowed] = {
    "session": sessions(10, 5),
    "tumbling": hopping(10, 10, 5),
    "hopping": hopping(10, 4, 5),
    "sliding": sliding(10, 5),
}
MEMORY_BYTES_MAX = 8 * 1024 * 1024
NONE = 0
"""No row stays in memory past its commit."""

turns = st.lists(st.sampled_from(["commit", "commit", "commit", "nothing", "crash"]), min_size=1, max_size=8)
RARELY = 39
"""One of 40 records does not fit a column. If most did not, single records would be processed anyway."""

many_keys = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"", None])
steps = st.one_of(st.integers(0, 6), st.integers(-25, 30), st.sampled_from([-40, 0, 60]))
parts = st.lists(st.sampled_from([1, 3, 8, 8, 13, 25]), min_size=1, max_size=5)


@st.composite
def spread(draw: st.DrawFn) -> list[Piped]:
    """Records of so many keys that most rows are only on disk, some of them unfit for columns."""
    now, out = draw(st.integers(0, 30)), []
    for key, step in draw(st.lists(st.tuples(many_keys, steps), min_size=20, max_size=60)):
        value: bytes | None = b'{"n":%d,"ms":%d.5}' % (len(out), len(out) % 7)
        if draw(st.integers(0, RARELY)) == RARELY:
            key, value = draw(st.one_of(st.tuples(st.just(key), odd), st.just((b"\xff", value))))
        out.append(Piped(key, value, max(0, now + step)))
        now = max(now, now + step)
    return out


@contextmanager
def both(windowed: Windowed, emit: Emit) -> Iterator[tuple[TopologyTestDriver, TopologyTestDriver]]:
    """Yields drivers of the topology in memory and on disk, both with the vectorized executor."""
    with tempfile.TemporaryDirectory() as folder:
        on_disk = StateDirectory(folder, "app", memory_bytes_max=MEMORY_BYTES_MAX, cache_bytes_max=NONE)
        drivers = tuple(
            TopologyTestDriver(
                topology(windowed, emit),
                commit_each=False,
                deduplicate_updates=True,
                columns_min=1,
                errors=ErrorHandlers(),
                state=where,
            )
            for where in (None, on_disk)
        )
        assert None not in map(path_of, drivers)
        try:
            yield drivers[0], drivers[1]
        finally:
            drivers[1].close()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(30))
@given(records=spread(), sizes=parts, plan=turns, emit=emits)
def test_batches_give_the_same_on_disk(
    kind: str, records: list[Piped], sizes: list[int], plan: list[str], emit: Emit
) -> None:
    """After each batch, commit or crash, windows on disk equal those in memory: results, late records, dead letters and
    state."""
    with both(KINDS[kind], emit) as drivers:
        for number, batch in enumerate(batches(records, sizes)):
            for driver in drivers:
                driver.pipe_columns("in", batch)
                if plan[number % len(plan)] == "crash":
                    driver.crash(torn_entries=2)
                    driver.restore()
                if plan[number % len(plan)] == "commit":
                    driver.commit()
            in_memory, on_disk = drivers
            assert state(on_disk) == state(in_memory)
            assert len(on_disk.task.stores["s"]) == len(live(in_memory))
            assert rejected_records(on_disk) == rejected_records(in_memory)
            assert results(on_disk) == results(in_memory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("late", [False, True])
def test_the_latest_record_of_a_batch_says_what_is_closed(kind: str, late: bool) -> None:
    """Any record of a batch, not only its first or last, closes the windows of a key that is only on disk."""
    with both(KINDS[kind], "on_close") as drivers:
        for driver in drivers:
            driver.pipe_columns("in", [(b"gone", b'{"n":1}', 20)])
            driver.commit()
            driver.pipe_columns("in", [(b"b", b'{"n":2}', at) for at in ((21, 90, 22) if late else (21, 90))])
            driver.commit()
        of_memory, of_disk = (results(driver) for driver in drivers)
        assert of_disk == of_memory
        assert b"gone" in {key for key, _, _ in of_disk}
