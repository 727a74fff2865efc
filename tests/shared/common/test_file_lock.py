"""A lock on a file, held by real processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.shared.common.file_lock import FileLock


def test_one_at_a_time(tmp_path: Path) -> None:
    """A held lock cannot be acquired again, by another or by its holder, until it is released."""
    first, second = FileLock(tmp_path / "new" / "lock"), FileLock(tmp_path / "new" / "lock")
    assert [first.try_acquire(), second.try_acquire(), first.try_acquire()] == [True, False, False]
    assert (first.is_held, second.is_held) == (True, False)
    assert repr(first) == f"<FileLock {tmp_path}/new/lock held>"
    first.release()
    first.release()
    assert second.try_acquire()
    second.release()


def test_a_child_that_inherits_the_lock_keeps_it(tmp_path: Path) -> None:
    """A release does not free the file while a child has it, and the child's end does."""
    lock, again = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.try_acquire()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.fd,)) as child:
        lock.release()
        assert not again.try_acquire()
        child.kill()
    assert again.try_acquire()
    again.release()


def test_a_file_that_cannot_be_created(tmp_path: Path) -> None:
    """An error of the folder is raised unchanged."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        FileLock(tmp_path / "file" / "lock").try_acquire()
