"""The common base of both herders: reads, validation, changes, restarts, and calls of plugins.

Reads of configs and statuses return what this worker has read. No read waits for a rebalance or needs the leader. Each
herder stores changes, and runs commands in its loop, in its own way.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from penstock.shared.clients.admin import Admin
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError, IllegalState, PenstockError
from penstock.shared.common.log import get_logger
from penstock.shared.connect import redaction
from penstock.shared.connect.errors import (
    BadRequest,
    ConnectError,
    ConnectorNotFound,
    TooManyTasks,
    summary_of,
    trace_of,
)
from penstock.shared.connect.herder import views
from penstock.shared.connect.herder.command_queue import REQUEST_TIMEOUT_MS, CommandQueue, request_timeout
from penstock.shared.connect.herder.connector_offsets import ConnectorOffsets, Row
from penstock.shared.connect.herder.errors import AlreadyExists, Forbidden, RequestTimedOut, StaleConfig
from penstock.shared.connect.herder.loggers import Loggers
from penstock.shared.connect.herder.restart_plan import RestartPlan, plan_restart
from penstock.shared.connect.herder.status_reporter import StatusReporter
from penstock.shared.connect.herder.views import Json
from penstock.shared.connect.herder.work_runner import WorkRunner
from penstock.shared.connect.runtime.client_settings import GROUP_ID_OVERRIDE
from penstock.shared.connect.runtime.config_validation import ConfigInfos, plugin_definitions, require_connector_class
from penstock.shared.connect.runtime.offset_backing_store import OffsetBackingStore
from penstock.shared.connect.runtime.plugins import Plugins, connector_type, plugin_version
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State, TargetState
from penstock.shared.connect.runtime.status_listener import Id, connector_of
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.storage.cluster_config_state import ConfigSnapshot
from penstock.shared.connect.storage.config_records import Config, RestartRequest
from penstock.shared.connect.storage.config_store import ConfigStore
from penstock.shared.connect.storage.status_store import StatusStore
from penstock.shared.connect.version import CONNECT_VERSION

log = get_logger(__name__)

NOT_STOPPED = (
    "Connectors must be in the STOPPED state before their offsets can be modified. This can be done for the specified "
    "connector by issuing a 'PUT' request to the '/connectors/{name}/stop' endpoint"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of a herder."""

    configs: ConfigStore
    statuses: StatusStore
    offsets: OffsetBackingStore


@contextmanager
def _connector_errors(problem: str, mask: redaction.Mask) -> Iterator[None]:
    """Raise any error of a connector's code with secrets masked. A ConfigError stays a ConfigError. Any other error
    becomes a ConnectError that begins with `problem`."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(mask(str(e))) from None
    except Exception as e:
        raise ConnectError(f"{problem}: {mask(summary_of(e))}") from None


class BaseHerder(ABC):
    """Answers reads, validates configs, and alters offsets. `generation` is that of the group, 0 without a group."""

    generation = 0
    _retry_backoff = ExponentialBackoff(250, 60_000)
    _started = False

    def __init__(
        self,
        worker: Worker,
        admin: Admin,
        stores: Stores,
        worker_id: str,
        *,
        before_task: Callable[[ConnectorTaskId], Awaitable[bool]] | None = None,
    ) -> None:
        self.worker = worker
        self.worker_id = worker_id
        self.plugins: Plugins = worker.plugins
        self.loggers = Loggers(SYSTEM_CLOCK)
        self._admin = admin
        self._stores = stores
        self._clock = SYSTEM_CLOCK
        self._offsets = ConnectorOffsets(admin, stores.offsets, worker.config)
        self._retries: dict[str, tuple[int, asyncio.Future[None]]] = {}
        """By connector, the last retry of its task configs, and the time at which it is due."""
        self._reporter = StatusReporter(
            stores.statuses,
            worker_id,
            SYSTEM_CLOCK,
            generation=lambda: self.generation,
            version=self._connector_version,
            tracks_topics=worker.config["topic.tracking.enable"],
        )
        self._wakeup = asyncio.Event()
        self._commands = CommandQueue(self._clock, self._wakeup.set)
        self._runner = WorkRunner(
            worker,
            self._reporter,
            self.snapshot,
            on_reconfiguration=self._reconfigure_tasks,
            before_task=before_task,
        )

    @property
    def is_ready(self) -> bool:
        """Return whether the worker has started up."""
        return self._started

    async def is_healthy(self) -> bool:
        """Return whether the loop reaches requests."""
        return await self._commands.is_attended()

    def snapshot(self) -> ConfigSnapshot:
        """Return the configs as far as they were read."""
        return self._stores.configs.snapshot()

    def _connector_version(self, connector: str) -> str | None:
        try:
            return plugin_version(self.plugins.connector_class(self.snapshot().configs[connector]["connector.class"]))
        except (KeyError, ConfigError):
            return None

    def startup_metrics(self) -> dict[str, float]:
        """Return the attempts to start connectors and tasks, and how many succeeded, under Kafka Connect's names.

        Percentages are from 0 to 1. Automatic restarts of failed tasks (`task.restart.enable`) do not count.
        """
        found: dict[str, float] = {}
        for kind in ("connector", "task"):
            good = float(self._runner.startups[kind, True])
            bad = float(self._runner.startups[kind, False])
            found[f"{kind}_startup_attempts_total"] = good + bad
            found[f"{kind}_startup_success_total"] = good
            found[f"{kind}_startup_failure_total"] = bad
            found[f"{kind}_startup_success_percentage"] = good / (good + bad) if good + bad else 0.0
            found[f"{kind}_startup_failure_percentage"] = bad / (good + bad) if good + bad else 0.0
        return found

    def rebalance_metrics(self) -> dict[str, float]:
        """Return this worker's metrics of rebalances, under Kafka Connect's names; empty if there is no group."""
        return {}

    def rebalance_texts(self) -> dict[str, str]:
        """Return the rebalance metrics that are texts: the leader, and the protocol."""
        return {}

    # --- reads of REST ---

    async def server_info(self) -> Json:
        """Return the release of Kafka Connect that this worker implements, and the id of the Kafka cluster."""
        cluster = await self._admin.cluster()
        return {"version": CONNECT_VERSION, "commit": "penstock", "kafka_cluster_id": cluster.cluster_id}

    def connectors(self) -> list[str]:
        """Return all connectors' names, sorted."""
        return self.snapshot().connectors()

    def connector_info(self, name: str) -> Json:
        """Return a connector's type, its tasks' ids, and its config with secrets hidden. Raises ConnectorNotFound."""
        info = views.connector_info(self.snapshot(), self.plugins, name)
        return {**info, "config": self.shown_config(name)}

    def connector_config(self, name: str) -> Config:
        """Return a connector's stored config, with unresolved variables (`${…}`). Raises ConnectorNotFound."""
        return views.config_of(self.snapshot(), name)

    def shown_config(self, name: str) -> dict[str, str]:
        """Return a connector's config as REST shows it, with secrets hidden. Raises ConnectorNotFound."""
        config = self.connector_config(name)
        return redaction.redacted(config, self.plugins.class_of_config(config))

    def _with_stored_secrets(self, name: str, config: Config) -> dict[str, str]:
        """Return a config from a request, with each hidden secret replaced by the stored one."""
        return redaction.restored(config, self.snapshot().configs.get(name, {}), self.plugins.class_of_config(config))

    def task_infos(self, name: str) -> list[Json]:
        """Return the tasks of a connector with their configs, with secrets hidden. Raises ConnectorNotFound."""
        plugin = self.plugins.class_of_config(self.connector_config(name))
        return [
            {**info, "config": redaction.redacted(info["config"], plugin)}
            for info in views.task_infos(self.snapshot(), name)
        ]

    def connector_status(self, name: str) -> Json:
        """Return the states of a connector and its tasks. Raises ConnectorNotFound if the connector has no config, or
        no status."""
        return views.connector_status(self.snapshot(), self._stores.statuses.cache, self.plugins, name)

    def task_status(self, task: ConnectorTaskId) -> Json:
        """Return the state of one task. Raises ConnectorNotFound if no status is known."""
        return views.task_status(self._stores.statuses.cache, task)

    def active_topics(self, name: str) -> Json:
        """Return the topics that a connector has used. Raises Forbidden if they are not tracked."""
        if not self.worker.config["topic.tracking.enable"]:
            raise Forbidden("Topic tracking is disabled.")
        return views.active_topics(self._stores.statuses.cache, name)

    def reset_active_topics(self, name: str) -> None:
        """Empty the list of topics that a connector has used. Raises Forbidden if the settings do not allow it."""
        if not self.worker.config["topic.tracking.enable"]:
            raise Forbidden("Topic tracking is disabled.")
        if not self.worker.config["topic.tracking.allow.reset"]:
            raise Forbidden("Topic tracking reset is disabled.")
        self._reporter.forget_topics(name)

    def plugin_list(self, *, connectors_only: bool) -> list[dict[str, str]]:
        """Return the installed plugins."""
        return self.plugins.listed(connectors_only=connectors_only)

    def plugin_config(self, name: str) -> list[Json]:
        """Return the definitions of a plugin's settings. Raises ConnectorNotFound if there is no such plugin."""
        return plugin_definitions(*self.plugins.config_of(name))

    async def connector_offsets(self, name: str) -> Json:
        """Return a connector's offsets. Raises ConnectorNotFound, and ConfigError if its class is not on this
        worker."""
        config = self.connector_config(name)
        plugin = self.plugins.connector_class(config.get("connector.class", ""))
        is_sink = connector_type(plugin) == "sink"
        used = self._resolved_part(config, GROUP_ID_OVERRIDE, "admin.override.") if is_sink else {}
        async with self._offsets.connected(name, used, is_sink=is_sink) as offsets:
            return await offsets.read(name, used, is_sink=is_sink)

    def _resolved_part(self, config: Config, *prefixes: str) -> Config:
        """Return only the settings that begin with one of the prefixes, resolved.

        The other settings are left out: a variable of theirs may have no value on this worker.
        """
        return self.worker.transformer.resolve(
            {name: text for name, text in config.items() if name.startswith(prefixes)}
        )

    # --- validation ---

    async def validate(self, config: Mapping[str, str], plugin: str | None = None) -> Json:
        """Return each setting of a config with its definition, value and errors. The values of variables are not shown.

        Raises BadRequest if `plugin` and the config name different classes. Raises ConfigError if the config names no
        known class, a variable cannot be resolved, or the connector raises ConfigError. Raises ConnectError for the
        connector's other errors, and RequestTimedOut.
        """
        given = config.get("connector.class")
        if plugin is not None and given is not None and not self._names_same_plugin(plugin, given):
            raise BadRequest(f"Included connector type {given} does not match request type {plugin}")
        return (await self._validate_connector_config(config)).as_json()

    def _names_same_plugin(self, plugin: str, given: str) -> bool:
        if plugin == given:
            return True
        found = self.plugins.any_kind(given)
        return found is not None and self.plugins.any_kind(plugin) is found

    async def _validate_connector_config(self, config: Mapping[str, str]) -> ConfigInfos:
        require_connector_class(config)
        mask = self.worker.masking(config)
        async with request_timeout("The connector takes too long to validate its configuration"):
            with _connector_errors(f"{config['connector.class']} cannot validate its configuration", mask):
                infos = await self.worker.validate(config)
        for row in infos.configs:
            value = row["value"]
            name = value["name"]
            # The response has the variable and not its value, which may be a secret.
            if "${" in config.get(name, ""):
                value["value"] = config[name]
            value["errors"] = [mask(error, name) for error in value["errors"]]
        return infos

    async def _check_config(self, name: str, config: Config) -> None:
        """Validate a connector's config. Raises BadRequest, in Kafka Connect's words, if a setting is invalid, and the
        errors of `validate`."""
        infos = await self._validate_connector_config(config)
        if infos.error_count:
            raise BadRequest(infos.error_message())

    # --- changes ---

    async def put_connector(
        self,
        name: str,
        config: Config,
        target: TargetState | None = None,
        *,
        replace: bool,
        instead_of: Config | None = None,
    ) -> tuple[bool, Json]:
        """Create a connector, or replace its config. Returns whether it is new, and its form in REST.

        Returns before the connector has started. `target` becomes the target state. None keeps the target state, which
        is STARTED for a new connector.

        Raises BadRequest if the config is invalid, and the other errors of `validate`. Raises AlreadyExists if the
        connector exists and `replace` is False, and StaleConfig if `instead_of` is given and is not the current config.
        In a group, also raises RebalanceNeeded, and NotHere if this worker is not the leader.
        """
        await self._check_config(name, self._with_stored_secrets(name, config))

        async def put_connector_config() -> tuple[bool, Json]:
            exists = self._check_config_precondition(name, replace=replace, instead_of=instead_of)
            await self._store_connector(name, self._with_stored_secrets(name, config), target)
            return not exists, self.connector_info(name)

        return await self._run_as_leader(put_connector_config)

    @abstractmethod
    async def _store_connector(self, name: str, config: Config, target: TargetState | None) -> None:
        """Store a connector's config, and start or restart the connector."""

    async def delete_connector(self, name: str) -> None:
        """Delete a connector. Raises ConnectorNotFound."""

        async def delete_connector_config() -> None:
            self.connector_config(name)
            await self._remove_connector(name)

        await self._run_as_leader(delete_connector_config)

    @abstractmethod
    async def _remove_connector(self, name: str) -> None:
        """Remove a connector's config, and stop the connector and its tasks. A standalone worker stops them first.

        In a group, each worker stops what it runs of them when it has read the removal, maybe after this call returns.
        """

    async def _execute_command(self, run: Callable[[], Awaitable[T]]) -> T:
        """Run a command in the herder's loop and return its result."""
        return await self._commands.execute(run)

    async def _run_as_leader(self, run: Callable[[], Awaitable[T]]) -> T:
        """Run a command in the herder's loop. In a group, only the leader runs it; others raise NotHere."""
        return await self._execute_command(run)

    async def patch_connector(self, name: str, patch: Mapping[str, str | None]) -> Json:
        """Change some settings of a connector; None removes one.

        Raises ConnectorNotFound, and the errors of `put_connector` except AlreadyExists and StaleConfig.

        If the config changes while the merged config is validated, the patch is merged and validated again.
        """

        async def current_config() -> Config:
            return self.connector_config(name)

        while True:
            # Optimistic: validation takes long and runs outside the loop, so another change may come first.
            base = await self._run_as_leader(current_config)
            merged = {key: value for key, value in {**base, **patch}.items() if value is not None}
            try:
                _, info = await self.put_connector(name, merged, replace=True, instead_of=base)
                return info
            except StaleConfig as e:
                log.info("a patch is merged again with the changed config", connector=name, reason=str(e))

    def _check_config_precondition(self, name: str, *, replace: bool, instead_of: Config | None) -> bool:
        """Return whether the connector exists. Raises AlreadyExists or StaleConfig as `put_connector` does."""
        config = self.snapshot().configs.get(name)
        if config is not None and not replace:
            raise AlreadyExists(f"Connector {name} already exists")
        if instead_of is not None and config != instead_of:
            raise StaleConfig(f"The config of connector {name} was changed meanwhile")
        return config is not None

    # --- restarts ---

    async def restart_connector(self, name: str) -> None:
        """Restart a connector without its tasks, on the worker that runs it. Raises NotHere on any other worker.

        Raises ConnectorNotFound if the connector is unknown, and ConnectError if it fails to start.
        """

        async def restart_here() -> asyncio.Task[State | None]:
            self._require_here(name)
            return self._runner.beside(self._runner.restart_connector(name))

        await self._await_connector_restart(name, await self._execute_command(restart_here))

    async def restart_task(self, task: ConnectorTaskId) -> None:
        """Restart a task, on the worker that runs it. Raises NotHere on any other worker.

        Raises ConnectorNotFound if the connector or the task is unknown. Without exactly-once, raises ConnectError if
        the task cannot be created.
        """

        async def restart_here() -> None:
            self._require_here(task)
            if not await self._runner.restart_tasks([task]):
                raise ConnectError(f"Failed to start task: {task}")

        await self._execute_command(restart_here)

    async def restart(self, request: RestartRequest) -> Json:
        """Restart what the request selects of a connector and its tasks, on all workers.

        Returns the connector's status, in which the selected ones are RESTARTING. Raises ConnectorNotFound if the
        connector is unknown or has no status yet.
        """

        async def begin_restart() -> Json:
            name = request.connector
            self._require_connector(name, ": ")
            plan = self._plan_restart(request)
            shown = views.connector_status(self.snapshot(), self._stores.statuses.cache, self.plugins, name, plan)
            await self._begin_restart(request, plan)
            return shown

        return await self._run_as_leader(begin_restart)

    @abstractmethod
    async def _begin_restart(self, request: RestartRequest, plan: RestartPlan) -> None:
        """Begin a request's restarts, which are those of the plan."""

    def _require_here(self, id: Id) -> None:
        """Raise ConnectorNotFound if the connector or task is unknown. In a group, raise NotHere if another worker runs
        it."""
        self._require_connector(connector_of(id), ": ")
        if isinstance(id, ConnectorTaskId) and id not in self.snapshot().tasks(id.connector):
            raise ConnectorNotFound(f"Unknown task: {id}")

    async def _await_connector_restart(self, name: str, restarting: asyncio.Task[State | None]) -> None:
        """Wait for a connector's restart. Raises ConnectError if the connector fails to start. Raises RequestTimedOut
        after REQUEST_TIMEOUT_MS; the restart then continues."""
        await asyncio.wait([restarting], timeout=REQUEST_TIMEOUT_MS / 1000)
        if not restarting.done():
            raise RequestTimedOut("The connector takes too long to start. Its restart continues")
        if restarting.cancelled():
            raise IllegalState("the worker is shutting down")
        if restarting.result() is State.FAILED:
            raise ConnectError(f"Failed to start connector: {name}")

    def _plan_restart(self, request: RestartRequest) -> RestartPlan:
        cache = self._stores.statuses.cache
        status = cache.get(request.connector)
        if status is None:
            raise ConnectorNotFound(f"Status for connector {request.connector} not found")
        return plan_restart(request, status, cache.tasks(request.connector))

    # --- task configs ---

    def _reconfigure_tasks(self, name: str, attempt: int = 0) -> None:
        """Get a running connector's task configs, and store them if they differ."""
        self._runner.beside(self._make_task_configs(name, attempt))

    async def _make_task_configs(self, name: str, attempt: int) -> None:
        snapshot = self.snapshot()
        config = snapshot.configs.get(name)
        if config is None or self.worker.state(name) is not State.RUNNING:
            return
        # Three kinds of errors, as in Kafka Connect:
        # 1. The connector was stopped meanwhile: nothing to do.
        # 2. More tasks than tasks.max: the connector fails.
        # 3. Any other error, such as a ConnectError of the connector: retries without a limit, with a backoff.
        try:
            made = await self.worker.connector_task_configs(name, config)
        except ConnectorNotFound:
            return
        except TooManyTasks as e:
            self._reporter.on_event(name, Event.FAILURE, self.worker.masking(config)(trace_of(e)))
            return
        except Exception as e:
            self._retry_task_configs_later(name, attempt, e)
            return
        try:
            await self._keep_tasks(name, made)
        # Also if the leader rejects the request: until this worker has read a new session key, its signature is wrong.
        except PenstockError as e:
            self._retry_task_configs_later(name, attempt, e)

    def _retry_task_configs_later(self, name: str, attempt: int, error: Exception) -> None:
        delay_ms = round(self._retry_backoff.wait_ms(attempt + 1))
        due_ms = self._clock.monotonic_ms() + delay_ms
        # One retry waits for each connector, the earliest, however often the connector requests new task configs.
        if (last := self._retries.get(name)) is not None and not last[1].done():
            if last[0] <= due_ms:
                return
            last[1].cancel()
        mask = self.worker.masking(self.snapshot().configs.get(name, {}))
        log.warning(
            "tasks cannot be configured yet", connector=name, again_in_ms=delay_ms, reason=mask(summary_of(error))
        )

        async def reconfigure_tasks_again() -> None:
            self._reconfigure_tasks(name, attempt + 1)

        self._retries[name] = due_ms, self._commands.put(reconfigure_tasks_again, delay_ms)

    @abstractmethod
    async def _keep_tasks(self, name: str, made: Sequence[Config]) -> None:
        """Store a connector's task configs, unless it was stopped or deleted meanwhile."""

    # --- offsets ---

    def _check_stopped(self, name: str) -> Config:
        snapshot = self.snapshot()
        config = views.config_of(snapshot, name)
        if snapshot.target_state(name) is not TargetState.STOPPED or snapshot.tasks(name):
            raise BadRequest(NOT_STOPPED.format(name=name))
        return config

    async def alter_offsets(self, name: str, rows: Sequence[Row] | None) -> Json:
        """Store a stopped connector's offsets, or remove all of them (None). The connector checks them outside the
        herder's loop, within a request's timeout.

        Raises BadRequest if the connector is not stopped. If the connector's code raises an error, raises a ConfigError
        for a ConfigError, and a ConnectError for any other.
        """
        config, resolved = await self._run_as_leader(lambda: self._config_for_offsets(name))
        is_sink = views.kind_of_connector(self.plugins, resolved) == "sink"
        mask = self.worker.masking(config)
        # Outside the loop, since the sink's cluster may be unreachable.
        async with self._offsets.connected(name, resolved, is_sink=is_sink) as offsets:
            wanted = await offsets.wanted(name, resolved, rows, is_sink=is_sink)
            async with request_timeout("The connector takes too long to check the offsets"):
                with _connector_errors(f"{config['connector.class']} rejects the offsets", mask):
                    altered = await self.worker.alter_offsets(resolved, wanted)

            async def keep_offsets() -> Json:
                # Again: the connector may have been resumed while its code checked the offsets.
                await self._check_offsets_fenced(name)
                return {"message": await offsets.keep(name, resolved, rows, wanted, altered=altered)}

            return await self._run_as_leader(keep_offsets)

    async def _config_for_offsets(self, name: str) -> tuple[Config, dict[str, str]]:
        """Return a stopped connector's config, and its resolved config."""
        config = await self._check_offsets_fenced(name)
        resolved = self.worker.transformer.resolve(config)
        self.worker.check_files(resolved)
        return config, resolved

    async def _check_offsets_fenced(self, name: str) -> Config:
        """Check that a connector is stopped, and fence the tasks of an exactly-once source. Returns the connector's
        config. Raises BadRequest if the connector is not stopped."""
        config = self._check_stopped(name)
        if views.kind_of_connector(self.plugins, config) == "source":
            await self._fence_for_offsets(name)
        return config

    @abstractmethod
    async def _fence_for_offsets(self, name: str) -> None:
        """Under exactly-once, fence the tasks of a source before its offsets are changed."""

    def _require_connector(self, name: str, separator: str = " ") -> None:
        """Raise ConnectorNotFound, in Kafka Connect's words, if a connector is unknown."""
        if name not in self.snapshot().configs:
            raise ConnectorNotFound(f"Unknown connector{separator}{name}")
