"""The leader's assignment of connectors and tasks to workers, by the incremental cooperative rule (KIP-415).

Workers keep their work through a rebalance. The leader assigns new work, and revokes surplus work. A worker whose work
was revoked stops it and requests the next rebalance at once. In that rebalance the leader assigns the revoked work. So
a rebalance interrupts only the work that moves.

If a worker leaves, its work is lost. For `scheduled.rebalance.max.delay.ms` the leader keeps lost work for a worker
that returns (a restart, a roll-out). After the delay it assigns the lost work to the workers with the least work, such
as a worker that returned without work. During the delay, no work is revoked for balance.

Connectors and tasks are balanced separately. When no rebalance is left to do, two workers' numbers of connectors, or of
tasks, differ by at most one.

>>> assignor = IncrementalAssignor(max_delay_ms=300_000)
>>> configured = ConnectorsAndTasks({"orders"}, {ConnectorTaskId("orders", 0), ConnectorTaskId("orders", 1)})
>>> plan = assignor.assign({"a": NOTHING, "b": NOTHING}, configured, now_ms=0, generation=1, completed=-1)
>>> plan.assigned
{'a': ConnectorsAndTasks(orders, orders-0), 'b': ConnectorsAndTasks(orders-1)}
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.connect.group.connect_protocol import NOTHING, ConnectorsAndTasks
from penstock.shared.connect.runtime.states import ConnectorTaskId

T = TypeVar("T", str, ConnectorTaskId)


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """The additional work and the revoked work of each member. `complete` is all work of a member after both.

    If `delay_ms` is not 0, all members join again after that time.
    """

    assigned: Mapping[str, ConnectorsAndTasks]
    revoked: Mapping[str, ConnectorsAndTasks]
    complete: Mapping[str, ConnectorsAndTasks]
    delay_ms: int = 0


@dataclass(slots=True)
class IncrementalAssignor:
    """The leader's state between rebalances. All times are of one clock."""

    max_delay_ms: int
    scheduled_ms: int | None = None
    """When lost work is assigned to other workers, or None if no lost work waits."""
    _previous: ConnectorsAndTasks = NOTHING
    """All work assigned in the last rebalance, with the lost work that waits."""
    _previous_members: frozenset[str] = frozenset()
    _previous_generation: int = NO_GENERATION
    _revoked: ConnectorsAndTasks = NOTHING

    def assign(
        self,
        held: Mapping[str, ConnectorsAndTasks],
        configured: ConnectorsAndTasks,
        *,
        now_ms: int,
        generation: int,
        completed: int,
    ) -> AssignmentPlan:
        """Plan one rebalance. `held` is each member's current work, `completed` the last generation that was
        completed."""
        # The sets of IncrementalCooperativeAssignor.performTaskAssignment, step by step:
        # 1. The work that members hold, and the work of the last assignment. If that is not the last completed
        #    generation, it may never have arrived.
        active = _union_of_work(held.values())
        if self._previous_generation != completed:
            self._previous = NOTHING
        elif self._revoked & active:
            # Some revoked work still runs, so its revocation is decided again.
            self._previous = active
        # 2. Deleted work, and work that several members hold: all of them must stop it.
        twice = _work_with_two_owners(held.values())
        gone = {member: (work - configured) | (work & twice) for member, work in held.items()}
        kept = {member: held[member] - gone[member] for member in sorted(held)}
        # 3. Lost work of departed members, and new work.
        lost = (self._previous & configured) - active
        fresh = configured - self._previous - active
        # 4. Lost work waits for a member that returns. Until then no work moves for balance: it might move back.
        delay_ms = self._delay_of_lost(lost, kept, now_ms)
        complete = _give_out(kept, fresh if delay_ms else fresh | lost)
        surplus = {} if delay_ms else _work_above_even_share(complete, kept)
        # 5. Surplus work is only revoked here. The next rebalance assigns it, when its owner has stopped it.
        complete = {member: work - surplus.get(member, NOTHING) for member, work in complete.items()}
        revoked = {member: gone[member] | surplus.get(member, NOTHING) for member in kept}
        assigned = {member: work - kept[member] for member, work in complete.items()}
        # 6. Waiting lost work counts as running. Otherwise the next rebalance would take it for new work.
        waiting = lost - _union_of_work(complete.values())
        self._previous = _union_of_work(complete.values()) | waiting
        self._revoked = _union_of_work(revoked.values())
        self._previous_generation = generation
        self._previous_members = frozenset(held)
        return AssignmentPlan(assigned, revoked, complete, delay_ms)

    def _delay_of_lost(self, lost: ConnectorsAndTasks, kept: Mapping[str, ConnectorsAndTasks], now_ms: int) -> int:
        """Return the remaining delay of lost work in ms, or 0 if it is assigned now."""
        is_over = self.scheduled_ms is not None and now_ms >= self.scheduled_ms
        # If no worker has left, the work was lost because a member missed the last assignment.
        nobody_left = self.scheduled_ms is None and self._previous_members <= kept.keys()
        # Without a delay (max_delay_ms=0), lost work is assigned in the same rebalance, as since KAFKA-15693.
        if not lost or is_over or nobody_left or self.max_delay_ms <= 0:
            self.scheduled_ms = None
            return 0
        if self.scheduled_ms is None:
            self.scheduled_ms = now_ms + self.max_delay_ms
        return min(self.scheduled_ms - now_ms, self.max_delay_ms)


def assign_eagerly(members: Iterable[str], configured: ConnectorsAndTasks) -> dict[str, ConnectorsAndTasks]:
    """Assign all work in turn: the rule of the protocol `eager`, whose members stop their work before they join."""
    return _give_out(dict.fromkeys(sorted(members), NOTHING), configured)


def _union_of_work(works: Iterable[ConnectorsAndTasks]) -> ConnectorsAndTasks:
    found = list(works)
    return ConnectorsAndTasks((c for w in found for c in w.connectors), (t for w in found for t in w.tasks))


def _work_with_two_owners(works: Iterable[ConnectorsAndTasks]) -> ConnectorsAndTasks:
    found = list(works)
    connectors = Counter(c for w in found for c in w.connectors)
    tasks = Counter(t for w in found for t in w.tasks)
    return ConnectorsAndTasks((c for c, n in connectors.items() if n > 1), (t for t, n in tasks.items() if n > 1))


def _give_out(complete: Mapping[str, ConnectorsAndTasks], more: ConnectorsAndTasks) -> dict[str, ConnectorsAndTasks]:
    """Return the members' work `complete` with `more` divided among them.

    Each connector or task of `more` goes to the member that has the fewest of its kind by then.
    """
    connectors = _deal_to_least_loaded(
        {member: work.connectors for member, work in complete.items()}, sorted(more.connectors)
    )
    tasks = _deal_to_least_loaded({member: work.tasks for member, work in complete.items()}, sorted(more.tasks))
    return {member: ConnectorsAndTasks(connectors[member], tasks[member]) for member in complete}


def _deal_to_least_loaded(loads: Mapping[str, frozenset[T]], more: Iterable[T]) -> dict[str, set[T]]:
    dealt = {member: set(load) for member, load in loads.items()}
    order = [(len(load), member) for member, load in dealt.items()]
    heapq.heapify(order)
    for item in more:
        size, member = order[0]
        dealt[member].add(item)
        heapq.heapreplace(order, (size + 1, member))
    return dealt


def _work_above_even_share(
    complete: Mapping[str, ConnectorsAndTasks], kept: Mapping[str, ConnectorsAndTasks]
) -> dict[str, ConnectorsAndTasks]:
    """Return the work above an even share, from the work that members already run."""
    connectors = _items_above_even_share(
        {m: w.connectors for m, w in complete.items()}, {m: w.connectors for m, w in kept.items()}
    )
    tasks = _items_above_even_share({m: w.tasks for m, w in complete.items()}, {m: w.tasks for m, w in kept.items()})
    return {member: ConnectorsAndTasks(connectors[member], tasks[member]) for member in complete}


def _items_above_even_share(loads: Mapping[str, frozenset[T]], kept: Mapping[str, frozenset[T]]) -> dict[str, list[T]]:
    floor, extra = divmod(sum(map(len, loads.values())), len(loads))
    above: dict[str, list[T]] = {}
    for member in sorted(loads, key=lambda m: (-len(loads[m]), m)):
        # Each of the largest loads keeps one of the extra items.
        allowed = floor + (extra > 0)
        if len(loads[member]) >= allowed:
            extra -= extra > 0
        count = max(0, len(loads[member]) - allowed)
        ordered = sorted(kept[member])
        above[member] = ordered[len(ordered) - min(count, len(ordered)) :]
    return above
