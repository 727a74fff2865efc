"""Late records in the changelog: the windows that each missed, and its own results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.records import Columns
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct, Max, Mean, Min, Sum
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, ConfirmedChanges
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.dsl.builder import GroupedStream, StreamsBuilder, WindowedGroup
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.task.restore import restore_changes
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.late_changelog_entries import NO_OFFSET
from penstock.shared.streams.windows.size_limits import require_missed_windows_fit
from tests.property_tests import examples

SIZE, ADVANCE, GRACE, GAP, DIFFERENCE = 100, 30, 20, 100, 50
KINDS: dict[str, Callable[[GroupedStream], WindowedGroup]] = {
    "session": lambda grouped: grouped.session_window(GAP, GRACE),
    "tumbling": lambda grouped: grouped.tumbling_window(SIZE, GRACE),
    "hopping": lambda grouped: grouped.hopping_window(SIZE, ADVANCE, GRACE),
    "sliding": lambda grouped: grouped.sliding_window(DIFFERENCE, GRACE),
}
NUMBERS: dict[str, Any] = {"n": Count(), "total": Sum("x"), "least": Min("x"), "most": Max("x"), "mean": Mean("x")}
OBJECTS: dict[str, Any] = {
    "n": Count(),
    "pages": CollectList("p"),
    "places": CountDistinct("p"),
    "first": First("p"),
    "last": Last("p"),
}
Sent = tuple[bytes, int, Any]
"""Key, timestamp, value."""
SENT = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b", b"\xc3\xa9"]),
        st.integers(0, 900),
        st.fixed_dictionaries({"x": st.sampled_from([None, 1, -2.5]), "p": st.sampled_from(["u", "v"])}),
    ),
    max_size=60,
)


class Late(NamedTuple):
    """A late record as the changelog has it."""

    store: str
    key: bytes
    timestamp: int
    offset: int
    missed: list[int]
    state: bytes | None


def topology(kind: str, aggregations: dict[str, Any], key: Any = "string") -> Topology:
    builder = StreamsBuilder()
    KINDS[kind](builder.stream("in", key=key).group_by_key()).aggregate("s", **aggregations).on_close().to("out")
    return builder.build()


def task_of(of: Topology, **more: Any) -> StreamTask:
    task = StreamTask(of, 0, application="app", **{"keeps_late": True, **more})
    task.initialize(0)
    return task


def columns(sent: list[Sent], first: int = 0) -> Columns:
    keys, times, values = ([one[i] for one in sent] for i in range(3))
    encoded = [value if isinstance(value, bytes) else msgspec.json.encode(value) for value in values]
    return Columns("in", 0, keys, encoded, np.array(times, np.int64), np.arange(first, first + len(sent)))


class Changelog:
    """Receives a task's commits and reads them back."""

    def __init__(self) -> None:
        self.late: list[Late] = []
        self.parts: list[ConfirmedChanges] = []
        self._reader, self._offset = ChangelogReader(self._take), 1
        self._reader.feed_record(0, None, fmt.encode_takeover(1, fmt.Takeover("app", "test", 0)))

    def commit(self, task: StreamTask) -> None:
        for key, value in task.prepare_commit(0).changelog:
            self._reader.feed_record(self._offset, key, value)
            self._offset += 1
        task.commit_succeeded()

    def _take(self, confirmed: ConfirmedChanges) -> None:
        self.parts.append(confirmed)
        for i in np.flatnonzero(confirmed.operations == fmt.LATE[0]).tolist():
            missed = np.frombuffer(confirmed.missed[i] or b"", ">i8").tolist()
            store, key = confirmed.stores[confirmed.numbers[i]].name, confirmed.keys[i] or b""
            times = int(confirmed.starts[i]), int(confirmed.ends[i])
            self.late.append(Late(store, key, *times, missed, confirmed.states[i]))


def late_of(of: Topology, sent: list[Sent], size: int, **more: Any) -> list[Late]:
    """Return the late records of a task that gets batches of this size, with a commit after every third one."""
    task, changelog = task_of(of, **more), Changelog()
    for nth, at in enumerate(range(0, len(sent), size)):
        task.process(columns(sent[at : at + size], at), 0)
        if nth % 3 == 2:
            changelog.commit(task)
    if task.needs_commit:
        changelog.commit(task)
    return changelog.late


def expected(kind: str, sent: list[Sent]) -> list[tuple[bytes, int, int, list[int]]]:
    """Return the records that missed windows, with the windows, by the definition of the close time. Sliding windows
    are not supported."""
    found, now, live = [], -1, dict[bytes, list[list[int]]]()
    for offset, (key, at, _) in enumerate(sent):
        now = max(now, at)
        if kind == "session":
            close = now - GRACE - GAP
            own = [one for one in live.get(key, []) if one[1] >= close and one[0] - GAP <= at <= one[1] + GAP]
            bounds = [min([at, *(one[0] for one in own)]), max([at, *(one[1] for one in own)])]
            if bounds[1] < close:
                found.append((key, at, offset, [at]))
            else:
                live[key] = [one for one in live.get(key, []) if one not in own] + [bounds]
            continue
        advance = SIZE if kind == "tumbling" else ADVANCE
        starts = [start for start in range(0, at + 1, advance) if at < start + SIZE]
        missed = [start for start in starts if start + SIZE <= now - GRACE]
        if missed:
            found.append((key, at, offset, missed))
    return found


@pytest.mark.parametrize("kind", ["session", "tumbling", "hopping"])
@settings(max_examples=examples(60), deadline=None)
@given(sent=SENT)
def test_a_late_entry_lists_the_missed_windows(kind: str, sent: list[Sent]) -> None:
    """A late entry lists the windows that the record missed, even if other windows accepted it."""
    found = late_of(topology(kind, NUMBERS), sent, 1_000, columns_min=1)
    assert [(one.key, one.timestamp, one.offset, one.missed) for one in found] == expected(kind, sent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aggregations", [NUMBERS, OBJECTS], ids=["numbers", "objects"])
@settings(max_examples=examples(25), deadline=None)
@given(sent=SENT)
def test_batches_of_any_size_write_the_same(kind: str, aggregations: dict[str, Any], sent: list[Sent]) -> None:
    """Batches of any size write the same late entries. An entry's state is that of a window with only this record."""
    of = topology(kind, aggregations)
    found = [late_of(of, sent, size, columns_min=least) for size, least in ((1, 1_000), (7, 1), (1_000, 1))]
    assert found[0] == found[1] == found[2]
    codec, builder = StateCodec(of.stores["s"].schema.state_columns()), of.stores["s"]
    for one in found[0]:
        value = sent[one.offset][2]
        alone = [a.add_at(a.initial(), value, one.timestamp) for a in builder.aggregations]
        packed = [
            column for a, state in zip(builder.aggregations, alone, strict=True) for column in a.to_columns(state)
        ]
        assert one.state == codec.pack(packed)


def test_a_record_that_is_too_late_for_any_sliding_window() -> None:
    """The entry names the window that would have ended at the record."""
    sent: list[Sent] = [(b"a", 1_000, {}), (b"a", 30, {}), (b"a", 500, {})]
    found = late_of(topology("sliding", {"n": Count()}), sent, 10)
    assert [(one.timestamp, one.missed) for one in found] == [(30, [0]), (500, [450])]


def test_without_a_lake_nothing_is_kept() -> None:
    """The changelog has no late records then."""
    sent: list[Sent] = [(b"a", 1_000, {}), (b"a", 0, {})]
    assert late_of(topology("session", {"n": Count()}), sent, 10, keeps_late=False) == []


def test_keys_of_bytes() -> None:
    """A late entry has the record's key, even if it is not UTF-8."""
    sent: list[Sent] = [(b"\xff", 1_000, {}), (b"\xff", 0, {})]
    (one,) = late_of(topology("session", {"n": Count()}, key="bytes"), sent, 10)
    assert (one.key, one.offset) == (b"\xff", 1)


def test_a_function_of_the_users_that_rejects_the_value() -> None:
    """If a user's aggregator raises for a late record, its entry has no state, and the next record has its own."""

    def add(state: int, value: Any) -> int:
        return state + int(value["x"])

    of = topology("session", {"sum": Aggregate(lambda: 0, add, lambda one, other: one + other)})
    sent: list[Sent] = [(b"a", 1_000, {"x": 1}), (b"a", 0, {"x": "no"}), (b"a", 1, {"x": 5})]
    first, second = late_of(of, sent, 10)
    assert (first.missed, first.state) == ([0], None)
    assert second.state == StateCodec(of.stores["s"].schema.state_columns()).pack([b"5"])


def test_a_state_that_cannot_be_encoded_costs_no_late_record() -> None:
    """The records go to the late topic as they do without a lake."""

    class Odd(CollectList):
        def to_columns(self, state: list[Any]) -> tuple[Any, ...]:
            raise TypeError("cannot be encoded")

    task = task_of(topology("session", {"odd": Odd("p")}))
    # A dead letter: its state cannot be encoded.
    task.process(columns([(b"a", 1_000, {})]), 0)
    task.stores["s"].windows.begin(1_000, 900)
    task.process(columns([(b"a", 1, {}), (b"a", 2, {})], 1), 0)
    changelog = Changelog()
    outputs = task.outputs.items
    changelog.commit(task)
    assert [one.state for one in changelog.late] == [None, None]
    assert [output.topic for output in outputs] == ["in-dlq", "in-late", "in-late"]


def test_windows_that_no_entry_can_name_are_rejected() -> None:
    """The starts that a record may miss have to fit into half of an entry."""
    (schema,) = topology("hopping", {"n": Count()}).schemas()
    require_missed_windows_fit([schema], 64)
    with pytest.raises(ConfigError, match=r"'s'.*4 windows"):  # the size is no multiple of the advance
        require_missed_windows_fit([schema], 40)


def test_a_state_that_no_entry_can_hold_is_left_out() -> None:
    """The late record itself is written."""
    of = topology("session", {"pages": CollectList("p")})
    sent: list[Sent] = [(b"a", 1_000, {"p": "-"}), (b"a", 0, {"p": "-" * 600}), (b"a", 1, {"p": "-"})]
    found = late_of(of, sent, 10, record_bytes_max=800)
    assert [one.state is None for one in found] == [True, False]


class Forwarder(Processor):
    """Forwards one old record at a punctuation."""

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        context.schedule(1_000, PunctuationType.STREAM_TIME, self._forward)

    def process(self, record: Record) -> None:
        self.context.forward(record)

    def _forward(self, time_ms: int) -> None:
        if time_ms >= 2_000:
            self.context.forward(Record("a", {"x": 2}, 0))


def test_a_punctuations_late_record_has_no_source_offset() -> None:
    """Its late record has no source offset."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").process_values(Forwarder).group_by_key()
    grouped.session_window(GAP, GRACE).aggregate("s", n=Count()).on_close().to("out")
    found = late_of(builder.build(), [(b"a", 1_000, {"x": 1}), (b"a", 5_000, {"x": 1})], 10)
    assert {(one.key, one.timestamp, one.offset) for one in found} == {(b"a", 0, NO_OFFSET)}


def test_a_rejected_record_leaves_no_late_record() -> None:
    """A record that is late for one window and rejected by another is only a dead letter."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    grouped.session_window(GAP, GRACE).aggregate("s", n=Count()).on_close().to("out")
    grouped.tumbling_window(10_000, GRACE).aggregate("t", total=Sum("x")).on_close().to("other")
    found = late_of(builder.build(), [(b"a", 1_000, {"x": 1}), (b"a", 0, {"x": "no"}), (b"a", 1, {"x": 2})], 1)
    assert [(one.store, one.timestamp) for one in found] == [("s", 1)]


def test_a_restore_passes_them_over() -> None:
    """The restored stores are those of a task without late records in its changelog."""
    sent: list[Sent] = [(b"ab"[n % 2 :][:1], (n * 37) % 700, {"x": n, "p": "u"}) for n in range(200)]
    of = topology("hopping", NUMBERS)
    found = []
    for keeps in (True, False):
        task, changelog = task_of(of, keeps_late=keeps), Changelog()
        task.process(columns(sent), 0)
        changelog.commit(task)
        assert bool(changelog.late) == keeps
        restored = StreamTask(of, 0, application="app")
        for part in changelog.parts:
            restore_changes(restored, part)
        found.append([sorted(store.rows()) for store in (task.stores["s"], restored.stores["s"])])
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]
