"""Who runs which connectors and tasks: the leader's decision, by the incremental cooperative rule (KIP-415).

Workers keep what they run through a rebalance. The leader gives out what nobody runs and takes back what is too much,
and what it takes back it gives out in the next rebalance, which the worker that gave it up asks for at once: so nothing
ever runs twice, and a rebalance costs only what moves.

When a worker is gone, what it ran is lost, but not given to others at once: for `scheduled.rebalance.max.delay.ms` it
is kept for a worker that comes back (a restart, a roll-out). Then it is given to those with the least to do, which a
worker that came back empty is. In the meantime nothing is taken back for balance.

Connectors and tasks are balanced each by itself: no worker has more than one connector, or one task, more than another.

>>> assignor = IncrementalAssignor(max_delay_ms=300_000)
>>> configured = Work({"orders"}, {ConnectorTaskId("orders", 0), ConnectorTaskId("orders", 1)})
>>> plan = assignor.assign({"a": NOTHING, "b": NOTHING}, configured, now_ms=0, generation=1, completed=-1)
>>> plan.assigned
{'a': Work(orders, orders-0), 'b': Work(orders-1)}
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.shared.connect.group.connect_protocol import NOTHING, Work
from penstock.shared.connect.runtime.states import ConnectorTaskId

T = TypeVar("T", str, ConnectorTaskId)

NO_GENERATION = -1


@dataclass(frozen=True, slots=True)
class Plan:
    """What each member gets in addition, and gives up; `complete` is what it then runs.

    After `delay_ms` (0: never) all members are to join again.
    """

    assigned: Mapping[str, Work]
    revoked: Mapping[str, Work]
    complete: Mapping[str, Work]
    delay_ms: int = 0


@dataclass(slots=True)
class IncrementalAssignor:
    """The leader's memory from one rebalance to the next; all times are of one clock."""

    max_delay_ms: int
    scheduled_ms: int | None = None
    """When what was lost is given out; None while nothing waits."""
    _previous: Work = NOTHING
    """What was to run after the last rebalance, with what was lost and waits."""
    _previous_members: frozenset[str] = frozenset()
    _previous_generation: int = NO_GENERATION
    _revoked: Work = NOTHING

    def assign(
        self, held: Mapping[str, Work], configured: Work, *, now_ms: int, generation: int, completed: int
    ) -> Plan:
        """One rebalance: `held` is what each member runs now, `completed` the last generation that was completed."""
        active = _union(held.values())
        if self._previous_generation != completed:
            self._previous = NOTHING  # the last assignment may never have arrived
        elif self._revoked & active:
            self._previous = active  # a revocation did not take effect: it is decided anew
        twice = _held_twice(held.values())
        gone = {member: (work - configured) | (work & twice) for member, work in held.items()}
        kept = {member: held[member] - gone[member] for member in sorted(held)}
        lost = (self._previous & configured) - active
        fresh = configured - self._previous - active
        delay_ms = self._delay_of_lost(lost, kept, now_ms)
        complete = _give_out(kept, fresh if delay_ms else fresh | lost)
        surplus = {} if delay_ms else _surplus(complete, kept)
        complete = {member: work - surplus.get(member, NOTHING) for member, work in complete.items()}
        revoked = {member: gone[member] | surplus.get(member, NOTHING) for member in kept}
        assigned = {member: work - kept[member] for member, work in complete.items()}
        # What was lost and waits counts as running, or the next rebalance would take it for new.
        waiting = lost - _union(complete.values())
        self._previous, self._revoked = _union(complete.values()) | waiting, _union(revoked.values())
        self._previous_generation, self._previous_members = generation, frozenset(held)
        return Plan(assigned, revoked, complete, delay_ms)

    def _delay_of_lost(self, lost: Work, kept: Mapping[str, Work], now_ms: int) -> int:
        """How long what was lost still waits for the worker that is gone; 0: it is given out now."""
        is_over = self.scheduled_ms is not None and now_ms >= self.scheduled_ms
        # Where nobody has left, somebody missed the last assignment.
        nobody_left = self.scheduled_ms is None and self._previous_members <= kept.keys()
        if not lost or is_over or nobody_left or self.max_delay_ms <= 0:
            self.scheduled_ms = None
            return 0
        if self.scheduled_ms is None:
            self.scheduled_ms = now_ms + self.max_delay_ms
        return min(self.scheduled_ms - now_ms, self.max_delay_ms)


def assign_eagerly(members: Iterable[str], configured: Work) -> dict[str, Work]:
    """Everything anew, in turn: the rule of the protocol `eager`, under which all give all up first."""
    return _give_out(dict.fromkeys(sorted(members), NOTHING), configured)


def _union(works: Iterable[Work]) -> Work:
    found = list(works)
    return Work((c for w in found for c in w.connectors), (t for w in found for t in w.tasks))


def _held_twice(works: Iterable[Work]) -> Work:
    found = list(works)
    connectors = Counter(c for w in found for c in w.connectors)
    tasks = Counter(t for w in found for t in w.tasks)
    return Work((c for c, n in connectors.items() if n > 1), (t for t, n in tasks.items() if n > 1))


def _give_out(complete: Mapping[str, Work], more: Work) -> dict[str, Work]:
    """Each member's work with its share of `more`: one by one to who has the least of its kind."""
    connectors = _dealt({member: work.connectors for member, work in complete.items()}, sorted(more.connectors))
    tasks = _dealt({member: work.tasks for member, work in complete.items()}, sorted(more.tasks))
    return {member: Work(connectors[member], tasks[member]) for member in complete}


def _dealt(loads: Mapping[str, frozenset[T]], more: Iterable[T]) -> dict[str, set[T]]:
    dealt = {member: set(load) for member, load in loads.items()}
    order = [(len(load), member) for member, load in dealt.items()]
    heapq.heapify(order)
    for item in more:
        size, member = order[0]
        dealt[member].add(item)
        heapq.heapreplace(order, (size + 1, member))
    return dealt


def _surplus(complete: Mapping[str, Work], kept: Mapping[str, Work]) -> dict[str, Work]:
    """What members have above an even share, of what they run already."""
    connectors = _above({m: w.connectors for m, w in complete.items()}, {m: w.connectors for m, w in kept.items()})
    tasks = _above({m: w.tasks for m, w in complete.items()}, {m: w.tasks for m, w in kept.items()})
    return {member: Work(connectors[member], tasks[member]) for member in complete}


def _above(loads: Mapping[str, frozenset[T]], kept: Mapping[str, frozenset[T]]) -> dict[str, list[T]]:
    floor, extra = divmod(sum(map(len, loads.values())), len(loads))
    above: dict[str, list[T]] = {}
    for member in sorted(loads, key=lambda m: (-len(loads[m]), m)):  # who has the most keeps the one beyond the floor
        allowed = floor + (extra > 0)
        if len(loads[member]) >= allowed:
            extra -= extra > 0
        count = max(0, len(loads[member]) - allowed)
        ordered = sorted(kept[member])
        above[member] = ordered[len(ordered) - min(count, len(ordered)) :]
    return above
