"""A real Postgres for tests, from the binaries on the machine.

The server does not run as root, so root runs it as another user.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BINARIES = ("initdb", "pg_ctl", "postgres")


def is_installed() -> bool:
    """Whether the binaries to start a Postgres server are on the PATH."""
    return all(shutil.which(name) for name in BINARIES)


def _user() -> str | None:
    """The user that runs the server if this process is root, or None."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise RuntimeError("there is no user to run Postgres as")


@contextmanager
def server(**settings: str) -> Iterator[str]:
    """Start a server with these settings in a temporary folder, and yield its URL.

    On exit the server and its data are removed.
    """
    user = _user()
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    data = folder / "data"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if user is not None:
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        done = subprocess.run(
            command, user=user, cwd=folder, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
        )
        assert done.returncode == 0, done.stdout + done.stderr

    binaries = [shutil.which(name) for name in BINARIES]
    initdb, pg_ctl, _ = (str(Path(name or "")) for name in binaries)
    run(initdb, "-D", str(data), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder} -c fsync=off"
    options += "".join(f" -c {name}={value}" for name, value in settings.items())
    run(pg_ctl, "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        run(pg_ctl, "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder, ignore_errors=True)
