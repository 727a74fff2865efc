"""An app served by uvicorn inside the running event loop.

The daemon owns the signals and the event loop; the server only listens. `start` returns when the address accepts
connections. Then the real port is known. `stop` closes the listening socket, waits for the requests in flight within a
limit, and closes the remaining connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.http.connection_guard import guarded_http
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.log import get_logger
from penstock.shared.common.repeated_failure import RepeatedFailure
from penstock.shared.common.settings import HttpSettings

log = get_logger(__name__)

BACKLOG = 2_048

OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The errors of `accept` after which asyncio pauses a listening socket."""

GRACE_MS = 10_000

KEEP_ALIVE_S = 30
"""How long a connection stays open after a response without another request: longer than in clients' pools. Otherwise a
client could send into a connection that is being closed."""


class _NotAccepted(OSError):
    """The process or the system has too few file descriptors or buffers for a connection. It is already logged."""


class ListeningSocket(socket.socket):
    """A listening socket that logs seldom that file descriptors are missing.

    When `accept` fails for want of them, asyncio pauses the socket for a second. Before, it calls `accept` as often as
    the backlog is long, and logs each failure with a traceback. So the call after a failure reports that no connection
    waits, which ends asyncio's loop.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._has_just_failed = False
        self._failure = RepeatedFailure()

    def accept(self) -> tuple[socket.socket, Any]:
        if self._has_just_failed:
            self._has_just_failed = False
            raise BlockingIOError
        try:
            accepted = super().accept()
        except OSError as e:
            if e.errno not in OUT_OF_RESOURCES:
                raise
            self._has_just_failed = True
            if (fields := self._failure.failed(SYSTEM_CLOCK.monotonic_ms())) is not None:
                log.warning("cannot accept connections", error=e.strerror, **fields)
            raise _NotAccepted(e.errno, e.strerror) from None
        if self._failure.is_failing and (fields := self._failure.succeeded(SYSTEM_CLOCK.monotonic_ms())) is not None:
            log.info("accepts connections again", **fields)
        return accepted


def _is_not_logged_yet(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], _NotAccepted)


logging.getLogger("asyncio").addFilter(_is_not_logged_yet)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, and with an event that is set after its start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class HttpServer:
    """One app at one address, from `start` to `stop`."""

    def __init__(self, app: ASGIApp, settings: HttpSettings, *, unix_socket: Path | None = None) -> None:
        """With `unix_socket` the server listens on that socket, for processes of this user, and not on a port."""
        self._app = app
        self._settings = settings
        self._unix_socket = unix_socket
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self.host = settings.host
        self.port = settings.port

    def __repr__(self) -> str:
        return f"HttpServer({self.url}, {'listening' if self._serving else 'closed'})"

    @property
    def url(self) -> str:
        """The address for a client on this machine."""
        if self._unix_socket is not None:
            return f"unix:{self._unix_socket}"
        url = url_of(self.host, self.port)
        return url if self._settings.ssl_certfile is None else url.replace("http:", "https:", 1)

    @property
    def advertised_url(self) -> str:
        """The URL of the server for other machines; with this machine's name if the server listens on every address.

        >>> from fastapi import FastAPI
        >>> HttpServer(FastAPI(), HttpSettings(host="10.0.0.7", port=8083)).advertised_url
        'http://10.0.0.7:8083'
        """
        if self.host not in ("0.0.0.0", "::"):  # noqa: S104 - a name for "every address", not a binding
            return self.url
        scheme = self.url.partition(":")[0]
        return f"{scheme}://{socket.getfqdn()}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound, or the TLS certificate or key cannot be loaded."""
        bound = _bind_socket(self._settings) if self._unix_socket is None else _bind_unix(self._unix_socket)
        if self._unix_socket is None:
            self.port = bound.getsockname()[1]
        password = self._settings.ssl_key_password
        config = uvicorn.Config(
            _answer_head_as_get(self._app),
            http=guarded_http(self._settings.max_head_bytes),
            ssl_certfile=self._settings.ssl_certfile,
            ssl_keyfile=self._settings.ssl_keyfile,
            ssl_keyfile_password=None if password is None else password.get_secret_value(),
            log_config=None,
            log_level="warning",  # this module logs the address and the shutdown
            access_log=False,
            server_header=False,
            # X-Forwarded-For counts only from trusted proxies. Any client could forge it in rates and in the audit log.
            proxy_headers=bool(self._settings.forwarded_allow_ips),
            forwarded_allow_ips=list(self._settings.forwarded_allow_ips),
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        try:
            config.load()
        except (OSError, ValueError) as e:
            # ssl.SSLError is an OSError.
            bound.close()
            raise ConfigError(f"http.ssl_certfile, http.ssl_keyfile: {e}") from None
        self._server = _Uvicorn(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name=f"http {self.port}")
        listening = asyncio.ensure_future(self._server.listening.wait())
        try:
            await asyncio.wait({listening, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        if self._serving.done():
            await self._serving
            raise ConfigError(f"http: the server at {self.url} ended at once")
        log.info("listening", url=self.url)

    async def wait(self) -> None:
        """Wait until the server ends. Raises the error that ended it."""
        assert self._serving is not None, "start() comes first"
        await asyncio.shield(self._serving)

    async def stop(self, grace_ms: int = GRACE_MS) -> None:
        """Stop accepting, finish the requests in flight within `grace_ms` (rounded up to seconds), close the rest."""
        if self._server is None or self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_ms / 1000)
        self._server.should_exit = True
        await asyncio.shield(self._serving)
        self._serving = None


def _answer_head_as_get(app: ASGIApp) -> ASGIApp:
    """Return an app that handles a HEAD request as a GET request (RFC 9110, section 9.3.2).

    uvicorn keeps the request's own method, and sends no body in response to HEAD.
    """

    async def answer_request(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)

    return answer_request


def url_of(host: str, port: int) -> str:
    """Return the URL by which a client on this machine reaches a server that listens there.

    >>> url_of("0.0.0.0", 80), url_of("::1", 80)
    ('http://127.0.0.1:80', 'http://[::1]:80')
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_unix(path: Path) -> socket.socket:
    """Return a socket that is bound to this path. Raises ConfigError if it cannot be bound."""
    bound = ListeningSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A killed process leaves its socket file behind.
        path.unlink(missing_ok=True)
        bound.bind(str(path))
        path.chmod(0o600)
        bound.setblocking(False)
    except OSError as e:
        bound.close()
        raise ConfigError(f"http: cannot listen on {path}: {e.strerror or e}") from None
    return bound


def _bind_socket(settings: HttpSettings) -> socket.socket:
    """Return a socket that listens on the first address of the host.

    Raises ConfigError if the host has no address, or if the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = ListeningSocket(family, kind, protocol)
    except OSError as e:
        raise ConfigError(f"http.host: {settings.host}: {e.strerror}") from None
    # A label is empty or too long.
    except UnicodeError:
        raise ConfigError(f"http.host: {settings.host}: not a host name") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # With SO_REUSEADDR, Linux lets two sockets bind one port until one of them listens.
        bound.listen(BACKLOG)
        bound.setblocking(False)
    except OSError as e:
        bound.close()
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"http.port: port {settings.port} on {settings.host} is in use by another process;"
                " choose another, or 0 for a free one"
            ) from None
        raise ConfigError(
            f"http.host, http.port: cannot listen on {settings.host}:{settings.port}: {e.strerror}"
        ) from None
    return bound
