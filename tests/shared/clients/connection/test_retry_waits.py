"""How long calls wait before they are made again."""

from __future__ import annotations

import pytest

from penstock.shared.clients.connection.client import retry_waits
from penstock.shared.common.errors import BrokerNotAvailable, ConcurrentTransactions

BUSY, DOWN = ConcurrentTransactions("x"), BrokerNotAvailable("x")


def test_waits_grow() -> None:
    """Each wait is twice the one before it, up to a second."""
    wait_after = retry_waits(100)
    assert [wait_after(DOWN) for _ in range(6)] == pytest.approx([100, 200, 400, 800, 1_000, 1_000])


def test_the_completion_of_a_transaction_has_short_waits_of_its_own() -> None:
    """They are at most 20 ms; another error has its own course."""
    wait_after = retry_waits(100, soon=True)
    waits = [wait_after(error) for error in (BUSY, BUSY, DOWN, BUSY, BUSY, DOWN)]
    assert waits == pytest.approx([5, 10, 100, 20, 20, 200])


def test_a_call_that_opens_no_transaction_has_one_course() -> None:
    """A coordinator that is busy counts as any other error."""
    wait_after = retry_waits(100)
    assert [wait_after(BUSY), wait_after(DOWN)] == pytest.approx([100, 200])


@pytest.mark.parametrize("retry_backoff_ms", [1, 7])
def test_no_wait_is_longer_than_the_setting_allows(retry_backoff_ms: int) -> None:
    """A retry_backoff_ms below the short waits bounds them as well."""
    wait_after = retry_waits(retry_backoff_ms, soon=True)
    assert max(wait_after(BUSY) for _ in range(5)) == retry_backoff_ms
