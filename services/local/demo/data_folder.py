"""The demo's data folder: emptied at each start, for one demo at a time.

A lock file in the folder, which is not removed, keeps a second demo out. When a demo is killed, its broker ends a
little later. The next demo waits for the broker's own lock before it removes anything.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.services.local.folder_lock import LOCK_FILE, FolderLock
from penstock.shared.common.errors import ConfigError

# This file marks a folder that a demo created. A demo empties no other folder.
MARKER = "penstock-demo"
# This subfolder has the broker's data.
KAFKA = "kafka"


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """Yield the absolute path of the demo's data folder, emptied and locked by this demo.

    The folder keeps its content at the end. Raises ConfigError if the folder cannot be used, or if it is not empty and
    was not created by a demo. Raises FolderInUse if another demo or its broker uses the folder.
    """
    folder = folder.absolute()
    require_a_demos(folder)
    lock = FolderLock(folder, "another demo,")
    asyncio.run(lock.acquire())
    try:
        if (folder / KAFKA).is_dir():
            broker = FolderLock(folder / KAFKA)
            asyncio.run(broker.acquire())
            broker.release()
        _empty_data_folder(folder)
        yield folder
    finally:
        lock.release()


def require_a_demos(folder: Path) -> None:
    """Raise ConfigError for a folder that cannot be read, or that is not empty and was not created by a demo."""
    try:
        names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except OSError as e:
        raise _unusable_data_folder(folder, e) from None
    if names - {LOCK_FILE} and MARKER not in names:
        raise ConfigError(f"--data-dir: {folder} is not empty and was not created by a demo")


def _empty_data_folder(folder: Path) -> None:
    try:
        # The marker comes first: the next demo takes the folder of one that ended while it emptied it.
        (folder / MARKER).write_text("This folder belongs to `penstock demo`, which empties it at its next start.\n")
        for entry in folder.iterdir():
            if entry.name in (LOCK_FILE, MARKER):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as e:
        raise _unusable_data_folder(folder, e) from None


def _unusable_data_folder(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--data-dir: {folder}: {error.strerror or error}")
