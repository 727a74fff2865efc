"""The addresses of a host name, tried in turn as Java's `client.dns.lookup=use_all_dns_ips` does (KIP-302).

If an address refuses the connection, the next one is tried at once. An address that does not respond uses up the whole
attempt. The next attempt begins with the address after it, so that every address is tried.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

Found = list[tuple[int, Any]]
"""Address families and socket addresses."""


class Addresses:
    """One client's memory of addresses that did not respond, by host and port."""

    def __init__(self, send_buffer_bytes: int = -1, receive_buffer_bytes: int = -1) -> None:
        """The buffer sizes, in bytes, are those of the sockets; -1 for the system's default."""
        sizes = {socket.SO_SNDBUF: send_buffer_bytes, socket.SO_RCVBUF: receive_buffer_bytes}
        self._buffers = {option: size for option, size in sizes.items() if size >= 0}
        self._silent: dict[tuple[str, int], Any] = {}

    def __repr__(self) -> str:
        return f"Addresses(silent {self._silent})"

    async def connected_socket(self, host: str, port: int) -> socket.socket:
        """Return a socket connected to one of the host's addresses.

        Raises the OSError of the last address if all refuse the connection.
        """
        error: OSError = ConnectionRefusedError(f"{host} has no address")
        for family, address in self._rotate_addresses((host, port), await _resolve_host(host, port)):
            connecting = socket.socket(family, socket.SOCK_STREAM)
            connecting.setblocking(False)
            try:
                # Before connecting: TCP negotiates its window from the buffer sizes.
                for option, size in self._buffers.items():
                    connecting.setsockopt(socket.SOL_SOCKET, option, size)
                await asyncio.get_running_loop().sock_connect(connecting, address)
            # 1. The address refuses the connection: try the next one.
            except OSError as e:
                connecting.close()
                error = e
            # 2. The caller's time limit has passed: the next attempt begins after this address.
            except BaseException:
                connecting.close()
                self._silent[host, port] = address
                raise
            else:
                return connecting
        raise error

    def _rotate_addresses(self, broker: tuple[str, int], found: Found) -> Found:
        """Return the addresses, beginning after the one that did not respond."""
        addresses = [address for _, address in found]
        if (silent := self._silent.get(broker)) not in addresses:
            return found
        first = addresses.index(silent) + 1
        return found[first:] + found[:first]


async def canonical_names(host: str, port: int) -> list[str]:
    """Return the name of each of a host's addresses, or the address itself if it has no name.

    Raises OSError if the host is unknown.
    """
    names = []
    for _, address in await _resolve_host(host, port):
        name, _ = await asyncio.get_running_loop().getnameinfo(address)
        names.append(name)
    return list(dict.fromkeys(names))


async def _resolve_host(host: str, port: int) -> Found:
    # An address needs no resolver, which may be slow or absent.
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    return [(family, (host, port))]
