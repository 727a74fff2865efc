"""Data folders and ports that another process uses, with real processes and sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.services.local import folder_lock
from penstock.services.local.folder_lock import (
    KAFKA_LOCK_FILE,
    LOCK_FILE,
    FolderInUse,
    FolderLock,
    check_no_kafka_runs_in,
)
from penstock.services.local.ports import FIRST, LAST, PortTaken, is_free, pick, require_free
from penstock.shared.common.errors import ConfigError


def run(*command: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=pass_fds)


async def test_a_second_lock_is_an_error_with_the_owner(tmp_path: Path) -> None:
    """A locked folder is an error with the owner's process id, until the lock is released."""
    first, second = FolderLock(tmp_path / "new"), FolderLock(tmp_path / "new")
    await first.acquire()
    with pytest.raises(FolderInUse, match=f"started by process {os.getpid()}"):
        await second.acquire()
    first.release()
    await second.acquire()
    second.release()


async def test_a_lock_file_without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a lock file that names no process does not contain a process id."""
    monkeypatch.setattr(folder_lock, "ORPHAN_WAIT_MS", 0)
    first = FolderLock(tmp_path)
    await first.acquire()
    (tmp_path / LOCK_FILE).write_text("")
    with pytest.raises(FolderInUse, match=rf"{LOCK_FILE} does not name$"):
        await FolderLock(tmp_path).acquire()
    first.release()


async def test_lock_is_held_while_the_process_that_inherited_it_runs(tmp_path: Path) -> None:
    """A lock is held as long as the process that inherited it runs."""
    lock, again = FolderLock(tmp_path), FolderLock(tmp_path)
    await lock.acquire()
    with run("cat", pass_fds=(lock.fd,)) as broker:
        lock.release()
        with pytest.raises(FolderInUse):
            await again.acquire()
        broker.kill()
    await again.acquire()
    again.release()


async def test_the_broker_of_a_dead_owner_is_waited_for(tmp_path: Path) -> None:
    """If the owner has ended, its broker is ending too, so the lock is waited for."""
    lock, again = FolderLock(tmp_path), FolderLock(tmp_path)
    await lock.acquire()
    with run("true") as gone:
        gone.wait()
    with run("sleep", "0.2", pass_fds=(lock.fd,)):
        lock.release()
        (tmp_path / LOCK_FILE).write_text(f"{gone.pid}\n")
        await again.acquire()
    again.release()


async def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A folder below a file is a ConfigError with its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/data cannot be used"):
        await FolderLock(tmp_path / "file" / "data").acquire()


LOCKER = """
import fcntl, sys
f = open(sys.argv[1], "w")
fcntl.lockf(f, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_another_kafka_is_detected(tmp_path: Path) -> None:
    """A POSIX lock on Kafka's own lock file, as Java takes it, is an error; a remaining file without a lock is not."""
    check_no_kafka_runs_in(tmp_path)
    command = [sys.executable, "-c", LOCKER, str(tmp_path / KAFKA_LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as kafka:
        assert kafka.stdout is not None
        assert kafka.stdout.readline() == b"locked\n"
        with pytest.raises(FolderInUse, match=str(tmp_path.parent)):
            check_no_kafka_runs_in(tmp_path)
        kafka.kill()
    check_no_kafka_runs_in(tmp_path)


def test_picked_ports_are_different_and_in_range() -> None:
    """Picked ports are different and below the range for outgoing connections."""
    picked = pick("127.0.0.1", 20)
    assert len(set(picked)) == 20
    assert all(FIRST <= port < LAST for port in picked)


def test_a_port_with_a_listener_is_in_use() -> None:
    """A port is in use while a listener exists, and free immediately afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(PortTaken, match=f"^http.port.*{port}"):
            require_free("127.0.0.1", port, "http.port")
    require_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error() -> None:
    """An address that this machine does not have is an invalid setting, not a port in use."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        pick("192.0.2.1", 1)
