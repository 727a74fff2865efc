"""A file lock that allows one broker for each data folder.

The broker inherits the lock (`file_lock`). So the lock is held until the broker ends, even if the process that started
it was killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from pathlib import Path

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.file_lock import FileLock

LOCK_FILE = ".penstock.lock"
KAFKA_LOCK_FILE = ".lock"
# A broker whose starter has ended is about to end: the guard's limit, and some time for the kernel.
ORPHAN_WAIT_MS = 15_000
_POLL_MS = 50


class FolderInUse(ConfigError):
    """Another running broker or demo uses the data folder.

    The message of FolderLock has the id of the process that took the lock, if known.
    """


class FolderLock:
    """The lock of one data folder, which is created if missing.

    `user` is the text that precedes the id of the holder's process in the error of a held lock.
    """

    def __init__(self, folder: Path, user: str = "another running broker, started by") -> None:
        self._folder = folder
        self._user = user
        self._lock = FileLock(folder / LOCK_FILE)

    def __repr__(self) -> str:
        return f"<FolderLock {self._folder} {'held' if self._lock.is_held else 'free'}>"

    @property
    def fd(self) -> int:
        """The descriptor that the broker inherits."""
        return self._lock.fd

    async def acquire(self) -> None:
        """Take the lock. Raises ConfigError if the folder cannot be used.

        Raises FolderInUse if the lock is held and the process that the lock file names is running. If that process is
        not running, or the file names none, waits up to ORPHAN_WAIT_MS for the release. Raises FolderInUse if the lock
        is still held then.
        """
        deadline = time.monotonic() + ORPHAN_WAIT_MS / 1000
        while True:
            owner = self._try_to_lock()
            if owner is None:
                return
            # If the owner has ended, its broker still holds the lock, and ends soon by the guard of its child process.
            # A live owner keeps the lock.
            if _is_process_alive(owner) or time.monotonic() >= deadline:
                user = f"{self._user} process {owner}" if owner else f"a process that {LOCK_FILE} does not name"
                raise FolderInUse(f"the data folder {self._folder} is in use by {user}")
            await asyncio.sleep(_POLL_MS / 1000)

    def release(self) -> None:
        """Release the lock. A broker that still runs keeps its own hold."""
        self._lock.release()

    def _try_to_lock(self) -> int | None:
        """Return None if the lock was taken, else the process id that the lock file has (0: none)."""
        try:
            if not self._lock.try_acquire():
                text = (self._folder / LOCK_FILE).read_bytes()[:32]
                return int(text) if text.strip().isdigit() else 0
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, b"%d\n" % os.getpid(), 0)
        except OSError as e:
            self._lock.release()
            raise ConfigError(f"the data folder {self._folder} cannot be used: {e.filename}: {e.strerror}") from None
        return None


def check_no_kafka_runs_in(log_folder: Path) -> None:
    """Raise FolderInUse if a Kafka that was started without FolderLock runs in the folder.

    Kafka's own lock is no protection: a second KRaft node reads and truncates the metadata log before it takes that
    lock. So starting a second node could damage the data of the first one.
    """
    try:
        fd = os.open(log_folder / KAFKA_LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as e:
        raise ConfigError(f"the data folder {log_folder.parent} cannot be used: {e.filename}: {e.strerror}") from None
    try:
        # Java's file locks are POSIX record locks, which flock() does not see and lockf() does.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise FolderInUse(f"the data folder {log_folder.parent} is in use by another running broker") from None
    finally:
        os.close(fd)


def _is_process_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
