"""The addresses of a host, in turn."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.shared.clients.connection import addresses
from penstock.shared.clients.connection.addresses import Addresses, Found, canonical_names

HERE, NOBODY, BLACK_HOLE = ("127.0.0.1", 0), ("127.0.0.1", 1), ("192.0.2.1", 9092)


class Network:
    """Addresses under one name; those that do not answer are waited for until the attempt is given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, silent: set[object]) -> None:
        self.found: Found = []
        self.tried: list[object] = []
        self._silent = silent
        self._connect = asyncio.get_running_loop().sock_connect
        monkeypatch.setattr(addresses, "_resolve", self.resolve)
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", self.connect)

    async def resolve(self, host: str, port: int) -> Found:
        return self.found

    async def connect(self, connecting: socket.socket, address: tuple[str, int]) -> None:
        self.tried.append(address)
        if address in self._silent:
            await asyncio.Event().wait()
        await self._connect(connecting, address)


async def attempt(known: Addresses) -> tuple[str, int] | None:
    """Whom a connection was made to; None where the attempt took too long."""
    try:
        async with asyncio.timeout(0.02):
            with await known.connected_socket("kafka", 9092) as connected:
                peer: tuple[str, int] = connected.getpeername()
                return peer
    except TimeoutError:
        return None


async def test_each_address_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What refuses is passed over at once; what is silent costs its attempt, and the next one begins after it."""
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


async def test_where_all_refuse_the_last_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a name without any address is refused as well."""
    network = Network(monkeypatch, set())
    network.found = [(socket.AF_INET, NOBODY)]
    with pytest.raises(ConnectionRefusedError):
        await attempt(Addresses())
    network.found = []
    with pytest.raises(ConnectionRefusedError, match="kafka has no address"):
        await attempt(Addresses())


async def test_names_and_addresses() -> None:
    """A name is looked up, an address is itself, and the canonical names are those that the addresses have."""
    assert await addresses._resolve("127.0.0.1", 5) == [(socket.AF_INET, ("127.0.0.1", 5))]
    assert await addresses._resolve("::1", 5) == [(socket.AF_INET6, ("::1", 5))]
    assert (socket.AF_INET, ("127.0.0.1", 5)) in await addresses._resolve("localhost", 5)
    assert await canonical_names("127.0.0.1", 5) == [socket.getnameinfo(("127.0.0.1", 5), 0)[0]]
