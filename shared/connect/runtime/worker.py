"""The worker: runs connectors and tasks, whatever assigns them to it.

A herder starts and stops them. The worker reports outcomes to the herder through a StatusListener. If a connector or
task fails or waits without end, all others continue. But an `async def` method that blocks the event loop blocks all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from penstock.shared.common.backoff import ExponentialBackoff, RestartBackoff
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.log import get_logger
from penstock.shared.connect.allowed_files import FILES_ALLOWED, AllowedFiles
from penstock.shared.connect.config_provider import ConfigTransformer, unresolved
from penstock.shared.connect.connector import Props, SinkConnector
from penstock.shared.connect.errors import ConnectError, ConnectorNotFound, TooManyTasks, summary_of, trace_of
from penstock.shared.connect.properties import properties_from_values
from penstock.shared.connect.redaction import Mask
from penstock.shared.connect.runtime.config_validation import ConfigInfos, validate_connector
from penstock.shared.connect.runtime.offset_backing_store import OffsetBackingStore
from penstock.shared.connect.runtime.plugins import Plugins, class_name
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State, TargetState
from penstock.shared.connect.runtime.status_listener import Id, StatusListener
from penstock.shared.connect.runtime.task_thread import TaskThread, connector_errors
from penstock.shared.connect.runtime.worker_config import WorkerConfig
from penstock.shared.connect.runtime.worker_connector import WorkerConnector
from penstock.shared.connect.runtime.worker_task import TaskSpec, WorkerTask

log = get_logger(__name__)

STALL_LOOKS = 10
"""The number of checks for stalled tasks within `task.stall.timeout.ms`."""
STALL_LOOK_MS_MIN = 50
"""The minimum interval between two checks for stalled tasks."""

TaskMaker = Callable[[TaskSpec, StatusListener], WorkerTask]
"""Makes a task ready to start. Raises ConfigError and ConnectError if the configuration does not allow it."""


class Worker:
    """Runs connectors and tasks, in one event loop. `TaskThread` says which methods run in threads."""

    def __init__(
        self, config: WorkerConfig, plugins: Plugins, offsets: OffsetBackingStore, make_task: TaskMaker
    ) -> None:
        self.config = config
        self.plugins = plugins
        self.offsets = offsets
        self.transformer = ConfigTransformer.of_worker(config["config.providers"], config.props)
        self._files = AllowedFiles(config[FILES_ALLOWED])
        plugins.import_nothing_from(self._files)
        self._make_task = make_task
        self._clock = SYSTEM_CLOCK
        self._connectors: dict[str, WorkerConnector] = {}
        self._tasks: dict[ConnectorTaskId, WorkerTask] = {}
        self._targets: dict[str, TargetState] = {}
        self._restarts = WorkerRestarts(restart_backoff(config))
        self._watchers: dict[ConnectorTaskId, asyncio.Task[None]] = {}
        """For each task on this worker, the asyncio task that restarts it. `_tasks` lacks tasks that cannot be made."""
        self._stalled: set[ConnectorTaskId] = set()
        self._stall_watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Worker {len(self._connectors)} connectors, {len(self._watchers)} tasks>"

    async def startup(self) -> None:
        """Open the offset store, and start to watch for stalled tasks."""
        await self.offsets.start()
        self._stall_watch = asyncio.create_task(self._watch_stalls(), name="stalled tasks")

    async def shutdown(self) -> None:
        """Stop all tasks, then all connectors, then the offset store."""
        if self._stall_watch is not None:
            self._stall_watch.cancel()
        await self.stop_tasks(self.task_ids())
        await self.stop_connectors(self.connector_names())
        await self.offsets.stop()

    @property
    def graceful_timeout_ms(self) -> int:
        timeout_ms: int = self.config["task.shutdown.graceful.timeout.ms"]
        return timeout_ms

    def connector_names(self) -> frozenset[str]:
        """Return the names of the connectors on this worker, running or not."""
        return frozenset(self._connectors)

    def task_ids(self) -> frozenset[ConnectorTaskId]:
        """Return the tasks on this worker, running or not, also those that cannot be made."""
        return frozenset(self._watchers)

    def is_constructed(self, id: ConnectorTaskId) -> bool:
        """Return whether the object of a task on this worker was constructed, at its first start or later."""
        return id in self._tasks

    def state(self, id: Id) -> State | None:
        """Return the state of a connector or task on this worker, or None if it is not here."""
        found = self._connectors.get(id) if isinstance(id, str) else self._tasks.get(id)
        if found is None:
            return State.FAILED if id in self._watchers else None
        return found.state

    def task_metrics(self) -> list[tuple[ConnectorTaskId, State, dict[str, float]]]:
        """Return each task that could be made, with its state and its metrics. The metrics have Kafka Connect's names,
        with underscores.

        Two metrics are added. `call_duration_ms` is the result of `stalled_ms`. `stalled` is 1 if that is at least
        `task.stall.timeout.ms`, else 0.
        """
        now_ms = self._clock.monotonic_ms()
        limit_ms = self.config["task.stall.timeout.ms"]
        found = []
        for id, task in sorted(self._tasks.items()):
            call_ms = task.stalled_ms(now_ms)
            beyond = {"call_duration_ms": float(call_ms), "stalled": float(call_ms >= limit_ms)}
            found.append((id, task.state, {**task.metrics.values(now_ms), **beyond}))
        return found

    async def _watch_stalls(self) -> None:
        """Log once when a task is stalled, and once when it no longer is."""
        limit_ms = self.config["task.stall.timeout.ms"]
        while True:
            await asyncio.sleep(max(limit_ms / STALL_LOOKS, STALL_LOOK_MS_MIN) / 1000)
            stalled = {id for id in self.task_ids() if self.stalled_ms(id) >= limit_ms}
            for id in sorted(stalled - self._stalled):
                log.warning(
                    "task is stalled inside one call of its connector or converters",
                    task=str(id), for_ms=self.stalled_ms(id),
                )  # fmt: skip
            for id in sorted(self._stalled - stalled):
                log.info("task is no longer stalled", task=str(id))
            self._stalled = stalled

    def stalled_ms(self, id: ConnectorTaskId) -> int:
        """Return how long a task has been inside one call of its connector's code, or has waited in one conversion.

        The result is in ms, and 0 if neither is in progress or the task is not on this worker.
        """
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
        """Start a connector and bring it to its target state. Returns the state that it reached.

        `config` has unresolved variables (`${…}`). `on_reconfiguration` is called when the connector requests new task
        configs. Raises ConnectError if the connector is already on this worker. Any other error is reported to
        `listener`.
        """
        if name in self._connectors:
            raise ConnectError(f"Connector with name {name} already exists")
        mask = self.masking(config)
        try:
            props = self.transformer.resolve(config)
            self.check_files(props)
            with connector_errors("the connector's constructor"):
                made = self.plugins.connector_class(props.get("connector.class", ""))()
            connector = WorkerConnector(name, made, props, listener, on_reconfiguration, mask=mask)
        except Exception as e:
            # The connector's constructor may raise any error.
            log.error("connector cannot be created", connector=name, error=mask(summary_of(e)))
            listener.on_event(name, Event.FAILURE, mask(trace_of(e)))
            return State.FAILED
        self._connectors[name] = connector
        self._targets[name] = target
        return await connector.transition_to(target)

    def masking(self, config: Props) -> Mask:
        """Return a function that masks the secrets of a connector's or task's configuration in a text."""
        return self.transformer.masking(config, self.plugins.class_of_config(config))

    def check_files(self, props: Props) -> None:
        """Raises ConfigError if a connector's configuration names a file that the worker does not allow."""
        self._files.check(self.plugins.connector_class(props.get("connector.class", "")).file_settings, props)

    async def alter_offsets(self, props: Props, offsets: Any) -> bool:
        """Return the result of the connector's `alter_offsets`. A connector is made for this call and is never
        started."""
        connector: Any = self.plugins.connector_class(props["connector.class"])()
        return bool(await TaskThread.call_once("alter-offsets", connector.alter_offsets, props, offsets))

    async def validate(self, config: Props) -> ConfigInfos:
        """Validate a configuration after its variables (`${…}`) are resolved.

        Raises ConfigError if a config provider fails, and as `validate_connector` does. An error of the connector is
        raised as `connector_errors` does.

        The validation runs in a thread, since the connector may read from its external system.
        """
        return await TaskThread.call_once(
            "validate", lambda: validate_connector(self.plugins, self.transformer.resolve(config), self.config.values)
        )

    async def stop_connector(self, name: str) -> None:
        """Stop a connector. After the graceful timeout it is cancelled and abandoned. Does nothing if it is not on this
        worker."""
        connector = self._connectors.pop(name, None)
        if connector is not None:
            await connector.shutdown(self.graceful_timeout_ms)

    async def stop_connectors(self, names: Iterable[str]) -> None:
        """Stop connectors, all at once."""
        await asyncio.gather(*(self.stop_connector(name) for name in names))

    async def connector_task_configs(self, name: str, config: Props) -> list[dict[str, str]]:
        """Return a connector's task configurations, with unresolved variables (`${…}`).

        Raises ConnectorNotFound if the connector is not on this worker, or was stopped meanwhile, also if another
        instance runs now, or was paused before it was asked. Raises TooManyTasks if there are more than `tasks.max`,
        unless `tasks.max.enforce` is false. Raises BadRequest if a value has no JSON form. An error of the connector is
        raised as it is.
        """
        connector = self._connectors.get(name)
        if connector is None:
            raise ConnectorNotFound(f"Connector {name} is not on this worker")
        props = connector.props
        try:
            made = await connector.task_configs(int(props.get("tasks.max", "1")))
        except Exception:
            # A stop while the call ran may be the cause of its error.
            if self._connectors.get(name) is not connector:
                raise ConnectorNotFound(f"Connector {name} was stopped") from None
            raise
        # An instance with a newer config returns its own task configs. These must not replace them.
        if self._connectors.get(name) is not connector:
            raise ConnectorNotFound(f"Connector {name} was stopped")
        if not isinstance(made, list | tuple):
            raise ConnectError(f"task_configs must return a list, and not {type(made).__name__}")
        _check_tasks_max(name, len(made), props)
        plugin = self.plugins.connector_class(props["connector.class"])
        added = {"task.class": class_name(plugin.task_class)}
        if issubclass(plugin, SinkConnector):
            added |= {key: props[key] for key in ("topics", "topics.regex") if key in props}
        # As the config topic stores them, so that both kinds of workers start tasks with the same configurations.
        texts = [properties_from_values(dict(task)) for task in made]
        return [unresolved({**task, **added}, config, props) for task in texts]

    async def start_task(self, spec: TaskSpec, target: TargetState, listener: StatusListener) -> bool:
        """Start a task. If the task cannot be made, reports its failure and returns False.

        After this and each later failure, the task is restarted after a backoff if `task.restart.enable` is set.
        """
        if spec.id in self._watchers:
            raise ConnectError(f"Task already exists in this worker: {spec.id}")
        self._targets[spec.id.connector] = target
        running = self._begin_task(spec, listener)
        self._watchers[spec.id] = asyncio.create_task(
            self._restart_after_failures(spec, listener, running), name=f"watch-{spec.id}"
        )
        return running is not None

    def _begin_task(self, spec: TaskSpec, listener: StatusListener) -> asyncio.Task[None] | None:
        """Make and start a task. Returns the asyncio task that runs it, or None if the task cannot be made, which is
        reported."""
        self._restarts.started(spec.id, self._clock.monotonic_ms())
        try:
            _check_tasks_max(spec.id.connector, spec.tasks, self.transformer.resolve(spec.connector_config))
            with connector_errors("a constructor or configure"):
                task = self._make_task(spec, listener)
        except Exception as e:
            # The constructors of the task, its converters and its transforms may raise any error.
            mask = self.masking({**spec.connector_config, **spec.task_config})
            log.error("task cannot be created", task=str(spec.id), error=mask(summary_of(e)))
            listener.on_event(spec.id, Event.FAILURE, mask(trace_of(e)))
            return None
        self._tasks[spec.id] = task
        return task.start(self._targets[spec.id.connector])

    async def _restart_after_failures(
        self, spec: TaskSpec, listener: StatusListener, running: asyncio.Task[None] | None
    ) -> None:
        """Restart a task after each failure, after a backoff, until it is stopped. `running` is from `_begin_task`."""
        id = spec.id
        while True:
            if running is not None:
                await asyncio.wait([running])
            if self.state(id) is not State.FAILED:
                return
            wait_ms = self.restart_wait_ms(id)
            if wait_ms is None:
                return
            log.warning("task will be restarted", task=str(id), in_ms=wait_ms)
            await asyncio.sleep(wait_ms / 1000)
            listener.on_event(id, Event.RESTART)
            running = self._begin_task(spec, listener)

    def restart_wait_ms(self, id: ConnectorTaskId) -> int | None:
        """Return the delay in ms before a task that has failed is restarted, or None if it is not restarted."""
        return self._restarts.failed(id, self._clock.monotonic_ms())

    async def stop_tasks(self, ids: Iterable[ConnectorTaskId]) -> None:
        """Stop tasks in parallel. Those that still run after the graceful timeout are cancelled and abandoned."""
        for id in (ids := tuple(ids)):
            self._restarts.forget(id)
            if (watcher := self._watchers.pop(id, None)) is not None:
                watcher.cancel()
        tasks = [task for id in ids if (task := self._tasks.pop(id, None)) is not None]
        for task in tasks:
            task.stop()
        await asyncio.gather(*(self._wait_until_task_stopped(task) for task in tasks))

    async def _wait_until_task_stopped(self, task: WorkerTask) -> None:
        if not await task.until_stopped(self.graceful_timeout_ms):
            log.error("task did not stop in time and is abandoned", task=str(task.id))
            task.cancel()

    async def set_target_state(self, name: str, target: TargetState) -> None:
        """Request a target state of a connector's tasks on this worker. Then bring the connector to that state, if it
        is on this worker and has not failed.

        For STOPPED the tasks only pause. The herder ends them.
        """
        self._targets[name] = target
        for id, task in self._tasks.items():
            if id.connector == name:
                task.transition_to(target)
        if (connector := self._connectors.get(name)) is not None:
            await connector.transition_to(target)


def _check_tasks_max(connector: str, count: int, props: Props) -> None:
    """Raise TooManyTasks if a connector has more tasks than `tasks.max`, unless `tasks.max.enforce` is false."""
    tasks_max = int(props.get("tasks.max", "1"))
    if count > tasks_max and props.get("tasks.max.enforce", "true").strip().lower() == "true":
        raise TooManyTasks(
            f"The connector {connector} has generated {count} tasks, which is greater than {tasks_max}, the maximum "
            "number of tasks it is configured to create (tasks.max)"
        )


def restart_backoff(config: WorkerConfig) -> ExponentialBackoff | None:
    """The backoff of failed tasks by the settings `task.restart.*`, or None if they are not restarted."""
    if not config["task.restart.enable"]:
        return None
    initial_ms = config["task.restart.backoff.ms"]
    return ExponentialBackoff(initial_ms, max(config["task.restart.backoff.max.ms"], initial_ms))


class WorkerRestarts:
    """Decides when a worker's tasks and isolated connectors are restarted. Without a backoff they are not restarted.

    >>> restarts = WorkerRestarts(ExponentialBackoff(10, 35))
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

    def __init__(self, backoff: ExponentialBackoff | None) -> None:
        self._backoff = backoff
        self._backoffs: dict[Id, RestartBackoff] = {}
        self._started_ms: dict[Id, int] = {}

    def started(self, id: Id, now_ms: int) -> None:
        """Record when the worker started a connector or task, from which `failed` derives the next backoff."""
        self._started_ms[id] = now_ms

    def failed(self, id: Id, now_ms: int) -> int | None:
        """Return the delay in ms before the worker restarts a connector or task that failed, or None if it does not."""
        if self._backoff is None:
            return None
        backoff = self._backoffs.setdefault(id, RestartBackoff(self._backoff))
        return backoff.wait_ms(now_ms - self._started_ms.get(id, now_ms))

    def forget(self, id: Id) -> None:
        """Forget the start and the failures of a connector or task that is stopped, also if it starts here again."""
        self._backoffs.pop(id, None)
        self._started_ms.pop(id, None)
