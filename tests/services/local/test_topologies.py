"""The topology for any topic of JSON events counts each session's events."""

from __future__ import annotations

import pytest

from penstock.services.local.topologies import sessions
from penstock.shared.common.errors import ConfigError
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


def test_sessions_count_their_events() -> None:
    """Gap and grace are given as text, and the result has the number of a session's events."""
    driver = TopologyTestDriver(sessions("clicks", "visits", gap="10ms", grace="0ms"))
    for at in (0, 8, 25):
        driver.pipe("clicks", key=b"ann", value=b'{"n":1}', timestamp=at)
    assert [r.value for r in driver.read("visits")] == [b'{"key":"ann","start":0,"end":8,"events":2}']


def test_an_invalid_duration_is_an_error() -> None:
    """An invalid duration is a ConfigError with its text."""
    with pytest.raises(ConfigError, match="'soon'"):
        sessions(gap="soon")
