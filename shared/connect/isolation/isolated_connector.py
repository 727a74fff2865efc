"""One connector and its tasks on this worker, in a separate process.

The process runs the parts of the connector that are assigned to this worker: the connector itself, and tasks. It is
started for the first part and ends with the last one. This module has only the states and last metrics of the parts, as
the process reports them.

A process ends in one of three ways:

1. Everything in it was stopped: its socket is closed.
2. A part does not stop within the graceful time: the process is killed.
3. It exits unexpectedly, by a crash or a signal.

In cases 2 and 3 all parts that were not to be stopped have failed. A new process starts them again: after the backoff
for failed tasks if `task.restart.enable` is set, or at once if another part of the connector is started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.shared.common.clock import Clock
from penstock.shared.common.log import get_logger
from penstock.shared.connect.connector import Props
from penstock.shared.connect.errors import ConnectorNotFound, trace_of
from penstock.shared.connect.isolation.connector_process import ConnectorProcess, ConnectorProcessEnded
from penstock.shared.connect.isolation.messages import METRICS_MS, Message
from penstock.shared.connect.runtime.states import TRANSITIONS, ConnectorTaskId, Event, State, TargetState
from penstock.shared.connect.runtime.status_listener import Id, StatusListener
from penstock.shared.connect.runtime.worker import WorkerRestarts
from penstock.shared.connect.runtime.worker_task import TaskSpec

log = get_logger(__name__)


@dataclass(slots=True)
class IsolatedPart:
    """An isolated connector or task: the command that starts it, its state, and its last metrics."""

    command: Message
    state: State = State.UNASSIGNED
    metrics: dict[str, float] = field(default_factory=dict)


class IsolatedConnector:
    """One connector and its tasks on this worker, in a process. `first` makes the first message to a new process."""

    def __init__(
        self, name: str, first: Callable[[str], Message], restarts: WorkerRestarts, stop_ms: int, clock: Clock
    ):
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
        """Start the isolated connector. Returns the state that it reached."""
        self._on_reconfiguration = on_reconfiguration
        command = {"do": "start_connector", "config": dict(config)}
        process = self._add_part(self.name, command, target, listener)
        try:
            return State(await process.request({**command, "target": target.value}))
        except ConnectorProcessEnded:
            # `_on_end` reports the failure and schedules the restart.
            return State.FAILED

    def start_task(self, spec: TaskSpec, target: TargetState, listener: StatusListener) -> None:
        """Start a task of the isolated connector, without a wait for it."""
        command = {"do": "start_task", "spec": spec}
        self._add_part(spec.id, command, target, listener).send({**command, "target": target.value})

    async def stop(self, ids: Iterable[Id]) -> None:
        """Stop these parts of the connector. If they take too long, the process is killed. The process ends with
        the last part."""
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
        except ConnectorProcessEnded:
            # The parts ended with their process.
            return

    async def set_target_state(self, target: TargetState) -> None:
        """Bring the isolated connector and its tasks to a target state."""
        self._target = target
        if self._process is not None:
            with contextlib.suppress(ConnectorProcessEnded):
                await self._process.request({"do": "target", "target": target.value})

    async def task_configs(self, config: Props) -> list[dict[str, str]]:
        """Return the connector's task configurations, as `Worker.connector_task_configs` does.

        Also raises ConnectorProcessEnded.
        """
        if self._process is None:
            raise ConnectorNotFound(f"Connector {self.name} has no process")
        made: list[dict[str, str]] = await self._process.request({"do": "task_configs", "config": dict(config)})
        return made

    def send(self, command: Message) -> None:
        """Send a command to the connector's process, if there is one."""
        if self._process is not None:
            self._process.send(command)

    def stalled_ms(self, id: Id, now_ms: int) -> int:
        """Return how long a part has been inside one call of the connector's code, as `Worker.stalled_ms` does.

        The result includes the time since the process last sent a message. If it sends none, one call blocks its event
        loop, and so all parts.
        """
        if self._process is None:
            return 0
        call_ms = int(self.parts[id].metrics.get("call_duration_ms", 0))
        silent_ms = now_ms - self._heard_ms
        # One missing report may be a delay. After two, the event loop of the process is blocked.
        return call_ms + silent_ms if call_ms or silent_ms >= 2 * METRICS_MS else 0

    def task_metrics(self, now_ms: int, stall_ms: int) -> Iterator[tuple[ConnectorTaskId, State, dict[str, float]]]:
        """Yield each task of the isolated connector with its state and the metrics that its process last reported.

        The metrics are those of `Worker.task_metrics`.
        """
        for id, part in self.parts.items():
            if isinstance(id, ConnectorTaskId):
                call_ms = self.stalled_ms(id, now_ms)
                beyond = {"call_duration_ms": float(call_ms), "stalled": float(call_ms >= stall_ms)}
                yield id, part.state, {**part.metrics, **beyond}

    def _add_part(self, id: Id, command: Message, target: TargetState, listener: StatusListener) -> ConnectorProcess:
        """Add a part. Returns the connector's process, to which the caller must send the part's command."""
        self._target = target
        self._listener = listener
        process = self._running_process()
        self.parts[id] = IsolatedPart(command)
        return process

    def _running_process(self) -> ConnectorProcess:
        """Return the process. If there is none, start one and restart all parts in it."""
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
        # A part that is being stopped is not in `parts`.
        part = self.parts.get(id, IsolatedPart({}))
        is_restarted = part.state is State.RESTARTING and event is Event.STARTUP
        part.state = TRANSITIONS[event][1]
        self._listener.on_event(id, event, trace)
        # The process may have ended before its connector had returned its task configs.
        if is_restarted and id == self.name:
            self._on_reconfiguration(self.name)
