"""The reader against a plain model of its rule, record by record, over logs that no owner alone would write."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, ConfirmedChanges, CorruptEntry
from penstock.shared.streams.changelog.format import DecodedEntry, Progress, Takeover
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from tests.property_tests import examples

Written = tuple[bytes | None, bytes | None]

STORE = StoreSchema(
    *("s", "session", "bytes", 1, 0, "on_close", "in", None, None, None), (AggregationSchema.of("n", Count()),)
)
GROWN = (STORE, StoreSchema(*("t", "session", "bytes", 1, 0, "on_close", "in", None, None, None), ()))


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


def progress(epoch: int, commit: int, stores: tuple[StoreSchema, ...]) -> Written:
    return None, fmt.encode_progress(epoch, commit, Progress("app", "exactly_once", {}, 0, {}, {}, stores, 0))


ENTRIES = st.one_of(
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
PROGRESS = st.builds(progress, EPOCHS, COMMITS, st.sampled_from([(STORE,), GROWN, GROWN]))
FOREIGN = st.tuples(st.one_of(st.none(), KEYS), st.one_of(st.none(), st.sampled_from([b"", b"\x01", b"{}", bytes(30)])))


@st.composite
def damaged(draw: st.DrawFn) -> Written:
    """A record with a byte that is another, cut off, longer, or without its key."""
    key, value = draw(st.one_of(ENTRIES, PROGRESS, TAKEOVERS))
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


RECORDS = st.one_of(ENTRIES, ENTRIES, ENTRIES, PROGRESS, PROGRESS, TAKEOVERS, FOREIGN)


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
        log.append(progress(epoch, commit, GROWN))
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
    + [progress(1, 1, (STORE,))],
    epoch=0,
    cuts=[2],
    gaps=[1],
)
@example(
    log=[(None, fmt.encode_takeover(1, Takeover("app", "i", 0)))]
    + [(b"a", fmt.encode_live(store, 1, 1, 0, 0, b"")) for store in (0, 1)]
    + [progress(1, 1, (STORE,))],
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
