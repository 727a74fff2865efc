"""An app on a server in the running event loop, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, Request

from penstock.api.http.app import create_app
from penstock.api.http.server import HttpServer
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import HttpSettings
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


async def test_an_unknown_host_is_named() -> None:
    """A host name that does not resolve is a ConfigError that names the setting."""
    with pytest.raises(ConfigError, match=r"http\.host: no\.such\.invalid"):
        await HttpServer(create_app(), HttpSettings(host="no.such.invalid")).start()


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
