"""The worker's side of a task in a process of its own: a task like every other (an edge).

The process reports the events of its task to the worker's listener. If a process ends without a message, its task has
failed, and is restarted after a backoff like any other. If a stopped task does not end in time, its process is killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import PenstockError
from penstock.shared.connect.config_provider import ConfigTransformer
from penstock.shared.connect.connector import SinkConnector
from penstock.shared.connect.errors import FailedThere
from penstock.shared.connect.isolation.messages import STATS_MS, Message, error_message, from_pairs, to_pairs
from penstock.shared.connect.isolation.process import END_MS, ChildProcess, Processes, runs_apart
from penstock.shared.connect.runtime.offset_store import OffsetBackingStore
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import Event, TargetState
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.worker_config import WorkerConfig
from penstock.shared.connect.runtime.worker_task import TaskSpec, WorkerTask

CHILD = "penstock.shared.connect.isolation.task_child"


class ReportedMetrics(TaskMetrics):
    """The metrics that the process sent last."""

    reported: Mapping[str, float] | None = None

    def values(self, now_ms: int) -> dict[str, float]:
        return super().values(now_ms) if self.reported is None else dict(self.reported)


class IsolatedTasks:
    """Makes tasks here or in processes of their own, as worker and connector configure (`penstock.task.isolation`)."""

    def __init__(
        self,
        here: TaskFactory,
        config: WorkerConfig,
        plugins: Plugins,
        offsets: OffsetBackingStore,
        processes: Processes,
        *,
        group_id: str = "connect",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._here, self._config, self._plugins, self._offsets = here, config, plugins, offsets
        self._processes, self._group_id, self._clock = processes, group_id, clock
        self._transformer = ConfigTransformer.of_worker(config["config.providers"], config.props)

    def __call__(self, spec: TaskSpec, listener: StatusListener) -> WorkerTask:
        props = self._transformer.resolve(spec.connector_config)
        if not runs_apart(props, self._config):
            return self._here(spec, listener)
        plugin = self._plugins.connector_class(props.get("connector.class", ""))
        kind = "sink" if issubclass(plugin, SinkConnector) else "source"
        metrics = ReportedMetrics(kind, self._clock.monotonic_ms())
        process = self._processes.make(CHILD, f"task {spec.id}")
        return ProcessTask(spec, listener, process, self._start_message(spec), self._offsets, metrics, self._clock)

    def _start_message(self, spec: TaskSpec) -> Message:
        return {
            "group_id": self._group_id,
            "offset_topic": self._offsets.topic,
            "connector": spec.id.connector,
            "task": spec.id.task,
            "connector_config": dict(spec.connector_config),
            "task_config": dict(spec.task_config),
            "generation": spec.generation,
            "tasks": spec.tasks,
        }


class ProcessTask(WorkerTask):
    """The worker's side of the task."""

    def __init__(
        self,
        spec: TaskSpec,
        listener: StatusListener,
        process: ChildProcess,
        start: Message,
        offsets: OffsetBackingStore,
        metrics: ReportedMetrics,
        clock: Clock,
    ) -> None:
        super().__init__(spec.id, listener, metrics, clock)
        self._process, self._start_message, self._offsets, self._reported = process, start, offsets, metrics
        self._begun = self._ended = False
        self._heard_ms = 0
        self._call_ms = 0
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The process' id, or None before it is started."""
        return self._process.pid

    def stalled_ms(self, now_ms: int) -> int:
        """As of any task. A process that sends no metrics counts as blocked inside a call."""
        silent_ms = max(0, now_ms - self._heard_ms)
        if not self._heard_ms or (not self._call_ms and silent_ms < 2 * STATS_MS):
            return 0
        return self._call_ms + silent_ms

    def transition_to(self, target: TargetState) -> None:
        super().transition_to(target)
        self._process.say({"target": target.value})

    def stop(self) -> None:
        super().stop()
        self._process.say({"stop": True})

    async def _start(self) -> None:
        await self._process.start({**self._start_message, "target": self.target.value})
        if self.stopping:
            self._process.say({"stop": True})
        while not self._begun:
            await self._hear()

    async def _execute(self) -> None:
        while not self._ended:
            await self._hear()

    async def _hear(self) -> None:
        message = await self._process.hear()
        self._heard_ms = self._clock.monotonic_ms()
        if "stats" in message:
            self._reported.reported, self._call_ms = message["stats"], int(message["call_ms"])
        elif "topic" in message:
            self._listener.on_topic_used(self.id, message["topic"])
        elif "ask" in message:
            answering = asyncio.create_task(self._answer(message))
            self._answering.add(answering)
            answering.add_done_callback(self._answering.discard)
        else:
            self._on_event(message)

    def _on_event(self, message: Message) -> None:
        event = Event(message["event"])
        if event is Event.FAILURE:
            trace = message["trace"]
            kind, _, said = trace.rstrip().rpartition("\n")[2].partition(": ")
            raise FailedThere(said, kind, trace)
        if event is Event.SHUTDOWN:
            self._begun = self._ended = True
        elif not self._begun:
            self._begun = True
        else:
            self.moved(event)

    async def _answer(self, asked: Message) -> None:
        """Answers a question of the process from the offset store."""
        answer: dict[str, Any] = {"answer": asked["ask"]}
        try:
            if "set" in asked:
                await self._offsets.set(from_pairs(asked["set"]))
            elif "get" in asked:
                keys = from_pairs([key, None] for key in asked["get"])
                answer["values"] = to_pairs(await self._offsets.get(list(keys)))
            else:
                answer["values"] = to_pairs(await self._offsets.connector_offsets(asked["of"]))
        except PenstockError as e:
            answer |= error_message(e)
        self._process.say(answer)

    async def _close(self) -> None:
        for answering in self._answering:
            answering.cancel()
        await self._process.end(0 if self.cancelled else END_MS)
