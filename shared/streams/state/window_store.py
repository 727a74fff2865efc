"""Live windows of fixed size in memory, with what the next commit must write.

A window is known by its key and start. Closing is found through a heap with one entry a window. A window that was
closed is written once more as a final; where its operator still needs it (sliding windows make new ones from it) it
stays until it expires, so a final may be followed by a live row of the same start.

>>> store = InMemoryWindowStore("s")
>>> store.put("ann", 0, 10, [1]); store.put("ann", 10, 20, [2]); store.put("bob", 0, 10, [3])
>>> [(w.key, w.start) for w in store.close_before(11, stream_time=25)]
[('ann', 0), ('bob', 0)]
>>> [(w.start, w.states) for w in store.rows_of("ann")]
[(10, [2])]
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.shared.streams.state.session_store import swept

_start = attrgetter("start")


class Window:
    """One window of a key, its bounds in ms, and its aggregations' states; `closed` ones are kept for their operator.

    `persisted` says that a live entry under this key and start is in the changelog.
    """

    __slots__ = ("closed", "end", "key", "live", "persisted", "start", "states")

    def __init__(self, key: Any, start: int, end: int, states: list[Any], persisted: bool = False) -> None:
        self.key, self.start, self.end, self.states, self.persisted = key, start, end, states, persisted
        self.live, self.closed = True, False

    def __repr__(self) -> str:
        return f"Window({self.key!r}, {self.start}..{self.end}, {self.states}{', closed' if self.closed else ''})"


class ClosedWindow(NamedTuple):
    """A window that the close time has passed; `closed_at` is the operator's stream time at that moment."""

    key: Any
    start: int
    end: int
    closed_at: int
    states: list[Any]


class WindowChanges(NamedTuple):
    """What a commit writes, in the order in which it must be written."""

    finals: list[ClosedWindow]
    deleted: list[tuple[Any, int]]
    live: list[Window]


class InMemoryWindowStore:
    """Window store in dicts and lists. With `keeps_closed` a closed window stays until `expire_before` takes it out."""

    def __init__(self, name: str, *, keeps_closed: bool = False) -> None:
        self.name, self.touched = name, False
        self._keeps_closed = keeps_closed
        self._windows: dict[Any, list[Window]] = {}
        self._open: list[tuple[int, int, Window]] = []
        self._kept: list[tuple[int, int, Window]] = []
        self._pushed = self._count = 0
        self._dirty: dict[tuple[Any, int], Window | None] = {}
        self._finals: list[ClosedWindow] = []

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        uncommitted = f"{len(self._dirty)} dirty, {len(self._finals)} finals"
        return f"InMemoryWindowStore({self.name!r}, {self._count} live, {uncommitted})"

    def fetch(self, key: Any, start: int) -> Window | None:
        """The key's window that starts there, None where there is none."""
        own = self._windows.get(key, ())
        at = bisect_left(own, start, key=_start)
        return own[at] if at < len(own) and own[at].start == start else None

    def fetch_range(self, key: Any, earliest: int, latest: int) -> Sequence[Window]:
        """The key's windows that start from `earliest` to `latest`, both inclusive, in order of start."""
        own = self._windows.get(key, ())
        return own[bisect_left(own, earliest, key=_start) : bisect_left(own, latest + 1, key=_start)]

    def put(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Set a window's states; one that is not there yet is added."""
        window = self.fetch(key, start)
        if window is None:
            window = self._add(Window(key, start, end, states))
        else:
            window.states = states
        self._mark(window)

    def remove(self, key: Any, start: int) -> None:
        """Take a window out, without a final; one that is not there is no error."""
        if (window := self.fetch(key, start)) is not None:
            self._discard(window)

    def close_before(self, limit: int, stream_time: int) -> list[ClosedWindow]:
        """Close and return all open windows that end before `limit`, in order of (start, key)."""
        closed = []
        while self._open and self._open[0][0] < limit:
            window = heapq.heappop(self._open)[2]
            if window.live and not window.closed:
                closed.append(ClosedWindow(window.key, window.start, window.end, stream_time, window.states))
                self._close(window)
        closed.sort(key=lambda c: (c.start, c.key))
        self._finals += closed
        return closed

    def take_before(self, limit: int) -> list[Window]:
        """Take out and return all open windows that end before `limit`, without finals, in order of (start, key)."""
        taken = []
        while self._open and self._open[0][0] < limit:
            window = heapq.heappop(self._open)[2]
            if window.live:
                self._discard(window)
                taken.append(window)
        return sorted(taken, key=lambda w: (w.start, w.key))

    def mark_closed_before(self, limit: int) -> None:
        """Take it that open windows which end before `limit` were closed before a restore."""
        while self._open and self._open[0][0] < limit:
            window = heapq.heappop(self._open)[2]
            if window.live:
                self._keep(window)

    def expire_before(self, start: int) -> None:
        """Take out the closed windows that start before `start`."""
        while self._kept and self._kept[0][0] < start:
            window = heapq.heappop(self._kept)[2]
            if window.live:
                self._discard(window)

    def rows(self) -> Iterator[Window]:
        """All windows that are open or kept."""
        for own in self._windows.values():
            yield from own

    def rows_of(self, key: Any) -> list[Window]:
        """The key's windows in order of start."""
        return list(self._windows.get(key, ()))

    def keys(self) -> Iterator[Any]:
        """The keys that there are at the first look."""
        return iter(list(self._windows))

    def changes(self) -> WindowChanges:
        """All changes since the last `committed()`."""
        deleted = [at for at, window in self._dirty.items() if window is None]
        return WindowChanges(list(self._finals), deleted, [w for w in self._dirty.values() if w is not None])

    def committed(self) -> None:
        """The changes are in the changelog now."""
        for window in self._dirty.values():
            if window is not None:
                window.persisted = True
        self._dirty.clear()
        self._finals.clear()

    def dirty_keys(self) -> set[Any]:
        """The keys whose windows are not as the last commit has them."""
        return {key for key, _ in self._dirty} | {closed.key for closed in self._finals}

    def evict(self, key: Any) -> int:
        """Forget a key's windows, which somebody else keeps: how many there were."""
        own = self._windows.pop(key, ())
        for window in own:
            window.live = False
        self._count -= len(own)
        self._open, self._kept = swept(self._open, self._count), swept(self._kept, self._count)
        return len(own)

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one window; one with the same key and start is replaced."""
        self.unload(key, start)
        self._add(Window(key, start, end, states, persisted=True))

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a window that is not there is no error."""
        if (window := self.fetch(key, start)) is not None:
            self._take_out(window)

    def _add(self, window: Window) -> Window:
        own = self._windows.setdefault(window.key, [])
        if own and own[-1].start > window.start:
            insort(own, window, key=_start)
        else:
            own.append(window)
        self._count += 1
        self._pushed += 1
        heapq.heappush(self._open, (window.end, self._pushed, window))
        return window

    def _close(self, window: Window) -> None:
        if self._keeps_closed:
            self._keep(window)
            self._mark(window)  # its final removes the live entry: this one puts it back
            return
        self._take_out(window)
        self._dirty.pop((window.key, window.start), None)

    def _keep(self, window: Window) -> None:
        window.closed = True
        self._pushed += 1
        heapq.heappush(self._kept, (window.start, self._pushed, window))

    def _discard(self, window: Window) -> None:
        self._take_out(window)
        if window.persisted:
            self._dirty[(window.key, window.start)] = None
        else:
            self._dirty.pop((window.key, window.start), None)

    def _take_out(self, window: Window) -> None:
        own = self._windows[window.key]
        if len(own) == 1:
            del self._windows[window.key]
        else:
            del own[bisect_left(own, window.start, key=_start)]
        window.live = False
        self._count -= 1
        self.touched = True

    def _mark(self, window: Window) -> None:
        at = (window.key, window.start)
        if not window.persisted and self._dirty.get(at, window) is None:
            window.persisted = True  # a tombstone was due here: should this one go too, it still is
        self._dirty[at] = window
        self.touched = True
