"""The waits between the retries of a call."""

from __future__ import annotations

import pytest

from penstock.shared.clients.connection.connection import retry_waits
from penstock.shared.common.errors import BrokerNotAvailable, ConcurrentTransactions

BUSY, DOWN = ConcurrentTransactions("x"), BrokerNotAvailable("x")


def test_waits_grow() -> None:
    """Each wait is twice the previous one, up to one second."""
    wait_after = retry_waits(100)
    assert [wait_after(DOWN) for _ in range(6)] == pytest.approx([100, 200, 400, 800, 1_000, 1_000])


def test_concurrent_transactions_have_short_waits() -> None:
    """Waits for the completion of the previous transaction are at most 20 ms. Other errors use the normal backoff."""
    wait_after = retry_waits(100, soon=True)
    waits = [wait_after(error) for error in (BUSY, BUSY, DOWN, BUSY, BUSY, DOWN)]
    assert waits == pytest.approx([5, 10, 100, 20, 20, 200])


def test_other_calls_have_one_backoff() -> None:
    """For a call that does not open a transaction, a busy coordinator is backed off like any other error."""
    wait_after = retry_waits(100)
    assert [wait_after(BUSY), wait_after(DOWN)] == pytest.approx([100, 200])


@pytest.mark.parametrize("retry_backoff_ms", [1, 7])
def test_no_wait_is_longer_than_the_setting_allows(retry_backoff_ms: int) -> None:
    """A retry_backoff_ms below the short waits limits them too."""
    wait_after = retry_waits(retry_backoff_ms, soon=True)
    assert max(wait_after(BUSY) for _ in range(5)) == retry_backoff_ms
