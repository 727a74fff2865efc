"""Restarts of a child process."""

from __future__ import annotations

import pytest

from penstock.services.supervision import keep_running
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import ConfigError


async def test_a_child_is_restarted_until_its_settings_are_invalid() -> None:
    """Any end but that of an invalid setting restarts the child, after a pause that doubles."""
    statuses = iter([0, 1, -9, 2])
    ends = list[tuple[int, int]]()
    starts = 0

    async def wait() -> int:
        return next(statuses)

    async def restart() -> None:
        nonlocal starts
        starts += 1

    with pytest.raises(ConfigError, match=r"the child .*: its topology"):
        await keep_running(
            "the child",
            wait,
            restart,
            on_end=lambda status, pause_ms: ends.append((status, pause_ms)),
            reason=lambda: "its topology is unknown",
            backoff=ExponentialBackoff(1, 60_000),
        )
    assert (ends, starts) == ([(0, 1), (1, 2), (-9, 4)], 3)
