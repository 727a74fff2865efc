"""The limits of a key's size and of a state's: fast checks and upper bounds that agree with measuring."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.errors import RecordTooLarge
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Aggregation, Count, CountDistinct
from penstock.shared.streams.aggregations.collect import CollectList, CollectSet
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.aggregations.quantiles import Quantiles
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_json, encode_updates
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.window_result import WindowKey, WindowResult
from penstock.shared.streams.windows.object_states import HLL_BYTES_MAX, KLL_BYTES_MAX, ObjectStates
from penstock.shared.streams.windows.size_limits import check_key, key_bytes
from penstock.shared.streams.windows.window_descriptions import describe_window
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples

KEYS = st.text(st.characters(exclude_categories=["Cs"])) | st.binary()
ENVELOPE = len(b'{"key":,"start":0,"end":0}')


@given(key=KEYS, limit=st.integers(0, 200))
def test_a_key_is_rejected_by_its_measured_bytes(key: Any, limit: int) -> None:
    """The limit applies to the measured bytes, and the fast check agrees with it."""
    if key_bytes(key) <= limit:
        check_key(key, "s", limit)
    else:
        with pytest.raises(RecordTooLarge, match=f"takes {key_bytes(key)} bytes"):
            check_key(key, "s", limit)


@given(key=KEYS)
def test_no_result_holds_more_of_a_key(key: Any) -> None:
    """The measured size of a key bounds its size in results of both encoders and in changelog entries."""
    record = Record(WindowKey(key, 0, 0), WindowResult(key, 0, 0, {}), 0)
    for encode, envelopes in ((encode_json, 1), (encode_updates, 2)):
        written = sum(len(part or b"") for part in encode(record))
        assert written <= key_bytes(key) + envelopes * ENVELOPE
    assert msgspec.json.decode(record.value.to_json(), type=dict[str, Any])["start"] == 0


def test_a_windows_name_is_short() -> None:
    """A long key is shown by its beginning and its length, a value that is no key by a part of its text."""
    assert describe_window("s", "k" * 200, 1, 2) == f"store 's', key '{'k' * 100}'... (200 characters), window 1 to 2"
    assert describe_window(None, b"\xff", 1, 2) == "key b'\\xff', window 1 to 2"
    assert len(describe_window("s", ["k" * 10_000], 1, 2)) < 1_100


RECORD_BYTES_MAX = 600

KINDS: dict[str, Any] = {
    "session": lambda grouped: grouped.session_window(10, 20),
    "tumbling": lambda grouped: grouped.tumbling_window(20, 5),
    "hopping": lambda grouped: grouped.hopping_window(40, 10, 5),
    "sliding": lambda grouped: grouped.sliding_window(10, 30),
}
FUNCTIONS: dict[str, Aggregation[Any]] = {
    "pages": CollectList("page", limit=30),
    "each": CollectSet("page", limit=30),
    "first": First("page"),
    "last": Last("page"),
    "n": Count(),
}


def topology(kind: str, names: list[str]) -> Topology:
    builder = StreamsBuilder()
    windows = KINDS[kind](builder.stream("in").group_by_key())
    windows.aggregate("s", **{name: FUNCTIONS[name] for name in names}).on_close().to("out")
    return builder.build()


def driver_of(made: Topology) -> TopologyTestDriver:
    return TopologyTestDriver(
        made, commit_each=False, columns_min=1, max_request_size=RECORD_BYTES_MAX, errors=ErrorHandlers()
    )


def measure_all(driver: TopologyTestDriver) -> None:
    """Have every state measured with every record."""
    operator: Any = driver.task.times.operators[0]
    operator.in_doubt = lambda codes, got: list(range(len(codes)))


text = st.one_of(st.sampled_from(["", "a", "\x01" * 9, "é" * 12]), st.integers(1, 260).map(lambda n: "x" * n))
values = st.one_of(text, st.none(), st.integers(-9, 9), st.just(2.5), st.just([1, "a"]))
arrivals = st.lists(st.tuples(st.sampled_from([b"k", b"key"]), values, st.integers(0, 90)), max_size=50)


@settings(max_examples=examples(150))
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=1, max_size=3, unique=True),
    arrivals,
    st.integers(1, 20),
    st.integers(0, 3),
)
def test_bounds_reject_what_measuring_rejects(
    kind: str, names: list[str], came: list[tuple[bytes, Any, int]], size: int, restore_at: int
) -> None:
    """Results, dead letters and changelog are those of a task that measures every state, and no entry is too large."""
    bounded, measuring = driver_of(topology(kind, names)), driver_of(topology(kind, names))
    measure_all(measuring)
    records = [(key, msgspec.json.encode({"page": page}), at) for key, page, at in came]
    for number, start in enumerate(range(0, len(records), size)):
        for driver in (bounded, measuring):
            driver.pipe_columns("in", records[start : start + size])
            driver.commit()
            if number == restore_at:
                driver.crash()
                driver.restore()
        if number == restore_at:
            measure_all(measuring)
        for topic in ("out", "in-late"):
            assert [(r.key, r.value) for r in bounded.read(topic)] == [(r.key, r.value) for r in measuring.read(topic)]
        assert [(r.value, r.headers) for r in bounded.read("in-dlq")] == [
            (r.value, r.headers) for r in measuring.read("in-dlq")
        ]
    for driver in (bounded, measuring):
        assert all(record_size(key, value, []) <= RECORD_BYTES_MAX for key, value in driver.changelog if key)
    assert restored(bounded) == restored(measuring)


def restored(driver: TopologyTestDriver) -> list[Any]:
    """The live windows, as the changelog has them."""
    driver.crash()
    driver.restore()
    return sorted((w.key, w.start, w.end, w.states) for w in driver.task.stores["s"].rows())


def test_a_state_that_would_get_too_large_rejects_its_record() -> None:
    """The dead letter has key, size and limit. The window stays unchanged, and other keys are not affected."""
    driver = driver_of(topology("tumbling", ["pages"]))
    pages = [(b"k", 150), (b"k", 150), (b"k", 150), (b"other", 150), (b"k", 5)]
    driver.pipe_columns("in", [(key, b'{"page":"%s"}' % (b"x" * n), 0) for key, n in pages])
    driver.commit()
    (dead_letter,) = driver.read("in-dlq")
    message = dict(dead_letter.headers)["penstock.dlq.message"]
    assert (dict(dead_letter.headers)["penstock.dlq.offset"], dead_letter.value) == (
        b"2",
        b'{"page":"%s"}' % (b"x" * 150),
    )
    assert message.startswith(b"store 's': key 'k': key and state take 481 bytes in the changelog; at most 344 fit")
    rows = {row.key: row.states[-1][1] for row in driver.task.stores["s"].rows()}
    assert rows == {"k": 3, "other": 1}


def test_far_from_the_limit_no_record_is_processed_singly() -> None:
    """Far from the size limit, no record of a batch is processed singly, also for sketches and for a key with a closed
    window."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10)
    windows.aggregate("s", pages=CollectList("page"), users=CountDistinct("page")).on_close().to("out")
    task = StreamTask(builder.build(), 0, application="app", columns_min=1)
    task.initialize(0)
    operator: Any = task.times.operators[0]
    operator.process = None  # nothing is taken one by one
    for batch in range(40):
        page = b'{"page":"%s"}' % (b"x" * 1_000)
        task.process(
            Columns.of([ConsumerRecord("in", 0, 50 * batch + i, 100 * batch, b"k", page) for i in range(50)]), 0
        )
    assert task.metrics.dead_letters_total == 0
    assert len(task.stores["s"]) == 1


@pytest.mark.parametrize(
    ("aggregation", "bytes_max"), [(CountDistinct("x"), HLL_BYTES_MAX), (Quantiles("x"), KLL_BYTES_MAX)]
)
def test_sketches_stay_below_their_limit(aggregation: Aggregation[Any], bytes_max: int) -> None:
    """However many values a sketch has seen."""
    state = aggregation.initial()
    for number in range(200_000):
        state.update(float(number))
    states = ObjectStates(aggregation)
    states.rows = [state]
    assert states.bytes_max == bytes_max
    assert states.encoded_bytes(0) < bytes_max


@given(st.lists(values, max_size=8))
def test_growth_is_an_upper_bound(got: list[Any]) -> None:
    """A list's JSON grows by at most the bound of each of its values."""
    bounds = ObjectStates(CollectList("x")).growth(got)
    assert len(msgspec.json.encode(got)) <= 2 + bounds.sum()
    assert [len(msgspec.json.encode(value)) <= most for value, most in zip(got, bounds, strict=True)] == [True] * len(
        got
    )
