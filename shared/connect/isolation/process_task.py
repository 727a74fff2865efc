"""A task in a process of its own, as the worker sees it: a task like every other (an edge).

The worker's listener hears what the process says of its task's life. A process that ends without a word (killed, out of
memory, a crash of the interpreter) is a failure with its exit status, which is restarted after a back-off as any other.
A task that is stopped and does not end in time is killed with its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from shared.common.clock import SYSTEM_CLOCK, Clock
from shared.common.errors import PenstockError
from shared.common.log import get_logger
from shared.common.settings import LogSettings
from shared.connect.config_provider import ConfigTransformer
from shared.connect.connector import SinkConnector
from shared.connect.errors import ConfigError, ConnectError
from shared.connect.herder.settings import DistributedConfig, StandaloneConfig
from shared.connect.isolation.messages import (
    LINE_BYTES_MAX,
    STATS_MS,
    Message,
    error_kind,
    from_pairs,
    pack,
    to_pairs,
    unpack,
)
from shared.connect.offset_store import OffsetBackingStore
from shared.connect.plugins import Plugins
from shared.connect.states import Event, TargetState
from shared.connect.status_listener import StatusListener
from shared.connect.task_factory import TaskFactory
from shared.connect.task_metrics import TaskMetrics
from shared.connect.worker_config import ISOLATION, WorkerConfig
from shared.connect.worker_task import TaskSpec, WorkerTask

log = get_logger(__name__)

CHILD = "shared.connect.isolation.child"
END_MS = 5_000
"""How long a process may take to end once its task has."""


class TaskProcessEnded(ConnectError):
    """A task's process has ended by itself."""


class FailedThere(ConnectError):
    """The task failed in its process; `trace` is what it said there."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace.rstrip().rpartition("\n")[2])
        self.trace = trace


class ReportedMetrics(TaskMetrics):
    """What the process said last."""

    reported: Mapping[str, float] | None = None

    def values(self, now_ms: int) -> dict[str, float]:
        return super().values(now_ms) if self.reported is None else dict(self.reported)


class IsolatedTasks:
    """Makes tasks here or in processes of their own, as worker and connector say (`penstock.task.isolation`)."""

    def __init__(
        self,
        here: TaskFactory,
        config: WorkerConfig,
        plugins: Plugins,
        offsets: OffsetBackingStore,
        *,
        group_id: str = "connect",
        log_settings: LogSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._here, self._config, self._plugins, self._offsets = here, config, plugins, offsets
        self._group_id, self._log, self._clock = group_id, log_settings or LogSettings(), clock
        self._transformer = ConfigTransformer.of_worker(config["config.providers"], config.props)
        self._levels: dict[str, str] = {}
        self._made: weakref.WeakSet[ProcessTask] = weakref.WeakSet()

    def set_level(self, name: str, level: str) -> None:
        """Set a logger's level in every task's process, also in those that come."""
        self._levels.pop(name, None)
        self._levels[name] = level
        for task in list(self._made):
            task.set_level(name, level)

    def __call__(self, spec: TaskSpec, listener: StatusListener) -> WorkerTask:
        props = self._transformer.resolve(spec.connector_config)
        where = props.get(ISOLATION) or self._config[ISOLATION]
        if where not in ("asyncio", "process"):
            raise ConfigError(f"Invalid value {where} for configuration {ISOLATION}: String must be asyncio or process")
        if where == "asyncio":
            return self._here(spec, listener)
        plugin = self._plugins.connector_class(props.get("connector.class", ""))
        kind = "sink" if issubclass(plugin, SinkConnector) else "source"
        metrics = ReportedMetrics(kind, self._clock.monotonic_ms())
        made = ProcessTask(spec, listener, self._start_message(spec), self._offsets, metrics, self._clock)
        self._made.add(made)
        return made

    def _start_message(self, spec: TaskSpec) -> Message:
        kinds = {DistributedConfig: "distributed", StandaloneConfig: "standalone"}
        return {
            "worker": self._config.props,
            "config": kinds.get(type(self._config), "worker"),
            "group_id": self._group_id,
            "offset_topic": self._offsets.topic,
            "log": {"level": self._log.level, "format": self._log.format},
            "levels": list(self._levels.items()),
            "connector": spec.id.connector,
            "task": spec.id.task,
            "connector_config": dict(spec.connector_config),
            "task_config": dict(spec.task_config),
            "generation": spec.generation,
            "tasks": spec.tasks,
        }


class ProcessTask(WorkerTask):
    """The worker's side."""

    def __init__(
        self,
        spec: TaskSpec,
        listener: StatusListener,
        start: Message,
        offsets: OffsetBackingStore,
        metrics: ReportedMetrics,
        clock: Clock,
    ) -> None:
        super().__init__(spec.id, listener, metrics, clock)
        self._start_message, self._offsets, self._reported = start, offsets, metrics
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._begun = self._ended = False
        self._heard_ms = 0
        self._call_ms = 0
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The process' id, once it has been started."""
        return None if self._process is None else self._process.pid

    def stalled_ms(self, now_ms: int) -> int:
        """As of any task; a process that says nothing is held up inside a call."""
        silent_ms = max(0, now_ms - self._heard_ms)
        if not self._heard_ms or (not self._call_ms and silent_ms < 2 * STATS_MS):
            return 0
        return self._call_ms + silent_ms

    def transition_to(self, target: TargetState) -> None:
        super().transition_to(target)
        self._say({"target": target.value})

    def stop(self) -> None:
        super().stop()
        self._say({"stop": True})

    def set_level(self, name: str, level: str) -> None:
        """Set a logger's level there."""
        self._say({"level": [name, level]})

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", CHILD, str(theirs.fileno()),
                pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        log.info("task has a process", task=str(self.id), pid=self._process.pid)
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES_MAX)
        self._say({**self._start_message, "target": self.target.value})
        if self.stopping:
            self._say({"stop": True})
        while not self._begun:
            await self._hear()

    async def _execute(self) -> None:
        while not self._ended:
            await self._hear()

    async def _hear(self) -> None:
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError):
            line = b""
        if not line:
            raise await self._end_without_a_word()
        message = unpack(line)
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

    async def _end_without_a_word(self) -> TaskProcessEnded:
        assert self._process is not None
        status = await self._ended_within(END_MS)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return TaskProcessEnded(f"the process of task {self.id} (pid {self._process.pid}) {how}")

    def _on_event(self, message: Message) -> None:
        event = Event(message["event"])
        if event is Event.FAILURE:
            raise FailedThere(message["trace"])
        if event is Event.SHUTDOWN:
            self._begun = self._ended = True
        elif not self._begun:
            self._begun = True
        else:
            self.moved(event)

    async def _answer(self, asked: Message) -> None:
        """Ask the offset store for the process."""
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
            answer |= {"error": str(e), "kind": error_kind(e)}
        self._say(answer)

    def _say(self, message: Message) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(pack(message))

    def _trace(self, error: Exception) -> str:
        return error.trace if isinstance(error, FailedThere) else super()._trace(error)

    async def _close(self) -> None:
        for answering in self._answering:
            answering.cancel()
        if self._writer is not None:
            self._writer.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        await self._ended_within(0 if self.cancelled else END_MS)

    async def _ended_within(self, timeout_ms: int) -> int:
        """The process' exit status; it is killed where it runs on for longer."""
        process = self._process
        assert process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                return await process.wait()
        log.warning("a task's process is killed", task=str(self.id), pid=process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
