"""A lock on a file that one process at a time has, and whom that process hands it on to.

The lock (flock) belongs to an open file, not to a process: it is held until the last process that has the file open is
gone, however it ends. So no lock outlives its holders, and a child that inherits the descriptor keeps it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class FileLock:
    """The lock of one file, which is made where it is missing, and its folder with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def __repr__(self) -> str:
        return f"<FileLock {self._path} {'held' if self.is_held else 'free'}>"

    @property
    def is_held(self) -> bool:
        """Whether it was taken here and not let go."""
        return self._fd is not None

    @property
    def fd(self) -> int:
        """The descriptor of the locked file, to be written to or handed on; the lock must be held."""
        assert self._fd is not None
        return self._fd

    def try_acquire(self) -> bool:
        """Take it if nobody has it: whether it is held now. OSError where the file cannot be made or locked."""
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
        """Let go, also more than once; who inherited the descriptor keeps his own hold."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
