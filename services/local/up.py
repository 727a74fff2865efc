"""`penstock up`: Kafka and every service on this machine, with one HTTP address for ingest, admin and dashboard.

A service that ends unexpectedly is restarted after a pause that doubles. If a service ends because of an invalid
setting, `up` ends everything and reports the reason. The services' settings come from the environment and from the
settings file of `up`. `up` overrides some of them, such as the addresses, the lake and the topics.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from penstock.services import service_lifecycle
from penstock.services.aggregator.settings import AggregatorSettings, CompactionSettings
from penstock.services.consumer.handlers import load_handler
from penstock.services.local import ports
from penstock.services.local.connect_worker import worker_properties
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.services.local.sample_event import sample_event, sample_event_fields, sample_event_type
from penstock.services.local.settings import ConnectWorkerSettings, UpSettings
from penstock.services.local.stack import HOST, KILL_GRACE_MS, Service, ServiceSpec, Stack
from penstock.services.supervision import keep_running
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.common import log
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.setting_names import ENV_PREFIX
from penstock.shared.common.settings import KafkaSettings, find_settings_file
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.topology_loading import load_topology

PROGRAM = "penstock up"


class Up:
    """The daemon of `penstock up`: Kafka and the services; see `penstock.services.service_lifecycle`."""

    def __init__(self, settings: UpSettings, console: Console | None = None, settings_file: Path | None = None) -> None:
        """The services load their other settings from `settings_file`, by default as any command does."""
        self._settings = settings
        self._file_variable = {} if settings_file is None else {"CONFIG": str(settings_file)}
        self._console = console or Console()
        folder = settings.data_dir.absolute()
        self._folder = folder
        self._files = folder / "files"
        self._broker = EmbeddedKafka(folder / "kafka", settings.broker)
        self._stack = Stack(folder, hermetic=False)

    async def startup(self) -> None:
        """Start Kafka, then the services. Raises ConfigError, KafkaDied, ChildDied or ServiceStuck, with the reason, if
        one of them does not start.

        The ports, the settings of the aggregator and of the Connect worker, the topology and the handler are checked
        before anything starts; whether the Connect worker's converters exist, when it starts. The topics that the
        services need are checked once Kafka answers, and before that if Kafka has no data yet.
        """
        settings = self._settings
        if settings.http.ssl_certfile is not None:
            raise ConfigError(
                f"http.ssl_certfile: {PROGRAM} serves HTTP only: unset it (for TLS use a reverse proxy), or name "
                "another settings file with --config"
            )
        for setting, (host, port) in settings.listening().items():
            # After a kill of this program, its broker keeps the port for some seconds. The start of Kafka waits for it.
            if setting != "broker.port" or not self._broker.has_data():
                ports.require_free(host, port, setting)
        variables = self._file_variable | self._aggregator_settings()
        own = {f"{ENV_PREFIX}{name}": value for name, value in variables.items()}
        aggregates = AggregatorSettings.load(environ={**os.environ, **own}, program="penstock aggregator")
        if settings.connect_worker:
            environ = {**os.environ, **own, f"{ENV_PREFIX}HTTP__HOST": settings.http.host}
            connect_settings = ConnectWorkerSettings.load(environ=environ, program="penstock connect")
            # Without a look at the converters: all plugins would take 60 MB of memory in this process.
            DistributedConfig(worker_properties(connect_settings))
        topology = load_topology(settings.topology, settings.topology_options)
        topology = topology.of_application(aggregates.streams.application_id)
        # An invalid handler is reported before Kafka starts.
        load_handler(settings.handler)
        # Without data there are no topics yet, so a missing one is reported before Kafka starts.
        if not self._broker.has_data():
            require_topics(settings, topology, ())
        self._console.print("starting Kafka …")
        await self._broker.start()
        kafka = KafkaSettings(bootstrap_servers=self._broker.bootstrap_servers)
        async with Admin(kafka) as admin:
            require_topics(settings, topology, await admin.list_topics())
            await admin.create_topics([event_time_topic(settings.topic, settings.partitions)], exist_ok=True)
        self._console.print("starting the services …")
        # The aggregator first: it creates the topics that the consumer reads.
        aggregator = await self._stack.start(self._service_spec("aggregator", self._aggregator_settings()))
        await aggregator.healthy(self._report_waiting)
        consumer = await self._stack.start(self._consumer_spec())
        others = [aggregator, consumer]
        connect = None
        if settings.connect_worker:
            connect = await self._stack.start(self._connect_spec(), settings.connect_port)
            others.append(connect)
        gateway = await self._stack.start(self._gateway_spec(others), settings.http.port)
        await asyncio.gather(*(service.healthy(self._report_waiting) for service in [*others, gateway]))
        self._print_urls_and_folders(gateway, connect, aggregates, topology)

    def _report_waiting(self, service: Service, reason: str) -> None:
        self._console.print(escape(f"waiting for the {service.name}: {reason}"), soft_wrap=True, highlight=False)

    async def main_loop(self) -> None:
        """Restart each service that ends.

        Raises an ExceptionGroup: with KafkaDied if Kafka ends unexpectedly, with ConfigError if a service ends because
        of an invalid setting.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._broker.wait())
            for service in self._stack.services.values():
                tasks.create_task(self._keep_service_running(service))

    async def shutdown(self) -> None:
        """Stop the services, then Kafka."""
        self._console.print("stopping …")
        await self._stack.stop()
        await self._broker.stop()

    async def _keep_service_running(self, service: Service) -> None:
        logger = log.get_logger(__name__)

        def log_restart(_status: int, pause_ms: int) -> None:
            logger.error("service ended: restarting", service=service.name, in_ms=pause_ms, reason=str(service.died()))

        await keep_running(
            f"the {service.name}",
            service.wait,
            service.start,
            on_end=log_restart,
            reason=lambda: str(service.died()),
        )

    # --- the settings of each service ---

    def _service_spec(
        self, name: str, own: dict[str, str], module: str = "penstock.services.cli", host: str = HOST
    ) -> ServiceSpec:
        http = self._settings.http
        settings = {
            **self._file_variable,
            "KAFKA__BOOTSTRAP_SERVERS": self._broker.bootstrap_servers,
            "KAFKA__SECURITY_PROTOCOL": "PLAINTEXT",
            "HTTP__FORWARDED_ALLOW_IPS": msgspec.json.encode(http.forwarded_allow_ips).decode(),
            "HTTP__MAX_HEAD_BYTES": str(http.max_head_bytes),
            **own,
        }
        limit_ms = self._settings.shutdown_timeout_ms
        return ServiceSpec(name, settings, module, shutdown_timeout_ms=limit_ms, host=host)

    def _aggregator_settings(self) -> dict[str, str]:
        settings = self._settings
        return {
            "TOPOLOGY": settings.topology,
            "TOPOLOGY_OPTIONS": msgspec.json.encode(settings.topology_options).decode(),
            "STREAMS__LAKE": str(self._folder / "lake"),
            "STREAMS__GROUP_INSTANCE_ID": "aggregator-1",
            # The broker's default: there is one broker.
            "STREAMS__REPLICATION_FACTOR": "-1",
            "WORKERS": str(settings.workers),
        }

    def _consumer_spec(self) -> ServiceSpec:
        settings = self._settings
        own = {
            "TOPICS": ",".join(settings.topics),
            "HANDLER": settings.handler,
            "GROUP_ID": settings.group_id,
            "CONSUMER__ISOLATION_LEVEL": "read_committed",
            "CONSUMER__AUTO_OFFSET_RESET": "earliest",
        }
        return self._service_spec("consumer", own)

    def _connect_spec(self) -> ServiceSpec:
        self._files.mkdir(parents=True, exist_ok=True)
        own = {"CONNECT_FILES": str(self._files)}
        return self._service_spec(
            "connect", own, module="penstock.services.local.connect_worker", host=self._settings.http.host
        )

    def _gateway_spec(self, others: list[Service]) -> ServiceSpec:
        settings = self._settings
        own = {
            "GATEWAY_SERVICES": msgspec.json.encode({service.name: service.url for service in others}).decode(),
            "INGEST__TOPICS": msgspec.json.encode(ingest_topics(settings)).decode(),
            "INGEST__DEFAULT_TOPIC__ALLOWED": "false",
        }
        return self._service_spec("gateway", own, module="penstock.services.local.gateway", host=settings.http.host)

    def _print_urls_and_folders(
        self, gateway: Service, connect: Service | None, aggregates: AggregatorSettings, topology: Topology
    ) -> None:
        settings = self._settings
        logs = self._folder / "logs"
        lake = self._folder / "lake"
        application = aggregates.streams.application_id
        servers = self._broker.bootstrap_servers
        value_type = sample_event_type(topology, settings.topic)
        fields = sample_event_fields(topology, settings.topic)
        event = shlex.quote(sample_event(settings.key, settings.time, value_type, settings.time_unit, fields))
        audit = ["--application", application, "--lake", str(lake), "--kafka.bootstrap-servers", servers]
        rows = {
            "dashboard": gateway.url,
            "ingest": "curl -H 'Content-Type: application/x-ndjson' "
            f"--data-binary {event} {gateway.url}/v1/topics/{settings.topic}/events",
            "topology": f"{settings.topology}, as application {application}",
            "results": f"{_describe_topics(settings.topics)}, handled by {settings.handler}, which logs to "
            f"{logs / 'consumer.log'}",
            "lake": f"{lake / application}, {when_compacted(aggregates.compaction)}",
            "audit": f"{penstock_command()} audit {shlex.join(audit)}",
            "connectors": f"{gateway.url}/connectors" if connect else "",
            "Connect": f"{connect.url}: the worker's complete REST API, for clients of Kafka Connect"
            if connect
            else "",
            "files": f"{self._files}, which file connectors may read and write" if connect else "",
            "Kafka": servers,
            "logs": str(logs),
            "": "Ctrl-C stops everything and keeps the data.",
        }
        for name, text in ((name, text) for name, text in rows.items() if text):
            self._console.print(f"[bold]{name:<11}[/bold]{escape(text)}", soft_wrap=True, highlight=False)


def require_topics(settings: UpSettings, topology: Topology, known: Collection[str]) -> None:
    """Raise ConfigError, which names the topics, if a service would wait for topics that nothing creates.

    `known` are the topics that Kafka has. `up` creates the topic `settings.topic`. The aggregator creates the topics
    that its topology writes to, once the topics that it only reads exist.
    """
    there = {*known, settings.topic}
    tables = [table.topic for table in topology.global_tables.values()]
    created = {*topology.internal_topics(), *topology.output_topics()}
    if missing := sorted({*topology.source_topics(), *tables} - created - there):
        raise ConfigError(
            f"the topology {settings.topology} reads the {_describe_topics(missing)}, which Kafka does not have: "
            f"`up` creates only {settings.topic} (--topic). Set --topic to the topic that the topology reads, or set "
            "the topology's topic with --topology-options"
        )
    # The consumer waits for all topics that it handles.
    if missing := sorted({*settings.topics} - there - {*topology.output_topics()}):
        raise ConfigError(
            f"the consumer handles the {_describe_topics(missing)} (--topics), which Kafka does not have: the topology "
            f"{settings.topology} writes to {', '.join(topology.output_topics())}"
        )


def _describe_topics(names: Sequence[str]) -> str:
    return f"topic{'s'[: len(names) != 1]} {', '.join(names)}"


def when_compacted(compaction: CompactionSettings) -> str:
    """Return the text of `penstock up` about when compactions write the lake.

    >>> when_compacted(CompactionSettings(interval_ms=90_000))
    'a compaction every 90 s (compaction.interval_ms=90000), the first after 90 s'
    >>> when_compacted(CompactionSettings(enabled=False))
    'not written (compaction.enabled=false)'
    """
    if not compaction.enabled:
        return "not written (compaction.enabled=false)"
    interval_ms = compaction.interval_ms
    seconds = f"{interval_ms / 1000:g} s"
    return f"a compaction every {seconds} (compaction.interval_ms={interval_ms}), the first after {seconds}"


def penstock_command() -> str:
    """Return the command `penstock` as `up` prints it: its path if only this Python's folder has it, else its name."""
    own = Path(sys.executable).parent / "penstock"
    return "penstock" if shutil.which("penstock") or not own.exists() else shlex.quote(str(own))


def ingest_topics(settings: UpSettings) -> dict[str, dict[str, Any]]:
    """Return the ingest's settings for `penstock up`, where one topic accepts events.

    >>> ingest_topics(UpSettings(topic="clicks", key=("/user",), time="/at", time_unit="s"))
    {'clicks': {'key': ('/user',), 'time': '/at', 'time_unit': 's'}}
    """
    return {settings.topic: {"key": settings.key, "time": settings.time, "time_unit": settings.time_unit}}


def stop_timeout_ms(settings: UpSettings) -> int:
    """Return the time limit of the shutdown of `penstock up`: each service's own limit, concurrently, then Kafka's.

    >>> from penstock.services.local.broker_config import EmbeddedKafkaSettings
    >>> stop_timeout_ms(UpSettings(shutdown_timeout_ms=10_000, broker=EmbeddedKafkaSettings(stop_timeout_ms=4_000)))
    18000
    """
    return settings.shutdown_timeout_ms + KILL_GRACE_MS + settings.broker.stop_timeout_ms + KILL_GRACE_MS


def main(arguments: list[str]) -> int:
    """Run `penstock up` until Ctrl-C or SIGTERM. Returns the exit status."""

    def make_up(settings: UpSettings) -> Up:
        _, settings_file = find_settings_file(arguments, os.environ)
        return Up(settings, settings_file=settings_file)

    return service_lifecycle.serve(PROGRAM, UpSettings, make_up, arguments, limit_ms=stop_timeout_ms)
