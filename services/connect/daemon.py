"""A Connect worker as a process. It starts the REST server, the stores and the herder, in this order.

The REST server listens first, so that a port in use is reported before anything else. It answers 503 until the herder
is ready, except for `/` and `/metrics` once Kafka is reached. If the start fails, the exit status shows the cause
(`EXIT_STATUSES`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry

from penstock.api.connect.routes import StartingApp, create_connect_app
from penstock.api.http.server import HttpServer
from penstock.services.connect.property_files import ConnectorFile
from penstock.services.connect.rest_server import guarded_rest_app, is_rest_open, rest_listener, worker_id_of
from penstock.services.connect.worker_command_line import CommandLine, misspelled_settings
from penstock.services.exit_status import ExitStatus, StartFailed
from penstock.services.service_lifecycle import leaf_exceptions
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.connection import Connection
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import ConfigError, InvalidRequest, InvalidTopic, PenstockError
from penstock.shared.common.gc_tuning import spare_the_collector
from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.herder.base_herder import Stores
from penstock.shared.connect.herder.distributed import DistributedHerder
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.connect.herder.metrics import ConnectMetrics
from penstock.shared.connect.herder.standalone import StandaloneHerder
from penstock.shared.connect.isolation.isolating_worker import IsolatingWorker
from penstock.shared.connect.runtime.create_request import INITIAL_STATES
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.runtime.worker_config import StandaloneConfig
from penstock.shared.connect.storage.cluster_config_state import ConfigChange
from penstock.shared.connect.storage.config_store import ConfigStore, KafkaConfigStore
from penstock.shared.connect.storage.offset_store import FileOffsetStore, KafkaOffsetStore
from penstock.shared.connect.storage.status_store import KafkaStatusStore, StatusStore

log = get_logger(__name__)

T = TypeVar("T")

PORT_IN_USE = 3
KAFKA_UNREACHABLE = 4
CONNECTOR_FAILED = 5
EXIT_STATUSES: Mapping[int, str] = {
    ExitStatus.FAILED: "an error while the worker ran or was stopped",
    ExitStatus.WRONG_SETTING: "a setting is missing or invalid",
    PORT_IN_USE: "the address of the REST server cannot be bound",
    KAFKA_UNREACHABLE: "Kafka cannot be reached, or rejects the credentials",
    CONNECTOR_FAILED: "a connector of the command line cannot be created, or fails during its start",
}
START_WAIT_MS = 60_000
"""The longest wait for the start of a connector of the command line, before the next one is created."""
REQUEST_DRAIN_MS = 5_000
"""How long requests in flight may take during the shutdown."""


class ConnectDaemon:
    """One worker. `server.url` is the address of its REST API after `startup`."""

    def __init__(self, command_line: CommandLine) -> None:
        self._command_line = command_line
        self._config = command_line.config
        self._registry = CollectorRegistry()
        self._http = rest_listener(self._config)
        self._rest = StartingApp()
        self.server = HttpServer(guarded_rest_app(self._rest, self._config, self._http), self._http)
        kafka = self._config.kafka
        self._admin = Admin(kafka)
        self._connection = Connection(kafka)
        self._producer = Producer(kafka, ProducerSettings(linger_ms=0))
        self.herder: DistributedHerder | StandaloneHerder | None = None
        self._loop: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ConnectDaemon {type(self._config).__name__}, {self.server!r}>"

    async def startup(self) -> None:
        """Start the REST server, the Kafka clients, the herder, and the connectors of the command line.

        Raises StartFailed if one of them fails with a PenstockError.
        """
        for name in misspelled_settings(self._config):
            log.warning("unknown setting", name=name)
        if is_rest_open(self._config, self._http):
            log.warning(
                "REST has no authentication: any client of this address can create connectors, "
                "which read and write with the worker's permissions",
                address=self._http.host,
                settings="rest.auth.token or rest.auth.users",
            )
        await self._run_start_step(self._start_http_server(), {ConfigError: PORT_IN_USE})
        await self._run_start_step(
            self._connect_kafka(), {ConfigError: ExitStatus.WRONG_SETTING, PenstockError: KAFKA_UNREACHABLE}
        )
        herder = await self._run_start_step(
            self._start_herder(),
            # InvalidRequest and InvalidTopic: Kafka rejects the settings of a storage topic, such as its replicas.
            {
                **dict.fromkeys((ConfigError, InvalidRequest, InvalidTopic), ExitStatus.WRONG_SETTING),
                PenstockError: KAFKA_UNREACHABLE,
            },
        )
        self._loop = asyncio.create_task(herder.main_loop(), name="herder")
        spare_the_collector()
        for path, connector in self._command_line.connectors.items():
            await self._run_start_step(
                self._put_command_line_connector(herder, path, connector), {PenstockError: CONNECTOR_FAILED}
            )

    async def main_loop(self) -> None:
        """Run until cancelled. Raises an ExceptionGroup if the herder or the REST server fails."""
        assert self._loop is not None, "startup() comes first"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.server.wait())
            # Shielded: requests in flight need the loop, so `shutdown` ends it after the REST server.
            await asyncio.shield(self._loop)

    async def shutdown(self) -> None:
        """Stop the REST server, then connectors and tasks, and leave the group."""
        await self.server.stop(REQUEST_DRAIN_MS)
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait([self._loop])
        if self.herder is not None:
            await self.herder.shutdown()
        await self._producer.close(REQUEST_DRAIN_MS)
        await self._connection.close()
        await self._admin.close()

    async def _run_start_step(self, step: Awaitable[T], statuses: Mapping[type[PenstockError], int]) -> T:
        """Await a step of the start. Raises StartFailed after a PenstockError, or a group of only PenstockErrors.

        The exit status is that of the first class in `statuses` that the error is an instance of; 1 if there is none.
        A group is represented by its first error. A group with another error is raised unchanged.
        """
        try:
            return await step
        except (PenstockError, ExceptionGroup) as e:
            # Not `except*`: before Python 3.11.4, an error raised in it is wrapped in an ExceptionGroup (gh-103590).
            errors = list(leaf_exceptions(e))
            if not all(isinstance(one, PenstockError) for one in errors):
                raise
            error = errors[0]
            status = next((status for cls, status in statuses.items() if isinstance(error, cls)), ExitStatus.FAILED)
            raise StartFailed(status, error) from None

    async def _start_http_server(self) -> None:
        try:
            await self.server.start()
        except ConfigError as e:
            # The error names http.port. A worker's setting is `listeners`.
            raise ConfigError(f"listeners: {str(e).partition(': ')[2]}") from None

    async def _start_herder(self) -> DistributedHerder | StandaloneHerder:
        herder = self._make_herder()
        self.herder = herder
        self._rest.app = create_connect_app(herder, self._registry)
        await herder.startup()
        return herder

    async def _connect_kafka(self) -> None:
        await self._admin.__aenter__()
        await self._connection.open()
        await self._producer.__aenter__()

    def _make_herder(self) -> DistributedHerder | StandaloneHerder:
        plugins = Plugins.installed()
        config = self._config
        worker_id = worker_id_of(config, self._http, self.server.port)
        stores = self._make_stores()
        group_id = config["group.id"] if isinstance(config, DistributedConfig) else "connect"
        tasks = TaskFactory(config, plugins, stores.offsets, group_id=group_id)
        herder: DistributedHerder | StandaloneHerder
        if isinstance(config, DistributedConfig):
            isolating_worker = IsolatingWorker(
                config, plugins, stores.offsets, tasks, log_settings=self._command_line.log
            )
            url = f"http://{worker_id}/"
            herder = DistributedHerder(
                config, isolating_worker, self._admin, self._connection, stores, url=url, worker_id=worker_id
            )
            herder.loggers.on_level = isolating_worker.set_level
        else:
            worker = Worker(config, plugins, stores.offsets, tasks)
            herder = StandaloneHerder(worker, self._admin, stores, worker_id)
        ConnectMetrics(herder, self._registry)
        return herder

    def _make_stores(self) -> Stores:
        config = self._config
        kafka = config.kafka
        # As in Kafka Connect: a standalone worker keeps only source offsets. Its connectors come with the command line.
        if isinstance(config, StandaloneConfig):
            file = FileOffsetStore(Path(config["offset.storage.file.filename"]))
            return Stores(ConfigStore(self._on_change), StatusStore(), file)
        clients = (kafka, self._admin, self._producer)
        configs = KafkaConfigStore(
            *clients,
            config.topic("config"),
            self._on_change,
            transactional_id=config.leader_transactional_id if config.transactional_leader else None,
        )
        statuses = KafkaStatusStore(*clients, config.topic("status"))
        return Stores(configs, statuses, KafkaOffsetStore(*clients, config.topic("offset")))

    def _on_change(self, change: ConfigChange) -> None:
        if self.herder is not None:
            self.herder.on_config_change(change)

    async def _put_command_line_connector(
        self, herder: DistributedHerder | StandaloneHerder, path: Path, connector: ConnectorFile
    ) -> None:
        name = connector.config.get("name")
        if not name:
            raise ConnectError(f"{path}: the connector has no name")
        target = INITIAL_STATES[connector.initial_state] if connector.initial_state else None
        try:
            await herder.put_connector(name, connector.config, target, replace=True)
            if isinstance(herder, StandaloneHerder):
                await herder.started(name, START_WAIT_MS)
        except PenstockError as e:
            raise ConnectError(f"{path}: {e}") from e
        log.info("created a connector", connector=name, file=str(path))
