"""Choosing ports, with real sockets."""

from __future__ import annotations

import socket

import pytest

from penstock.services.local.ports import FIRST, LAST, PortTaken, is_free, pick, require_free
from penstock.shared.common.errors import ConfigError


def test_picked_ports_are_different_and_in_range() -> None:
    """Below the systems' range for outgoing connections, and never one twice."""
    picked = pick("127.0.0.1", 20)
    assert len(set(picked)) == 20
    assert all(FIRST <= port < LAST for port in picked)


def test_port_that_is_listened_on_is_taken() -> None:
    """A listener makes a port taken, and its end makes it free at once."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(PortTaken, match=f"^http.port: port {port} on 127.0.0.1 is in use"):
            require_free("127.0.0.1", port, "http.port")
    require_free("127.0.0.1", port)


def test_address_of_another_machine_is_refused() -> None:
    """An address that this machine does not have is a wrong setting, not a taken port."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        pick("192.0.2.1", 1)
