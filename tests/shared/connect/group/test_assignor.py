"""The incremental cooperative assignor: no work runs twice, work is balanced, and lost work waits for the delay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.connect.group.assignor import AssignmentPlan, IncrementalAssignor, assign_eagerly
from penstock.shared.connect.group.connect_protocol import NOTHING, ConnectorsAndTasks
from penstock.shared.connect.runtime.states import ConnectorTaskId

DELAY_MS = 1_000


def work(connectors: int, tasks: int) -> ConnectorsAndTasks:
    names = [f"c{n}" for n in range(connectors)]
    return ConnectorsAndTasks(names, (ConnectorTaskId(name, n) for name in names for n in range(tasks)))


class Cluster:
    """Workers that follow their assignments, as the workers of a real group do."""

    def __init__(self, members: int, configured: ConnectorsAndTasks, delay_ms: int = DELAY_MS) -> None:
        self.assignor = IncrementalAssignor(delay_ms)
        self.held = {f"w{n}": NOTHING for n in range(members)}
        self.configured, self.generation, self.now_ms = configured, 0, 0

    def rebalance(self) -> AssignmentPlan:
        self.generation += 1
        plan = self.assignor.assign(
            self.held, self.configured, now_ms=self.now_ms, generation=self.generation, completed=self.generation - 1
        )
        for member in self.held:
            assert not plan.revoked[member] - self.held[member], "only what is held is revoked"
            self.held[member] = (self.held[member] - plan.revoked[member]) | plan.assigned[member]
        self.check()
        return plan

    def settle(self) -> int:
        """Rebalance until no work is revoked, and return the number of rebalances."""
        for count in range(1, 10):
            if not any(self.rebalance().revoked.values()):
                return count
        raise AssertionError("it never settles")

    def check(self) -> None:
        connectors = [c for held in self.held.values() for c in held.connectors]
        tasks = [t for held in self.held.values() for t in held.tasks]
        assert len(connectors) == len(set(connectors)), "a connector runs twice"
        assert len(tasks) == len(set(tasks)), "a task runs twice"

    def running(self) -> ConnectorsAndTasks:
        found = NOTHING
        for held in self.held.values():
            found = found | held
        return found

    def spread(self) -> tuple[int, int]:
        connectors = [len(held.connectors) for held in self.held.values()]
        tasks = [len(held.tasks) for held in self.held.values()]
        return max(connectors) - min(connectors), max(tasks) - min(tasks)


def test_new_work_is_spread_without_revocation() -> None:
    """New work goes to the members with the least work, and nothing is revoked."""
    cluster = Cluster(3, work(5, 4))
    assert cluster.settle() == 1
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_a_worker_that_joins_gets_its_share_in_two_steps() -> None:
    """Excess work is first revoked and then assigned to a new worker, so no work runs twice."""
    cluster = Cluster(2, work(4, 4))
    cluster.settle()
    cluster.held["new"] = NOTHING
    plan = cluster.rebalance()
    assert plan.assigned["new"] == NOTHING
    assert any(plan.revoked.values())
    cluster.settle()
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_lost_work_waits_for_the_delay() -> None:
    """Work of a lost worker is assigned to no one until the delay is over, and then balanced."""
    cluster = Cluster(3, work(3, 3))
    cluster.settle()
    gone = cluster.held.pop("w1")
    assert cluster.rebalance().delay_ms == DELAY_MS
    assert cluster.running() == cluster.configured - gone
    cluster.now_ms = 400
    assert cluster.rebalance().delay_ms == DELAY_MS - 400
    cluster.now_ms = DELAY_MS
    assert cluster.rebalance().delay_ms == 0
    cluster.settle()
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_a_returning_worker_gets_its_work_back() -> None:
    """After the delay lost work goes to a member that joined without work, and nothing else moves."""
    cluster = Cluster(3, work(3, 3))
    cluster.settle()
    gone = cluster.held.pop("w1")
    others = dict(cluster.held)
    cluster.rebalance()
    cluster.held["back"] = NOTHING
    assert not any(cluster.rebalance().revoked.values())
    cluster.now_ms = DELAY_MS
    cluster.rebalance()
    assert cluster.held == {**others, "back": gone}


def test_a_returning_worker_gets_no_more_than_its_share() -> None:
    """If a second worker leaves while the first one's work is delayed, the work of both is balanced."""
    cluster = Cluster(1, work(3, 2))
    for joined in ("x0", "x1"):
        cluster.held[joined] = NOTHING
        cluster.rebalance()
    del cluster.held["x0"]
    cluster.rebalance()
    cluster.held["x0"] = NOTHING
    cluster.rebalance()
    del cluster.held["x1"]
    cluster.settle()
    cluster.now_ms = DELAY_MS
    cluster.settle()
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_without_delay_lost_work_is_assigned_immediately() -> None:
    """With `scheduled.rebalance.max.delay.ms=0` lost work is assigned immediately."""
    cluster = Cluster(3, work(3, 3), delay_ms=0)
    cluster.settle()
    del cluster.held["w0"]
    assert cluster.rebalance().delay_ms == 0
    assert cluster.running() == cluster.configured


def test_work_that_was_never_received_is_new() -> None:
    """If a member missed an assignment but none left, its work is assigned without delay."""
    cluster = Cluster(2, work(2, 2))
    cluster.settle()
    cluster.held["w0"] = NOTHING
    assert cluster.rebalance().delay_ms == 0
    assert cluster.running() == cluster.configured


def test_a_new_leader_delays_nothing() -> None:
    """A new leader does not know the last assignment, so it assigns lost work without delay."""
    cluster = Cluster(3, work(3, 3))
    cluster.settle()
    del cluster.held["w2"]
    cluster.assignor = IncrementalAssignor(DELAY_MS)
    assert cluster.rebalance().delay_ms == 0
    cluster.settle()
    assert cluster.running() == cluster.configured


def test_deleted_work_is_revoked() -> None:
    """A deleted connector and its tasks are revoked, and the rest is balanced."""
    cluster = Cluster(2, work(3, 2))
    cluster.settle()
    cluster.configured = work(1, 2)
    cluster.settle()
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_duplicate_work_is_revoked_from_both() -> None:
    """Work that two workers hold is revoked from both."""
    cluster = Cluster(2, work(2, 2))
    cluster.settle()
    held = {"w0": cluster.held["w0"] | cluster.held["w1"], "w1": cluster.held["w1"]}
    plan = cluster.assignor.assign(held, cluster.configured, now_ms=0, generation=9, completed=cluster.generation)
    assert not cluster.held["w1"] - plan.revoked["w0"]
    assert not cluster.held["w1"] - plan.revoked["w1"]


def test_a_missed_revocation_is_repeated() -> None:
    """A member that missed a revocation still holds the work, which is neither lost nor assigned twice."""
    cluster = Cluster(1, work(2, 2))
    cluster.settle()
    cluster.held["w1"] = NOTHING
    before = dict(cluster.held)
    cluster.rebalance()
    cluster.held = before
    plan = cluster.rebalance()
    assert plan.delay_ms == 0
    cluster.settle()
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_eager_assigns_everything_round_robin() -> None:
    """Under the eager protocol all work is assigned round-robin."""
    plan = assign_eagerly(["b", "a"], work(2, 1))
    assert {member: len(held.connectors) + len(held.tasks) for member, held in plan.items()} == {"a": 2, "b": 2}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 5)),
        st.tuples(st.just("leave"), st.integers(0, 5)),
        st.tuples(st.just("connectors"), st.integers(0, 6)),
        st.tuples(st.just("time"), st.integers(0, 2 * DELAY_MS)),
        st.tuples(st.just("rebalance"), st.just(0)),
    ),
    max_size=15,
)


@given(EVENTS, st.integers(0, 3))
def test_whatever_happens_it_ends_balanced(events: list[tuple[str, int]], tasks: int) -> None:
    """While workers join and leave and connectors change, no work runs twice.

    Once the delay is over all work runs, balanced.
    """
    cluster = Cluster(1, work(3, tasks))
    for event, n in events:
        if event == "join":
            cluster.held.setdefault(f"x{n}", NOTHING)
        elif event == "leave" and len(cluster.held) > 1:
            cluster.held.pop(f"x{n}", None)
        elif event == "connectors":
            cluster.configured = work(n, tasks)
        elif event == "time":
            cluster.now_ms += n
        cluster.rebalance()
    cluster.settle()
    cluster.now_ms += DELAY_MS
    cluster.settle()
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1
