"""Connection attempts over the addresses of a host."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.shared.clients.connection import addresses
from penstock.shared.clients.connection.addresses import Addresses, Found, canonical_names

HERE, NOBODY, BLACK_HOLE = ("127.0.0.1", 0), ("127.0.0.1", 1), ("192.0.2.1", 9092)


class Network:
    """A fake network with several addresses under one name. An address that does not respond consumes the attempt's
    time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent: set[object]) -> None:
        self.found: Found = []
        self.tried: list[object] = []
        self._silent = silent
        self._connect = asyncio.get_running_loop().sock_connect
        monkeypatch.setattr(addresses, "_resolve_host", self.resolve)
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", self.connect)

    async def resolve(self, host: str, port: int) -> Found:
        return self.found

    async def connect(self, connecting: socket.socket, address: tuple[str, int]) -> None:
        self.tried.append(address)
        if address in self._silent:
            await asyncio.Event().wait()
        await self._connect(connecting, address)


async def attempt(known: Addresses) -> tuple[str, int] | None:
    """Returns the address that was connected to, or None if the attempt timed out."""
    try:
        async with asyncio.timeout(0.02):
            with await known.connected_socket("kafka", 9092) as connected:
                peer: tuple[str, int] = connected.getpeername()
                return peer
    except TimeoutError:
        return None


async def test_each_address_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refused connection the next address is tried at once. An unresponsive address uses up its attempt, and
    the next attempt starts after it."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    here = server.sockets[0].getsockname()
    network = Network(monkeypatch, {BLACK_HOLE})
    network.found = [(socket.AF_INET, address) for address in (NOBODY, BLACK_HOLE, here)]
    known = Addresses()
    assert [await attempt(known) for _ in range(3)] == [None, here, here]
    assert network.tried == [NOBODY, BLACK_HOLE, here, here]
    assert "192.0.2.1" in repr(known)
    network.found = [(socket.AF_INET, here)]  # the name has moved
    assert await attempt(known) == here
    server.close()


async def test_if_all_addresses_refuse_the_last_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all addresses refuse the connection, the last error is raised. A name without addresses is an error too."""
    network = Network(monkeypatch, set())
    network.found = [(socket.AF_INET, NOBODY)]
    with pytest.raises(ConnectionRefusedError):
        await attempt(Addresses())
    network.found = []
    with pytest.raises(ConnectionRefusedError, match="kafka has no address"):
        await attempt(Addresses())


async def test_names_and_addresses() -> None:
    """A name is resolved, an address is used unchanged, and canonical names come from the reverse lookup of the
    addresses."""
    assert await addresses._resolve_host("127.0.0.1", 5) == [(socket.AF_INET, ("127.0.0.1", 5))]
    assert await addresses._resolve_host("::1", 5) == [(socket.AF_INET6, ("::1", 5))]
    assert (socket.AF_INET, ("127.0.0.1", 5)) in await addresses._resolve_host("localhost", 5)
    assert await canonical_names("127.0.0.1", 5) == [socket.getnameinfo(("127.0.0.1", 5), 0)[0]]
