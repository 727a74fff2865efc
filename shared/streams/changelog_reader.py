"""The reader's rule as code: which entries of a changelog partition count, and what they do to a store.

Feed every record from the covered offset on; what a progress record confirms is applied, the rest is forgotten. See
`changelog_format` for the rule. One commit is held in memory at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from shared.common.errors import CorruptRecord, SchemaMismatch
from shared.streams import changelog_format as fmt
from shared.streams.changelog_format import Entry, Progress, StoreSchema


class Change(NamedTuple):
    """One confirmed change of a store: `operation` is LIVE, DELETED or FINAL; `end` and `state` are those of LIVE."""

    operation: bytes
    store: str
    key: bytes
    start: int
    end: int = 0
    state: bytes = b""


class ChangelogReader:
    """Reads one partition; `apply` is called with each confirmed change in log order.

    Where `stores` says what the reader's own topology has, a commit that was written under another raises
    SchemaMismatch before any of its changes is applied. `takeover_offset` is where the epoch in force was declared:
    of two owners that write the same epoch at once, the one whose record that is has won.
    """

    def __init__(
        self,
        apply: Callable[[Change], None],
        *,
        epoch: int = 0,
        progress: Progress | None = None,
        stores: tuple[StoreSchema, ...] | None = None,
    ) -> None:
        self._apply, self._stores = apply, stores
        self.epoch = epoch
        self.takeover_offset: int | None = None
        self.progress = progress
        self.next_offset: int | None = None
        self.entries_applied = self.entries_ignored = 0
        self._pending: dict[int, list[tuple[Entry, bytes | None]]] = {}

    def __repr__(self) -> str:
        pending = sum(map(len, self._pending.values()))
        done = f"{self.entries_applied} applied, {self.entries_ignored} ignored, {pending} pending"
        return f"ChangelogReader(epoch {self.epoch}, next {self.next_offset}, {done})"

    def feed(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        """Take the record at `offset`; CorruptRecord names the offset."""
        try:
            self._feed(offset, key, fmt.decode(value))
        except CorruptRecord as e:
            raise CorruptRecord(f"offset {offset}: {e}") from None
        self.next_offset = offset + 1

    def _feed(self, offset: int, key: bytes | None, entry: Entry) -> None:
        if entry.operation == fmt.TAKEOVER:
            if entry.epoch > self.epoch:
                self.epoch, self.takeover_offset = entry.epoch, offset
                self._forget()
        elif entry.epoch != self.epoch:
            self.entries_ignored += 1
        elif entry.operation == fmt.PROGRESS:
            self._confirm(entry)
        else:
            self._pending.setdefault(entry.commit, []).append((entry, key))

    def _confirm(self, entry: Entry) -> None:
        progress = fmt.decode_progress(entry.body)
        if self._stores is not None:
            check_schema(progress.stores, self._stores)
        confirmed = self._pending.pop(entry.commit, [])
        self._forget()
        names = [store.name for store in progress.stores]
        for own, key in confirmed:
            if key is None or own.store >= len(names):
                raise CorruptRecord(f"an entry for store {own.store} with key {key!r}; there are {len(names)} stores")
            self._apply(_change(own, names[own.store], key))
        self.entries_applied += len(confirmed)
        self.progress = progress

    def _forget(self) -> None:
        self.entries_ignored += sum(map(len, self._pending.values()))
        self._pending.clear()


def _change(entry: Entry, store: str, key: bytes) -> Change:
    body = entry.body
    try:
        if entry.operation == fmt.LIVE:
            start, end = fmt.START_END.unpack_from(body)
            return Change(fmt.LIVE, store, key, start, end, body[fmt.START_END.size :])
        (start,) = fmt.START.unpack_from(body)
    except struct.error as e:
        raise CorruptRecord(f"a changelog entry's body is too short: {e}") from None
    return Change(entry.operation, store, key, start)


def check_schema(stored: tuple[StoreSchema, ...], own: tuple[StoreSchema, ...]) -> None:
    """SchemaMismatch, naming the difference, where state that was written under `stored` cannot be read under `own`.

    The gap, the grace, the emission and the topics may change: they say what happens from now on. The stores' order,
    names and keys, and the aggregations' names, functions and columns may not.
    """
    for number, (old, new) in enumerate(zip(stored, own, strict=False)):
        for what in ("name", "kind", "key", "source"):
            if getattr(old, what) != getattr(new, what):
                raise SchemaMismatch(
                    f"store {number}: {what} was {getattr(old, what)!r}, is now {getattr(new, what)!r}"
                )
        was = {a.name: (a.function, a.field, a.state) for a in old.aggregations}
        now = {a.name: (a.function, a.field, a.state) for a in new.aggregations}
        if list(was.items()) != list(now.items()):
            changed = sorted(n for n in was.keys() | now.keys() if was.get(n) != now.get(n)) or ["their order"]
            raise SchemaMismatch(f"store {old.name!r}: the aggregations changed: {', '.join(changed)}")
    if len(stored) != len(own):
        raise SchemaMismatch(f"the changelog holds {len(stored)} stores, the topology has {len(own)}")
