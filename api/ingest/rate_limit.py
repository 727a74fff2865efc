"""Rate limits of clients: each client has a limit per second, with a burst of one second (a token bucket).

Sans-IO. A client is charged after its request. While its balance is not positive its requests are rejected, with the
seconds to wait. So a single large request always passes, and the rate holds over time.

>>> rates = Rates(per_second=100)
>>> rates.wait_s("ann", 0), rates.charge("ann", 300, 0), rates.wait_s("ann", 0), rates.wait_s("ann", 2_100)
(0, None, 2, 0)
"""

from __future__ import annotations

from collections import OrderedDict

CLIENTS_MAX = 10_000
"""The most clients with a balance. Beyond it the client that was charged longest ago gets a full balance again."""


class Rates:
    """The balance of each client. `per_second` of None is no limit."""

    def __init__(self, per_second: int | None) -> None:
        self._per_second = per_second
        self._clients: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Rates(per_second={self._per_second}, clients={len(self._clients)})"

    def wait_s(self, client: str, now_ms: int) -> int:
        """Return the whole seconds until the client may send again; 0 if it may now."""
        if self._per_second is None:
            return 0
        balance = self._event_balance(client, now_ms)
        return 0 if balance > 0 else max(1, int(-balance / self._per_second + 0.999))

    def charge(self, client: str, count: int, now_ms: int) -> None:
        """Charge the client for `count` units."""
        if self._per_second is None:
            return
        self._clients[client] = (self._event_balance(client, now_ms) - count, now_ms)
        self._clients.move_to_end(client)
        if len(self._clients) > CLIENTS_MAX:
            self._clients.popitem(last=False)

    def _event_balance(self, client: str, now_ms: int) -> float:
        assert self._per_second is not None
        balance, at_ms = self._clients.get(client, (float(self._per_second), now_ms))
        return min(float(self._per_second), balance + (now_ms - at_ms) * self._per_second / 1_000)
