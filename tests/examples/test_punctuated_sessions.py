"""`examples/punctuated_sessions.py`, also after a restart."""

from __future__ import annotations

from examples import punctuated_sessions as example
from penstock.testing import TopologyTestDriver


def test_held_records_survive_a_restart() -> None:
    """Records that were held before a crash are forwarded at the next multiple of ten minutes, once and in order."""
    driver = TopologyTestDriver(example.topology())
    found = []
    for minute, key in ((11, b"bob"), (14, None), (12, b"ann"), (19, b"bob"), (20, b"ann"), (25, b"ann")):
        driver.pipe("clicks", key=key, value=b'{"page":%d}' % minute, timestamp=minute * example.MINUTE)
        found.append([(r.key, r.value, (r.timestamp or 0) // example.MINUTE) for r in driver.read("held")])
        driver.crash()
        driver.restore()
    first, *held = found
    assert first == [(b"bob", b'{"page":11}', 11)]
    assert held == [
        [],
        [],
        [],
        [
            (None, b'{"page":14}', 14),
            (b"ann", b'{"page":12}', 12),
            (b"bob", b'{"page":19}', 19),
            (b"ann", b'{"page":20}', 20),
        ],
        [],
    ]
