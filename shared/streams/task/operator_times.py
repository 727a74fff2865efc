"""Advances the times of a task's operators without a record.

An operator that reads only source topics advances by the time that the task's source topics were idle. An operator may
also be behind other operators, in the same task or through a repartition topic. If it advanced in the same way, it
would close its windows before the others' results arrive. So it advances only to the time before which no result can
come. That is the minimum of two times: the earliest result that an operator above may still forward, and the lowest
watermark (`watermarks`) of all tasks that write to a repartition topic above.

Each source topic has a time of its own: the highest timestamp of its records. The stream time of a sub-topology, which
drives the punctuation of its nodes, is the highest time of its source topics. Without a record, the time of a topic
advances by the time that the task's source topics were idle, and that of a repartition topic to the lowest watermark.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.processor import NO_TIME, Processor, TimedProcessor
from penstock.shared.streams.task.watermarks import NO_LIMIT, Watermark
from penstock.shared.streams.topology import SinkNode, SourceNode, Topology


class Above(NamedTuple):
    """The operators and the repartition topics above a node."""

    operators: tuple[TimedProcessor, ...]
    topics: tuple[str, ...]


class OperatorTimes:
    """The times of one task's source topics and operators (parents first), and the watermarks that it has read since it
    started."""

    def __init__(self, topology: Topology, processors: Mapping[str, Processor]) -> None:
        self.operators = [p for p in processors.values() if isinstance(p, TimedProcessor)]
        self._above = {
            id(p): _sources_and_operators_above(topology, processors, name)
            for name, p in processors.items()
            if p in self.operators
        }
        internal = [node for node in topology.nodes.values() if isinstance(node, SinkNode) and node.is_internal]
        self._fed = {sink.topic: _sources_and_operators_above(topology, processors, sink.name) for sink in internal}
        passed = {name for name, p in processors.items() if isinstance(p, TimedProcessor)}
        external = {source.name: source.topic for source in topology.sources() if not source.is_internal}
        self._direct_sources = {
            sink.topic: [external[name] for name in external.keys() & topology.above([sink.name], without=passed)]
            for sink in internal
        }
        self._internal = frozenset(topology.internal_topics())
        self.source_times_ms: dict[str, int] = {}
        self._watermarks: dict[str, dict[int, Watermark]] = {}

    def by_store(self) -> dict[str, int]:
        """Return each operator's stream time in ms by the name of its store; NO_TIME before its first record.

        A join of two streams is named by its left store.
        """
        return {operator.store_name: operator.stream_time_ms for operator in self.operators}

    def close_times(self) -> dict[str, int]:
        """Return each operator's close time, if it has one, by the name of its store."""
        times = {operator.store_name: operator.close_time_ms for operator in self.operators}
        return {name: time_ms for name, time_ms in times.items() if time_ms is not None}

    def restore(self, progress: Progress) -> None:
        """Restore the times of operators and source topics."""
        self.source_times_ms = dict(progress.source_times_ms)
        for operator in self.operators:
            operator.stream_time_ms = progress.operator_times_ms.get(operator.store_name, NO_TIME)
            operator.close_time_ms = progress.close_times_ms.get(operator.store_name)

    def stream_time_ms(self, topics: Iterable[str]) -> int:
        """Return the highest time of these source topics, or NO_TIME if none has one."""
        return max([self.source_times_ms.get(topic, NO_TIME) for topic in topics], default=NO_TIME)

    def advance_source(self, topic: str, timestamp_ms: int) -> None:
        """Advance a source topic's time to the timestamp of a record, if it is higher."""
        self.source_times_ms[topic] = max(self.source_times_ms.get(topic, NO_TIME), timestamp_ms)

    def set_source_back(self, topic: str, time_ms: int | None) -> None:
        """Set a source topic's time to what it was before a record that was rejected; None if it had none."""
        if time_ms is None:
            self.source_times_ms.pop(topic, None)
        else:
            self.source_times_ms[topic] = time_ms

    def take(self, topic: str, watermark: Watermark) -> None:
        """Take a watermark; everything that its task wrote before it to this partition has been read."""
        self._watermarks.setdefault(topic, {})[watermark.partition] = watermark

    def advance(self, ms: int) -> None:
        """Advance each source topic and each operator that has had a record.

        A source topic advances by `ms`, but a repartition topic to its lowest watermark. An operator advances by `ms`
        if no operator and no repartition topic is above it, otherwise to the limit that these set.
        """
        for topic, time_ms in self.source_times_ms.items():
            if topic not in self._internal:
                self.source_times_ms[topic] = time_ms + ms
            elif (limit := self._lowest_watermark(topic)) is not None and limit != NO_LIMIT:
                self.source_times_ms[topic] = max(limit, time_ms)
        # Parents come first, so that an operator follows its parents' new times in the same call.
        for operator in self.operators:
            if operator.stream_time_ms == NO_TIME:
                continue
            above = self._above[id(operator)]
            if above.operators or above.topics:
                limit = self._earliest_time_above(above)
                # NO_LIMIT: no task above has had a record yet, so there is no time to follow.
                if limit is not None and limit != NO_LIMIT:
                    operator.advance_time(max(limit, operator.stream_time_ms))
            elif ms:
                operator.advance_time(operator.stream_time_ms + ms)

    def watermarks(self) -> dict[str, int]:
        """Return the watermark for each repartition topic that the task writes to, if it is known already.

        If records of source topics reach the repartition topic without passing an operator (`TimedProcessor`), the
        watermark is at most the highest time of these source topics, because a merged stream has one stream time. A
        source topic without a record does not limit it.
        """
        found = {}
        for topic, above in self._fed.items():
            limit = self._earliest_time_above(above)
            if limit is not None:
                times = [self.source_times_ms[s] for s in self._direct_sources[topic] if s in self.source_times_ms]
                found[topic] = min(limit, max(times, default=NO_LIMIT))
        return found

    def _earliest_time_above(self, above: Above) -> int | None:
        """Return the earliest time that may still come from above; None if a topic's watermarks are incomplete."""
        known = [o.results_from_ms() for o in above.operators if o.stream_time_ms != NO_TIME]
        for topic in above.topics:
            if (lowest := self._lowest_watermark(topic)) is None:
                return None
            known.append(lowest)
        return min(known, default=NO_LIMIT)

    def _lowest_watermark(self, topic: str) -> int | None:
        """Return the lowest watermark of a repartition topic; None if those of some tasks are missing."""
        watermarks = self._watermarks.get(topic, {})
        # A task that has not sent its watermark may still send earlier results. Watermarks are in no changelog, so
        # after a restart time waits until every task has sent one again.
        if not watermarks or len(watermarks) < next(iter(watermarks.values())).tasks:
            return None
        return min(watermark.time_ms for watermark in watermarks.values())


def _sources_and_operators_above(topology: Topology, processors: Mapping[str, Processor], name: str) -> Above:
    names = topology.above([name])
    nodes = [topology.nodes[node] for node in topology.nodes if node in names]
    sources = [node for node in nodes if isinstance(node, SourceNode)]
    own = [processors[node.name] for node in nodes if node.name in processors]
    operators = tuple(p for p in own if isinstance(p, TimedProcessor))
    topics = tuple(source.topic for source in sources if source.is_internal)
    return Above(operators, topics)
