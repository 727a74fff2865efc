"""A changelog reader applies valid commits, and reports corrupt entries and incompatible stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import ChangelogHole, CorruptRecord, SchemaMismatch
from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.aggregations.aggregation import Count, Max, Sum
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.changelog_reader import (
    Change,
    ChangelogReader,
    ConfirmedChanges,
    CorruptEntry,
    apply_one_by_one,
    ignore_changes,
    reader_start_offset,
)
from penstock.shared.streams.changelog.format import Progress, Takeover
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema, check_schema

Written = tuple[bytes | None, bytes | None]

AT = TopicPartition("app-changelog", 2)

STORE = StoreSchema(
    name="s",
    kind="session",
    key="bytes",
    gap_ms=1,
    grace_ms=0,
    emit="on_close",
    source="in",
    results="out",
    late="in-late",
    dead_letters="in-dlq",
    aggregations=(AggregationSchema.of("n", Count()), AggregationSchema.of("top", Max("x"))),
)


def takeover(epoch: int) -> Written:
    return None, fmt.encode_takeover(epoch, Takeover("app", "host", 0))


def live(epoch: int, commit: int, key: bytes, start: int = 0, end: int = 0, store: int = 0) -> Written:
    return key, fmt.encode_live(store, epoch, commit, start, end, b"%d/%d" % (epoch, commit))


def deleted(epoch: int, commit: int, key: bytes, start: int = 0) -> Written:
    return key, fmt.encode_deleted(0, epoch, commit, start)


def final(epoch: int, commit: int, key: bytes, start: int = 0, end: int = 0) -> Written:
    return key, fmt.encode_final(0, epoch, commit, start, end, end + 1, b"")


def progress(epoch: int, commit: int, at: int = 0, stores: tuple[StoreSchema, ...] = (STORE,)) -> Written:
    return None, fmt.encode_progress(
        epoch, commit, Progress("app", "exactly_once", {"in": at}, 0, {"s": 0}, {}, stores, 0)
    )


@dataclass
class Read:
    """A reader, the changes that it applied, and the resulting state."""

    reader: ChangelogReader = field(init=False)
    changes: list[Change] = field(default_factory=list)
    state: dict[tuple[bytes, int], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = ChangelogReader(apply_one_by_one(self._apply))

    def _apply(self, change: Change) -> None:
        self.changes.append(change)
        if change.operation == fmt.LIVE:
            self.state[change.key, change.start] = change.state
        else:
            self.state.pop((change.key, change.start), None)

    @property
    def at(self) -> int | None:
        return None if self.reader.progress is None else self.reader.progress.sources["in"]


def read(*log: Written) -> Read:
    out = Read()
    for offset, (key, value) in enumerate(log):
        out.reader.feed_record(offset, key, value)
    return out


def test_two_commits() -> None:
    """Confirmed commits are applied in log order, and the last progress record is kept."""
    got = read(
        takeover(1),
        live(1, 1, b"a", 5, 9),
        live(1, 1, b"b"),
        progress(1, 1, at=3),
        final(1, 2, b"a", 5, 9),
        deleted(1, 2, b"b"),
        live(1, 2, b"a", 5, 20),
        progress(1, 2, at=4),
    )
    assert got.changes == [
        Change(fmt.LIVE, "s", b"a", 5, 9, b"1/1", STORE),
        Change(fmt.LIVE, "s", b"b", 0, 0, b"1/1", STORE),
        Change(fmt.FINAL, "s", b"a", 5, 9, b"", STORE),
        Change(fmt.DELETED, "s", b"b", 0, 0, b"", STORE),
        Change(fmt.LIVE, "s", b"a", 5, 20, b"1/2", STORE),
    ]
    assert (got.at, got.state) == (4, {(b"a", 5): b"1/2"})
    assert (got.reader.next_offset, got.reader.entries_applied, got.reader.entries_ignored) == (8, 5, 0)


def test_commits_under_different_stores_in_one_batch() -> None:
    """Consecutive commits with the same stores are applied together. Each has the number of changes up to it."""
    other = msgspec.structs.replace(STORE, name="t")
    log = [
        takeover(1),
        *(live(1, 1, b"a"), live(1, 1, b"b"), progress(1, 1, at=1)),
        *(live(1, 2, b"c"), progress(1, 2, at=2)),
        *(live(1, 3, b"d", store=1), live(1, 3, b"e"), progress(1, 3, at=3, stores=(STORE, other))),
        *(live(1, 4, b"f"), progress(1, 4, at=4)),
        *(progress(1, 5, at=5, stores=(STORE, other)), live(1, 6, b"g")),
    ]
    found: list[ConfirmedChanges] = []
    reader = ChangelogReader(found.append)
    reader.feed(np.arange(20, 20 + len(log)), *zip(*log, strict=True))
    assert [(list(one.keys), [store.name for store in one.stores]) for one in found] == [
        ([b"a", b"b", b"c"], ["s"]),
        ([b"d", b"e"], ["s", "t"]),
        ([b"f"], ["s"]),
        ([], ["s", "t"]),
    ]
    commits = [[(c.offset, c.epoch, c.changes, c.progress.sources["in"]) for c in one.commits] for one in found]
    assert commits == [[(23, 1, 2, 1), (25, 1, 3, 2)], [(28, 1, 2, 3)], [(30, 1, 1, 4)], [(31, 1, 0, 5)]]
    assert [one.offsets.tolist() for one in found] == [[21, 22, 24], [26, 27], [29], []]
    assert (reader.next_offset, reader.covered_offset, reader.entries_applied) == (33, 32, 6)
    rest = [progress(1, 6, at=6), progress(1, 7, at=7)]
    reader.feed(np.arange(33, 35), *zip(*rest, strict=True))
    assert [(list(one.keys), len(one.commits)) for one in found[4:]] == [([b"g"], 0), ([], 2)]
    assert reader.progress is not None
    assert (reader.progress.sources["in"], reader.covered_offset) == (7, 35)


def test_a_commit_over_several_batches() -> None:
    """The entries of a commit that wait over a batch's end are applied as they were written, each with its offset."""
    found: list[ConfirmedChanges] = []
    reader = ChangelogReader(found.append)
    waiting = [takeover(1), live(1, 1, b"a", 1, 2), live(1, 1, b"b", 3, 4), live(1, 1, b"c", 5, 6)]
    for first, log in ((40, waiting), (44, [live(1, 1, b"d", 7, 8), progress(1, 1, at=1)])):
        reader.feed(np.arange(first, first + len(log)), *zip(*log, strict=True))
        assert (reader.next_offset, reader.covered_offset) == ((44, 41) if first == 40 else (46, 46))
    assert [(offset, change.key, change.start) for one in found for offset, change in one.changes()] == [
        *((41, b"a", 1), (42, b"b", 3), (43, b"c", 5), (44, b"d", 7)),
    ]


def test_an_unknown_store_in_a_batch() -> None:
    """An entry of a store that its commit does not list is rejected with its offset. The commits before it count."""
    found: list[ConfirmedChanges] = []
    reader = ChangelogReader(found.append)
    log = [takeover(1), live(1, 1, b"a"), progress(1, 1, at=1), live(1, 2, b"b"), live(1, 2, b"c", store=1)]
    log += [progress(1, 2, at=2), live(1, 3, b"d"), progress(1, 3, at=3)]
    with pytest.raises(CorruptEntry, match="store 1; there are 1") as raised:
        reader.feed(np.arange(60, 60 + len(log)), *zip(*log, strict=True))
    assert (raised.value.offset, [list(one.keys) for one in found]) == (64, [[b"a"]])
    assert reader.progress is not None
    assert reader.progress.sources == {"in": 1}


def test_late_records_are_no_changes_of_windows() -> None:
    """Late entries have the starts of the windows that they missed, and are not among the changes of windows."""
    late = [((), b""), ((5,), None), ((1, 2, 3), b"xyz"), ((7,), b"")]
    entries = [(b"k", fmt.encode_late(0, 1, 1, 10 + i, i, missed, state)) for i, (missed, state) in enumerate(late)]
    found: list[ConfirmedChanges] = []
    log = [takeover(1), live(1, 1, b"a", 3, 4), *entries, live(1, 1, b"b", 5, 6), progress(1, 1)]
    ChangelogReader(found.append).feed(np.arange(len(log)), *zip(*log, strict=True))
    (confirmed,) = found
    records = confirmed.at(confirmed.operations == fmt.LATE[0])
    assert list(records.missed) == [b"".join(map(fmt.START.pack, missed)) for missed, _ in late]
    assert records.missed.offsets.dtype == np.int64
    assert list(records.states) == [state for _, state in late]
    assert (records.starts.tolist(), records.ends.tolist()) == ([10, 11, 12, 13], [0, 1, 2, 3])
    assert [(offset, change.key, change.start, change.end) for offset, change in confirmed.changes()] == [
        (1, b"a", 3, 4),
        (6, b"b", 5, 6),
    ]
    assert list(confirmed.of_windows().keys) == [b"a", b"b"]


def test_an_incomplete_commit_is_not_applied() -> None:
    """Entries without a following progress record are not applied, not even when the next owner commits."""
    torn = (takeover(1), live(1, 1, b"a"), progress(1, 1, at=1), live(1, 2, b"a", end=9), deleted(1, 2, b"b"))
    assert read(*torn).state == {(b"a", 0): b"1/1"}
    got = read(*torn, takeover(2), live(2, 1, b"c"), progress(2, 1, at=2))
    assert got.state == {(b"a", 0): b"1/1", (b"c", 0): b"2/1"}
    assert (got.at, got.reader.entries_ignored) == (2, 2)


def test_entries_of_an_old_owner_after_a_takeover_are_ignored() -> None:
    """All records that a previous owner writes after a takeover are ignored, also within a commit of the new owner."""
    got = read(
        takeover(1),
        live(1, 1, b"a"),
        progress(1, 1, at=1),
        takeover(2),
        live(1, 2, b"a", end=50),
        live(2, 1, b"b"),
        progress(1, 2, at=50),
        live(2, 1, b"c"),
        progress(2, 1, at=2),
        live(1, 3, b"d"),
        progress(1, 3, at=60),
    )
    assert got.state == {(b"a", 0): b"1/1", (b"b", 0): b"2/1", (b"c", 0): b"2/1"}
    assert (got.at, got.reader.epoch) == (2, 2)


def test_takeover_in_mid_commit() -> None:
    """A commit whose progress record follows the takeover was not confirmed in time. It is a zombie's commit."""
    got = read(takeover(1), live(1, 1, b"a"), takeover(2), progress(1, 1, at=9))
    assert (got.changes, got.at, got.reader.entries_ignored) == ([], None, 2)


def test_an_aborted_commit_number_is_skipped() -> None:
    """A progress record confirms only the entries of its own number. Entries of an earlier number are discarded."""
    got = read(takeover(1), live(1, 1, b"a"), live(1, 2, b"b"), progress(1, 2), progress(1, 1, at=5))
    assert got.state == {(b"b", 0): b"1/2"}
    assert got.reader.entries_ignored == 1


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_older_or_equal_takeover_changes_nothing(epoch: int) -> None:
    """A takeover is valid only with a higher epoch. Of two with the same epoch, the first is valid."""
    got = read(takeover(2), live(2, 1, b"a"), takeover(epoch), progress(2, 1))
    assert got.state == {(b"a", 0): b"2/1"}
    assert (got.reader.epoch, got.reader.takeover_offset) == (2, 0)


def test_the_winner_of_an_epoch_is_known_by_its_offset() -> None:
    """If two owners declare the same epoch at once, each can tell from the log which of them owns it."""
    reader = read(takeover(1), takeover(2), takeover(2)).reader
    assert (reader.epoch, reader.takeover_offset) == (2, 1)


FOREIGN_TAKEOVER = (None, b"\x00" + fmt.encode_takeover(2, Takeover("app", "host", 0))[1:])


def test_commits_without_a_takeover_are_invalid() -> None:
    """If the takeover record of an epoch is missing, the reader cannot know the epoch's first commit, and fails."""
    log = [takeover(1), FOREIGN_TAKEOVER, live(2, 1, b"b"), progress(2, 1, at=2), takeover(3), progress(3, 1, at=4)]
    message = r"offset 3: .*epoch 2 .*: 1\)"
    with pytest.raises(CorruptEntry, match=message):
        read(*log)
    with pytest.raises(CorruptEntry, match=r"offset 0.*epoch.*none"):
        read(progress(1, 1))


def test_entries_of_epoch_0_are_ignored() -> None:
    """Entries and progress records of epoch 0 are ignored, with or without a takeover."""
    for log in ([], [takeover(0)], [takeover(1)]):
        got = read(*log, live(0, 1, b"a"), progress(0, 1, at=1))
        assert (got.state, got.at, got.reader.entries_ignored) == ({}, None, 2)


def test_no_owner_goes_above_the_highest_epoch() -> None:
    """A new owner could write nothing that a reader accepts, so a record with the highest epoch is reported before."""
    assert read(takeover(1), deleted(fmt.EPOCH_MAX, 1, b"a")).reader.next_epoch == 2
    assert read(takeover(fmt.EPOCH_MAX - 1)).reader.next_epoch == fmt.EPOCH_MAX
    reader = read(takeover(1), takeover(fmt.EPOCH_MAX), deleted(1, 1, b"a")).reader
    with pytest.raises(CorruptEntry) as raised:
        _ = reader.next_epoch
    assert raised.value.offset == 1
    with pytest.raises(CorruptRecord, match="2147483646"):
        _ = ChangelogReader(ignore_changes, epoch=fmt.EPOCH_MAX).next_epoch


def test_an_epoch_from_a_snapshot() -> None:
    """A reader that continues from a snapshot accepts entries of the snapshot's epoch without its takeover record."""
    got = Read()
    got.reader = ChangelogReader(apply_one_by_one(got._apply), epoch=3)
    for offset, (key, value) in enumerate([live(2, 9, b"z"), live(3, 7, b"a"), progress(3, 7, at=1)], 100):
        got.reader.feed_record(offset, key, value)
    assert (got.state, got.at, got.reader.next_offset) == ({(b"a", 0): b"3/7"}, 1, 103)
    assert got.reader.takeover_offset is None


def test_a_commit_without_changes_moves_progress() -> None:
    """A progress record without entries is a commit."""
    assert read(takeover(1), progress(1, 1, at=8)).at == 8


def test_repr_counts() -> None:
    """The reader prints its position and the numbers of applied, ignored and pending entries."""
    got = read(takeover(1), live(1, 1, b"a"), progress(1, 1), live(1, 2, b"b"), live(0, 1, b"c"))
    assert repr(got.reader) == "ChangelogReader(epoch 1, next 5, 1 applied, 1 ignored, 1 pending)"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(b"a", b"\x01L")], "offset 1: .* no envelope"),
        ([(b"a", b"\x02L of a layout to come")], "offset 1: .*version 2"),
        ([(b"a", b"\x01Y" + bytes(20))], "offset 1: .*b'Y'"),
        ([(b"a", fmt.encode_live(0, -1, 1, 0, 0, b""))], "offset 1: .*epoch -1"),
        ([takeover(fmt.EPOCH_MAX + 1)], "offset 1: .*2147483647; 2147483646"),
        ([live(1, 1, b"a", store=1), progress(1, 1)], "offset 1: .*store 1; "),
        ([(None, live(1, 1, b"a")[1]), progress(1, 1)], "offset 1: .*b'L' .*store 0.* key"),
        ([(b"a", fmt.encode_deleted(0, 1, 1, 0)[:-1])], "offset 1: .* 7 .* 8 "),
        ([(b"a", fmt.encode_deleted(0, 1, 1, 0) + b"x")], "offset 1: .* 9 .* 8 "),
        ([(b"a", fmt.encode_live(0, 1, 1, 0, 0, b"")[:-1])], "offset 1: .* 15 .* 16 "),
        ([(b"a", fmt.encode_final(0, 9, 1, 0, 0, 0, b"")[:-1])], "offset 1: .* 23 .* 24 "),
        ([(None, fmt.ENVELOPE.pack(1, fmt.PROGRESS, 0, 1, 1) + b"{")], "offset 1: .*progress record"),
        ([(None, fmt.ENVELOPE.pack(1, fmt.PROGRESS, 0, 0, 1) + b"{")], "offset 1: .*progress record"),
    ],
)
def test_corruption_names_the_offset(entries: Sequence[Written], message: str) -> None:
    """An entry that cannot be decoded is rejected with its own offset, whether or not it is confirmed."""
    with pytest.raises(CorruptEntry, match=message) as raised:
        read(takeover(1), *entries)
    assert raised.value.offset == 1


FOREIGN: list[bytes | None] = [None, b"", b"\x01", b'{"id":1}', b"hello", bytes(20), b"\x08L" + bytes(20), b"\x01l"]


@pytest.mark.parametrize("value", FOREIGN)
@pytest.mark.parametrize("key", [None, b"a"])
def test_a_foreign_record_changes_nothing(key: bytes | None, value: bytes | None) -> None:
    """A record that is no entry is counted with its offset, wherever it is, and has no effect."""
    got = read(takeover(1), live(1, 1, b"a"), (key, value), progress(1, 1, at=1), (key, value))
    assert (got.state, got.at) == ({(b"a", 0): b"1/1"}, 1)
    assert (got.reader.foreign_records, got.reader.first_foreign_offset) == (2, 2)
    assert (got.reader.entries_applied, got.reader.entries_ignored, got.reader.next_offset) == (1, 0, 5)


def test_a_state_that_cannot_be_read_is_named_by_its_own_offset() -> None:
    """If applying an entry fails, the error names the entry, not the progress record that confirms it."""

    def fail(change: Change) -> None:
        raise CorruptRecord(f"no such key as {change.key!r}")

    reader = ChangelogReader(apply_one_by_one(fail))
    reader.feed_record(7, *takeover(1))
    reader.feed_record(8, *live(1, 1, b"a"))
    with pytest.raises(CorruptEntry, match=r"offset 8.*b'a'"):
        reader.feed_record(9, *progress(1, 1))


# --- schemas ---


def changed(**fields: Any) -> StoreSchema:
    return msgspec.structs.replace(STORE, **fields)


N, TOP = STORE.aggregations


def test_windows_may_get_aggregations() -> None:
    """A new aggregation does not change written entries. Older entries come with the store's older schema."""
    more = AggregationSchema.of("more", Count())
    for grown in ((N, TOP, more), (more, N, TOP)):
        check_schema((STORE,), (changed(aggregations=grown),))
    for stores in ((changed(aggregations=(N, TOP, more)),), (STORE,), None):
        got = Read()
        got.reader = ChangelogReader(apply_one_by_one(got._apply), stores=stores)
        for offset, record in enumerate((takeover(1), live(1, 1, b"a"), progress(1, 1))):
            got.reader.feed_record(offset, *record)
        assert [change.written_as for change in got.changes] == [STORE]


@pytest.mark.parametrize("kind", ["table", "join"])
def test_rows_of_the_user_get_no_aggregations(kind: str) -> None:
    """Another column of the user's rows is a change, because their value is one column."""
    stored = changed(kind=kind, aggregations=(N,))
    check_schema((stored,), (stored,))
    with pytest.raises(SchemaMismatch, match="changed: top"):
        check_schema((stored,), (changed(kind=kind, aggregations=(N, TOP)),))


def test_a_renamed_repartition_topic_is_reported_with_the_remedy() -> None:
    """If the source was a repartition topic, the message says that a name keeps it, and how to delete the state. It
    does not advise to read the old topic to its end, because the store's source would still differ."""
    stored = changed(source="app-key_by-2-repartition")
    with pytest.raises(SchemaMismatch, match=r"`name` to the key_by.*penstock streams reset") as raised:
        check_schema((stored,), (changed(source="app-key_by-3-repartition"),))
    assert "until everything is read" not in str(raised.value)


@pytest.mark.parametrize("what", ["name", "key", "gap_ms", "size_ms"])
def test_a_change_beside_a_repartition_topic_is_no_rename(what: str) -> None:
    """The remedy of a name would change nothing."""
    stored = changed(source="app-key_by-2-repartition")
    with pytest.raises(SchemaMismatch, match=what) as raised:
        check_schema((stored,), (msgspec.structs.replace(stored, **{what: 7}),))
    assert "`name`" not in str(raised.value)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (changed(aggregations=(N,)), "'s': .*aggregations.*top"),
        (changed(aggregations=(TOP, N)), "'s': .*aggregations.*order"),
        (changed(aggregations=(N, AggregationSchema.of("top", Max("y")))), "changed: top"),
        (changed(aggregations=(N, AggregationSchema.of("top", Sum("x")))), "changed: top"),
        (changed(aggregations=(N, msgspec.structs.replace(TOP, state=(("max", "int64"), ("n", "int64"))))), "top"),
        (changed(aggregations=(AggregationSchema.of("m", Count()), TOP)), "changed: m, n"),
    ],
)
def test_incompatible_changes_of_aggregations_are_rejected(own: StoreSchema, message: str) -> None:
    """An aggregation that is removed, moved, renamed or computed differently is named."""
    with pytest.raises(SchemaMismatch, match=message):
        check_schema((STORE,), (own,))


@pytest.mark.parametrize(
    ("stored", "own", "message"),
    [
        ("s", "", "the state has the stores 's', the topology has none: 's' is gone"),
        ("s", "st", "the state has the stores 's', the topology has 's', 't': 't' is new"),
        ("s", "ts", "the state has the stores 's', the topology has 't', 's': 't' is new"),
        ("s", "tu", "the state has the stores 's', the topology has 't', 'u': 't' is new, 'u' is new, 's' is gone"),
        ("", "s", "the state has the stores none, the topology has 's': 's' is new"),
    ],
)
def test_a_store_more_or_less_is_refused_by_name(stored: str, own: str, message: str) -> None:
    """The error has the names of all stores and the possible remedies."""
    with pytest.raises(SchemaMismatch) as raised:
        check_schema(tuple(changed(name=name) for name in stored), tuple(changed(name=name) for name in own))
    assert str(raised.value).startswith(f"{message}. ")
    for remedy in ("Run the topology as it was", "application_id", "`penstock streams reset`", "`penstock batch`"):
        assert remedy in str(raised.value)


def test_a_reader_rejects_commits_of_other_stores() -> None:
    """State of another topology is rejected, with the difference, before any entry of the commit is applied."""
    got = Read()
    got.reader = ChangelogReader(apply_one_by_one(got._apply), stores=(changed(aggregations=(N,)),))
    got.reader.feed_record(0, *takeover(1))
    got.reader.feed_record(1, *live(1, 1, b"a"))
    with pytest.raises(SchemaMismatch, match=r"'s': .*aggregations.*top"):
        got.reader.feed_record(2, *progress(1, 1))
    assert got.changes == []


# --- two owners at once ---


@dataclass
class Owner:
    """Writes commits of its epoch, and tracks which of them count."""

    epoch: int
    commit: int = 0

    def script(self, plan: list[list[tuple[str, bytes, int]]]) -> list[Written]:
        out = [takeover(self.epoch)]
        for entries in plan:
            self.commit += 1
            for kind, key, start in entries:
                make = {"live": live, "deleted": deleted, "final": final}[kind]
                out.append(make(self.epoch, self.commit, key, start))
            out.append(progress(self.epoch, self.commit, at=100 * self.epoch + self.commit))
        return out


entries = st.tuples(st.sampled_from(["live", "live", "deleted", "final"]), st.sampled_from([b"a", b"b"]), st.just(0))
plans = st.lists(st.lists(entries, max_size=3), max_size=4)


@given(plans, plans, st.integers(0, 20), st.data())
def test_only_valid_commits_define_the_state(
    old_plan: list[list[tuple[str, bytes, int]]],
    new_plan: list[list[tuple[str, bytes, int]]],
    before: int,
    data: st.DataObject,
) -> None:
    """Only valid commits define the state, whatever an old owner writes among them."""
    old, new = Owner(1).script(old_plan), Owner(2).script(new_plan)
    before = max(1, min(before, len(old)))
    log, zombie, rest = old[:before], old[before:], list(new)
    legitimate = log + new
    log = [*log, rest.pop(0)]
    while zombie or rest:
        take_zombie = bool(zombie) and (not rest or data.draw(st.booleans()))
        log.append(zombie.pop(0) if take_zombie else rest.pop(0))
    got, expected = read(*log), read(*legitimate)
    assert (got.state, got.at, got.changes) == (expected.state, expected.at, expected.changes)
    # `expected` equals the result of applying whole commits in order, without the rule:
    state: dict[tuple[bytes, int], bytes] = {}
    confirmed_old = sum(1 for _, value in old[:before] if value is not None and value[1:2] == fmt.PROGRESS)
    for epoch, plan in ((1, old_plan[:confirmed_old]), (2, new_plan)):
        for commit, changes in enumerate(plan, 1):
            for kind, key, start in changes:
                state.pop((key, start), None)
                if kind == "live":
                    state[key, start] = b"%d/%d" % (epoch, commit)
    assert got.state == state


def test_a_restore_begins_at_the_covered_offset() -> None:
    """It is read from its beginning without a snapshot, from the covered offset with one."""
    logs = [(None, 0, 9), (5, 0, 9), (9, 9, 9)]
    assert [reader_start_offset(AT, *log) for log in logs] == [0, 5, 9]


@pytest.mark.parametrize(
    ("covered", "first", "end", "message"),
    [
        (None, 3, 9, "app-changelog-2: offsets 0 to 2"),
        (4, 6, 9, "app-changelog-2: offsets 4 to 5"),
        (12, 6, 9, "app-changelog-2: .*ends at 9.* 12"),
    ],
)
def test_missing_changelog_offsets_are_in_the_error(covered: int | None, first: int, end: int, message: str) -> None:
    """The offsets that are missing between a snapshot and the log are in the error."""
    with pytest.raises(ChangelogHole, match=message):
        reader_start_offset(AT, covered, first, end)
