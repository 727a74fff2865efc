"""Connections to the server over real sockets: its address, its stop, limits of request heads, and pipelining."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import re
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Request, Response
from pydantic import SecretStr

from penstock.api.http import connection_guard
from penstock.api.http.app import create_app
from penstock.api.http.connection_guard import HEADERS_MAX, WRITE_TIMEOUT_MS, GuardedHttp
from penstock.api.http.server import BACKLOG, HttpServer, ListeningSocket
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import HEAD_BYTES_MIN, HttpSettings
from tests.integration.certificates import Authority


class Gate:
    """A route that answers once the gate is open."""

    def __init__(self) -> None:
        self.entered, self.open = asyncio.Event(), asyncio.Event()
        self.router = APIRouter()
        self.router.add_api_route("/gate", self.gate)
        self.server = HttpServer(create_app(admin=self.router), HttpSettings())

    async def gate(self) -> str:
        self.entered.set()
        await self.open.wait()
        return "through"


async def knock_until_closed(url: str) -> None:
    """Request a URL until the connection is refused; connections that the kernel had accepted are reset."""
    async with asyncio.timeout(5):
        while True:
            async with httpx.AsyncClient(trust_env=False) as client:
                with contextlib.suppress(httpx.ReadError, httpx.RemoteProtocolError):
                    await client.get(url)


async def test_the_real_port_is_known_after_start() -> None:
    """With port 0 the chosen port is known after the start, and the server answers; signal handlers are unchanged."""
    gate = Gate()
    gate.open.set()
    handler = signal.getsignal(signal.SIGTERM)
    await gate.server.start()
    try:
        assert gate.server.port > 0
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{gate.server.url}/gate")).json() == "through"
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        await gate.server.stop(1_000)


async def test_a_port_in_use_is_named() -> None:
    """A port in use is a ConfigError that names the setting."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"http\.port.*{port}"):
            await HttpServer(create_app(), HttpSettings(port=port)).start()


async def test_of_two_servers_that_start_together_one_has_the_port() -> None:
    """The other one's error is a ConfigError that names the setting."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = [HttpServer(create_app(), HttpSettings(port=port)) for _ in range(2)]
    started = await asyncio.gather(*(server.start() for server in servers), return_exceptions=True)
    await asyncio.gather(*(server.stop(0) for server in servers))
    assert started[0] is None
    assert isinstance(started[1], ConfigError)
    assert "http.port" in str(started[1])


@pytest.mark.parametrize("host", ["no.such.invalid", "a..b"])
async def test_an_unknown_host_is_named(host: str) -> None:
    """A host name that does not resolve, or is none, is a ConfigError that names the setting."""
    with pytest.raises(ConfigError, match=re.escape(f"http.host: {host}")):
        await HttpServer(create_app(), HttpSettings(host=host)).start()


async def test_stop_lets_requests_in_flight_finish() -> None:
    """A stop waits for requests in flight and accepts no new connection."""
    gate = Gate()
    await gate.server.start()
    async with httpx.AsyncClient(trust_env=False) as client:
        request = asyncio.ensure_future(client.get(f"{gate.server.url}/gate"))
        await gate.entered.wait()
        stopping = asyncio.ensure_future(gate.server.stop(10_000))
        with pytest.raises(httpx.ConnectError):
            await knock_until_closed(f"{gate.server.url}/nowhere")
        assert not request.done()
        gate.open.set()
        assert (await request).json() == "through"
        await stopping


async def test_stop_ends_requests_after_its_timeout() -> None:
    """A stop ends requests that exceed its timeout."""
    gate = Gate()
    await gate.server.start()
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        request = asyncio.ensure_future(client.get(f"{gate.server.url}/gate"))
        await gate.entered.wait()
        async with asyncio.timeout(5):
            await gate.server.stop(1)
        outcome = (await asyncio.gather(request, return_exceptions=True))[0]
        assert isinstance(outcome, httpx.HTTPError) or outcome.status_code >= 500


async def test_stop_before_start_does_nothing() -> None:
    """A stop before the start does nothing."""
    await HttpServer(create_app(), HttpSettings()).stop()


async def test_with_a_certificate_the_address_is_https(tmp_path: Path) -> None:
    """With a certificate the server uses TLS; an unreadable certificate is a ConfigError with the setting."""
    authority = Authority(tmp_path, "authority")
    gate = Gate()
    gate.open.set()
    server = HttpServer(create_app(admin=gate.router), HttpSettings(ssl_certfile=authority.issue("server")))
    await server.start()
    try:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=authority.cafile)
        async with httpx.AsyncClient(trust_env=False, verify=context) as client:
            assert (await client.get(f"{server.url}/gate")).json() == "through"
    finally:
        await server.stop(1_000)
    (tmp_path / "broken.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"http\.ssl_certfile"):
        await HttpServer(create_app(), HttpSettings(ssl_certfile=tmp_path / "broken.pem")).start()
    with pytest.raises(ConfigError, match="ssl_certfile"):
        HttpSettings(ssl_keyfile=tmp_path / "server.pem")


async def test_missing_file_descriptors_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """While no file descriptor is free, asyncio tries once and then waits. The first failure and the end are logged."""
    caplog.set_level(logging.INFO)
    errors = [OSError(errno.EMFILE, "Too many open files")] * 2
    reported: list[dict[str, object]] = []
    failed = asyncio.Event()

    class Full(ListeningSocket):
        def _accept(self) -> tuple[int, object]:
            if errors:
                failed.set()
                raise errors.pop()
            return super()._accept()  # type: ignore[misc,no-any-return]

    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    with Full() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.setblocking(False)
        server = await asyncio.start_server(lambda _, __: None, sock=listening, backlog=BACKLOG)
        _, writer = await asyncio.open_connection(*listening.getsockname())
        await failed.wait()
        # asyncio pauses the socket. The next attempts: one that fails, the one that would follow it, one that succeeds.
        with pytest.raises(OSError, match="Too many open files"):
            listening.accept()
        with pytest.raises(BlockingIOError):
            listening.accept()
        listening.accept()[0].close()
        writer.close()
        server.close()
    (context,) = reported
    asyncio.get_running_loop().default_exception_handler(context)
    lines = [record.getMessage().partition("=")[0] for record in caplog.records]
    assert lines == ["cannot accept connections error", "accepts connections again failures"]


async def test_a_server_at_a_unix_socket(tmp_path: Path) -> None:
    """A server on a Unix socket replaces a stale file and is accessible by this user only; an
    invalid path is a ConfigError.
    """
    gate, path = Gate(), tmp_path / "s.sock"
    gate.open.set()
    path.touch()
    server = HttpServer(create_app(admin=gate.router), HttpSettings(), unix_socket=path)
    await server.start()
    assert (server.url, path.stat().st_mode & 0o777) == (f"unix:{path}", 0o600)
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/gate")).json() == "through"
    await server.stop(0)
    with pytest.raises(ConfigError, match="cannot listen on"):
        await HttpServer(server._app, HttpSettings(), unix_socket=tmp_path / "no" / "s.sock").start()


@pytest.mark.parametrize(("trusted", "client"), [((), "127.0.0.1"), (("127.0.0.1",), "192.0.2.7")])
async def test_a_clients_address_is_its_own_unless_a_proxy_is_trusted(trusted: tuple[str, ...], client: str) -> None:
    """X-Forwarded-For sets the client's address only if the proxy is in `forwarded_allow_ips`."""
    router = APIRouter()

    async def client_host(request: Request) -> str:
        assert request.client is not None
        return request.client.host

    router.add_api_route("/client", client_host)
    server = HttpServer(create_app(admin=router), HttpSettings(forwarded_allow_ips=trusted))
    await server.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            response = await http.get(f"{server.url}/client", headers={"X-Forwarded-For": "192.0.2.7"})
        assert response.json() == client
    finally:
        await server.stop(1_000)


START = b"GET /ok HTTP/1.1\r\nHost: localhost\r\n"
OK = START + b"\r\n"
LARGE = OK.replace(b"/ok", b"/large", 1)
LARGE_BYTES = 20_000_000
"""The size of a response to LARGE. It is more than the buffers of the sockets and of the client hold."""


@dataclass
class Site:
    """An app that records the requests that reach it."""

    token: SecretStr | None = None
    tls: Authority | None = None
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    entered: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        router = APIRouter()
        router.add_api_route("/ok", self.ok, methods=["GET", "POST"])
        router.add_api_route("/gate", self.wait)
        router.add_api_route("/v3/clusters", self.ok)
        router.add_api_route("/large", self.large)
        certificate = None if self.tls is None else self.tls.issue("server")
        self.server = HttpServer(
            create_app(admin=router, auth_token=self.token),
            HttpSettings(max_head_bytes=HEAD_BYTES_MIN, ssl_certfile=certificate),
        )

    async def ok(self, request: Request) -> str:
        self.bodies.append(await request.body())
        self.headers.append(dict(request.headers))
        return "ok"

    async def wait(self) -> str:
        self.entered.set()
        await self.gate.wait()
        return "through"

    async def large(self) -> Response:
        return Response(b"a" * LARGE_BYTES)

    @property
    def connection(self) -> GuardedHttp:
        """The only connection."""
        assert self.server._server is not None
        (connection,) = self.server._server.server_state.connections
        assert isinstance(connection, GuardedHttp)
        return connection


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[Site]:
    await site.server.start()
    try:
        yield site
    finally:
        await site.server.stop(1_000)


class Client:
    """A raw connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def to(cls, site: Site) -> AsyncIterator[Client]:
        context = None if site.tls is None else ssl.create_default_context(cafile=site.tls.cafile)
        reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port, ssl=context)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def send(self, *parts: bytes) -> None:
        """Send each part separately: the server receives one before the next is sent."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            for _ in range(3):
                await asyncio.sleep(0)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """The next response's status, headers and body."""
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def ended(self) -> bytes:
        """The remaining data before the server closes."""
        async with asyncio.timeout(10):
            return await self.reader.read()


def head_of(size: int, start: bytes = START) -> bytes:
    """A head of `size` bytes."""
    return start + b"X-Long: " + b"a" * (size - len(start) - len(b"X-Long: \r\n\r\n")) + b"\r\n\r\n"


async def test_a_head_request_is_answered_like_get_without_the_body() -> None:
    """The response to HEAD has the status and the headers of GET, and no body. The connection stays usable."""
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(OK.replace(b"GET", b"HEAD", 1))
        async with asyncio.timeout(10):
            head = await client.reader.readuntil(b"\r\n\r\n")
        await client.send(OK)
        status, headers, body = await client.response()
        assert (status, body) == (200, b'"ok"')
        assert head.startswith(b"HTTP/1.1 200 ")
        assert f"content-length: {headers['content-length']}".encode() in head


async def test_an_incomplete_head_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete head, first or later, ends its connection after the timeout, and others are served meanwhile."""
    monkeypatch.setattr(connection_guard.GuardedHttp, "head_timeout_ms", 150)
    router = APIRouter()
    router.add_api_route("/ok", lambda: "ok")
    server = HttpServer(create_app(admin=router), HttpSettings())
    await server.start()
    try:
        first = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
        for _, writer in first:
            writer.write(b"GET /ok HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        reader, later = await asyncio.open_connection("127.0.0.1", server.port)
        later.write(b"GET /ok HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        later.write(b"GET /ok HT")
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{server.url}/ok")).status_code == 200
        async with asyncio.timeout(5):
            for held, _ in first:
                while await held.read(1_000):
                    pass
            while await reader.read(1_000):
                pass
        for _, writer in [*first, (reader, later)]:
            writer.close()
    finally:
        await server.stop(1_000)


def expire_write_timer(connection: GuardedHttp) -> None:
    """Let the client's time for reading pass."""
    timer = connection._write_timer
    assert timer is not None
    assert timer.when() - connection.loop.time() == pytest.approx(WRITE_TIMEOUT_MS / 1000, abs=10)
    timer._run()
    timer.cancel()


async def expire_until_lost(connection: GuardedHttp) -> None:
    """Let the time pass again and again: the client's buffers may not be full yet."""
    async with asyncio.timeout(10):
        while connection in connection.connections:
            if connection._write_timer is not None:
                expire_write_timer(connection)
            await asyncio.sleep(0)


@pytest.mark.parametrize("tls", [False, True], ids=["", "TLS"])
async def test_a_client_that_reads_nothing_is_disconnected(tls: bool, tmp_path: Path) -> None:
    """A connection is aborted if its client reads nothing of a response for a time, with and without TLS."""
    async with serving(Site(tls=Authority(tmp_path, "authority") if tls else None)) as site, Client.to(site) as client:
        await client.send(OK)
        await client.response()
        await client.send(LARGE * 2)
        await expire_until_lost(site.connection)


async def test_a_client_that_reads_slowly_gets_its_response() -> None:
    """A connection is not aborted if its client has read part of a response in the time."""
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(LARGE)
        await client.reader.readuntil(b"\r\n\r\n")
        for _ in range(2):
            await client.reader.readexactly(LARGE_BYTES // 4)
            expire_write_timer(site.connection)
        await client.reader.readexactly(LARGE_BYTES // 2)
        assert site.connection._write_timer is None


async def test_a_client_that_ends_tls_and_reads_nothing_is_disconnected(tmp_path: Path) -> None:
    """After the client's close_notify, asyncio does not report what is buffered below TLS, and waits for the client."""
    async with serving(Site(tls=Authority(tmp_path, "authority"))) as site, Client.to(site) as client:
        await client.send(OK)
        await client.response()
        connection = site.connection
        connection.transport.write(b"a" * LARGE_BYTES)
        assert connection._write_timer is None
        connection.eof_received()
        await expire_until_lost(connection)


EARLY = b"POST /ok HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"
"""A head that is answered without its body if the app requires a token."""


@pytest.mark.parametrize("part", [b"ab", b"abcd"], ids=["stalls", "ends"])
async def test_a_connection_whose_body_follows_its_response_is_closed(part: bytes) -> None:
    """A response that precedes the body starts the keep-alive timeout, and bytes of the body do not stop it."""
    async with serving(Site(SecretStr("at least sixteen characters"))) as site, Client.to(site) as client:
        await client.send(EARLY)
        assert (await client.response())[0] == 401
        timer = site.connection.timeout_keep_alive_task
        assert timer is not None
        await client.send(part)
        assert site.connection.timeout_keep_alive_task is timer
        assert not timer.cancelled()
        site.connection.timeout_keep_alive_handler()
        assert await client.ended() == b""


async def test_a_request_after_a_body_that_follows_its_response_is_served() -> None:
    """A body that arrives after its response is discarded, and the next request stops the keep-alive timeout."""
    async with serving(Site(SecretStr("at least sixteen characters"))) as site, Client.to(site) as client:
        await client.send(EARLY)
        assert (await client.response())[0] == 401
        timer = site.connection.timeout_keep_alive_task
        assert timer is not None
        await client.send(b"ab", b"cd" + OK)
        assert (await client.response())[0] == 401
        assert timer.cancelled()


@pytest.mark.parametrize("later", [False, True], ids=["first request", "later request"])
@pytest.mark.parametrize("cut", [1, 7, 4_000, 100_000])
async def test_the_limit_on_a_head_is_exact_however_it_is_cut(cut: int, later: bool) -> None:
    """A head of max_head_bytes is served.

    One byte more is a 431 with the limit's name, and the connection is closed.
    """
    async with serving(Site()) as site, Client.to(site) as client:
        if later:
            await client.send(OK)
            assert (await client.response())[0] == 200
        whole = head_of(HEAD_BYTES_MIN)
        await client.send(*(whole[i : i + cut] for i in range(0, len(whole), cut)))
        assert (await client.response())[0] == 200
        longer = head_of(HEAD_BYTES_MIN + 1)
        await client.send(*(longer[i : i + cut] for i in range(0, len(longer), cut)))
        status, headers, body = await client.response()
        assert await client.ended() == b""
    assert (status, headers["content-type"], headers["connection"]) == (431, "application/problem+json", "close")
    problem = json.loads(body)
    assert (problem["status"], problem["error_code"]) == (431, "HEAD_TOO_LARGE")
    assert f"{HEAD_BYTES_MIN} bytes (http.max_head_bytes" in problem["detail"]
    assert headers["x-content-type-options"] == "nosniff"


async def test_the_limit_on_a_head_precedes_authentication() -> None:
    """A head over the limit is a 431 without a token, and a shorter one a 401."""
    async with serving(Site(SecretStr("at least sixteen characters"))) as site, Client.to(site) as client:
        await client.send(OK)
        assert (await client.response())[0] == 401
        await client.send(START + b"X: " + b"a" * 100_000)
        assert (await client.response())[0] == 431
    assert not site.headers


@pytest.mark.parametrize("cut", [500, 100_000])
async def test_a_request_line_over_the_limit_is_a_414(cut: int) -> None:
    """A request line over the limit is a 414; paths of REST Proxy have its error format."""
    async with serving(Site()) as site:
        line = b"GET /ok?" + b"q" * HEAD_BYTES_MIN
        async with Client.to(site) as client:
            await client.send(*(line[i : i + cut] for i in range(0, len(line), cut)))
            status, _, body = await client.response()
            assert (status, json.loads(body)["error_code"]) == (414, "URI_TOO_LONG")
        async with Client.to(site) as client:
            await client.send(b"a" * HEAD_BYTES_MIN * 2)
            assert (await client.response())[0] == 414
        for path in (b"/v3/clusters", b"/topics?a=b", b"/topics"):
            async with Client.to(site) as client:
                whole = head_of(HEAD_BYTES_MIN + 1, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n")
                await client.send(*(whole[i : i + cut] for i in range(0, len(whole), cut)))
                status, _, body = await client.response()
                assert (status, json.loads(body)["error_code"]) == (431, 431)


async def test_empty_lines_before_a_request_are_not_its_request_line() -> None:
    """A request line over the limit is a 414 also after empty lines, and header fields over the limit are a 431."""
    async with serving(Site()) as site:
        for request, expected in ((b"GET /ok?" + b"q" * HEAD_BYTES_MIN, 414), (head_of(HEAD_BYTES_MIN + 1), 431)):
            async with Client.to(site) as client:
                await client.send(b"\r\n" + request)
                assert (await client.response())[0] == expected


async def test_header_fields_are_counted() -> None:
    """More header fields than the limit are a 431."""
    async with serving(Site()) as site, Client.to(site) as client:
        fields = b"".join(b"a:%d\r\n" % i for i in range(HEADERS_MAX - 1))
        await client.send(START + fields + b"\r\n")
        assert (await client.response())[0] == 200
        await client.send(START + fields + b"a:b\r\n\r\n")
        status, _, body = await client.response()
    assert (status, f"more than {HEADERS_MAX} header fields" in json.loads(body)["detail"]) == (431, True)
    assert len(site.headers) == 1


@pytest.mark.parametrize(("path", "error_code"), [(b"/ok", "TOO_MANY_CONNECTIONS"), (b"/v3/clusters", 50003)])
async def test_a_request_on_a_connection_too_many_is_a_503(
    path: bytes, error_code: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response has the error format of its path and `Retry-After`. As many connections as allowed are served."""
    monkeypatch.setattr(GuardedHttp, "concurrent_max", 2)
    async with serving(Site()) as site, Client.to(site), Client.to(site) as second:
        await second.send(OK)
        assert (await second.response())[0] == 200
        async with Client.to(site) as third:
            await third.send(OK.replace(b"/ok", path, 1))
            status, headers, body = await third.response()
            assert (status, json.loads(body)["error_code"]) == (503, error_code)
            assert headers["retry-after"] == "1"
            # The third connection is still open at its side.
            await second.send(OK)
            assert (await second.response())[0] == 200
            assert await third.ended() == b""


@pytest.mark.parametrize("trailers", [b"X: " + b"a" * 300_000, b"x:y\r\n" * 2 * HEADERS_MAX], ids=["long", "many"])
async def test_trailers_have_the_limits_of_a_head(trailers: bytes) -> None:
    """Trailers over the limits of a head are a 431, and the app sees a disconnect."""
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(b"POST /ok HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        await client.send(trailers, b"b" * 1_000)
        status, _, body = await client.response()
    assert (status, json.loads(body)["error_code"]) == (431, "HEAD_TOO_LARGE")
    assert site.bodies == []


async def test_trailers_are_no_headers() -> None:
    """Trailers are not added to the headers."""
    async with serving(Site()) as site, Client.to(site) as client:
        head = b"POST /ok HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nTrailer: X-Late\r\n\r\n"
        await client.send(head + b"3\r\nabc\r\n0\r\nX-Late: 1\r\n\r\n" + OK)
        assert [(await client.response())[0] for _ in range(2)] == [200, 200]
    assert site.bodies == [b"abc", b""]
    assert "x-late" not in site.headers[0]


async def test_a_chunked_body_of_many_chunks_has_no_limit() -> None:
    """The lines of chunks do not count as a head, even if a chunk contains empty lines."""
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(b"POST /ok HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        await client.send(*[b"4\r\n\r\n\r\n\r\n" * 500] * 10, b"0\r\n\r\n")
        assert (await client.response())[0] == 200
    assert site.bodies == [b"\r\n" * 2 * 5_000]


async def test_pipelined_requests_wait_unparsed() -> None:
    """Pipelined requests wait unparsed while one is answered, the connection stops reading, and all are answered."""
    async with serving(Site()) as site, Client.to(site) as client:
        gate = b"GET /gate HTTP/1.1\r\nHost: localhost\r\n\r\n"
        ahead = 50_000
        client.writer.write(gate + OK * ahead)
        async with asyncio.timeout(10):
            await site.entered.wait()
        connection = site.connection
        for _ in range(100):
            await asyncio.sleep(0)
        assert (len(connection.pipeline), len(connection.tasks)) == (0, 1)
        assert 0 < len(connection._unread) <= 262_144
        assert not connection.transport.is_reading()
        site.gate.set()
        assert (await client.response())[2] == b'"through"'
        for _ in range(1_000):
            assert (await client.response())[0] == 200
            assert len(connection.pipeline) == 0
            assert len(connection._unread) <= 2 * 262_144
        client.writer.transport.abort()


@pytest.mark.parametrize("cut", [1, 30, 10_000])
async def test_pipelined_requests_are_served_in_order(cut: int) -> None:
    """Pipelined requests with and without bodies are served in order, however the bytes are split."""
    posted = b"POST /ok HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\n\r\n\r\nab"
    chunked = b"POST /ok HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    sent = (posted + OK + chunked + b"\r\n" + OK) * 3
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(*(sent[i : i + cut] for i in range(0, len(sent), cut)))
        assert [(await client.response())[0] for _ in range(12)] == [200] * 12
    assert site.bodies == [b"\r\n\r\nab", b"", b"abc", b""] * 3


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"Content-Length: 5", b"a\r\nbc"),
        (b"Content-Length: 5 \t", b"a\r\nbc"),
        (b"Transfer-Encoding: chunked", b"2\r\na\r\r\n3\r\n\nbc\r\n0\r\n\r\n"),
        (b"Transfer-Encoding: chunked \t", b"2\r\na\r\r\n3\r\n\nbc\r\n0\r\n\r\n"),
    ],
    ids=["length", "length and whitespace", "chunked", "chunked and whitespace"],
)
@pytest.mark.parametrize("cut", [1, 10_000])
async def test_the_body_of_a_request_with_an_upgrade_is_read(framing: bytes, body: bytes, cut: int) -> None:
    """An Upgrade to h2c, which Java's HttpClient requests, is ignored, and the body is read."""
    head = b"POST /ok HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + framing
    sent = head + b"\r\n\r\n" + body + OK
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(*(sent[i : i + cut] for i in range(0, len(sent), cut)))
        assert [(await client.response())[0] for _ in range(2)] == [200, 200]
    assert site.bodies == [b"a\r\nbc", b""]


@pytest.mark.parametrize(
    ("request_head", "expected"),
    [
        (b"GET / SPDY", (400, "MALFORMED_REQUEST")),
        (b"GET /ok HTTP/1.1\r\nHost: localhost\r\nHost: localhost", (400, "MALFORMED_REQUEST")),
        (b"GET /ok HTTP/1.1\r\nHost: 127.0.0.1:80@evil", (400, "MALFORMED_REQUEST")),
        (
            b"POST /ok HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked",
            (501, "UNSUPPORTED_TRANSFER_ENCODING"),
        ),
        (
            b"POST /ok HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
            (501, "UNSUPPORTED_TRANSFER_ENCODING"),
        ),
    ],
)
async def test_a_request_that_is_not_understood_is_rejected(request_head: bytes, expected: tuple[int, str]) -> None:
    """A malformed request is a 400 problem, one in an unknown coding a 501, and the connection is closed."""
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(request_head + b"\r\n\r\n")
        status, _, body = await client.response()
        assert await client.ended() == b""
    assert (status, json.loads(body)["error_code"]) == expected
    assert site.headers == []


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"HEAD / SPDY\r\n", 400),
        (b"HEAD / HTTP/1.1\r\nHost: a\r\nHost: b\r\n", 400),
        (head_of(HEAD_BYTES_MIN + 1, b"\r\nHEAD / HTTP/1.1\r\n"), 431),
    ],
)
@pytest.mark.parametrize("cut", [7, 100_000])
async def test_a_rejected_head_request_gets_no_body(start: bytes, status: int, cut: int) -> None:
    """A request that is not understood gets one, also after a HEAD."""
    sent = start + b"\r\n"
    async with serving(Site()) as site:
        async with Client.to(site) as client:
            await client.send(*(sent[i : i + cut] for i in range(0, len(sent), cut)))
            head, _, body = (await client.ended()).partition(b"\r\n\r\n")
            assert (head.startswith(b"HTTP/1.1 %d " % status), body) == (True, b"")
        async with Client.to(site) as client:
            await client.send(OK.replace(b"GET", b"HEAD", 1))
            await client.reader.readuntil(b"\r\n\r\n")
            await client.send(b"X / HTTP/1.1\r\n\r\n")
            assert json.loads((await client.response())[2])["status"] == 400


@pytest.mark.parametrize("host", [b"", b"localhost:", b"[::1]:8080", b"my_host.example \t"])
async def test_a_host_may_have_a_port(host: bytes) -> None:
    """A Host field may be empty, a name or an address. A port and whitespace may follow. Pipelined requests have one
    each.
    """
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(b"GET /v3/clusters HTTP/1.1\r\nHost: %s\r\n\r\n" % host * 2)
        assert [(await client.response())[0] for _ in range(2)] == [200, 200]


async def test_a_rejected_client_that_keeps_sending_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a 431 further data is discarded up to a limit, and then the connection is closed."""
    monkeypatch.setattr(connection_guard, "DISCARDED_BYTES_MAX", 300_000)
    async with serving(Site()) as site, Client.to(site) as client:
        await client.send(OK)
        assert (await client.response())[0] == 200
        connection = site.connection
        await client.send(START + b"X: " + b"a" * HEAD_BYTES_MIN)
        assert (await client.response())[0] == 431
        with pytest.raises(ConnectionError):
            await client.send(*[b"a" * 10_000] * 10_000)
        assert connection.transport.is_closing()
        assert connection._unread == b""
