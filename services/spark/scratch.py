"""A job's scratch folder, which goes with the job: at its end, or by the next job where it was killed.

A folder is in use as long as its lock is held, which ends with the process that holds it, however that ends. So of
folders that are there the ones with a free lock are nobody's. One without a lock is just being made, or not ours.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.shared.common.file_lock import FileLock

PREFIX = "penstock-spark-"
LOCK = "in-use"


@contextmanager
def scratch_folder(root: Path | None = None) -> Iterator[str]:
    """A folder below `root` (the machine's own for such things) that only this user can read, for as long as needed."""
    root = Path(tempfile.gettempdir()) if root is None else root
    sweep(root)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=root, ignore_cleanup_errors=True) as work:
        made = Path(work) / f"{LOCK}.made"
        lock = FileLock(made)
        lock.try_acquire()
        made.rename(made.with_name(LOCK))  # whoever sees it sees it locked
        try:
            yield work
        finally:
            lock.release()


def sweep(root: Path) -> list[Path]:
    """Remove what jobs left that were killed; which folders those were."""
    removed = []
    for folder in root.glob(f"{PREFIX}*"):
        lock = FileLock(folder / LOCK)
        with suppress(OSError):  # another user's
            if not folder.is_symlink() and (folder / LOCK).is_file() and lock.try_acquire():
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        lock.release()
    return removed
