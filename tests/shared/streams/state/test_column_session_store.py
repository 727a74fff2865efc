"""The column store one session at a time, against the store of objects."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Count, Max
from penstock.shared.streams.columnar import StateColumns
from penstock.shared.streams.state import column_store
from penstock.shared.streams.state.column_session_store import ColumnSessionStore
from penstock.shared.streams.state.session_store import InMemorySessionStore, Session, SessionChanges

GAP = 10

Live = dict[tuple[Any, int], tuple[int, Any]]


def store_of(name: str = "s", *, text_keys: bool = True) -> ColumnSessionStore:
    columns = StateColumns([Count(), Max("ms").bind(dict)])
    return ColumnSessionStore(name, columns, gap_ms=GAP, text_keys=text_keys)


def replay(changes: SessionChanges, log: Live) -> None:
    """What a reader of the changelog does with one commit."""
    for final in changes.finals:
        log.pop((final.key, final.start), None)
    for at in changes.deleted:
        log.pop(at, None)
    for session in changes.live:
        log[session.key, session.start] = (session.end, session.states)


def take(store: ColumnSessionStore | InMemorySessionStore, key: str, at: int, close_time: int) -> None:
    """One record, as the operator takes it."""
    found = store.find(key, max(at - GAP, close_time), at + GAP)
    if not found:
        if at >= close_time:
            store.put(Session(key, at, at, [1, (float(at), 1)]))
        return
    count = sum(s.states[0] for s in found) + 1
    highest = max([at, *(s.states[1][0] for s in found)])
    for other in found[1:]:
        store.remove(other)
    bounds = min(at, found[0].start), max(at, *(s.end for s in found))
    store.extend(found[0], *bounds, [count, (float(highest), count)])


steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.sampled_from("abc"), st.integers(-25, 15)),
        st.tuples(st.just("close"), st.just(""), st.integers(0, 30)),
        st.tuples(st.just("commit"), st.just(""), st.just(0)),
        st.tuples(st.just("restore"), st.just(""), st.just(0)),
    ),
    max_size=80,
)


@given(steps)
def test_equal_to_the_store_of_objects(plan: list[tuple[str, str, int]]) -> None:
    """Found, closed and live sessions are those of the other store, and so is what a reader makes of the changelog."""
    stores: list[Any] = [store_of(), InMemorySessionStore("s")]
    logs: list[Live] = [{}, {}]
    now = close_time = 0
    for what, key, number in plan:
        if what == "take":
            now = max(now, now + number)
            for store in stores:
                take(store, key, max(0, now - max(0, -number)), close_time)
        elif what == "close":
            close_time += number
            closed = [store.close_before(close_time, now) for store in stores]
            assert sorted(closed[0]) == sorted(closed[1])
        else:
            for store, log in zip(stores, logs, strict=True):
                replay(store.changes(), log)
                store.committed()
            assert logs[0] == logs[1]
            if what == "restore":
                stores[0] = store_of()
                for (own, start), (end, states) in logs[0].items():
                    stores[0].load(own, start, end, states)
        ours, theirs = (sorted((s.key, s.start, s.end, s.states) for s in store.rows()) for store in stores)
        assert ours == theirs
        assert len(stores[0]) == len(ours)
        for own in "abc":
            assert [s.start for s in stores[0].rows_of(own)] == [s.start for s in stores[1].rows_of(own)]


class Counted:
    """A column whose single accesses are counted."""

    def __init__(self, column: Any) -> None:
        self.column, self.count = column, 0

    def __getitem__(self, row: int) -> Any:
        self.count += 1
        return self.column[row]

    def __setitem__(self, row: int, value: Any) -> None:
        self.count += 1
        self.column[row] = value


def test_a_key_with_many_sessions_costs_no_more_steps_than_one_with_few() -> None:
    """In order, a session that begins, grows, is merged away or closed touches its neighbours, not the whole chain."""
    touched = []
    for live in (5, 500):
        store = store_of()
        for number in range(live):
            store.put(Session("a", 100 * number, 100 * number, [1, (0.0, 1)]))
        links = {name: Counted(store.table.views[name]) for name in ("next", "newer")}
        store.table.views.update(links)
        now = 100 * live
        for at in (now, now + 5, now + 25, now + 15):  # begins, grows, begins, joins the two
            take(store, "a", at, 0)
        store.put(Session("a", now - 50, now - 50, [1, (0.0, 1)]))  # one from the latest
        assert [s.start for s in store.close_before(1, now)] == [0]
        assert [s.start for s in store.rows_of("a")][-3:] == [now - 100, now - 50, now]
        walked = 2 * (live + 1)
        touched.append(sum(link.count for link in links.values()) - walked // 2)
    assert touched[0] == touched[1] < 60


def test_keys_are_forgotten_with_their_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many keys that have no session any more the store keeps no more than it says, and their numbers are reused."""
    monkeypatch.setattr(column_store, "IDLE_KEYS_MIN", 10)
    store = store_of()
    for turn in range(20):
        for number in range(10):
            store.put(Session(f"{turn}-{number}", turn * 100, turn * 100, [1, (0.0, 1)]))
        store.close_before(turn * 100 + 50, turn * 100 + 50)
        store.committed()
    assert len(store.codes) <= 31
    assert store.key_table.used <= 40
    assert list(store.rows()) == []
    assert repr(store) == f"ColumnSessionStore('s', 0 live, {len(store.codes) - 1} keys)"


def test_keys_are_text_or_bytes_as_the_stream_has_them() -> None:
    """A store of text gives text back, one of bytes gives bytes, and what is no key finds nothing."""
    for text_keys, key in ((True, "ä"), (False, b"\xff\x00")):
        store = store_of(text_keys=text_keys)
        store.put(Session(key, 1, 2, [1, (0.0, 1)]))
        assert [s.key for s in store.rows()] == [key]
        assert store.find(7, 0, 9) == store.find("\ud800", 0, 9) == []


def test_sessions_closer_than_the_gap() -> None:
    """Such as a gap that was shorter has left; what is merged away or closed is close to nothing."""
    store = store_of()
    for key, at in (("a", 0), ("b", 0), ("a", 11), ("b", 30)):
        take(store, key, at, -100)
    assert [store.is_crowded(gap_ms) for gap_ms in (10, 11)] == [False, True]
    store.close_before(5, 200)
    assert not store.is_crowded(11)
    assert not store.is_crowded(100)
