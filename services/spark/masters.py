"""Whether a standalone master is there, before a JVM is started that would try for a minute."""

from __future__ import annotations

import socket

STANDALONE = "spark://"
CONNECT_TIMEOUT_S = 5.0  # of each address; masters that stand in for each other are several


def addresses(master: str) -> list[tuple[str, int]]:
    """The hosts and ports of a standalone master and of those that stand in for it; none of any other kind of master.

    >>> addresses("spark://one:7077,[::1]:7078")
    [('one', 7077), ('::1', 7078)]
    >>> addresses("local[2]")
    []
    """
    if not master.startswith(STANDALONE):
        return []
    pairs = [text.rpartition(":") for text in master.removeprefix(STANDALONE).split(",")]
    return [(host.strip("[]"), int(port)) for host, _, port in pairs]


def silence(master: str, timeout_s: float = CONNECT_TIMEOUT_S) -> str | None:
    """Why no connection can be made to any address of a standalone master; None where one can, or for another kind."""
    said = []
    for host, port in addresses(master):
        try:
            with socket.create_connection((host, port), timeout_s):
                return None
        except (OSError, OverflowError, UnicodeError) as e:  # the latter two: a port or a name that there cannot be
            said.append(f"{host}:{port}: {getattr(e, 'strerror', None) or e}")
    return "; ".join(said) or None
