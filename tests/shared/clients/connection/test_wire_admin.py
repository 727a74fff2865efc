"""The request for sizes on disk, on the wire."""

from __future__ import annotations

from io import BytesIO

from penstock.shared.clients.connection.wire_admin import DESCRIBE_LOG_DIRS


def test_round_trip() -> None:
    """An encoded message decodes to the same value and is consumed to the last byte."""
    struct = DESCRIBE_LOG_DIRS([("t", [0, 1])]).prepare({35: (0, 4)})
    data = BytesIO(struct.encode())
    assert type(struct).decode(data) == struct
    assert data.read() == b""
