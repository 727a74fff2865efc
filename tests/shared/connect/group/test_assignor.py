"""The incremental cooperative assignor: nothing twice, balance, and the delay for a worker that is gone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.connect.group.assignor import IncrementalAssignor, Plan, assign_eagerly
from penstock.shared.connect.group.connect_protocol import NOTHING, Work
from penstock.shared.connect.runtime.states import ConnectorTaskId

DELAY_MS = 1_000


def work(connectors: int, tasks: int) -> Work:
    names = [f"c{n}" for n in range(connectors)]
    return Work(names, (ConnectorTaskId(name, n) for name in names for n in range(tasks)))


class Cluster:
    """Workers that do what they are told: what a group of real ones amounts to."""

    def __init__(self, members: int, configured: Work, delay_ms: int = DELAY_MS) -> None:
        self.assignor = IncrementalAssignor(delay_ms)
        self.held = {f"w{n}": NOTHING for n in range(members)}
        self.configured, self.generation, self.now_ms = configured, 0, 0

    def rebalance(self) -> Plan:
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
        """Rebalance as long as something is given up; how many rebalances that took."""
        for count in range(1, 10):
            if not any(self.rebalance().revoked.values()):
                return count
        raise AssertionError("it never settles")

    def check(self) -> None:
        connectors = [c for held in self.held.values() for c in held.connectors]
        tasks = [t for held in self.held.values() for t in held.tasks]
        assert len(connectors) == len(set(connectors)), "a connector runs twice"
        assert len(tasks) == len(set(tasks)), "a task runs twice"

    def running(self) -> Work:
        found = NOTHING
        for held in self.held.values():
            found = found | held
        return found

    def spread(self) -> tuple[int, int]:
        connectors = [len(held.connectors) for held in self.held.values()]
        tasks = [len(held.tasks) for held in self.held.values()]
        return max(connectors) - min(connectors), max(tasks) - min(tasks)


def test_new_work_is_spread_without_revocation() -> None:
    """Work that nobody has goes to those with the least, and nothing moves."""
    cluster = Cluster(3, work(5, 4))
    assert cluster.settle() == 1
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_a_worker_that_joins_gets_its_share_in_two_steps() -> None:
    """First the others give up what is too much, then it is given out: never is anything run twice."""
    cluster = Cluster(2, work(4, 4))
    cluster.settle()
    cluster.held["new"] = NOTHING
    plan = cluster.rebalance()
    assert plan.assigned["new"] == NOTHING
    assert any(plan.revoked.values())
    cluster.settle()
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_work_of_a_worker_that_is_gone_waits() -> None:
    """Nobody gets it before the delay is over; then it is spread."""
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


def test_a_worker_that_comes_back_gets_it_again() -> None:
    """What waited goes to the member that came empty, when the delay is over; nothing else moves."""
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


def test_a_worker_that_came_back_gets_no_more_than_its_share() -> None:
    """A second worker leaves while the first one's work waits: what both had goes to those with the least to do."""
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


def test_without_delay_lost_work_is_given_out_at_once() -> None:
    """`scheduled.rebalance.max.delay.ms=0` waits for nobody."""
    cluster = Cluster(3, work(3, 3), delay_ms=0)
    cluster.settle()
    del cluster.held["w0"]
    assert cluster.rebalance().delay_ms == 0
    assert cluster.running() == cluster.configured


def test_work_that_was_never_received_is_new() -> None:
    """Nobody left, but somebody missed an assignment: it is given out without delay."""
    cluster = Cluster(2, work(2, 2))
    cluster.settle()
    cluster.held["w0"] = NOTHING
    assert cluster.rebalance().delay_ms == 0
    assert cluster.running() == cluster.configured


def test_a_new_leader_delays_nothing() -> None:
    """Who did not make the last assignment does not know what is lost: it is new."""
    cluster = Cluster(3, work(3, 3))
    cluster.settle()
    del cluster.held["w2"]
    cluster.assignor = IncrementalAssignor(DELAY_MS)
    assert cluster.rebalance().delay_ms == 0
    cluster.settle()
    assert cluster.running() == cluster.configured


def test_what_is_deleted_is_revoked() -> None:
    """A connector that is gone is taken from who has it, also while a delay runs."""
    cluster = Cluster(2, work(3, 2))
    cluster.settle()
    cluster.configured = work(1, 2)
    cluster.settle()
    assert cluster.running() == cluster.configured
    assert max(cluster.spread()) <= 1


def test_what_two_have_both_give_up() -> None:
    """A worker that came back from a long silence may hold what others got: both stop it, then one gets it."""
    cluster = Cluster(2, work(2, 2))
    cluster.settle()
    held = {"w0": cluster.held["w0"] | cluster.held["w1"], "w1": cluster.held["w1"]}
    plan = cluster.assignor.assign(held, cluster.configured, now_ms=0, generation=9, completed=cluster.generation)
    assert not cluster.held["w1"] - plan.revoked["w0"]
    assert not cluster.held["w1"] - plan.revoked["w1"]


def test_a_revocation_that_was_not_heard_of_is_made_again() -> None:
    """Who missed it still holds the work in the next rebalance: it is neither lost nor given to somebody else."""
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


def test_eager_gives_everything_out_anew() -> None:
    """Under the old protocol all of it is dealt out in turn."""
    plan = assign_eagerly(["b", "a"], work(2, 1))
    assert {member: len(held) for member, held in plan.items()} == {"a": 2, "b": 2}


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
    """Workers come and go, connectors are made and deleted: nothing ever runs twice, and in the end, when the delay is
    over, all of it runs, evenly."""
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
