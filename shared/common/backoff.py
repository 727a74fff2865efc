"""The wait before another attempt: Kafka's ExponentialBackoff (KIP-580), and a backoff for restarts.

The wait after the n-th failure in a row is `initial_ms` times `multiplier` to the power of n - 1. It is spread by
`jitter` in both directions, so that many clients do not retry at the same moment. No wait is above `max_ms`, whatever
the jitter. If `max_ms` is below `initial_ms`, every wait is `max_ms`, without jitter.

>>> backoff = ExponentialBackoff(100, 1_000)
>>> [backoff.wait_ms(failures) for failures in range(7)]
[0.0, 100.0, 200.0, 400.0, 800.0, 1000.0, 1000.0]
>>> ExponentialBackoff(100, 1_000, jitter=0.2).wait_ms(2, random=0.0)
160.0
>>> ExponentialBackoff(100, 100, jitter=0.2).wait_ms(2, random=0.0)
80.0
>>> ExponentialBackoff(110, 100, jitter=0.2).wait_ms(2, random=0.0)
100.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RETRY_BACKOFF_MAX_MS = 1_000
"""The longest wait between attempts of one request: Kafka's default of `retry.backoff.max.ms`."""


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """Waits in ms; see the module. `jitter` is from 0 to 1."""

    initial_ms: float
    max_ms: float
    multiplier: float = 2.0
    jitter: float = 0.0

    def wait_ms(self, failures: int, random: float = 0.5) -> float:
        """Return the wait after that many failures in a row: 0 ms if nothing failed.

        The caller draws the number `random` uniformly from 0 to 1, for the jitter.
        """
        if failures < 1 or self.initial_ms <= 0:
            return 0.0
        # KIP-580 defines this constant. Java also returns a constant if both are equal. Here jitter applies to equal
        # waits as well: otherwise all that failed at the same moment would be retried at the same moment.
        if self.max_ms < self.initial_ms:
            return float(self.max_ms)
        # Above this power the limit applies, and the power itself would overflow.
        powers = math.log(self.max_ms / self.initial_ms, self.multiplier) if self.multiplier > 1 else 0.0
        wait_ms: float = self.initial_ms * self.multiplier ** min(failures - 1, powers)
        return float(min(wait_ms * (1 + self.jitter * (2 * random - 1)), self.max_ms))


class RestartBackoff:
    """The backoff of restarts: the wait before a service that ended is started again.

    If the service ran for at least the longest wait (`max_ms`), its end counts as the first failure in a row. This is
    for services that report no success of their own. If success is known, count the failures since the last success.

    >>> restarts = RestartBackoff(ExponentialBackoff(1_000, 60_000))
    >>> [restarts.wait_ms(ran_ms) for ran_ms in (100, 100, 100, 3_600_000, 100)]
    [1000, 2000, 4000, 1000, 2000]
    """

    def __init__(self, backoff: ExponentialBackoff) -> None:
        self._backoff = backoff
        self._failures = 0

    def __repr__(self) -> str:
        return f"<RestartBackoff {self._failures} failures in a row>"

    def wait_ms(self, ran_ms: int) -> int:
        """Return the wait before the next start of a service that has ended after `ran_ms`."""
        self._failures = 1 if ran_ms >= self._backoff.max_ms else self._failures + 1
        return round(self._backoff.wait_ms(self._failures))
