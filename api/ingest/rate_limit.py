"""Rates of clients: the limit of each client a second, with a burst of one second.

Sans-IO. A client is charged after its work is done. While its balance is negative it is rejected, with the seconds to
wait. So a single large request always passes, and the rate holds over time.

>>> rates = Rates(per_second=100)
>>> rates.wait_s("ann", 0), rates.pay("ann", 300, 0), rates.wait_s("ann", 0), rates.wait_s("ann", 2_100)
(0, None, 2, 0)
"""

from __future__ import annotations

from collections import OrderedDict

CLIENTS_MAX = 10_000
"""Clients that are kept. Beyond it the client that was charged longest ago is forgotten and starts again."""


class Rates:
    """The balance of each client; `per_second` None is no limit."""

    def __init__(self, per_second: int | None) -> None:
        self._per_second = per_second
        self._clients: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __repr__(self) -> str:
        return f"Rates(per_second={self._per_second}, clients={len(self._clients)})"

    def wait_s(self, client: str, now_ms: int) -> int:
        """Return the whole seconds until the client may send again; 0 if it may now."""
        if self._per_second is None:
            return 0
        left = self._left(client, now_ms)
        return 0 if left > 0 else max(1, int(-left / self._per_second + 0.999))

    def pay(self, client: str, count: int, now_ms: int) -> None:
        """Charge the client for `count` units."""
        if self._per_second is None:
            return
        self._clients[client] = (self._left(client, now_ms) - count, now_ms)
        self._clients.move_to_end(client)
        if len(self._clients) > CLIENTS_MAX:
            self._clients.popitem(last=False)

    def _left(self, client: str, now_ms: int) -> float:
        assert self._per_second is not None
        left, at_ms = self._clients.get(client, (float(self._per_second), now_ms))
        return min(float(self._per_second), left + (now_ms - at_ms) * self._per_second / 1_000)
