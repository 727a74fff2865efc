"""A worker that runs connectors in separate processes if `penstock.task.isolation=process`.

A process runs one connector's work on this worker: the connector, if it is assigned here, and those of its tasks that
are assigned here. It starts with the first of them and ends with the last. This module holds only their states and last
metrics, as the events of the process report them.

A process ends in one of three ways:

1. Everything in it was stopped: its link is closed.
2. Something in it does not stop within the graceful time: it is killed.
3. It ends unexpectedly, by a crash or a signal.

In cases 2 and 3 the rest of its work has failed. It is started again in a new process: after the backoff of failed
tasks, or at once if another part of the connector is started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import LogSettings
from penstock.shared.connect.connector import Props
from penstock.shared.connect.errors import ConfigError, ConnectorNotFound, trace_of
from penstock.shared.connect.isolation.connector_process import ConnectorProcess, ConnectorProcessEnded
from penstock.shared.connect.isolation.messages import METRICS_MS, Message
from penstock.shared.connect.runtime.config_validation import ConfigInfos
from penstock.shared.connect.runtime.offset_backing_store import OffsetBackingStore
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import TRANSITIONS, ConnectorTaskId, Event, State, TargetState
from penstock.shared.connect.runtime.status_listener import Id, StatusListener
from penstock.shared.connect.runtime.worker import TaskMaker, TaskRestarts, Worker
from penstock.shared.connect.runtime.worker_config import ISOLATION, WorkerConfig
from penstock.shared.connect.runtime.worker_task import TaskSpec

log = get_logger(__name__)


@dataclass(slots=True)
class IsolatedPart:
    """A connector or a task: the command that starts it, its state, and its last metrics."""

    command: Message
    state: State = State.UNASSIGNED
    metrics: dict[str, float] = field(default_factory=dict)


class IsolatedConnector:
    """One connector and its tasks on this worker, in a process. `first` returns the first message of a process."""

    def __init__(self, name: str, first: Callable[[str], Message], restarts: TaskRestarts, stop_ms: int, clock: Clock):
        self.name = name
        self.parts: dict[Id, IsolatedPart] = {}
        self._first = first
        self._restarts = restarts
        self._stop_ms = stop_ms
        self._clock = clock
        self._listener: StatusListener
        self._on_reconfiguration: Callable[[str], None]
        self._target = TargetState.STARTED
        self._heard_ms = 0
        self._process: ConnectorProcess | None = None
        self._restart: asyncio.TimerHandle | None = None
        self._stopping = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<IsolatedConnector {self.name}, {len(self.parts)} parts, {self._process!r}>"

    @property
    def pid(self) -> int | None:
        """The process' id, or None if there is none."""
        return None if self._process is None else self._process.pid

    async def start_connector(
        self, config: Props, target: TargetState, listener: StatusListener, on_reconfiguration: Callable[[str], None]
    ) -> State:
        """Starts the connector. Returns the state that it reached."""
        self._on_reconfiguration = on_reconfiguration
        command = {"do": "start_connector", "config": dict(config)}
        process = self._add_part(self.name, command, target, listener)
        try:
            return State(await process.request({**command, "target": target.value}))
        except ConnectorProcessEnded:  # `_on_end` reports the failure and schedules the restart
            return State.FAILED

    def start_task(self, spec: TaskSpec, target: TargetState, listener: StatusListener) -> None:
        """Starts a task, without a wait for it."""
        command = {"do": "start_task", "spec": spec}
        self._add_part(spec.id, command, target, listener).send({**command, "target": target.value})

    async def stop(self, ids: Iterable[Id]) -> None:
        """Stops these parts. Kills the process if they take longer than the graceful time. Ends it with the last."""
        async with self._stopping:
            ids = [id for id in ids if self.parts.pop(id, None) is not None]
            if self._process is not None and ids:
                await self._stop_tasks(self._process, [None if isinstance(id, str) else id.task for id in ids])
            if not self.parts:
                self._cancel_restart()
                process = self._process
                self._process = None
                if process is not None:
                    await process.close()

    async def _stop_tasks(self, process: ConnectorProcess, tasks: list[int | None]) -> None:
        try:
            async with asyncio.timeout(self._stop_ms / 1000):
                await process.request({"do": "stop", "tasks": tasks})
        except TimeoutError:
            log.error("a process did not stop its work in time", connector=self.name, tasks=tasks)
            await process.kill()
        except ConnectorProcessEnded:  # nothing runs any more
            return

    async def set_target_state(self, target: TargetState) -> None:
        """Brings all parts to a target state."""
        self._target = target
        if self._process is not None:
            with contextlib.suppress(ConnectorProcessEnded):
                await self._process.request({"do": "target", "target": target.value})

    async def task_configs(self, config: Props) -> list[dict[str, str]]:
        """See `Worker.connector_task_configs`."""
        if self._process is None:
            raise ConnectorNotFound(f"Connector {self.name} has no process")
        made: list[dict[str, str]] = await self._process.request({"do": "task_configs", "config": dict(config)})
        return made

    def send(self, command: Message) -> None:
        """Sends a command to the process, if there is one."""
        if self._process is not None:
            self._process.send(command)

    def stalled_ms(self, id: Id, now_ms: int) -> int:
        """See `Worker.stalled_ms`. If no metrics arrive, one task blocks the event loop, and so all tasks."""
        if self._process is None:
            return 0
        call_ms = int(self.parts[id].metrics.get("call_duration_ms", 0))
        silent_ms = now_ms - self._heard_ms
        # One missing report may be a delay. After two, the event loop of the process is blocked.
        return call_ms + silent_ms if call_ms or silent_ms >= 2 * METRICS_MS else 0

    def task_metrics(self, now_ms: int, stall_ms: int) -> Iterator[tuple[ConnectorTaskId, State, dict[str, float]]]:
        """See `Worker.task_metrics`."""
        for id, part in self.parts.items():
            if isinstance(id, ConnectorTaskId):
                call_ms = self.stalled_ms(id, now_ms)
                beyond = {"call_duration_ms": float(call_ms), "stalled": float(call_ms >= stall_ms)}
                yield id, part.state, {**part.metrics, **beyond}

    def _add_part(self, id: Id, command: Message, target: TargetState, listener: StatusListener) -> ConnectorProcess:
        """Adds a part. Returns the process that is to start it."""
        self._target = target
        self._listener = listener
        process = self._running_process()
        self.parts[id] = IsolatedPart(command)
        return process

    def _running_process(self) -> ConnectorProcess:
        """Return the process. If there is none, start one, with all parts that the last one ran."""
        if self._process is None:
            self._cancel_restart()
            self._heard_ms = self._clock.monotonic_ms()
            self._restarts.started(self.name, self._heard_ms)
            self._process = ConnectorProcess(
                self.name, self._first(self.name), self._stop_ms, self._on_event, self._on_end
            )
            for id, part in self.parts.items():
                part.state = State.RESTARTING
                part.metrics = {}
                self._listener.on_event(id, Event.RESTART)
                self._process.send({**part.command, "target": self._target.value})
        return self._process

    def _cancel_restart(self) -> None:
        if self._restart is not None:
            self._restart.cancel()

    def _on_end(self, error: ConnectorProcessEnded) -> None:
        self._process = None
        for id, part in self.parts.items():
            if part.state is not State.FAILED:
                part.state = State.FAILED
                self._listener.on_event(id, Event.FAILURE, trace_of(error))
        wait_ms = self._restarts.failed(self.name, self._clock.monotonic_ms()) if self.parts else None
        log.error("a process ended", connector=self.name, reason=str(error), restart_in_ms=wait_ms)
        if wait_ms is not None:
            self._restart = asyncio.get_running_loop().call_later(wait_ms / 1000, self._running_process)

    def _on_event(self, message: Message) -> None:
        self._heard_ms = self._clock.monotonic_ms()
        if "metrics" in message:
            for task, values in message["metrics"]:
                if (part := self.parts.get(ConnectorTaskId(self.name, task))) is not None:
                    part.metrics = values
            for task, topic in message["topics"]:
                self._listener.on_topic_used(ConnectorTaskId(self.name, task), topic)
        elif "reconfigure" in message:
            self._on_reconfiguration(self.name)
        else:
            task = message["task"]
            id = self.name if task is None else ConnectorTaskId(self.name, task)
            self._move_part_state(id, Event(message["event"]), message["trace"])

    def _move_part_state(self, id: Id, event: Event, trace: str | None) -> None:
        part = self.parts.get(id, IsolatedPart({}))  # a part that is being stopped is not in `parts`
        is_restarted = part.state is State.RESTARTING and event is Event.STARTUP
        part.state = TRANSITIONS[event][1]
        self._listener.on_event(id, event, trace)
        # The process may have ended before its connector had returned its task configs.
        if is_restarted and id == self.name:
            self._on_reconfiguration(self.name)


class IsolatingWorker(Worker):
    """A worker with processes. It runs what needs none as every worker does."""

    def __init__(
        self,
        config: WorkerConfig,
        plugins: Plugins,
        offsets: OffsetBackingStore,
        make_task: TaskMaker,
        *,
        log_settings: LogSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(config, plugins, offsets, make_task, clock=clock)
        self._log_settings = log_settings or LogSettings()
        self._isolated: dict[str, IsolatedConnector] = {}
        self._levels: dict[str, str] = {}

    async def shutdown(self) -> None:
        await super().shutdown()
        # A cancelled stop may have left processes without parts.
        await asyncio.gather(*(self._stop_parts(name, ()) for name in tuple(self._isolated)))

    def set_level(self, name: str, level: str) -> None:
        """Sets a logger's level in every process, also in future ones."""
        self._levels.pop(name, None)
        self._levels[name] = level
        for isolated in self._isolated.values():
            isolated.send({"do": "level", "name": name, "level": level})

    def connector_names(self) -> frozenset[str]:
        return super().connector_names() | {name for name, found in self._isolated.items() if name in found.parts}

    def task_ids(self) -> frozenset[ConnectorTaskId]:
        parts = (id for isolated in self._isolated.values() for id in isolated.parts)
        return super().task_ids() | {id for id in parts if isinstance(id, ConnectorTaskId)}

    def state(self, id: Id) -> State | None:
        isolated = self._connector_with_part(id)
        return super().state(id) if isolated is None else isolated.parts[id].state

    def task_metrics(self) -> list[tuple[ConnectorTaskId, State, dict[str, float]]]:
        now_ms = self._clock.monotonic_ms()
        stall_ms = self.config["task.stall.timeout.ms"]
        isolated = [found.task_metrics(now_ms, stall_ms) for found in self._isolated.values()]
        return super().task_metrics() + [row for rows in isolated for row in rows]

    def stalled_ms(self, id: ConnectorTaskId) -> int:
        isolated = self._connector_with_part(id)
        return super().stalled_ms(id) if isolated is None else isolated.stalled_ms(id, self._clock.monotonic_ms())

    async def start_connector(
        self,
        name: str,
        config: Props,
        target: TargetState,
        listener: StatusListener,
        on_reconfiguration: Callable[[str], None] = lambda _name: None,
    ) -> State:
        if not self._is_isolated_connector(config):
            return await super().start_connector(name, config, target, listener, on_reconfiguration)
        return await self._isolated_connector(name).start_connector(config, target, listener, on_reconfiguration)

    async def stop_connector(self, name: str) -> None:
        await asyncio.gather(super().stop_connector(name), self._stop_parts(name, [name]))

    async def connector_task_configs(self, name: str, config: Props) -> list[dict[str, str]]:
        isolated = self._connector_with_part(name)
        if isolated is None:
            return await super().connector_task_configs(name, config)
        try:
            return await isolated.task_configs(config)
        except ConnectorProcessEnded:
            raise ConnectorNotFound(f"Connector {name} was stopped, or its process has ended") from None

    async def start_task(self, spec: TaskSpec, target: TargetState, listener: StatusListener) -> bool:
        if not self._is_isolated_connector(spec.connector_config):
            return await super().start_task(spec, target, listener)
        self._isolated_connector(spec.id.connector).start_task(spec, target, listener)
        return True

    async def stop_tasks(self, ids: Iterable[ConnectorTaskId]) -> None:
        ids = tuple(ids)
        names = {id.connector for id in ids}
        isolated = (self._stop_parts(name, [id for id in ids if id.connector == name]) for name in names)
        await asyncio.gather(super().stop_tasks(ids), *isolated)

    async def set_target_state(self, name: str, target: TargetState) -> None:
        await super().set_target_state(name, target)
        if (isolated := self._isolated.get(name)) is not None:
            await isolated.set_target_state(target)

    async def validate(self, config: Props) -> ConfigInfos:
        if not self._is_isolated_connector(config):
            return await super().validate(config)
        return ConfigInfos(**await self._request_once({"do": "validate", "config": dict(config)}))

    async def alter_offsets(self, props: Props, offsets: Any) -> bool:
        if not self._is_isolated_connector(props):
            return await super().alter_offsets(props, offsets)
        is_sink = isinstance(offsets, Mapping)
        rows = [((tp.topic, tp.partition), at) for tp, at in offsets.items()] if is_sink else offsets
        command = {"do": "alter_offsets", "config": dict(props), "rows": rows, "sink": is_sink}
        return bool(await self._request_once(command))

    def _is_isolated_connector(self, config: Props) -> bool:
        where = config.get(ISOLATION) or self.config[ISOLATION]
        try:
            return self.resolve({ISOLATION: where})[ISOLATION] == "process"
        except ConfigError:
            return False  # the start without a process resolves it again and reports the error

    def _connector_with_part(self, id: Id) -> IsolatedConnector | None:
        isolated = self._isolated.get(id if isinstance(id, str) else id.connector)
        return isolated if isolated is not None and id in isolated.parts else None

    def _isolated_connector(self, name: str) -> IsolatedConnector:
        if name not in self._isolated:
            self._isolated[name] = IsolatedConnector(
                name, self._first_message_to_child, self._restarts, self.graceful_timeout_ms, self._clock
            )
        return self._isolated[name]

    async def _stop_parts(self, name: str, ids: Iterable[Id]) -> None:
        isolated = self._isolated.get(name)
        if isolated is None:
            return
        await isolated.stop(ids)
        # While the stop waited, a start may have added parts, or another stop may have removed the entry.
        if not isolated.parts and self._isolated.get(name) is isolated:
            del self._isolated[name]
            self._restarts.forget(name)

    async def _request_once(self, command: Message) -> Any:
        """Return the answer of a process that ends after it."""
        name = command["config"].get("name", "")
        process = ConnectorProcess(name, self._first_message_to_child(name), self.graceful_timeout_ms)
        try:
            return await process.request(command)
        finally:
            await process.kill()

    def _first_message_to_child(self, connector: str) -> Message:
        return {
            "connector": connector,
            "worker": self.config.props,
            "log": {"level": self._log_settings.level, "format": self._log_settings.format},
            "levels": list(self._levels.items()),
        }
