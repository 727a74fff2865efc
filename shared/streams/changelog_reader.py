"""The reader's rule as code: which entries of a changelog partition count, and what they do to a store.

Feed every record from the covered offset on; what a progress record confirms is applied, the rest is forgotten. See
`changelog_format` for the rule, and for which records are foreign: those are counted and passed over. One commit is
held in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.shared.common.errors import ChangelogHole, CorruptRecord, SchemaMismatch
from penstock.shared.common.topic_names import REPARTITION_SUFFIX
from penstock.shared.streams import changelog_format as fmt
from penstock.shared.streams.changelog_format import Entry, Progress, StoreSchema

NO_EPOCH = 0
"""Before the first takeover record, and in none: what says to be of it never counts."""

ROWS = frozenset(("table", "join"))
"""Kinds of stores whose rows are values of the user's, not aggregations."""


class Change(NamedTuple):
    """One confirmed change of a store: `operation` is LIVE, DELETED or FINAL; DELETED has no `end` and no `state`.

    `written_as` is what the store was when the state was written, where it had fewer aggregations than it has now, and
    always where the reader has no topology of its own.
    """

    operation: bytes
    store: str
    key: bytes
    start: int
    end: int = 0
    state: bytes = b""
    written_as: StoreSchema | None = None


class CorruptEntry(CorruptRecord):
    """The record at `offset` claims to be an entry and cannot be read; `reason` says why."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"offset {offset}: {reason}")
        self.offset, self.reason = offset, reason


class HistoryMissing(ChangelogHole):
    """A changelog that rests on what a backfill leaves was begun with nothing."""

    def __init__(self, tables: str) -> None:
        super().__init__(
            f"the changelog rests on a backfill: what that leaves is the `state` of {tables}, which was not found. If "
            "the backfill has not ended, run it again as it was; if it has, name the lake that has it (streams.lake), "
            "or put `state` back. Else begin anew (`penstock streams reset`, then `penstock backfill`)"
        )
        self.tables = tables


class ChangelogReader:
    """Reads one partition; `apply` is called with each confirmed change in log order.

    Where `stores` says what the reader's own topology has, a commit that was written under another raises
    SchemaMismatch before any of its changes is applied. `takeover_offset` is where the epoch in force was declared: of
    two owners that write the same epoch at once, the one whose record that is has won. What lies before
    `covered_offset` has been applied, or counts for nobody.

    `feed` raises HistoryMissing where no epoch is known yet and the changelog rests on a backfill's tables.
    """

    def __init__(
        self,
        apply: Callable[[Change], None],
        *,
        epoch: int = NO_EPOCH,
        progress: Progress | None = None,
        stores: tuple[StoreSchema, ...] | None = None,
    ) -> None:
        self._apply, self._stores, self.epoch = apply, stores, epoch
        self.takeover_offset: int | None = None
        self.progress = progress
        self.next_offset: int | None = None
        self.covered_offset: int | None = None
        self.entries_applied = self.entries_ignored = self.foreign_records = 0
        self.first_foreign_offset: int | None = None
        self._pending: dict[int, list[tuple[Entry, bytes, int]]] = {}

    def __repr__(self) -> str:
        pending = sum(map(len, self._pending.values()))
        done = f"{self.entries_applied} applied, {self.entries_ignored} ignored, {pending} pending"
        return f"ChangelogReader(epoch {self.epoch}, next {self.next_offset}, {done})"

    @property
    def next_epoch(self) -> int:
        """What the next owner takes.

        CorruptRecord where there is none any more: CorruptEntry where it is known which record says so.
        """
        if self.epoch < fmt.EPOCH_MAX:
            return self.epoch + 1
        offset, said = self.takeover_offset, f"a changelog record of epoch {self.epoch}: no owner can go above it"
        raise CorruptRecord(f"what came before has {said}") if offset is None else CorruptEntry(offset, said)

    @property
    def is_between_commits(self) -> bool:
        """Whether no entry waits for the progress record that confirms it."""
        return not self._pending

    def feed(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        """Take the record at `offset`; CorruptEntry names the record that cannot be read: it, or one it confirms."""
        if fmt.is_foreign(value):
            self.foreign_records += 1
            if self.first_foreign_offset is None:
                self.first_foreign_offset = offset
        else:
            try:
                self._feed(offset, key, fmt.decode(value))
            except CorruptEntry:
                raise
            except CorruptRecord as e:
                raise CorruptEntry(offset, str(e)) from None
        self.next_offset = offset + 1
        if self.is_between_commits:
            self.covered_offset = self.next_offset

    def _feed(self, offset: int, key: bytes | None, entry: Entry) -> None:
        if entry.operation == fmt.TAKEOVER:
            if entry.epoch > self.epoch:
                if self.epoch == NO_EPOCH and (tables := fmt.history_before(entry.body)) is not None:
                    raise HistoryMissing(tables)
                self.epoch, self.takeover_offset = entry.epoch, offset
                self._forget()
        elif entry.operation == fmt.PROGRESS:
            progress = fmt.decode_progress(entry.body)  # whether it counts or not, as with every other record
            if entry.epoch == self.epoch > NO_EPOCH:
                self._confirm(entry, progress)
            else:
                if entry.epoch > self.epoch:
                    raise CorruptRecord(fmt.without_takeover(entry.epoch, self.epoch))
                self.entries_ignored += 1
        elif key is None:
            raise CorruptRecord(f"an entry {entry.operation!r} for store {entry.store} without a key")
        elif entry.epoch == self.epoch > NO_EPOCH:
            self._pending.setdefault(entry.commit, []).append((entry, key, offset))
        else:
            self.entries_ignored += 1

    def _confirm(self, entry: Entry, progress: Progress) -> None:
        if self._stores is not None:
            check_schema(progress.stores, self._stores)
        confirmed = self._pending.pop(entry.commit, [])
        self._forget()
        stores = progress.stores
        tells = self._stores is None or any(
            old.aggregations != new.aggregations for old, new in zip(stores, self._stores, strict=False)
        )
        for own, key, offset in confirmed:
            try:
                if own.store >= len(stores):
                    raise CorruptRecord(f"an entry for store {own.store}; there are {len(stores)} stores")
                change = _change(own, stores[own.store].name, key)
                self._apply(change._replace(written_as=stores[own.store]) if tells else change)
            except CorruptRecord as e:
                raise CorruptEntry(offset, str(e)) from None
        self.entries_applied += len(confirmed)
        self.progress = progress

    def _forget(self) -> None:
        self.entries_ignored += sum(map(len, self._pending.values()))
        self._pending.clear()


def _change(entry: Entry, store: str, key: bytes) -> Change:
    body = entry.body
    if entry.operation == fmt.LIVE:
        start, end = fmt.START_END.unpack_from(body)
        return Change(fmt.LIVE, store, key, start, end, body[fmt.START_END.size :])
    if entry.operation == fmt.FINAL:
        start, end, _ = fmt.START_END_CLOSED.unpack_from(body)
        return Change(fmt.FINAL, store, key, start, end, body[fmt.START_END_CLOSED.size :])
    (start,) = fmt.START.unpack_from(body)
    return Change(fmt.DELETED, store, key, start)


RENAMED = (
    "give it the name that it had, and its topic stays the one that it was. Otherwise run the topology as it was until "
    "all is read, or forget everything with `penstock streams reset`."
)


WAYS_OUT = (
    "Run the topology as it was; or give this one an application_id of its own, which reads the sources from their "
    "beginning; or stop all instances, forget everything with `penstock streams reset`, and start again, after "
    "`penstock backfill` where the sources do not hold all that there was."
)
STORES_STAY = (
    "An application's stores stay the ones that it began with: a new one would lack every record that was read before, "
    f"and what is gone could not be had back. {WAYS_OUT}"
)
WINDOWS_STAY = f"What a store's windows are stays as it was: those that there are were made so. {WAYS_OUT}"


AGGREGATIONS_STAY = (
    "A window may get further aggregations; those that it has stay as they are (docs/changelog-format.md, Versions). "
    "Run the topology as it was, or give this one an application_id of its own"
)


def check_schema(stored: tuple[StoreSchema, ...], own: tuple[StoreSchema, ...]) -> None:
    """SchemaMismatch, naming the difference, where state that was written under `stored` cannot be read under `own`.

    The grace, the emission and the topics that are written to may change: they say what happens from now on. So may
    windows get aggregations that they did not have. The stores' order, names, keys and source topics, the windows'
    kind, gap, size and advance, and the aggregations' names, functions and columns may not.
    """
    if len(stored) != len(own):
        raise SchemaMismatch(f"{_other_stores(stored, own)}. {STORES_STAY}")
    for number, (old, new) in enumerate(zip(stored, own, strict=True)):
        for what in ("name", "kind", "key", "source", "gap_ms", "size_ms", "advance_ms"):
            if getattr(old, what) != getattr(new, what):
                said = f"store {number}: {what} was {getattr(old, what)!r}, is now {getattr(new, what)!r}"
                is_renamed = what == "source" and old.source.endswith(REPARTITION_SUFFIX)
                raise SchemaMismatch(f"{said}. {f'If a key_by has no name: {RENAMED}' if is_renamed else WINDOWS_STAY}")
        if changed := changed_aggregations(old, new):
            raise SchemaMismatch(
                f"store {old.name!r}: the aggregations changed: {', '.join(changed)}. {AGGREGATIONS_STAY}"
            )


def _other_stores(stored: tuple[StoreSchema, ...], own: tuple[StoreSchema, ...]) -> str:
    was, now = [one.name for one in stored], [one.name for one in own]
    changes = [f"{name!r} is new" for name in now if name not in was]
    changes += [f"{name!r} is gone" for name in was if name not in now]
    held, has = (", ".join(map(repr, names)) or "none" for names in (was, now))
    return f"the state has the stores {held}, the topology has {has}: {', '.join(changes)}"


def changed_aggregations(old: StoreSchema, new: StoreSchema) -> list[str]:
    """What keeps states of `old` from being read as those of `new`; empty where nothing does.

    A window may have aggregations more than it had. One that is gone, or is another under its name, is named.
    """
    was = {a.name: (a.function, a.field, a.state) for a in old.aggregations}
    now = {a.name: (a.function, a.field, a.state) for a in new.aggregations}
    if any(now.get(name) != shape for name, shape in was.items()) or (new.kind in ROWS and was != now):
        return sorted(n for n in was.keys() | now.keys() if was.get(n) != now.get(n))
    return [] if [name for name in now if name in was] == list(was) else ["their order"]
