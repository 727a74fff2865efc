"""Only valid commits of a changelog define the state: the reader case by case, against a plain model of its rule over
logs that no owner alone would write, and its kernels against the plain functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.shared.common.errors import ChangelogHole, CorruptRecord, SchemaMismatch
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.aggregations.aggregation import Column, Count, Max, Sum
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog import reader_kernels as k
from penstock.shared.streams.changelog.changelog_reader import (
    Change,
    ChangelogReader,
    ConfirmedChanges,
    CorruptEntry,
    apply_one_by_one,
    ignore_changes,
    reader_start_offset,
)
from penstock.shared.streams.changelog.format import DecodedEntry, Progress, Takeover
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema, check_schema
from tests.property_tests import examples

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
        epoch, commit, Progress("app", "exactly_once", {"in": at}, {"s": 0}, {}, {}, stores, 0)
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


@pytest.mark.parametrize("size", [0, 1, 16, 32, 1_000])
def test_states_of_any_length(size: int) -> None:
    """A live entry's state is the rest of the record after its bounds."""
    state = b"x" * size
    out = read(takeover(1), (b"k", fmt.encode_live(0, 1, 1, 3, 4, state)), progress(1, 1))
    assert out.state == {(b"k", 3): state}


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
    log = [takeover(1), live(1, 1, b"a"), (key, value), progress(1, 1, at=1), (key, value)]
    got = read(*log)
    assert (got.state, got.at) == ({(b"a", 0): b"1/1"}, 1)
    in_one_batch = ChangelogReader(ignore_changes)
    in_one_batch.feed(np.arange(len(log)), *zip(*log, strict=True))
    for reader in (got.reader, in_one_batch):
        assert (reader.foreign_records, reader.first_foreign_offset) == (2, 2)
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


@pytest.mark.parametrize("what", ["key", "gap_ms", "size_ms"])
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
        (changed(aggregations=(AggregationSchema.of("m", Count()), TOP)), r"changed: n\."),
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
def test_a_store_more_or_less_is_rejected_by_name(stored: str, own: str, message: str) -> None:
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


PLAIN_STORE = StoreSchema(
    *("s", "session", "bytes", 1, 0, "on_close", "in", None, None, None), (AggregationSchema.of("n", Count()),)
)
GROWN_STORES = (PLAIN_STORE, StoreSchema(*("t", "session", "bytes", 1, 0, "on_close", "in", None, None, None), ()))


@dataclass
class Model:
    """The rule of `format`, written in the simplest way."""

    epoch: int = 0
    applied: list[tuple[int, bytes, str, bytes | None, bytes]] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)
    pending: list[tuple[int, bytes | None, DecodedEntry]] = field(default_factory=list)
    foreign: int = 0
    ignored: int = 0
    covered: int | None = None

    def take(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        if fmt.is_foreign_record(value):
            self.foreign += 1
        else:
            self.take_entry(offset, key, fmt.decode_entry(value))
        if not self.pending:
            self.covered = offset + 1

    def take_entry(self, offset: int, key: bytes | None, entry: DecodedEntry) -> None:
        if entry.operation == fmt.TAKEOVER:
            if entry.epoch > self.epoch:
                self.epoch, self.ignored, self.pending = entry.epoch, self.ignored + len(self.pending), []
        elif entry.operation == fmt.PROGRESS:
            stores = fmt.decode_progress(entry.body).stores
            if entry.epoch > self.epoch:
                raise CorruptRecord("no takeover")
            if entry.epoch < self.epoch or self.epoch == 0:
                self.ignored += 1
                return
            own = [(at, k, e) for at, k, e in self.pending if e.commit == entry.commit]
            for at, _, e in own:
                if e.store >= len(stores):
                    raise CorruptEntry(at, "no such store")
            self.applied += [(at, e.operation, stores[e.store].name, k, e.body) for at, k, e in own]
            self.ignored, self.pending = self.ignored + len(self.pending) - len(own), []
            self.progress.append(offset)
        elif key is None:
            raise CorruptRecord("no key")
        elif entry.epoch == self.epoch > 0:
            self.pending.append((offset, key, entry))
        else:
            self.ignored += 1


EPOCHS, COMMITS, STORES = st.integers(0, 3), st.integers(1, 2), st.sampled_from([0, 0, 0, 0, 1])
TIMES = st.sampled_from([-(2**63), -1, 0, 5, 2**63 - 1])
KEYS = st.sampled_from([b"a", b"b", b""])
STATES = st.binary(max_size=12)
TAKEOVERS = st.builds(lambda epoch: (None, fmt.encode_takeover(epoch, Takeover("app", "i", 0))), EPOCHS)


def progress_of(epoch: int, commit: int, stores: tuple[StoreSchema, ...]) -> Written:
    return None, fmt.encode_progress(epoch, commit, Progress("app", "exactly_once", {}, {}, {}, {}, stores, 0))


ANY_ENTRIES = st.one_of(
    st.tuples(KEYS, st.builds(fmt.encode_live, STORES, EPOCHS, COMMITS, TIMES, TIMES, STATES)),
    st.tuples(KEYS, st.builds(fmt.encode_final, STORES, EPOCHS, COMMITS, TIMES, TIMES, TIMES, STATES)),
    st.tuples(KEYS, st.builds(fmt.encode_deleted, STORES, EPOCHS, COMMITS, TIMES)),
    st.tuples(
        KEYS,
        st.builds(
            fmt.encode_late, STORES, EPOCHS, COMMITS, TIMES, TIMES, st.lists(TIMES, max_size=3), st.none() | STATES
        ),
    ),
)
PROGRESS = st.builds(progress_of, EPOCHS, COMMITS, st.sampled_from([(PLAIN_STORE,), GROWN_STORES, GROWN_STORES]))
FOREIGN_RECORDS = st.tuples(
    st.one_of(st.none(), KEYS), st.one_of(st.none(), st.sampled_from([b"", b"\x01", b"{}", bytes(30)]))
)


@st.composite
def damaged(draw: st.DrawFn) -> Written:
    """A record with a byte that is another, cut off, longer, or without its key."""
    key, value = draw(st.one_of(ANY_ENTRIES, PROGRESS, TAKEOVERS))
    assert value is not None
    how = draw(st.sampled_from(["byte", "cut", "more", "key"]))
    at = draw(st.integers(0, min(len(value) - 1, 40)))
    if how == "byte":
        value = value[:at] + draw(st.binary(min_size=1, max_size=1)) + value[at + 1 :]
    elif how == "cut":
        value = value[:at]
    elif how == "more":
        value += b"!"
    return (None if how == "key" else key), value


RECORDS = st.one_of(ANY_ENTRIES, ANY_ENTRIES, ANY_ENTRIES, PROGRESS, PROGRESS, TAKEOVERS, FOREIGN_RECORDS)


@st.composite
def logs(draw: st.DrawFn) -> list[Written]:
    """Logs with complete commits, torn commits, records of zombies and duplicates, and sometimes a damaged record."""
    log: list[Written] = []
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()):
            log += draw(st.lists(RECORDS, max_size=5))
            continue
        epoch, commit = draw(EPOCHS), draw(COMMITS)
        log += [draw(TAKEOVERS)] * draw(st.booleans())
        operations = draw(st.lists(st.tuples(KEYS, TIMES, STATES), max_size=4))
        log += [(key, fmt.encode_live(0, epoch, commit, at, at, state)) for key, at, state in operations]
        log.append(progress_of(epoch, commit, GROWN_STORES))
    if log and draw(st.booleans()):
        copied = draw(st.sampled_from(log))
        log.insert(draw(st.integers(0, len(log))), copied)
    if draw(st.sampled_from([False, False, True])):
        log.insert(draw(st.integers(0, len(log))), draw(damaged()))
    return log


CUTS, GAPS = st.lists(st.integers(0, 40), max_size=6), st.lists(st.integers(1, 3), min_size=1)


@given(log=logs(), epoch=EPOCHS, cuts=CUTS, gaps=GAPS)
@example(
    log=[(None, fmt.encode_takeover(1, Takeover("app", "i", 0)))]
    + [(b"a", fmt.encode_live(1, 1, commit, 0, 0, b"")) for commit in (1, 2)]
    + [progress_of(1, 1, (PLAIN_STORE,))],
    epoch=0,
    cuts=[2],
    gaps=[1],
)
@example(
    log=[(None, fmt.encode_takeover(1, Takeover("app", "i", 0)))]
    + [(b"a", fmt.encode_live(store, 1, 1, 0, 0, b"")) for store in (0, 1)]
    + [progress_of(1, 1, (PLAIN_STORE,))],
    epoch=0,
    cuts=[2],
    gaps=[1],
)
@settings(max_examples=examples(400), deadline=None)
def test_the_reader_agrees_with_the_model(log: list[Written], epoch: int, cuts: list[int], gaps: list[int]) -> None:
    """Reader and model apply the same entries in the same order, reject the same record, and report the same position,
    wherever batches end."""
    offsets = np.cumsum([gaps[i % len(gaps)] for i in range(len(log))])
    model, failed_at = Model(epoch), None
    for offset, (key, value) in zip(offsets.tolist(), log, strict=True):
        try:
            model.take(offset, key, value)
        except CorruptEntry as e:
            failed_at = e.offset
        except CorruptRecord:
            failed_at = offset
        if failed_at is not None:
            break
    applied: list[tuple[int, bytes, str, bytes, bytes]] = []
    commits: list[int] = []

    def apply(confirmed: ConfirmedChanges) -> None:
        ends = [commit.changes for commit in confirmed.commits]
        assert ends == sorted(ends)
        assert not ends or ends[-1] == len(confirmed)
        own = [(offset, *change[:3], body_of(*change[:-1])) for offset, change in confirmed.changes()]
        applied.extend(sorted(own + late_in(confirmed)))
        commits.extend(commit.offset for commit in confirmed.commits)

    reader, failed = ChangelogReader(apply, epoch=epoch), None
    keys, values = PackedBytes.of([key for key, _ in log]), PackedBytes.of([value for _, value in log])
    bounds = sorted({0, len(log), *(cut for cut in cuts if cut < len(log))})
    for low, high in pairwise(bounds):
        try:
            reader.feed(offsets[low:high], keys[low:high], values[low:high])
        except CorruptEntry as e:
            failed = e.offset
            break
    assert failed == failed_at
    by_offset = zip(offsets.tolist(), log, strict=True)
    bodies = {offset: (value or b"")[fmt.ENVELOPE.size :] for offset, (_, value) in by_offset}
    assert [one[:4] for one in applied] == [one[:4] for one in model.applied]
    assert [body for *_, body in applied] == [bodies[offset][: len(body)] for offset, *_, body in applied]
    assert all(body == bodies[offset] for offset, operation, *_, body in applied if operation == fmt.LATE)
    assert commits == model.progress
    assert (reader.epoch, reader.entries_applied) == (model.epoch, len(model.applied))
    if failed_at is None:
        assert (reader.entries_ignored, reader.foreign_records) == (model.ignored, model.foreign)
        assert (reader.covered_offset, not reader._unconfirmed) == (model.covered, not model.pending)
        assert reader.next_offset == (int(offsets[-1]) + 1 if log else None)


def body_of(operation: bytes, store: str, key: bytes, start: int, end: int, state: bytes) -> bytes:
    """The body of a change's entry, as far as it has one without the time of closing."""
    if operation == fmt.DELETED:
        return fmt.START.pack(start)
    return fmt.START_END.pack(start, end) + (state if operation == fmt.LIVE else b"")


def late_in(confirmed: ConfirmedChanges) -> list[tuple[int, bytes, str, bytes, bytes]]:
    """The late records of a batch, each with the body that its columns represent."""
    found = []
    for i in np.flatnonzero(confirmed.operations == fmt.LATE[0]).tolist():
        missed, state = confirmed.missed[i], confirmed.states[i]
        head = fmt.TIME_OFFSET_COUNT.pack(confirmed.starts[i], confirmed.ends[i], confirmed.closed_at[i])
        body = head + (missed or b"") + (b"\0" if state is None else b"\1" + state)
        store = confirmed.stores[confirmed.numbers[i]].name
        found.append((int(confirmed.offsets[i]), fmt.LATE, store, confirmed.keys[i] or b"", body))
    return found


UNSET = -77
"""Stands in every output before a kernel runs, so that a test sees what the kernel left alone."""
AROUND = [b"\1L" * 15, b"L" * 30]
"""Bytes of other records before and after the record that is read: it would be another with some of them."""
BEGIN = 30

# --- parse_envelopes ---

ENTRIES = {
    "live": fmt.encode_live(3, 5, 7, -2, 258, b"st"),
    "live without a state": fmt.encode_live(3, 5, 7, 1, 2, b""),
    "deleted": fmt.encode_deleted(3, 5, 7, -2),
    "final": fmt.encode_final(3, 5, 7, -2, 258, 300, b"st"),
    "late": fmt.encode_late(3, 5, 7, -2, -1, [4, 5], b"st"),
    "late without a state": fmt.encode_late(3, 5, 7, -2, 258, [4, 5], None),
    "late in no window": fmt.encode_late(3, 5, 7, -2, 258, [], b""),
    "progress": fmt.ENVELOPE.pack(1, fmt.PROGRESS, 0, 5, 7) + b"{}",
    "takeover": fmt.ENVELOPE.pack(1, fmt.TAKEOVER, 0, 5, 0) + b"{}",
}


def parsed(value: bytes, has_key: bool, around: bytes = AROUND[0]) -> list[int] | None:
    """The numbers of a record as the kernel reads them; None if it finds the record invalid."""
    data = np.frombuffer(around + value + around, np.uint8)
    numbers = np.full((1, k.NUMBERS), UNSET, np.int64)
    at, size, key_size = (np.array([number]) for number in (BEGIN, len(value), 0 if has_key else -1))
    count = k.parse_envelopes(data, at, size, key_size, numbers)
    return numbers[0].tolist() if count else None


def expected(value: bytes, has_key: bool) -> list[int] | None:
    """The numbers of a record as the functions of the format read it."""
    if fmt.is_foreign_record(value):
        return [k.FOREIGN, *[UNSET] * (k.NUMBERS - 1)]
    try:
        operation, store, epoch, commit, body = fmt.decode_entry(value)
    except CorruptRecord:
        return None
    envelope = [operation[0], store, epoch, commit]
    if operation in (fmt.PROGRESS, fmt.TAKEOVER):
        return [*envelope, *[UNSET] * (k.NUMBERS - 4)]
    if not has_key:
        return None
    begin = BEGIN + fmt.ENVELOPE.size
    if operation == fmt.LATE:
        time, offset, missed = fmt.TIME_OFFSET_COUNT.unpack_from(body)
        head = fmt.TIME_OFFSET_COUNT.size + 8 * missed + 1
        return [*envelope, time, offset, missed, begin + head, len(body) - head if body[head - 1] else k.NO_STATE]
    layout = {fmt.LIVE: fmt.START_END, fmt.DELETED: fmt.START, fmt.FINAL: fmt.START_END_CLOSED}[operation]
    times = [*layout.unpack_from(body), 0, 0][:3]
    return [*envelope, *times, begin + layout.size, len(body) - layout.size]


def variants(value: bytes) -> list[bytes]:
    """The record itself, cut off anywhere, longer by a byte, and with each of its bytes replaced by others."""
    found = [value[:size] for size in range(len(value) + 1)] + [value + b"\0"]
    for at in range(len(value)):
        others = b"\0\1\2\7\x08@AZ[\x7f\x80\xff" if at < fmt.ENVELOPE.size else b"\0\1\2\xff"
        found += [value[:at] + bytes([other]) + value[at + 1 :] for other in others]
    return found


@pytest.mark.parametrize("kind", ENTRIES)
def test_records_are_read_as_the_format_defines_them(kind: str) -> None:
    """An entry, and each record that differs from it in one byte or in length, has the numbers of the format's own
    functions, or is invalid where these reject it."""
    for value, has_key, around in product(variants(ENTRIES[kind]), (True, False), AROUND):
        assert parsed(value, has_key, around) == expected(value, has_key), value
    assert expected(ENTRIES[kind], has_key=True) is not None


@pytest.mark.parametrize(("epoch", "is_valid"), [(fmt.EPOCH_MAX, True), (fmt.EPOCH_MAX + 1, False)])
def test_the_highest_epoch_is_valid(epoch: int, is_valid: bool) -> None:
    """No owner takes an epoch above the highest."""
    assert (parsed(fmt.encode_deleted(3, epoch, 7, 1), has_key=True) is not None) == is_valid


def test_parsing_stops_at_the_first_invalid_record() -> None:
    """The records before an invalid one are read, the records after it are not."""
    good = fmt.encode_deleted(3, 5, 7, 1)
    for values, count in (([b"", good, b"\1Y", good], 2), ([good, good], 2), ([b"\2L", good], 0), ([], 0)):
        sizes = np.array([len(value) for value in values], np.int64)
        numbers = np.full((len(values), k.NUMBERS), UNSET, np.int64)
        data = np.frombuffer(b"".join(values) + AROUND[0], np.uint8)
        assert k.parse_envelopes(data, np.cumsum(sizes) - sizes, sizes, np.zeros_like(sizes), numbers) == count
        assert [operation != UNSET for operation in numbers[:, k.OPERATION].tolist()] == [
            index < count for index in range(len(values))
        ]


# --- apply_reader_rule ---

Row = tuple[int, int, int]
"""A record's operation, epoch and commit number."""

ROWS: list[Row] = [
    (k.FOREIGN, 0, 0),
    *((k.TAKEOVER, epoch, 0) for epoch in (0, 1, 2)),
    *((k.LIVE, epoch, commit) for epoch, commit in ((0, 1), (1, 1), (1, 2), (2, 1))),
    *((k.PROGRESS, epoch, 1) for epoch in (0, 1, 2)),
]


def table_of(rows: tuple[Row, ...]) -> NDArray[np.int64]:
    numbers = np.full((len(rows), k.NUMBERS), UNSET, np.int64)
    for i, (operation, epoch, commit) in enumerate(rows):
        numbers[i, [k.OPERATION, k.EPOCH, k.COMMIT]] = operation, epoch, commit
    return numbers


def applied(rows: tuple[Row, ...], force: int, at: int = 0) -> tuple[object, ...]:
    """What the kernel returns and leaves: confirmed changes, commits with their ends, and counters."""
    counters = np.zeros(k.COUNTERS, np.int64)
    counters[k.FORCE], counters[k.AT] = force, at
    confirmed = np.full(len(rows), UNSET, np.int64)
    commits = np.full((len(rows), 2), UNSET, np.int64)
    why = k.apply_reader_rule(table_of(rows), len(rows), confirmed, commits, counters)
    pending = counters[k.PENDING]
    return (
        int(why),
        int(counters[k.AT]),
        confirmed[: counters[k.CONFIRMED]].tolist(),
        commits[: counters[k.COMMITS]].tolist(),
        (int(pending), int(counters[k.FIRST_PENDING]) if pending else None),
        (int(counters[k.IGNORED]), int(counters[k.FOREIGN_RECORDS])),
    )


def by_the_rule(rows: tuple[Row, ...], force: int, at: int = 0) -> tuple[object, ...]:
    """The same by the rule of `format`, record by record."""
    confirmed: list[int] = []
    commits: list[list[int]] = []
    pending: list[int] = []
    ignored = foreign = 0
    why = k.DONE
    for i in range(at, len(rows)):
        operation, epoch, commit = rows[i]
        if operation == k.TAKEOVER and epoch > force:
            why = k.BEGINS
            break
        if operation == k.PROGRESS and epoch > force:
            why = k.LOST
            break
        if operation == k.FOREIGN:
            foreign += 1
        elif operation == k.TAKEOVER:
            pass
        elif epoch != force or not force:
            ignored += 1
        elif operation == k.PROGRESS:
            own = [j for j in pending if rows[j][2] == commit]
            confirmed += own
            ignored += len(pending) - len(own)
            pending = []
            commits.append([i, len(confirmed)])
        else:
            pending.append(i)
    else:
        i = len(rows)
    return why, i, confirmed, commits, (len(pending), pending[0] if pending else None), (ignored, foreign)


@pytest.mark.parametrize("first", ROWS)
def test_every_short_log_is_settled_by_the_rule(first: Row) -> None:
    """The kernel and the rule agree about all logs of up to four records, with and without an epoch in force."""
    for rest in product(ROWS, repeat=3):
        assert applied((first, *rest), 1) == by_the_rule((first, *rest), 1), (first, *rest)
    for size, force in product((0, 1, 2), (0, 2)):
        for rest in product(ROWS, repeat=size):
            assert applied((first, *rest), force) == by_the_rule((first, *rest), force), (first, *rest)
    assert applied((), 1) == by_the_rule((), 1)


def test_commits_with_records_of_others_between() -> None:
    """A commit has its own changes alone, and the next one begins after it; the kernel goes on where it is told."""
    rows: tuple[Row, ...] = (
        (k.PROGRESS, 1, 1),
        *((k.LIVE, 2, 1), (k.FINAL, 2, 2), (k.LIVE, 1, 2), (k.PROGRESS, 1, 2), (k.TAKEOVER, 2, 2)),
        *((k.FOREIGN, 2, 2), (k.LATE, 2, 2), (k.DELETED, 2, 2), (k.PROGRESS, 2, 2)),
        *((k.LIVE, 2, 2), (k.LIVE, 2, 3), (k.PROGRESS, 2, 3), (k.PROGRESS, 2, 4)),
        *((k.LIVE, 1, 5), (k.LIVE, 2, 5), (k.LIVE, 2, 5)),
    )
    for at in range(len(rows)):
        assert applied(rows, 2, at) == by_the_rule(rows, 2, at)
    assert applied(rows, 2) == (
        *(k.DONE, len(rows), [2, 7, 8, 11], [[9, 3], [12, 4], [13, 4]]),
        *((2, 15), (6, 1)),
    )


# --- read_state_columns ---


def test_states_are_read_as_the_codec_unpacks_them() -> None:
    """Each state has the codec's values. The first one that is cut off or too long is reported by its index."""
    codec = StateCodec([Column("a", "binary"), Column("b", "int64"), Column("c", "int64"), Column("d", "binary")])
    rows = [[b"abc", -2, 258, b"defg"], [b"", 1, 2, b""], [b"x" * 300, 2**62, -1, b"y"]]
    packed = [codec.pack(row) for row in rows]
    damaged = [state[:size] for state in packed for size in range(len(state))] + [state + b"\0" for state in packed]
    for states in ([*packed], *([*packed, one, *after] for one in damaged for after in ([], [packed[0]]))):
        # Nothing follows the last state, so that a read beyond it would fail.
        data = np.frombuffer(AROUND[0] + b"".join(states), np.uint8)
        sizes = np.array([len(state) for state in states])
        offsets = BEGIN + np.cumsum(sizes) - sizes
        cells, begins, lengths = np.full((3, 2, len(states)), UNSET, np.int64)
        assert k.read_state_columns(data, offsets, sizes, 2, 2, cells, begins, lengths) == len(packed)
        for i, (a, b, c, d) in enumerate(rows):
            found = [data[at : at + size].tobytes() for at, size in zip(begins[:, i], lengths[:, i], strict=True)]
            assert (cells[:, i].tolist(), found) == ([b, c], [a, d])
