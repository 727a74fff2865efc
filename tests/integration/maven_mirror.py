"""A Maven repository on this machine that serves one set of jars from this user's cache."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from penstock.shared.common.java.jars import JarSet, cache_root


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder's files."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line for each request would hide the test's own output."""


@contextmanager
def mirror(jars: JarSet, folder: Path) -> Iterator[str]:
    """Serve these jars of the cache from `folder`, and yield the repository's address."""
    for jar in jars.jars:
        (folder / jar.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / jar.path).symlink_to(cache_root() / jars.folder / jar.name)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
