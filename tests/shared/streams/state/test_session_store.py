"""The session store against a dict, and its changes against a log that is replayed."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.shared.streams.state.session_store import (
    HEAP_SPARE,
    ClosedSession,
    InMemorySessionStore,
    Session,
    SessionChanges,
)

At = tuple[str, int]
Live = dict[At, tuple[int, Any]]


def store_of(*sessions: tuple[str, int, int]) -> InMemorySessionStore:
    """A store with committed sessions whose state is their number."""
    store = InMemorySessionStore("s")
    for number, (key, start, end) in enumerate(sessions):
        store.put(Session(key, start, end, [number]))
    store.committed()
    return store


def bounds(sessions: list[Session]) -> list[tuple[int, int]]:
    return [(s.start, s.end) for s in sessions]


def written(changes: SessionChanges) -> tuple[list[At], list[At], list[At]]:
    """Finals, deleted and live entries by key and start."""
    return (
        [(f.key, f.start) for f in changes.finals],
        changes.deleted,
        [(s.key, s.start) for s in changes.live],
    )


def replay(changes: SessionChanges, log: Live) -> None:
    """What a reader of the changelog does with one commit: finals and deleted remove, then live ones replace."""
    for final in changes.finals:
        log.pop((final.key, final.start), None)
    for at in changes.deleted:
        log.pop(at, None)
    for session in changes.live:
        log[session.key, session.start] = (session.end, session.states)


# --- one by one ---


def test_find_by_end_and_start() -> None:
    """Found are the key's sessions that end late enough and start early enough, both inclusive, in order of start."""
    store = store_of(("a", 40, 50), ("a", 0, 10), ("a", 20, 30), ("b", 0, 99))
    assert bounds(store.find("a", 10, 40)) == [(0, 10), (20, 30), (40, 50)]
    assert bounds(store.find("a", 11, 39)) == [(20, 30)]
    assert bounds(store.find("a", 31, 39)) == []
    assert bounds(store.find("b", 99, 0)) == [(0, 99)]
    assert bounds(store.find("b", 100, 0)) == bounds(store.find("b", 0, -1)) == bounds(store.find("c", 0, 99)) == []


def test_close_in_order_of_end_then_start() -> None:
    """Closed are the sessions that end below the close time, in order of (end, start), with the time of closing."""
    store = store_of(("c", 5, 10), ("a", 0, 10), ("b", 0, 9), ("d", 0, 11))
    closed = store.close_before(11, 77)
    assert closed == [
        ClosedSession("b", 0, 9, 77, [2]),
        ClosedSession("a", 0, 10, 77, [1]),
        ClosedSession("c", 5, 10, 77, [0]),
    ]
    assert store.close_before(11, 78) == []
    assert len(store) == 1


def test_a_session_that_grew_closes_by_its_new_end() -> None:
    """Closing goes by a session's end at the time, not by the one it was put with."""
    store = store_of(("a", 0, 10))
    (session,) = store.sessions()
    store.extend(session, 0, 25, [1])
    assert store.close_before(20, 20) == []
    assert [c.end for c in store.close_before(26, 26)] == [25]


def test_came_and_went_leaves_nothing() -> None:
    """A session put and removed, or put and moved, within one commit is not written at its first place."""
    store = InMemorySessionStore("s")
    gone, moved = Session("a", 0, 0, []), Session("a", 50, 50, [])
    store.put(gone)
    store.put(moved)
    store.remove(gone)
    store.extend(moved, 45, 50, [])
    assert written(store.changes()) == ([], [], [("a", 45)])


def test_a_moved_start_deletes_the_old_one() -> None:
    """A committed session whose start moves is deleted under the old start and written under the new."""
    store = store_of(("a", 50, 60))
    (session,) = store.sessions()
    store.extend(session, 45, 60, [0])
    assert written(store.changes()) == ([], [("a", 50)], [("a", 45)])


def test_a_new_session_replaces_the_tombstone_of_its_start() -> None:
    """Where one session goes and another comes under the same start, one live entry says it; its end says both."""
    store = store_of(("a", 50, 60))
    (session,) = store.sessions()
    store.remove(session)
    other = Session("a", 50, 55, [])
    store.put(other)
    assert written(store.changes()) == ([], [], [("a", 50)])
    store.remove(other)
    assert written(store.changes()) == ([], [("a", 50)], [])


def test_a_final_and_a_live_session_may_share_a_start() -> None:
    """A key's session that closes and its next one under the same start are a final and a live entry."""
    store = store_of(("a", 0, 0), ("a", 10, 10))
    store.close_before(1, 11)
    (session,) = store.sessions()
    store.extend(session, 0, 10, [9])
    changes = store.changes()
    assert written(changes) == ([("a", 0)], [("a", 10)], [("a", 0)])
    log: Live = {("a", 0): (0, [0]), ("a", 10): (10, [1])}
    replay(changes, log)
    assert log == {("a", 0): (10, [9])}


def test_changes_last_until_committed() -> None:
    """Changes can be taken more than once; `committed` ends them."""
    store = InMemorySessionStore("s")
    store.put(Session("a", 0, 0, []))
    assert written(store.changes()) == written(store.changes()) == ([], [], [("a", 0)])
    assert repr(store) == "InMemorySessionStore('s', 1 live, 1 dirty, 0 finals)"
    store.committed()
    assert written(store.changes()) == ([], [], [])
    assert repr(store) == "InMemorySessionStore('s', 1 live, 0 dirty, 0 finals)"


def test_load_replaces_and_is_no_change() -> None:
    """A restored session replaces one with its key and start, and is nothing to commit."""
    store = InMemorySessionStore("s")
    store.load("a", 0, 5, [1])
    store.load("a", 0, 9, [2])
    store.load("a", 20, 20, [3])
    assert [(s.start, s.end, s.states) for s in store.sessions_of("a")] == [(0, 9, [2]), (20, 20, [3])]
    assert written(store.changes()) == ([], [], [])
    assert [c.end for c in store.close_before(10, 10)] == [9]


def test_unload_of_what_is_not_there() -> None:
    """A restored removal of an unknown session changes nothing."""
    store = InMemorySessionStore("s")
    store.unload("a", 0)
    store.load("a", 5, 5, [])
    store.unload("a", 0)
    store.unload("a", 9)
    assert len(store) == 1
    store.unload("a", 5)
    assert (len(store), store.sessions_of("a")) == (0, [])


# --- against the model ---

keys = st.sampled_from(["a", "b"])
times = st.integers(0, 40)


class StoreMachine(RuleBasedStateMachine):
    """`live` is what the store must hold, `log` what a reader of the commits so far has."""

    @initialize()
    def begin(self) -> None:
        self.store = InMemorySessionStore("s")
        self.live: Live = {}
        self.log: Live = {}
        self.number = 0

    def _state(self) -> list[int]:
        self.number += 1
        return [self.number]

    def _of(self, key: str) -> list[Session]:
        return self.store.sessions_of(key)

    @rule(key=keys, start=times, length=st.integers(0, 6))
    def put(self, key: str, start: int, length: int) -> None:
        if any(s.start <= start + length and start <= s.end for s in self._of(key)):
            return
        states = self._state()
        self.store.put(Session(key, start, start + length, states))
        self.live[key, start] = (start + length, states)

    @rule(key=keys, which=st.integers(0, 5), left=st.integers(0, 4), right=st.integers(0, 4))
    def extend(self, key: str, which: int, left: int, right: int) -> None:
        own = self._of(key)
        if not own:
            return
        at = which % len(own)
        start, end = own[at].start - left, own[at].end + right
        if (at and start <= own[at - 1].end) or (at + 1 < len(own) and end >= own[at + 1].start):
            return
        del self.live[key, own[at].start]
        states = self._state()
        self.store.extend(own[at], start, end, states)
        self.live[key, start] = (end, states)

    @rule(key=keys, which=st.integers(0, 5))
    def merge(self, key: str, which: int) -> None:
        own = self._of(key)
        if len(own) < 2:
            return
        first, second = own[which % (len(own) - 1)], own[which % (len(own) - 1) + 1]
        del self.live[key, first.start], self.live[key, second.start]
        end, states = second.end, self._state()
        self.store.remove(second)
        self.store.extend(first, first.start, end, states)
        self.live[key, first.start] = (end, states)

    @rule(key=keys, which=st.integers(0, 5))
    def remove(self, key: str, which: int) -> None:
        if own := self._of(key):
            session = own[which % len(own)]
            self.store.remove(session)
            del self.live[key, session.start]

    @rule(close_time=times)
    def close(self, close_time: int) -> None:
        expected = [(at, *held) for at, held in self.live.items() if held[0] < close_time]
        got = self.store.close_before(close_time, 99)
        assert sorted(((c.key, c.start), c.end, c.states) for c in got) == sorted(expected)
        assert [(c.end, c.start) for c in got] == sorted((c.end, c.start) for c in got)
        for at, *_ in expected:
            del self.live[at]

    @rule(key=keys, earliest_end=times, latest_start=times)
    def find(self, key: str, earliest_end: int, latest_start: int) -> None:
        expected = sorted(
            (start, end)
            for (k, start), (end, _) in self.live.items()
            if k == key and end >= earliest_end and start <= latest_start
        )
        assert bounds(self.store.find(key, earliest_end, latest_start)) == expected

    @rule()
    def commit(self) -> None:
        changes = self.store.changes()
        assert set(changes.deleted) <= self.log.keys(), "a tombstone for what was never written"
        replay(changes, self.log)
        self.store.committed()
        assert self.log == self.live

    @precondition(lambda self: self.log)
    @rule()
    def crash(self) -> None:
        self.store = InMemorySessionStore("s")
        for (key, start), (end, states) in self.log.items():
            self.store.load(key, start, end + 1, states)
            self.store.load(key, start, end, states)
        self.store.load("gone", 0, 0, [])
        self.store.unload("gone", 0)
        self.live = dict(self.log)

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        held = {(s.key, s.start): (s.end, s.states) for s in self.store.sessions()}
        assert (held, len(self.store)) == (self.live, len(self.live))
        for key in ("a", "b"):
            assert bounds(self._of(key)) == sorted(bounds(self._of(key)))


StoreMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)


class TestAgainstModel(StoreMachine.TestCase):  # type: ignore[name-defined, misc]
    """Any sequence of calls leaves the store equal to a dict, and its commits equal to what a reader replays."""


def test_an_evicted_key_leaves_nothing_behind() -> None:
    """A key that somebody else keeps is gone with its place in the heap, and was no change; dirty keys are named."""
    store = InMemorySessionStore("s")
    for i in range(3 * HEAP_SPARE):
        store.load(i, 0, 10, [1])
        assert store.evict(i) == 1
    assert (len(store), store.evict("x"), store.dirty_keys(), store.touched) == (0, 0, set(), False)
    assert len(store._heap) <= HEAP_SPARE
    store.put(Session("a", 0, 10, [1]))
    store.put(Session("b", 20, 30, [1]))
    assert [c.key for c in store.close_before(15, 99)] == ["a"]
    assert store.dirty_keys() == {"a", "b"}
    store.committed()
    assert store.dirty_keys() == set()
