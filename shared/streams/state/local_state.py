"""One task's state on disk: holds back the changes of a commit or a restore until they are confirmed.

`prepare` keeps the changelog entries of a commit in memory. They are written to disk, together with the checkpoint,
only when the commit is known to have succeeded. During a restore, the changes that the log confirms are buffered.
Whenever the buffer is full, it is written with a checkpoint of the offset reached. While a snapshot is loaded, there is
no checkpoint. So rows with a checkpoint always have the state of some commit in the log, and are never ahead of the
log. KIP-892 (transactional state stores) has the same aim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from penstock.shared.common.errors import RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.state.checkpoint import Checkpoint, CommitPosition
from penstock.shared.streams.state.persistent_stores import (
    CacheBudget,
    PersistentAggregateStore,
    PersistentJoinStore,
    PersistentKeyValueStore,
    PersistentWindowStore,
)
from penstock.shared.streams.state.rocksdb import RocksDb, RowId, StoredRow
from penstock.shared.streams.state.row_codec import RowCodec
from penstock.shared.streams.state.store_builder import StoreBuilder

log = get_logger(__name__)

RESTORE_BYTES_MAX = 2 * 1024 * 1024
"""The bytes of rows that a restore buffers before it writes them."""
BUFFERED_ROW_BYTES = 200
"""The estimated bytes of a buffered row besides its key and states."""

AnyPersistentStore = PersistentJoinStore | PersistentKeyValueStore | PersistentWindowStore
PERSISTENT_STORES: dict[str, Callable[..., AnyPersistentStore]] = {
    "table": PersistentKeyValueStore,
    "aggregate": PersistentAggregateStore,
    "join": PersistentJoinStore,
}
"""The stores on disk by kind; all other kinds are windows."""


class CommitOffsetUnknown(RetriableError):
    """A commit succeeded, but the broker did not return its offset. The task is restored from the changelog."""


class LocalState:
    """One task's database on disk, and the stores over it."""

    def __init__(self, db: RocksDb, budget: CacheBudget, on_close: Callable[[], None] = lambda: None) -> None:
        self.db = db
        self._budget = budget
        self._on_close = on_close
        self._stores: dict[int, AnyPersistentStore] = {}
        self._numbers: dict[str, int] = {}
        self._indexed: frozenset[int] = frozenset()
        self._buffered: dict[RowId, StoredRow | None] = {}
        self._buffered_bytes = 0
        self._closed = False
        self._prepared: tuple[dict[RowId, StoredRow | None], Progress] | None = None

    def __repr__(self) -> str:
        return f"LocalState({self.db!r}, {len(self._buffered)} rows buffered)"

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Which changelog records are in the rows on disk; None while the rows are incomplete."""
        return self.db.checkpoint

    def begin(self, schemas: Sequence[StoreSchema]) -> None:
        """Begin a task with these stores; drop what an earlier task had in memory."""
        self._forget_stores()
        self._numbers = {schema.name: number for number, schema in enumerate(schemas)}
        self._indexed = frozenset(i for i, schema in enumerate(schemas) if not schema.is_table)

    def store(self, number: int, builder: StoreBuilder) -> AnyPersistentStore:
        """Build a store on disk, the `number`th of its topology."""
        restore = partial(self.restore_raw, builder.schema.name)
        codec = RowCodec(builder.schema, builder.aggregations)
        on_disk = PERSISTENT_STORES.get(builder.schema.kind, PersistentWindowStore)
        store = on_disk(builder.build(), self.db, number, restore, codec, self._budget)
        self._stores[number] = store
        return store

    def discard(self, reason: str) -> None:
        """Delete the state on disk, which cannot be used for this reason. Log that, unless it has no checkpoint."""
        if self.checkpoint is not None:
            log.warning("the state on disk is deleted and restored", folder=str(self.db.folder), reason=reason)
        if not self.db.is_new:
            self.clear()

    def clear(self) -> None:
        """Delete all rows of the state on disk."""
        self._buffered = {}
        self._buffered_bytes = 0
        self.db.clear()

    def close(self) -> None:
        """Close the database without writing buffered or prepared rows; the log has them."""
        if not self._closed:
            self._closed = True
            self._forget_stores()
            self.db.close()
            self._on_close()

    # --- restoring ---

    @property
    def is_full(self) -> bool:
        """Whether the buffered rows should be written."""
        return self._buffered_bytes >= RESTORE_BYTES_MAX

    def restore(self, id_: RowId, row: StoredRow | None) -> None:
        """Buffer one row that a restore adds, or with None removes."""
        self._buffered[id_] = row
        self._buffered_bytes += BUFFERED_ROW_BYTES + len(id_[1]) + (0 if row is None else len(row.state))

    def restore_raw(self, store: str, key: bytes, start: int, end: int, state: bytes | None) -> None:
        """As `restore`, by the store's name and with the changelog's bytes; without a state the row is removed."""
        self.restore((self._numbers[store], key, start), None if state is None else StoredRow(end, state))

    def write(self, checkpoint: Checkpoint | None) -> None:
        """Write the buffered rows; without a checkpoint if the state is not complete yet."""
        rows = self._buffered
        self._buffered = {}
        self._buffered_bytes = 0
        self.db.write(rows, checkpoint, indexed=self._indexed)

    # --- committing ---

    def prepare(self, entries: Iterable[tuple[bytes | None, bytes]], progress: Progress) -> None:
        """Keep the row changes of a commit until `confirm`. `entries` are its live, deleted and final entries."""
        rows: dict[RowId, StoredRow | None] = {}
        for key, value in entries:
            entry = fmt.decode_entry(value)
            assert key is not None
            if entry.operation == fmt.LIVE:
                start, end = fmt.START_END.unpack_from(entry.body)
                rows[entry.store, key, start] = StoredRow(end, entry.body[fmt.START_END.size :])
            else:
                (start,) = fmt.START.unpack_from(entry.body)
                # A deleted row or a closed window: the store does not have it any more.
                rows[entry.store, key, start] = None
        # Not written before `confirm`. Until then the commit may fail, and the rows would have to be undone.
        self._prepared = rows, progress

    def confirm(self, epoch: int, position: CommitPosition) -> None:
        """Write the prepared commit, which has succeeded in Kafka, to the disk.

        After `close`, nothing is written. Raises CommitOffsetUnknown if the broker did not return the offset at which
        the commit ends in the changelog.
        """
        # A checkpoint needs an offset. Without one, the rows on disk could not be related to the log.
        if position.covered_offset < 1:
            raise CommitOffsetUnknown(
                "the broker returned no offset of the commit, so the state on disk stays behind it"
            )
        # The commit succeeded only after the task was closed. The log has the commit, so the next restore reads it.
        if self._closed:
            return
        assert self._prepared is not None, "no commit was prepared"
        rows, progress = self._prepared
        self._prepared = None
        # Up to `due_ms` the index is not searched again, so no entry may be left before it.
        due = {number: store.due_ms for number, store in self._stores.items()}
        checkpoint = Checkpoint(position.topic_id, epoch, position.covered_offset, progress)
        more = self.db.write(rows, checkpoint, indexed=self._indexed, due=due)
        own: dict[int, dict[tuple[bytes, int], StoredRow | None]] = {number: {} for number in self._stores}
        for (number, key, start), row in rows.items():
            own[number][key, start] = row
        for number, store in self._stores.items():
            store.confirm_written(own[number], more.get(number, 0))

    # --- inside ---

    def _forget_stores(self) -> None:
        for store in self._stores.values():
            store.forget()
        self._stores.clear()
        self._buffered = {}
        self._buffered_bytes = 0
        self._prepared = None
