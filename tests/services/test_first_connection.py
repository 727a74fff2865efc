"""The first connection to Kafka is retried, and each reason is logged once."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.services.first_connection import first_connection
from penstock.shared.common.errors import AuthenticationFailed, BrokerNotAvailable, PenstockError


async def test_the_first_connection_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retriable errors are retried. A reason is logged again only after another one."""
    monkeypatch.setattr("penstock.services.first_connection.RETRY_MS", 0)
    failures = [BrokerNotAvailable(reason) for reason in ("a", "a", "b", "b", "a")]

    async def connect() -> str:
        if failures:
            raise failures.pop(0)
        return "connected"

    with capture_logs() as logged:
        assert await first_connection(connect) == "connected"
    assert [line["reason"] for line in logged] == ["a", "b", "a"]


async def test_a_rejected_login_is_not_retried() -> None:
    """An error that a retry cannot fix is raised after the first attempt, and not logged."""
    failures: list[PenstockError] = [AuthenticationFailed("wrong password")]

    async def connect() -> None:
        raise failures.pop()

    with capture_logs() as logged, pytest.raises(AuthenticationFailed):
        await first_connection(connect)
    assert logged == []
