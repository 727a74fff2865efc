"""A lock on a file. One process at a time holds it and can pass it to its child processes.

The lock (flock) belongs to an open file, not to a process. It is held until every process that has inherited the open
file has closed it or ended. So a child that inherits the descriptor keeps the lock, and a crash releases it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """The lock of one file. The file and its folder are created if they are missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __repr__(self) -> str:
        return f"<FileLock {self._path} {'held' if self.is_held else 'free'}>"

    @property
    def is_held(self) -> bool:
        """Whether this object has acquired the lock and not released it."""
        return self._fd is not None

    @property
    def fd(self) -> int:
        """The descriptor of the locked file, to write to or to pass to a child. The lock must be held."""
        assert self._fd is not None
        return self._fd

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free. Returns False if anyone has it, this object included.

        Raises OSError if the file cannot be locked.
        """
        if self._fd is not None:
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        """Release the lock; a second call does nothing. A process that inherited the descriptor keeps its hold."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
