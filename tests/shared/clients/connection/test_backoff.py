"""How long calls wait before they are made again."""

from __future__ import annotations

import pytest

from penstock.shared.clients.connection.backoff import Backoff
from penstock.shared.common.errors import BrokerNotAvailable, ConcurrentTransactions

BUSY, DOWN = ConcurrentTransactions("x"), BrokerNotAvailable("x")


def test_waits_grow() -> None:
    """Each wait is twice the last, up to a second."""
    backoff = Backoff(100)
    assert [backoff.after(DOWN) for _ in range(6)] == [100, 200, 400, 800, 1_000, 1_000]
    assert repr(backoff) == "<Backoff 1000 ms>"


def test_a_transaction_begins_soon() -> None:
    """The completion of the last one is waited for in steps of at most 20 ms; another refusal has its own course."""
    backoff = Backoff(100, soon=True)
    assert [backoff.after(error) for error in (BUSY, BUSY, DOWN, BUSY, BUSY, DOWN)] == [5, 10, 100, 20, 20, 200]


def test_nothing_else_does() -> None:
    """Where a call does not open a transaction, its refusals back off as all others."""
    backoff = Backoff(100)
    assert [backoff.after(BUSY), backoff.after(BUSY)] == [100, 200]


@pytest.mark.parametrize("retry_backoff_ms", [1, 7])
def test_never_longer_than_asked_for(retry_backoff_ms: int) -> None:
    """A retry_backoff_ms below the short steps bounds those as well."""
    backoff = Backoff(retry_backoff_ms, soon=True)
    assert max(backoff.after(BUSY) for _ in range(5)) == retry_backoff_ms
