"""The demo's folder, with a real second process and a broker's lock."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.local.demo.data_folder import KAFKA, fresh_folder
from penstock.services.local.folder_lock import FolderInUse, FolderLock
from penstock.shared.common.errors import ConfigError

HOLDER = """
import sys
from pathlib import Path
from penstock.services.local.demo.data_folder import fresh_folder
with fresh_folder(Path(sys.argv[1])) as folder:
    (folder / "data").write_text("mine")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_use_keeps_its_data(tmp_path: Path) -> None:
    """A second demo is rejected with the first one's process id and leaves the folder
    unchanged; after its end the folder is emptied.
    """
    folder = tmp_path / "new" / "demo"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(FolderInUse, match=f"process {first.pid}$"), fresh_folder(folder):
            pass
        assert (folder / "data").read_text() == "mine"
        first.kill()
    (folder / "lake").mkdir()
    with fresh_folder(folder) as again:
        assert again == folder
        assert not (folder / "data").exists()
        assert not (folder / "lake").exists()


def test_a_folder_with_a_running_broker_is_not_emptied(tmp_path: Path) -> None:
    """The folder of a demo in which a broker runs is left unchanged."""
    with fresh_folder(tmp_path) as folder:
        lock = FolderLock(folder / KAFKA)
        asyncio.run(lock.acquire())
    (folder / KAFKA / "log").write_text("mine")
    message = f"broker.*process {os.getpid()}"
    with pytest.raises(FolderInUse, match=message), fresh_folder(folder):
        pass
    assert (folder / KAFKA / "log").read_text() == "mine"
    lock.release()


def test_a_folder_of_something_else_is_rejected(tmp_path: Path) -> None:
    """A folder with other files is a ConfigError, and the files are unchanged."""
    (tmp_path / "thesis").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"), fresh_folder(tmp_path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis"]
    with pytest.raises(ConfigError, match="--data-dir"), fresh_folder(tmp_path / "thesis"):
        pass
