"""The topology for any topic of JSON events."""

from __future__ import annotations

import pytest

from penstock.services.local.topologies import sessions
from penstock.shared.common.errors import ConfigError
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


def test_it_counts_the_events_of_a_session() -> None:
    """Gap and grace are given as text; the result goes to the topic named."""
    driver = TopologyTestDriver(sessions("clicks", "visits", gap="10ms", grace="0ms"))
    for at in (0, 8, 25):
        driver.pipe("clicks", key=b"ann", value=b'{"n":1}', timestamp=at)
    assert [r.value for r in driver.read("visits")] == [b'{"key":"ann","start":0,"end":8,"events":2}']


def test_a_wrong_duration_is_named() -> None:
    """The text that could not be read stands in the error."""
    with pytest.raises(ConfigError, match="'soon' is no duration"):
        sessions(gap="soon")
