"""The reader of changelog partitions. All restores and compactions use it, so they agree which entries count.

The caller feeds it every record from the covered offset on, in batches of columns. The reader applies the changes that
a progress record confirms, and drops all others. It counts and skips foreign records. `format` defines which changes
are confirmed, and which records are foreign. A commit may span batches; its entries are unconfirmed until its progress
record is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.errors import ChangelogHole, CorruptRecord
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Columns, Int64Array, TopicPartition
from penstock.shared.streams.aggregations.aggregation import Column
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog import reader_kernels as k
from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import StoreSchema, check_restorable

NO_OWNER_EPOCH = 0
"""The epoch before the first takeover record. No takeover record has it, and entries with it never count."""


class Change(NamedTuple):
    """One confirmed change of a store: `operation` is LIVE, DELETED or FINAL; DELETED has no `end` and no `state`.

    `written_as` is the store's schema when the change was written.
    """

    operation: bytes
    store: str
    key: bytes
    start: int
    end: int
    state: bytes
    written_as: StoreSchema


class ConfirmedCommit(NamedTuple):
    """A commit that counts: the offset of its progress record, its epoch, and its progress.

    `changes` is cumulative: the number of changes in the `ConfirmedChanges` that belong to this commit or to a commit
    before it in `ConfirmedChanges.commits`.
    """

    offset: int
    epoch: int
    progress: Progress
    changes: int


@dataclass(frozen=True, slots=True)
class ConfirmedChanges:
    """Confirmed changes as columns, in log order: changes of windows and rows, and late records.

    All were written under the same store schemas, `stores`. A time that an operation lacks is 0.
    """

    operations: Int64Array
    """The operations' letters as numbers: those of LIVE, DELETED, FINAL and LATE."""
    numbers: Int64Array
    """The store numbers: the indexes of the stores in `stores`."""
    keys: PackedBytes
    starts: Int64Array
    """The starts of windows in ms. For a late record, its timestamp."""
    ends: Int64Array
    """The ends of windows in ms. For a late record, its source offset (-1: none)."""
    closed_at: Int64Array
    """The stream time in ms at which a window was closed. For a late record, the number of windows that it missed."""
    states: PackedBytes
    """The states. That of DELETED is empty. That of a late record is the aggregation of this record alone, or null if
    the entry has no state."""
    offsets: Int64Array
    """The offsets of the entries."""
    stores: tuple[StoreSchema, ...]
    commits: tuple[ConfirmedCommit, ...] = ()
    """The commits that end in these changes, in order. A commit that was read in several batches is delivered in
    several parts, and only the last part lists it."""

    def __len__(self) -> int:
        return len(self.offsets)

    def at(self, indexes: NDArray[np.int64] | NDArray[np.bool_]) -> ConfirmedChanges:
        """Return the changes at these indexes, without the commits."""
        return ConfirmedChanges(
            operations=self.operations[indexes],
            numbers=self.numbers[indexes],
            keys=self.keys.at(indexes),
            starts=self.starts[indexes],
            ends=self.ends[indexes],
            closed_at=self.closed_at[indexes],
            states=self.states.at(indexes),
            offsets=self.offsets[indexes],
            stores=self.stores,
        )

    @property
    def missed(self) -> PackedBytes:
        """For each late record, the starts of the windows that it missed, each as a big-endian int64.

        The result has a row for every change, but only the rows of late records are valid.
        """
        sizes = self.closed_at * fmt.START.size
        return PackedBytes(self.states.data, self.states.offsets - 1 - sizes, sizes)

    def of_windows(self) -> ConfirmedChanges:
        """Return the changes without the late records."""
        is_late = self.operations == k.LATE
        return self.at(~is_late) if is_late.any() else self

    def changes(self) -> Iterator[tuple[int, Change]]:
        """Yield all changes except late records one by one, each with its offset."""
        windows = self.of_windows()
        columns = (windows.operations, windows.numbers, windows.starts, windows.ends, windows.offsets)
        rows = zip(*(column.tolist() for column in columns), windows.keys, windows.states, strict=True)
        for operation, number, start, end, offset, key, state in rows:
            store = self.stores[number]
            yield offset, Change(bytes((operation,)), store.name, key or b"", start, end, state or b"", store)


Apply = Callable[[ConfirmedChanges], None]


def apply_one_by_one(apply: Callable[[Change], None]) -> Apply:
    """Return a function for a ChangelogReader that applies confirmed changes one by one, except late records.

    It raises CorruptEntry with the record's offset where `apply` raises CorruptRecord.
    """

    def apply_changes(confirmed: ConfirmedChanges) -> None:
        for offset, change in confirmed.changes():
            try:
                apply(change)
            except CorruptRecord as e:
                raise CorruptEntry(offset, str(e)) from None

    return apply_changes


def ignore_changes(confirmed: ConfirmedChanges) -> None:
    """Do nothing with changes; for a reader of progress alone."""


class CorruptEntry(CorruptRecord):
    """The error of the changelog record at `offset`; `reason` describes it."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"offset {offset}: {reason}")
        self.offset = offset
        self.reason = reason


def locate_corrupt_entry(at: TopicPartition, entry: CorruptEntry) -> CorruptRecord:
    """Return the error for an invalid changelog entry. It says what the user can do."""
    return CorruptRecord(f"{at} at offset {entry.offset}: {entry.reason}. {fmt.REMEDY}")


class _ParsedRecords:
    """Parsed records, up to the first that is invalid (`error` at index `count`)."""

    def __init__(self, offsets: Int64Array, keys: PackedBytes, values: PackedBytes) -> None:
        self.offsets = offsets
        self.keys = keys
        self.values = values
        self.numbers = np.zeros((len(offsets), k.NUMBERS), np.int64)
        packed = (values.data, values.offsets, values.lengths)
        self.count = int(k.parse_envelopes(*packed, keys.lengths, self.numbers))
        self.progress: dict[int, Progress] = {}
        self.error: CorruptEntry | None = None
        if self.count < len(offsets):
            self.error = CorruptEntry(int(offsets[self.count]), self._corrupt_entry_reason(self.count))
        for index in np.flatnonzero(self.numbers[: self.count, k.OPERATION] == k.PROGRESS).tolist():
            # Decoded whether it counts or not, as every other record is.
            try:
                self.progress[index] = fmt.decode_progress(self.body(index))
            except CorruptRecord as e:
                self.count = index
                self.error = CorruptEntry(int(offsets[index]), str(e))
                break

    def body(self, index: int) -> bytes:
        """Return the bytes after the envelope."""
        return (self.values[index] or b"")[fmt.ENVELOPE.size :]

    def confirmed(
        self, rows: Int64Array, stores: tuple[StoreSchema, ...], commits: tuple[ConfirmedCommit, ...]
    ) -> ConfirmedChanges:
        """Return the entries at these indexes."""
        n = self.numbers[rows].T.copy()
        return ConfirmedChanges(
            operations=n[k.OPERATION],
            numbers=n[k.STORE],
            keys=self.keys.at(rows),
            starts=n[k.START],
            ends=n[k.END],
            closed_at=n[k.CLOSED_AT],
            states=PackedBytes(self.values.data, n[k.STATE], n[k.STATE_BYTES]),
            offsets=self.offsets[rows],
            stores=stores,
            commits=commits,
        )

    def entries_of_epoch(self, epoch: int, first: int) -> tuple[Int64Array, Int64Array]:
        """Return the indexes of the epoch's entries from `first` on, and their commit numbers."""
        own = self.numbers[first : self.count]
        is_entry = np.isin(own[:, k.OPERATION], (k.LIVE, k.DELETED, k.FINAL, k.LATE))
        rows = np.flatnonzero(is_entry & (own[:, k.EPOCH] == epoch))
        return rows + first, own[rows, k.COMMIT]

    def _corrupt_entry_reason(self, index: int) -> str:
        try:
            entry = fmt.decode_entry(self.values[index])
        except CorruptRecord as e:
            return str(e)
        return f"an entry {entry.operation!r} for store {entry.store} without a key"


class ChangelogReader:
    """Reads one changelog partition. It calls `apply` with confirmed changes, in log order.

    `stores` are the stores of the reader's own topology. If they are given, a commit that was written under
    incompatible stores raises SchemaMismatch before any of its changes is applied.
    """

    def __init__(
        self,
        apply: Apply,
        *,
        epoch: int = NO_OWNER_EPOCH,
        progress: Progress | None = None,
        stores: tuple[StoreSchema, ...] | None = None,
    ) -> None:
        self._apply = apply
        self._stores = stores
        self.epoch = epoch
        """The epoch in force."""
        self.takeover_offset: int | None = None
        """The offset of the takeover record that began the epoch; None if this reader has not read it. If two owners
        declare the same epoch, it belongs to the owner of this record."""
        self.progress = progress
        self.next_offset: int | None = None
        self.covered_offset: int | None = None
        """All records below it have been applied or ignored for good. None until it is known."""
        self.entries_applied = 0
        self.entries_ignored = 0
        self.foreign_records = 0
        self.first_foreign_offset: int | None = None
        self._unconfirmed: list[tuple[ConfirmedChanges, Int64Array]] = []
        """Entries of the epoch in force that no commit has confirmed yet, with their commit numbers, by batch."""

    def __repr__(self) -> str:
        pending = sum(len(entries) for entries, _ in self._unconfirmed)
        done = f"{self.entries_applied} applied, {self.entries_ignored} ignored, {pending} pending"
        return f"ChangelogReader(epoch {self.epoch}, next {self.next_offset}, {done})"

    @property
    def next_epoch(self) -> int:
        """Return the epoch of the next owner.

        If the current epoch is the highest possible, raise CorruptEntry for its takeover record, or CorruptRecord if
        that epoch came from the snapshot.
        """
        if self.epoch < fmt.EPOCH_MAX:
            return self.epoch + 1
        offset = self.takeover_offset
        reason = f"the highest epoch {self.epoch} is in use, and no owner can take over"
        raise CorruptRecord(f"the snapshot: {reason}") if offset is None else CorruptEntry(offset, reason)

    def feed_record(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        """As `feed`, for one record."""
        self.feed(np.array([offset]), [key], [value])

    def feed(self, offsets: Int64Array, keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> None:
        """Take the next records, and apply the changes that are confirmed by a commit in them.

        Entries that no commit has confirmed yet are kept for later calls. Raises CorruptEntry for the first invalid
        record, after applying the changes that were confirmed before it.
        """
        if not len(offsets):
            return
        # 1. Read the envelopes.
        batch = _ParsedRecords(offsets, PackedBytes.of(keys), PackedBytes.of(values))
        confirmed = np.empty(batch.count, np.int64)
        ends = np.empty((len(batch.progress), 2), np.int64)
        # 2. Decide which entries count, from one takeover to the next. The kernel stops where an epoch begins, because
        # the reader keeps the epoch. A takeover discards all unconfirmed entries before it, including those of earlier
        # batches.
        counters = np.zeros(k.COUNTERS, np.int64)
        counters[k.FORCE] = self.epoch
        unconfirmed = self._unconfirmed
        self._unconfirmed = []
        error: Exception | None = batch.error
        while (stop_reason := k.apply_reader_rule(batch.numbers, batch.count, confirmed, ends, counters)) != k.DONE:
            index = int(counters[k.AT])
            epoch = int(batch.numbers[index, k.EPOCH])
            # The commit's owner wrote a takeover record before it, so the log has lost that record. To ignore the
            # commit would lose it silently.
            if stop_reason == k.LOST:
                reason = _missing_takeover(epoch, self.epoch)
                batch.count = index
                error = CorruptEntry(int(offsets[index]), reason)
                break
            self.epoch = epoch
            self.takeover_offset = int(offsets[index])
            counters[k.FORCE] = epoch
            counters[k.AT] = index + 1
            counters[k.IGNORED] += counters[k.PENDING]
            counters[k.PENDING] = 0
            # If the batch had a commit before the takeover, step 3 decides about the entries of earlier batches.
            if not counters[k.COMMITS]:
                self.entries_ignored += sum(len(entries) for entries, _ in unconfirmed)
                unconfirmed = []
        # 3. Apply the confirmed entries. The first commit may also confirm entries of earlier batches.
        self._count_ignored_entries(batch, counters)
        if counters[k.COMMITS]:
            self._apply_batch(batch, confirmed, ends[: counters[k.COMMITS]], unconfirmed)
            unconfirmed = []
        # 4. Keep the entries that no commit has confirmed yet.
        self._keep_unconfirmed(batch, counters, unconfirmed)
        # 5. Last, so that all changes confirmed before the invalid record are applied.
        if error is not None:
            raise error

    def _count_ignored_entries(self, batch: _ParsedRecords, counters: Int64Array) -> None:
        self.entries_ignored += int(counters[k.IGNORED])
        if counters[k.FOREIGN_RECORDS]:
            self.foreign_records += int(counters[k.FOREIGN_RECORDS])
            if self.first_foreign_offset is None:
                first = np.flatnonzero(batch.numbers[: batch.count, k.OPERATION] == k.FOREIGN)[0]
                self.first_foreign_offset = int(batch.offsets[first])

    def _apply_batch(
        self,
        batch: _ParsedRecords,
        confirmed: Int64Array,
        ends: Int64Array,
        unconfirmed: list[tuple[ConfirmedChanges, Int64Array]],
    ) -> None:
        """Apply the commits that end in the batch; consecutive ones under the same stores are applied at once."""
        first = 0
        commits = list[ConfirmedCommit]()
        for number, (index, end) in enumerate(ends.tolist()):
            progress = batch.progress[index]
            epoch = int(batch.numbers[index, k.EPOCH])
            # `ConfirmedChanges` has one list of stores, to which its store numbers refer.
            if commits and progress.stores != commits[-1].progress.stores:
                self._apply_commits(batch, confirmed[first : first + commits[-1].changes], commits)
                first += commits[-1].changes
                commits = []
            if not commits and self._stores is not None:
                check_restorable(progress.stores, self._stores)
            # Held entries precede the batch, so they can only be of its first commit.
            if number == 0 and unconfirmed:
                parts = self._take_commit(unconfirmed, int(batch.numbers[index, k.COMMIT]), progress.stores)
                _require_stores(
                    batch.numbers[confirmed[:end], k.STORE], batch.offsets[confirmed[:end]], progress.stores
                )
                for part in parts:
                    self._apply_confirmed(part)
            commits.append(ConfirmedCommit(int(batch.offsets[index]), epoch, progress, end - first))
        self._apply_commits(batch, confirmed[first : first + commits[-1].changes], commits)

    def _take_commit(
        self, unconfirmed: list[tuple[ConfirmedChanges, Int64Array]], commit: int, stores: tuple[StoreSchema, ...]
    ) -> list[ConfirmedChanges]:
        """Return the unconfirmed entries of this commit, as they were written; the others never count."""
        parts = []
        for entries, numbers in unconfirmed:
            own = entries.at(np.flatnonzero(numbers == commit))
            self.entries_ignored += len(entries) - len(own)
            _require_stores(own.numbers, own.offsets, stores)
            if len(own):
                parts.append(replace(own, stores=stores))
        return parts

    def _apply_commits(self, batch: _ParsedRecords, rows: Int64Array, commits: list[ConfirmedCommit]) -> None:
        """Apply the commits before the first that has an entry of an unknown store; that one is an error."""
        stores = commits[0].progress.stores
        unknown = np.flatnonzero(batch.numbers[rows, k.STORE] >= len(stores))
        # An entry must not be applied to a store that its commit does not list.
        if not len(unknown):
            self._apply_confirmed(batch.confirmed(rows, stores, tuple(commits)))
            return
        if sound := [commit for commit in commits if commit.changes <= unknown[0]]:
            self._apply_confirmed(batch.confirmed(rows[: sound[-1].changes], stores, tuple(sound)))
        _require_stores(batch.numbers[rows, k.STORE], batch.offsets[rows], stores)

    def _apply_confirmed(self, confirmed: ConfirmedChanges) -> None:
        self._apply(confirmed)
        self.entries_applied += len(confirmed)
        if confirmed.commits:
            self.progress = confirmed.commits[-1].progress

    def _keep_unconfirmed(
        self, batch: _ParsedRecords, counters: Int64Array, unconfirmed: list[tuple[ConfirmedChanges, Int64Array]]
    ) -> None:
        if batch.count:
            self.next_offset = int(batch.offsets[batch.count - 1]) + 1
        waiting = int(counters[k.PENDING])
        first = int(counters[k.FIRST_PENDING])
        # The covered offset ends before the first unconfirmed entry. If that is of an earlier batch, the covered offset
        # stays where it was.
        if not unconfirmed and batch.count:
            if not waiting:
                self.covered_offset = self.next_offset
            elif first:
                self.covered_offset = int(batch.offsets[first - 1]) + 1
        if waiting:
            rows, numbers = batch.entries_of_epoch(self.epoch, first)
            unconfirmed.append((batch.confirmed(rows, (), ()), numbers))
        self._unconfirmed = unconfirmed


def _missing_takeover(epoch: int, in_force: int) -> str:
    """Return the reason to reject a commit of an epoch above the one in force (0: none is)."""
    return (
        f"a commit of epoch {epoch} without its takeover record (epoch in force: {in_force or 'none'}): the record was "
        "damaged or lost, and no commit of its owner would count"
    )


def _require_stores(numbers: Int64Array, offsets: Int64Array, stores: tuple[StoreSchema, ...]) -> None:
    """Raise CorruptEntry for the first entry with a store number that the commit's stores do not have."""
    for index in np.flatnonzero(numbers >= len(stores)):
        raise CorruptEntry(int(offsets[index]), f"an entry for store {numbers[index]}; there are {len(stores)} stores")


def feed_records(reader: ChangelogReader, columns: Columns) -> None:
    """Feed records of the reader's partition to it.

    Raises CorruptRecord, whose message names the record that cannot be decoded and says what to do.
    """
    try:
        reader.feed(columns.offsets, columns.keys, columns.values)
    except CorruptEntry as e:
        raise locate_corrupt_entry(columns.topic_partition, e) from e


def compile_changelog_reader() -> None:
    """Compile the kernels that read changelogs, or load them from numba's cache, by calling each once."""
    nothing = PackedBytes.of([None])
    ChangelogReader(ignore_changes).feed(np.arange(len(nothing)), nothing, nothing)
    StateCodec([Column("n", "int64")]).unpacked_columns(nothing[:0])


def reader_start_offset(
    at: TopicPartition,
    covered: int | None,
    first: int,
    end: int,
    lake: str | None = None,
    lake_name: str = "streams.lake",
) -> int:
    """Return the offset at which a changelog's reader starts. The log has the offsets from `first` up to `end`.

    The reader starts at `covered`, the end of the snapshot in the lake, or at 0 if `covered` is None. Raises
    ChangelogHole if `first` is above the start or `end` below it. `lake` and `lake_name` are for the message.
    """
    if covered is None:
        if first > 0:
            raise ChangelogHole(
                f"{at}: offsets 0 to {first - 1} were deleted, and there is no snapshot that covers them "
                f"({lake_name} is {lake or 'not set'}: is it the one that compactions write to?)"
            )
        return first
    if first > covered:
        raise ChangelogHole(f"{at}: offsets {covered} to {first - 1} are missing: the snapshot ends before them")
    if end < covered:
        raise ChangelogHole(f"{at}: the log ends at {end}, but the snapshot covers it up to {covered}")
    return covered
