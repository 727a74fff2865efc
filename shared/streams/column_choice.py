"""Which sources of a task are taken as columns.

That is where a source feeds one window and nothing else, if through functions of single records (`chain`), the window's
states have columns and are in memory, and nobody could see the difference. Sliding windows are taken record by record:
which windows there are depends on the records that a key had before, one by one, and a new window begins as a copy of
what another one holds of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.shared.streams.chain import Chain
from penstock.shared.streams.column_path import ColumnPath
from penstock.shared.streams.each import Each
from penstock.shared.streams.session_path import SessionPath
from penstock.shared.streams.session_windows import SessionAggregate
from penstock.shared.streams.state.column_store import ColumnStore
from penstock.shared.streams.time_windows import TimeWindowAggregate
from penstock.shared.streams.topology import SourceNode
from penstock.shared.streams.window_path import WindowPath

if TYPE_CHECKING:
    from penstock.shared.streams.stream_task import StreamTask
    from penstock.shared.streams.wiring import Wiring

_PATHS: dict[type, type[ColumnPath]] = {SessionAggregate: SessionPath, TimeWindowAggregate: WindowPath}


def column_paths(task: StreamTask, wiring: Wiring) -> dict[str, ColumnPath]:
    """The sources of a task that can be taken as columns, by topic."""
    found = {}
    for source in task.topology.sources():
        nodes, name = _chain(task, wiring, source)
        operator = None if name is None else wiring.processors.get(name)
        if name is not None and isinstance(operator, SessionAggregate | TimeWindowAggregate):
            store = task.stores[operator.store_name]
            in_order = operator.emit == "on_update" and not task.deduplicate_updates
            at_moment = operator.emit == "on_close" and _sees_time(task, wiring, name)
            if isinstance(store, ColumnStore) and not in_order and not at_moment:
                chain = Chain(task, nodes, store.key_of) if nodes else None
                found[source.topic] = _PATHS[type(operator)](task, source, operator, store, chain)
    return found


def _chain(task: StreamTask, wiring: Wiring, source: SourceNode) -> tuple[list[Each], str | None]:
    """The functions below a source, and the only node below them, if there is one; in a topic of our own there are
    headers that they must not see, and nothing is called ahead."""
    nodes: list[Each] = []
    below = task.topology.children[source.name]
    while len(below) == 1:
        node = wiring.processors.get(below[0])
        if not (isinstance(node, Each) and node.at_most_once and not source.is_internal):
            return nodes, below[0]
        nodes.append(node)
        below = task.topology.children[below[0]]
    return nodes, None


def _sees_time(task: StreamTask, wiring: Wiring, name: str) -> bool:
    """Whether a node below this one may see when it is given a result: that of a batch comes at the batch's end."""
    names = list(task.topology.children[name])
    for one in names:
        names += task.topology.children[one]
    return any(one in wiring.processors and wiring.processors[one].sees_time for one in names)
