"""The start of `penstock demo`: its command line, and its folder with a real second process and a broker's lock."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.services.cli import app
from penstock.services.local.demo.data_folder import KAFKA, MARKER, fresh_folder
from penstock.services.local.folder_lock import FolderInUse, FolderLock
from penstock.shared.common.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--key", "who"), "--key: only with --input FILE"),
        (("--time-format", "epoch", "--gap", "5m"), "--time-format and --gap: only with --input FILE"),
        (("--input", "latin.csv", "--key", "who", "--time", "at"), "latin.csv, line 1: byte 2 (0xe9) is not UTF-8"),
        (
            ("--input", "ok.csv", "--key", "who", "--time", "when"),
            "--time: ok.csv has no column 'when'; it has who, at",
        ),
        (("--input", "ok.csv", "--key", "who", "--time", "at", "--gap", "bogus"), "--gap: 'bogus' is not a duration"),
        (("--input", "ok.csv", "--key", "who", "--time", "at"), "ok.csv, row 1 (line 2), column 'at': '17' is no"),
        (
            ("--input", "seconds.csv", "--key", "who", "--time", "at", "--time-format", "epoch_ms"),
            "seconds.csv, row 1 (line 2), column 'at': '1714557600' is a time in 1970 by --time-format epoch_ms; "
            "--time-format epoch reads it",
        ),
        (("--input", "nowhere.csv"), "--input also needs --key COLUMN and --time COLUMN"),
        (("--input", "nowhere.csv", "--key", "a", "--time", "b"), "nowhere.csv: No such file"),
        (("--data-dir", "."), "is not empty and was not created by a demo"),
    ],
)
def test_invalid_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """An invalid argument exits with status 2 and one line that names it, before a service starts."""
    (tmp_path / "latin.csv").write_bytes(b"n\xe9,at\n")
    (tmp_path / "ok.csv").write_bytes(b"who,at\nann,17\n")
    (tmp_path / "seconds.csv").write_bytes(b"who,at\nann,1714557600\n")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    run = CliRunner().invoke(app, ["demo", *arguments])
    assert run.exit_code == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_help_names_the_command() -> None:
    """The usage line names the command as the user types it."""
    run = CliRunner().invoke(app, ["demo", "--help"])
    assert run.exit_code == 0
    assert "Usage: penstock demo [OPTIONS]" in run.stdout


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


def test_a_folder_that_was_not_emptied_to_its_end_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo that ended while it emptied its folder leaves a folder that the next one takes."""
    with fresh_folder(tmp_path):
        (tmp_path / "lake").mkdir()

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", fail)
        patched.setattr(Path, "iterdir", lambda folder: iter([folder / MARKER, folder / "lake"]))
        with pytest.raises(ConfigError, match="Input/output error"), fresh_folder(tmp_path):
            pass
    with fresh_folder(tmp_path):
        assert not (tmp_path / "lake").exists()


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
