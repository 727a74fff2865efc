"""Live sessions in memory, with what the next commit must write.

Live sessions of one key lie more than the gap apart (nearer ones would have merged), so by start they are also in
order of end. `changes()` gives what happened since the last commit, reduced: a session that came and went within one
commit leaves nothing behind. Closing is found through a heap with one entry a session, pushed back where the session
has grown since, so that a record costs no heap operation.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

_start = attrgetter("start")

HEAP_SPARE = 1_024
"""Entries of rows that are gone which a heap may always hold."""


class Session:
    """One live session of a key: first and last event time (ms, both inclusive) and its aggregations' states.

    `persisted` says that a live entry under this key and start is in the changelog, or is about to be replaced there.
    """

    __slots__ = ("end", "key", "live", "persisted", "start", "states")

    def __init__(self, key: Any, start: int, end: int, states: list[Any], persisted: bool = False) -> None:
        self.key, self.start, self.end, self.states, self.persisted = key, start, end, states, persisted
        self.live = True

    def __repr__(self) -> str:
        return f"Session({self.key!r}, {self.start}..{self.end}, {self.states})"


class ClosedSession(NamedTuple):
    """A session whose end the close time has passed; `closed_at` is the operator's stream time at that moment."""

    key: Any
    start: int
    end: int
    closed_at: int
    states: list[Any]


class SessionChanges(NamedTuple):
    """What a commit writes, in the order in which it must be written."""

    finals: list[ClosedSession]
    deleted: list[tuple[Any, int]]
    live: list[Session]


def swept(heap: list[tuple[int, int, Any]], live: int) -> list[tuple[int, int, Any]]:
    """A heap of rows without those that are gone, once these are the most of it: so that it does not outgrow them."""
    if len(heap) <= 2 * live + HEAP_SPARE:
        return heap
    kept = [entry for entry in heap if entry[2].live]
    heapq.heapify(kept)
    return kept


class InMemorySessionStore:
    """Session store in dicts and lists; `touched` is set by every change, for its owner to see and take back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._sessions: dict[Any, list[Session]] = {}
        self._heap: list[tuple[int, int, Session]] = []
        self._pushed = 0
        self._dirty: dict[tuple[Any, int], Session | None] = {}
        self._finals: list[ClosedSession] = []
        self._count = 0
        self.touched = False

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        uncommitted = f"{len(self._dirty)} dirty, {len(self._finals)} finals"
        return f"InMemorySessionStore({self.name!r}, {self._count} live, {uncommitted})"

    def find(self, key: Any, earliest_end: int, latest_start: int) -> list[Session]:
        """The key's live sessions with end >= `earliest_end` and start <= `latest_start`, in order of start."""
        own = self._sessions.get(key)
        if own is None:
            return []
        if len(own) == 1:
            only = own[0]
            return [only] if only.end >= earliest_end and only.start <= latest_start else []
        return [s for s in own if s.end >= earliest_end and s.start <= latest_start]

    def put(self, session: Session) -> None:
        """Add a session; no live one of its key may lie within the gap."""
        own = self._sessions.get(session.key)
        if own is None:
            self._sessions[session.key] = [session]
        else:
            insort(own, session, key=_start)
        self._count += 1
        self._push(session)
        self._mark(session)

    def extend(self, session: Session, start: int, end: int, states: list[Any]) -> None:
        """Give a live session new bounds and states; it must keep its place among the key's sessions."""
        if start != session.start:
            self._unmark(session)
            session.start = start
            session.persisted = False
        session.end, session.states = end, states
        self._mark(session)

    def remove(self, session: Session) -> None:
        """Take a session out, since it was merged away."""
        self._take_out(session)
        self._unmark(session)

    def close_before(self, close_time: int, stream_time: int) -> list[ClosedSession]:
        """Take out and return all sessions whose end is below `close_time`, in order of (end, start, key)."""
        heap, closed = self._heap, []
        while heap and heap[0][0] < close_time:
            session = heapq.heappop(heap)[2]
            if not session.live:
                continue
            if session.end >= close_time:
                self._push(session)
                continue
            self._take_out(session)
            self._dirty.pop((session.key, session.start), None)
            closed.append(ClosedSession(session.key, session.start, session.end, stream_time, session.states))
        closed.sort(key=lambda c: (c.end, c.start, c.key))
        self._finals += closed
        return closed

    def sessions(self) -> Iterator[Session]:
        """All live sessions."""
        for own in self._sessions.values():
            yield from own

    def sessions_of(self, key: Any) -> list[Session]:
        """The key's live sessions in order of start."""
        return list(self._sessions.get(key, ()))

    rows, rows_of = sessions, sessions_of

    def keys(self) -> Iterator[Any]:
        """The keys that there are at the first look."""
        return iter(list(self._sessions))

    def changes(self) -> SessionChanges:
        """All changes since the last `committed()`."""
        deleted = [at for at, session in self._dirty.items() if session is None]
        return SessionChanges(list(self._finals), deleted, [s for s in self._dirty.values() if s is not None])

    def committed(self) -> None:
        """The changes are in the changelog now."""
        for session in self._dirty.values():
            if session is not None:
                session.persisted = True
        self._dirty.clear()
        self._finals.clear()

    def dirty_keys(self) -> set[Any]:
        """The keys whose sessions are not as the last commit has them."""
        return {key for key, _ in self._dirty} | {closed.key for closed in self._finals}

    def evict(self, key: Any) -> int:
        """Forget a key's sessions, which somebody else keeps: how many there were."""
        own = self._sessions.pop(key, ())
        for session in own:
            session.live = False
        self._count -= len(own)
        self._heap = swept(self._heap, self._count)
        return len(own)

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one live session; one with the same key and start is replaced."""
        self.unload(key, start)
        session = Session(key, start, end, states, persisted=True)
        insort(self._sessions.setdefault(key, []), session, key=_start)
        self._count += 1
        self._push(session)

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a session that is not there is no error, since a snapshot may be ahead of the log."""
        own = self._sessions.get(key, ())
        at = bisect_left(own, start, key=_start)
        if at < len(own) and own[at].start == start:
            self._take_out(own[at])

    def _push(self, session: Session) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (session.end, self._pushed, session))

    def _take_out(self, session: Session) -> None:
        own = self._sessions[session.key]
        if len(own) == 1:
            del self._sessions[session.key]
        else:
            own.remove(session)
        session.live = False
        self._count -= 1
        self.touched = True

    def _mark(self, session: Session) -> None:
        at = (session.key, session.start)
        if not session.persisted and self._dirty.get(at, session) is None:
            session.persisted = True  # a tombstone was due here: the new session replaces what it would have removed
        self._dirty[at] = session
        self.touched = True

    def _unmark(self, session: Session) -> None:
        at = (session.key, session.start)
        if session.persisted:
            self._dirty[at] = None
        else:
            self._dirty.pop(at, None)
