"""Ports for the embedded broker and the services, and the text of an address.

The ports are below the ephemeral ports, from which systems take the ports of outgoing connections (from 32768 on Linux,
from 49152 on macOS). While a broker restarts, a client's connection attempt could take an ephemeral port as its own. On
the loopback the attempt could even connect to itself.
"""

from __future__ import annotations

import errno
import random
import socket

from penstock.shared.common.errors import ConfigError

FIRST = 20_000
LAST = 32_000
# One call of `pick` tries at most this many ports in all. If these do not suffice, something else is wrong.
ATTEMPTS = 200


class PortTaken(ConfigError):
    """Another process listens on the port."""


def address_text(host: str, port: int) -> str:
    """Return `host:port`, with an IPv6 address in brackets.

    >>> address_text("127.0.0.1", 80), address_text("::1", 80)
    ('127.0.0.1:80', '[::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_free(host: str, port: int) -> bool:
    """Return whether the port is free now. Raises ConfigError if listening fails for another reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        # As in Java's server sockets, a port with old connections in TIME_WAIT counts as free.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
            s.listen(1)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return False
            raise ConfigError(f"cannot listen on {address_text(host, port)}: {e.strerror or e}") from None
    return True


def pick(host: str, count: int) -> list[int]:
    """Return `count` different ports that are free now. Another process can still take one before it is used."""
    picked: list[int] = []
    for _ in range(ATTEMPTS):
        if len(picked) == count:
            return picked
        port = random.randrange(FIRST, LAST)  # noqa: S311 - nothing secret
        if port not in picked and is_free(host, port):
            picked.append(port)
    raise ConfigError(f"no {count} free ports on {host} between {FIRST} and {LAST}")


def require_free(host: str, port: int, setting: str = "port") -> None:
    """Raise PortTaken, which names the setting, if a process listens on the port."""
    if not is_free(host, port):
        raise PortTaken(
            f"{setting}: port {port} on {host} is in use by another process; choose another, or 0 for a free one"
        )
