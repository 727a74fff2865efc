"""moto's server, which implements S3's protocol, as a separate process."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 30
MOTO = shutil.which("moto_server", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@contextmanager
def s3_server(folder: Path, bucket: str) -> Iterator[str]:
    """Start a server with one empty bucket, and yield its address. Its log is in `folder`."""
    assert MOTO is not None
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = folder / "moto.log"
    with log.open("wb") as output:
        server = subprocess.Popen([MOTO, "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                request = urllib.request.Request(f"{url}/{bucket}", method="PUT")
                urllib.request.urlopen(request, timeout=START_SECONDS).close()
                break
            except urllib.error.URLError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()
