"""How far the times of a task's operators may be moved on where no record does it.

What reads a source moves on by as much as the source was quiet. What gets results of other operators, in the same task
or through a repartition topic, would close its windows before those results are there if it did the same. It moves up
to where they cannot come any more: no further than the earliest result that an operator above may still have, and than
the earliest of the marks (`time_marks`) of all tasks that write to a topic above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.task.watermarks import NO_LIMIT, Watermark
from penstock.shared.streams.topology import SinkNode, SourceNode, Topology
from penstock.shared.streams.windows.timed_processor import NO_TIME, TimedProcessor


class Above(NamedTuple):
    """What a node gets records from: operators, repartition topics, and whether sources of other data too."""

    operators: tuple[TimedProcessor, ...]
    topics: tuple[str, ...]
    has_source: bool


class OperatorTimes:
    """The operators of one task, parents first, and the marks it has read since it runs."""

    def __init__(self, topology: Topology, processors: Mapping[str, Processor]) -> None:
        self.operators = [p for p in processors.values() if isinstance(p, TimedProcessor)]
        self._above = {
            id(p): _above(topology, processors, name) for name, p in processors.items() if p in self.operators
        }
        internal = [node for node in topology.nodes.values() if isinstance(node, SinkNode) and node.is_internal]
        self._fed = {sink.topic: _above(topology, processors, sink.name) for sink in internal}
        self._marks: dict[str, dict[int, Watermark]] = {}

    def by_store(self) -> dict[str, int]:
        """Each operator's time under the name of its store."""
        return {operator.store_name: operator.stream_time_ms for operator in self.operators}

    def close_times(self) -> dict[str, int]:
        """Each operator's close time under the name of its store, where it has one."""
        times = {operator.store_name: operator.close_time_ms for operator in self.operators}
        return {name: time_ms for name, time_ms in times.items() if time_ms is not None}

    def restore(self, progress: Progress) -> None:
        """Take up the operators' times."""
        for operator in self.operators:
            operator.stream_time_ms = progress.operator_times_ms.get(operator.store_name, NO_TIME)
            operator.close_time_ms = progress.close_times_ms.get(operator.store_name)

    def take(self, topic: str, mark: Watermark) -> None:
        """A mark was read: all that its task wrote before it to this partition was read too."""
        self._marks.setdefault(topic, {})[mark.partition] = mark

    def advance(self, ms: int) -> None:
        """Move the operators on by `ms` that read sources alone, and the others as far as they may."""
        for operator in self.operators:
            if operator.stream_time_ms == NO_TIME:
                continue
            above = self._above[id(operator)]
            if above.operators or above.topics:
                limit = self._limit(above)
                if limit is not None and limit != NO_LIMIT:
                    operator.advance_time(max(limit, operator.stream_time_ms))
            elif ms:
                operator.advance_time(operator.stream_time_ms + ms)

    def marks(self, stream_time_ms: int) -> dict[str, int]:
        """What is to be said in each repartition topic that is written to; nothing where that is not known yet.

        `stream_time_ms` is the task's: it is what records have that no operator holds back.
        """
        found = {}
        for topic, above in self._fed.items():
            limit = self._limit(above)
            if limit is not None and above.has_source and not above.operators and stream_time_ms != NO_TIME:
                limit = min(limit, stream_time_ms)
            if limit is not None:
                found[topic] = limit
        return found

    def _limit(self, above: Above) -> int | None:
        """The earliest that may still come from above; None where the marks of a topic are not complete."""
        known = [o.results_from_ms() for o in above.operators if o.stream_time_ms != NO_TIME]
        for topic in above.topics:
            marks = self._marks.get(topic, {})
            if not marks or len(marks) < next(iter(marks.values())).tasks:
                return None
            known += [mark.time_ms for mark in marks.values()]
        return min(known, default=NO_LIMIT)


def _above(topology: Topology, processors: Mapping[str, Processor], name: str) -> Above:
    names = topology.above([name])
    nodes = [topology.nodes[node] for node in topology.nodes if node in names]
    sources = [node for node in nodes if isinstance(node, SourceNode)]
    operators = _timed(processors[node.name] for node in nodes if node.name in processors)
    topics = tuple(source.topic for source in sources if source.is_internal)
    return Above(operators, topics, any(not source.is_internal for source in sources))


def _timed(processors: Iterable[Processor]) -> tuple[TimedProcessor, ...]:
    return tuple(p for p in processors if isinstance(p, TimedProcessor))
