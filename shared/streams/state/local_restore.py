"""Restores from an instance's disk: finds the offset from which to read the changelog, and detects unusable state.

Rows on disk contain the changelog up to the checkpoint's covered offset. State that does not fit the changelog, or to
which an aggregation was added, is deleted, and restored from the snapshot and the log. That is no error. The reason is
logged, unless the state is incomplete or has another format. State that the topology cannot read stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.shared.streams.changelog.changelog_reader import ChangelogReader
from penstock.shared.streams.changelog.format import EPOCH_MAX
from penstock.shared.streams.changelog.store_schema import StoreSchema, check_restorable
from penstock.shared.streams.state.checkpoint import Checkpoint
from penstock.shared.streams.state.row_codec import row_layout

if TYPE_CHECKING:
    from penstock.shared.streams.state.local_state import LocalState


def continue_from_local_state(
    reader: ChangelogReader,
    local: LocalState,
    stores: tuple[StoreSchema, ...],
    topic_id: str | None,
    first: int,
    end: int,
) -> Checkpoint | None:
    """Continue the reader from the state on disk, and return its checkpoint.

    If the state is unusable, it is deleted, and the result is None. `topic_id`, `first` and `end` are the id and the
    offsets of the changelog, as for `Checkpoint.mismatch`. Raises SchemaMismatch if `stores` cannot read the state.
    """
    found = local.checkpoint
    if found is None:
        local.discard("it is incomplete")
        return None
    reason = found.mismatch(topic_id, first, end)
    # Checked before rows are deleted: the next start with the old topology needs them.
    if reason is None and found.progress is not None:
        check_restorable(found.progress.stores, stores)
    if (reason := reason or _why_checkpoint_unusable(found, stores)) is not None:
        local.discard(reason)
        return None
    reader.epoch = found.epoch
    reader.progress = found.progress
    return found


def _why_checkpoint_unusable(found: Checkpoint, stores: tuple[StoreSchema, ...]) -> str | None:
    rows = found.rows or (() if found.progress is None else found.progress.stores)
    if rows and row_layout(rows) != row_layout(stores):
        return "the stores have changed"
    return f"no owner can go above its epoch {found.epoch}" if found.epoch >= EPOCH_MAX else None


def write_restored_rows(
    reader: ChangelogReader, local: LocalState, topic_id: str | None, stores: tuple[StoreSchema, ...]
) -> None:
    """Write what was restored so far to the local state, up to the last offset before which no commit is incomplete.

    `stores` are the schemas of the task, which has checked that they can read all of it.
    """
    covered = reader.covered_offset
    progress = reader.progress
    if covered is not None:
        # Rows are written in the layout of the task's stores. The changelog may have another one, before the first
        # commit of a topology with an added aggregation.
        local.write(Checkpoint(topic_id, reader.epoch, covered, progress, stores))
