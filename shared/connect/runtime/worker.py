"""The worker: runs connectors and tasks and knows nothing of who decided that it should.

A herder tells it what to start and stop, and hears through a StatusListener what becomes of each. Connectors and tasks
are kept apart by name: one that fails or hangs ends by itself, and the worker goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.log import get_logger
from penstock.shared.connect.allowed_files import FILES_ALLOWED, AllowedFiles
from penstock.shared.connect.config_provider import ConfigTransformer, Mask
from penstock.shared.connect.connector import Connector, Props, SinkConnector, task_class
from penstock.shared.connect.errors import ConnectError, ConnectorNotFound, said_of, trace_of
from penstock.shared.connect.isolation.own_thread import in_thread
from penstock.shared.connect.isolation.process import Processes, runs_apart
from penstock.shared.connect.isolation.process_connector import ProcessConnector
from penstock.shared.connect.runtime.offset_store import OffsetBackingStore
from penstock.shared.connect.runtime.plugins import Plugins, class_name
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.status_listener import Id, StatusListener
from penstock.shared.connect.runtime.validation import ConfigInfos, validate_connector
from penstock.shared.connect.runtime.worker_config import ISOLATION, WorkerConfig
from penstock.shared.connect.runtime.worker_connector import WorkerConnector
from penstock.shared.connect.runtime.worker_task import TaskSpec, WorkerTask

log = get_logger(__name__)

STALL_LOOKS, STALL_LOOK_MS_MIN = 10, 50
"""How often within `task.stall.timeout.ms` it is looked which tasks are stalled, and how soon again at the earliest."""

TaskMaker = Callable[[TaskSpec, StatusListener], WorkerTask]
"""Makes a task ready to start; ConfigError and ConnectError where the configuration does not allow it."""


class Worker:
    """Runs connectors and tasks, in one event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        plugins: Plugins,
        offsets: OffsetBackingStore,
        make_task: TaskMaker,
        *,
        processes: Processes | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`processes` makes those of connectors; by default with the log's own settings."""
        self.config, self.plugins, self.offsets = config, plugins, offsets
        self._processes = processes or Processes(config)
        self.transformer = ConfigTransformer.of_worker(config["config.providers"], config.props)
        self._files = AllowedFiles(config[FILES_ALLOWED])
        self._make_task = make_task
        self._clock = clock
        self._connectors: dict[str, WorkerConnector] = {}
        self._tasks: dict[ConnectorTaskId, WorkerTask] = {}
        self._specs: dict[ConnectorTaskId, tuple[TaskSpec, StatusListener]] = {}
        self._targets: dict[str, TargetState] = {}
        self._restarts = Restarts(config)
        self._watchers: dict[ConnectorTaskId, asyncio.Task[None]] = {}
        self._stalled: set[ConnectorTaskId] = set()
        self._stall_watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Worker {len(self._connectors)} connectors, {len(self._tasks)} tasks>"

    async def startup(self) -> None:
        """Open the offset store."""
        await self.offsets.start()
        self._stall_watch = asyncio.create_task(self._watch_stalls(), name="stalled tasks")

    async def shutdown(self) -> None:
        """Stop all tasks, then all connectors, then the offset store."""
        if self._stall_watch is not None:
            self._stall_watch.cancel()
        await self.stop_tasks(tuple(self._tasks))
        await self.stop_connectors(tuple(self._connectors))
        await self.offsets.stop()

    @property
    def graceful_timeout_ms(self) -> int:
        timeout_ms: int = self.config["task.shutdown.graceful.timeout.ms"]
        return timeout_ms

    def connector_names(self) -> frozenset[str]:
        """The connectors here, running or not."""
        return frozenset(self._connectors)

    def task_ids(self) -> frozenset[ConnectorTaskId]:
        """The tasks here, running or not."""
        return frozenset(self._tasks)

    def state(self, id: Id) -> State | None:
        """What a connector or task here is doing; None where it is not here."""
        found = self._connectors.get(id) if isinstance(id, str) else self._tasks.get(id)
        return None if found is None else found.state

    def task_metrics(self) -> list[tuple[ConnectorTaskId, State, dict[str, float]]]:
        """Each task here with its state and what it counts, by Kafka Connect's names with underscores.

        Beyond those, `call_duration_ms`: for how long it has been inside one call of the connector's code, and
        `stalled`: whether that is longer than `task.stall.timeout.ms`.
        """
        now_ms, limit_ms = self._clock.monotonic_ms(), self.config["task.stall.timeout.ms"]
        found = []
        for id, task in sorted(self._tasks.items()):
            call_ms = task.stalled_ms(now_ms)
            beyond = {"call_duration_ms": float(call_ms), "stalled": float(call_ms >= limit_ms)}
            found.append((id, task.state, {**task.metrics.values(now_ms), **beyond}))
        return found

    async def _watch_stalls(self) -> None:
        """Say once of each task that it has been inside one call for too long, and once that it goes on."""
        limit_ms = self.config["task.stall.timeout.ms"]
        while True:
            await asyncio.sleep(max(limit_ms / STALL_LOOKS, STALL_LOOK_MS_MIN) / 1000)
            now_ms = self._clock.monotonic_ms()
            stalled = {id for id, task in self._tasks.items() if task.stalled_ms(now_ms) >= limit_ms}
            for id in sorted(stalled - self._stalled):
                call_ms = self._tasks[id].stalled_ms(now_ms)
                log.warning(
                    "task is stalled inside one call of its connector or converters", task=str(id), for_ms=call_ms
                )
            for id in sorted(self._stalled - stalled):
                log.info("task is stalled no more", task=str(id))
            self._stalled = stalled

    def stalled_ms(self, id: ConnectorTaskId) -> int:
        """For how long a task has been inside one call of its connector's code; 0 where it is not."""
        task = self._tasks.get(id)
        return 0 if task is None else task.stalled_ms(self._clock.monotonic_ms())

    async def start_connector(
        self,
        name: str,
        config: Props,
        target: TargetState,
        listener: StatusListener,
        on_reconfiguration: Callable[[str], None] = lambda _name: None,
    ) -> State:
        """Start a connector and bring it to its target state; gives the state it came to.

        `config` is as it is kept, with its `${…}`. What goes wrong is reported as its failure and not raised.
        `on_reconfiguration` is called when the connector asks for its tasks to be configured anew.
        """
        if name in self._connectors:
            raise ConnectError(f"Connector with name {name} already exists")
        mask = self.transformer.masking(config)
        try:
            props = self.transformer.resolve(config)
            self.check_files(props)
            made = self._make_connector(name, props)
            connector = WorkerConnector(name, made, props, listener, on_reconfiguration, mask=mask)
        except Exception as e:  # of the connector's constructor too
            log.error("connector cannot be made", connector=name, error=mask(said_of(e)))
            listener.on_failure(name, mask(trace_of(e)))
            return State.FAILED
        self._connectors[name] = connector
        self._targets[name] = target
        return await connector.transition_to(target)

    def _make_connector(self, name: str, props: Props) -> Connector:
        """One here or in a process of its own, as worker and connector say."""
        plugin = self.plugins.connector_class(props.get("connector.class", ""))
        if runs_apart(props, self.config):
            return ProcessConnector(name, plugin, self._processes, self.graceful_timeout_ms)
        return plugin()

    def check_files(self, props: Props) -> None:
        """ConfigError if a connector's configuration names a file that the worker does not allow."""
        self._files.check(self.plugins.connector_class(props.get("connector.class", "")).file_settings, props)

    @asynccontextmanager
    async def connector_to_ask(self, props: Props) -> AsyncIterator[Connector]:
        """A connector that is asked something and never started."""
        connector = self._make_connector(props.get("name", ""), props)
        try:
            yield connector
        finally:
            if isinstance(connector, ProcessConnector):
                await connector.close(0)

    async def validate(self, config: Props) -> ConfigInfos:
        """What is wrong with a configuration, which may have `${…}`; what the connector raises.

        Where the connector has no process of its own it is asked on a thread, since it may look at what it connects to.
        """
        props = await in_thread(lambda: self.resolve(config))
        if props.get(ISOLATION, self.config[ISOLATION]) == "process":
            async with self.connector_to_ask(props) as connector:
                assert isinstance(connector, ProcessConnector)
                return await connector.validated(props)
        return await in_thread(lambda: validate_connector(self.plugins, props, self.config.values))

    async def stop_connector(self, name: str) -> None:
        """Stop a connector, for at most the graceful timeout; nothing where it is not here."""
        connector = self._connectors.pop(name, None)
        if connector is not None:
            await connector.shutdown(self.graceful_timeout_ms)

    async def stop_connectors(self, names: Iterable[str]) -> None:
        """Stop connectors, all at once."""
        await asyncio.gather(*(self.stop_connector(name) for name in names))

    async def connector_task_configs(self, name: str, config: Props) -> list[dict[str, str]]:
        """The tasks that a running connector divides its work into, as they are to be kept: with `${…}` unresolved.

        Raises ConnectorNotFound, also where it is stopped meanwhile, ConnectError where there are more than tasks.max,
        and what the connector raises.
        """
        connector = self._connectors.get(name)
        if connector is None:
            raise ConnectorNotFound(f"Connector {name} is not on this worker")
        props = connector.props
        tasks_max = int(props.get("tasks.max", "1"))
        try:
            made = await connector.task_configs(tasks_max)
        except Exception:  # of the connector
            if self._connectors.get(name) is not connector:
                raise ConnectorNotFound(f"Connector {name} was stopped") from None
            raise
        if len(made) > tasks_max and props.get("tasks.max.enforce", "true").lower() == "true":
            raise ConnectError(
                f"The connector {name} has generated {len(made)} tasks, which is greater than {tasks_max}, the maximum "
                "number of tasks it is configured to create (tasks.max)"
            )
        plugin = self.plugins.connector_class(props["connector.class"])
        added = {"task.class": class_name(task_class(plugin))}
        if issubclass(plugin, SinkConnector):
            added |= {key: props[key] for key in ("topics", "topics.regex") if key in props}
        return [self.transformer.unresolve({**task, **added}, config) for task in made]

    async def start_task(self, spec: TaskSpec, target: TargetState, listener: StatusListener) -> bool:
        """Start a task; False, reported as its failure, where it cannot even be made.

        A task that fails later is restarted by itself, after a back-off, where `task.restart.enable` says so.
        """
        if spec.id in self._tasks:
            raise ConnectError(f"Task already exists in this worker: {spec.id}")
        self._targets[spec.id.connector] = target
        self._specs[spec.id] = (spec, listener)
        begun = self._begin(spec, listener, target)
        if not begun:
            self._specs.pop(spec.id, None)
        return begun

    def _begin(self, spec: TaskSpec, listener: StatusListener, target: TargetState) -> bool:
        try:
            self._check_tasks_max(spec)
            task = self._make_task(spec, listener)
        except Exception as e:  # of the connector's constructor too
            mask = self.transformer.masking({**spec.connector_config, **spec.task_config})
            log.error("task cannot be made", task=str(spec.id), error=mask(str(e)))
            listener.on_failure(spec.id, mask(trace_of(e)))
            return False
        self._tasks[spec.id] = task
        self._restarts.started(spec.id, self._clock.monotonic_ms())
        running = task.start(target)
        self._watchers[spec.id] = asyncio.create_task(self._watch(task, running), name=f"watch-{spec.id}")
        return True

    def _check_tasks_max(self, spec: TaskSpec) -> None:
        tasks_max = int(spec.connector_config.get("tasks.max", "1"))
        if spec.tasks > tasks_max and spec.connector_config.get("tasks.max.enforce", "true").lower() == "true":
            raise ConnectError(
                f"The connector {spec.id.connector} has {spec.tasks} tasks, which is greater than {tasks_max}, the "
                "maximum number of tasks it is configured to create (tasks.max)"
            )

    async def _watch(self, task: WorkerTask, running: asyncio.Task[None]) -> None:
        """Restart a task that failed, again and again where it cannot even be made."""
        await asyncio.wait([running])
        id, begun = task.id, task.state is not State.FAILED or task.stopping
        while not begun and (wait_ms := self._restarts.failed(id, self._clock.monotonic_ms())) is not None:
            log.warning("task will be restarted", task=str(id), in_ms=wait_ms)
            await asyncio.sleep(wait_ms / 1000)
            spec, listener = self._specs[id]
            listener.on_restart(id)
            self._restarts.started(id, self._clock.monotonic_ms())
            begun = self._begin(spec, listener, self._targets[id.connector])

    async def stop_tasks(self, ids: Iterable[ConnectorTaskId]) -> None:
        """Stop tasks, all at once; those that run on after the graceful timeout are cancelled and abandoned."""
        for id in (ids := tuple(ids)):
            self._specs.pop(id, None)
            self._restarts.forget(id)
            if (watcher := self._watchers.pop(id, None)) is not None:
                watcher.cancel()
        tasks = [task for id in ids if (task := self._tasks.pop(id, None)) is not None]
        for task in tasks:
            task.stop()
        await asyncio.gather(*(self._until_stopped(task) for task in tasks))

    async def _until_stopped(self, task: WorkerTask) -> None:
        if not await task.until_stopped(self.graceful_timeout_ms):
            log.error("task did not stop in time and is abandoned", task=str(task.id))
            task.cancel()

    async def set_target_state(self, name: str, target: TargetState) -> None:
        """Bring a connector and its tasks here to a target state."""
        self._targets[name] = target
        for id, task in self._tasks.items():
            if id.connector == name:
                task.transition_to(target)
        if (connector := self._connectors.get(name)) is not None:
            await connector.transition_to(target)

    def resolve(self, config: Mapping[str, str]) -> dict[str, str]:
        """A configuration with its `${…}` resolved, to be validated and never kept."""
        return self.transformer.resolve(config)

    def masking(self, config: Mapping[str, str]) -> Mask:
        """What takes the values of a configuration's `${…}` out of a text."""
        return self.transformer.masking(config)


class RestartSettings(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...


class Restarts:
    """When failed tasks are restarted: after a backoff that doubles with each failure.

    >>> backoff = {"task.restart.backoff.ms": 10, "task.restart.backoff.max.ms": 35}
    >>> restarts = Restarts({"task.restart.enable": True, **backoff})
    >>> task = ConnectorTaskId("src", 0)
    >>> waits = []
    >>> for now_ms in (0, 1, 2, 3):
    ...     restarts.started(task, now_ms)
    ...     waits.append(restarts.failed(task, now_ms))
    >>> waits
    [10, 20, 35, 35]
    >>> restarts.failed(task, 100)  # it ran for longer than the longest wait
    10
    """

    def __init__(self, settings: RestartSettings) -> None:
        self._enabled = bool(settings["task.restart.enable"])
        self._first_ms = int(settings["task.restart.backoff.ms"])
        self._max_ms = max(int(settings["task.restart.backoff.max.ms"]), self._first_ms)
        self._failures: dict[ConnectorTaskId, int] = {}
        self._started_ms: dict[ConnectorTaskId, int] = {}

    def started(self, id: ConnectorTaskId, now_ms: int) -> None:
        """The task was started."""
        self._started_ms[id] = now_ms

    def failed(self, id: ConnectorTaskId, now_ms: int) -> int | None:
        """How long to wait before it is started again, in ms; None: not at all."""
        if not self._enabled:
            return None
        ran_ms = now_ms - self._started_ms.get(id, now_ms)
        failures = 0 if ran_ms > self._max_ms else self._failures.get(id, 0)
        self._failures[id] = failures + 1
        return min(self._first_ms << min(failures, 32), self._max_ms)

    def forget(self, id: ConnectorTaskId) -> None:
        """The task is not here any more."""
        self._failures.pop(id, None)
        self._started_ms.pop(id, None)
