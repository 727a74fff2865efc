"""The rate limits of clients."""

from __future__ import annotations

from penstock.api.ingest.rate_limit import CLIENTS_MAX, Rates


def test_without_a_rate_no_client_is_limited() -> None:
    """Without a rate no client is limited."""
    rates = Rates(None)
    rates.charge("ann", 10**9, 0)
    assert rates.wait_s("ann", 0) == 0


def test_the_rate_holds_over_time_for_each_client_alone() -> None:
    """A client within its rate is served, and one with a negative balance waits. Other clients are not affected."""
    rates, served = Rates(10), 0
    for now_ms in range(0, 10_000, 10):
        if rates.wait_s("ann", now_ms) == 0:
            rates.charge("ann", 1, now_ms)
            served += 1
    assert 100 <= served <= 111
    assert rates.wait_s("bob", 10_000) == 0


def test_clients_are_bounded() -> None:
    """The client that was charged longest ago is dropped."""
    rates = Rates(1)
    for client in range(CLIENTS_MAX + 1):
        rates.charge(str(client), 5, 0)
    assert (rates.wait_s("0", 0), rates.wait_s(str(CLIENTS_MAX), 0)) == (0, 4)
