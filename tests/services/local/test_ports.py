"""Choosing ports, with real sockets."""

from __future__ import annotations

import socket

import pytest

from penstock.services.local.ports import FIRST, LAST, PortTaken, is_free, pick, require_free
from penstock.shared.common.errors import ConfigError


def test_picked_ports_are_different_and_in_range() -> None:
    """Picked ports are different and below the range for outgoing connections."""
    picked = pick("127.0.0.1", 20)
    assert len(set(picked)) == 20
    assert all(FIRST <= port < LAST for port in picked)


def test_a_port_with_a_listener_is_in_use() -> None:
    """A port is in use while a listener exists, and free immediately afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)
        with pytest.raises(PortTaken, match=f"^http.port.*{port}"):
            require_free("127.0.0.1", port, "http.port")
    require_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error() -> None:
    """An address that this machine does not have is an invalid setting, not a port in use."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        pick("192.0.2.1", 1)
