"""The settings of every worker, and of a standalone one: Kafka Connect's names and defaults, and additional ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import HEAD_BYTES_MIN, KafkaSettings
from penstock.shared.connect.allowed_files import FILES_ALLOWED, are_allowed_files
from penstock.shared.connect.config_def import (
    HIGH,
    LOW,
    MEDIUM,
    NO_DEFAULT,
    ClassResolver,
    ConfigDef,
    Type,
    at_least,
    one_of,
)
from penstock.shared.connect.properties import with_prefix
from penstock.shared.connect.redaction import hidden
from penstock.shared.connect.runtime.client_settings import kafka_settings, rejected_overrides

ISOLATION = "penstock.task.isolation"
ISOLATIONS = ("asyncio", "process")
WORKER_ONLY = (
    "task.restart.enable",
    "task.restart.backoff.ms",
    "task.restart.backoff.max.ms",
    "task.stall.timeout.ms",
    "topic.wait.timeout.ms",
    FILES_ALLOWED,
)
"""Additional settings of the worker alone. A connector's configuration that contains one is rejected, unless the
connector defines a setting of that name."""
SIMPLE_HEADER_CONVERTER = "org.apache.kafka.connect.storage.SimpleHeaderConverter"


def worker_config() -> ConfigDef:
    """The settings of standalone and distributed workers (org.apache.kafka.connect.runtime.WorkerConfig)."""
    return (
        ConfigDef()
        .define("bootstrap.servers", Type.STRING, "localhost:9092", HIGH,
                "Addresses (host:port) of Kafka brokers, comma-separated.")
        .define("key.converter", Type.CLASS, NO_DEFAULT, HIGH,
                "Converter class for keys, unless the connector configures one.")
        .define("value.converter", Type.CLASS, NO_DEFAULT, HIGH,
                "Converter class for values, unless the connector configures one.")
        .define("header.converter", Type.CLASS, SIMPLE_HEADER_CONVERTER, LOW,
                "Converter class for headers, unless the connector configures one.")
        .define("task.shutdown.graceful.timeout.ms", Type.LONG, 5_000, LOW,
                "Time for all tasks, and then for all connectors, to stop. Those that take longer are cancelled.",
                at_least(0))
        .define("offset.flush.interval.ms", Type.LONG, 60_000, LOW,
                "Interval between a task's offset commits.", at_least(1))
        .define("offset.flush.timeout.ms", Type.LONG, 5_000, LOW,
                "Maximum time of an offset commit. A longer commit counts as failed.", at_least(1))
        .define("listeners", Type.LIST, "http://:8083", LOW,
                "URI on which the REST API listens. The first one is used.")
        .define("rest.advertised.host.name", Type.STRING, None, LOW,
                "Host name at which other workers reach this worker.")
        .define("rest.advertised.port", Type.INT, None, LOW, "Port at which other workers reach this worker.")
        .define("rest.auth.token", Type.PASSWORD, "", LOW,
                "Bearer token that REST requests must have. All workers of a cluster need the same token.")
        .define("rest.auth.users", Type.PASSWORD, "", LOW,
                "Users (user:password, comma-separated) whose REST requests are accepted with basic authentication.")
        .define("rest.max.head.bytes", Type.INT, 65_536, LOW,
                "Maximum size of a REST request's line and header fields together. Beyond it: status 431 or 414.",
                at_least(HEAD_BYTES_MIN))
        .define("plugin.path", Type.LIST, "", LOW,
                "Accepted for compatibility: plugins are found among the installed packages.")
        .define("config.providers", Type.LIST, "", LOW,
                "Names of config providers for ${name:path:key}, such as env,file,dir. Empty: none.")
        .define(FILES_ALLOWED, Type.LIST, "", HIGH,
                "Locations that file connectors may read and write: absolute folders, and URLs such as "
                "s3://bucket/folder, each with everything below it. Empty: none.", are_allowed_files)
        .define("connector.client.config.override.policy", Type.STRING, "All", MEDIUM,
                "Client settings that connectors may override: All, None or Principal.",
                one_of("All", "None", "Principal", ignore_case=True))
        .define("topic.tracking.enable", Type.BOOLEAN, True, LOW,
                "Whether the active topics of each connector are tracked.")
        .define("topic.tracking.allow.reset", Type.BOOLEAN, True, LOW,
                "Whether REST requests may reset a connector's active topics.")
        .define("topic.creation.enable", Type.BOOLEAN, True, LOW,
                "Whether source connectors with topic.creation settings may create topics.")
        .define("topic.wait.timeout.ms", Type.LONG, 60_000, LOW,
                "Maximum time that a source record waits for a topic that does not exist. After it, the task fails.",
                at_least(1))
        .define("exactly.once.source.support", Type.STRING, "disabled", HIGH,
                "enabled: source tasks write records and offsets in transactions, and producers of earlier task "
                "generations are fenced. preparing: a rolling upgrade, in which only the leader uses transactions.",
                one_of("disabled", "preparing", "enabled", ignore_case=True))
        .define("task.restart.enable", Type.BOOLEAN, True, MEDIUM, "Whether failed tasks are restarted automatically.")
        .define("task.restart.backoff.ms", Type.LONG, 10_000, LOW,
                "Delay before the first restart of a failed task. It doubles with each further failure.", at_least(1))
        .define("task.restart.backoff.max.ms", Type.LONG, 300_000, LOW,
                "Maximum delay before a restart. If a task ran for longer, the first delay applies again.", at_least(1))
        .define(ISOLATION, Type.STRING, "asyncio", LOW,
                "asyncio: all connectors run in the worker's process. process: each connector runs with its tasks in "
                "its own process, so that one that blocks or crashes affects no other. A connector may override it. "
                "Only distributed workers support process.", one_of(*ISOLATIONS))
        .define("task.stall.timeout.ms", Type.LONG, 300_000, LOW,
                "Duration of one call of a connector's code after which its task is reported as stalled.",
                at_least(1))
    )  # fmt: skip


def isolation_error(isolation: str, worker: Mapping[str, Any]) -> str | None:
    """Return why a value of `penstock.task.isolation` is invalid with a worker's settings, or None if it is valid."""
    if isolation not in ISOLATIONS:
        return f"Invalid value {isolation} for configuration {ISOLATION}: String must be one of: asyncio, process"
    if isolation == "process" and "offset.storage.file.filename" in worker:
        return f"{ISOLATION}=process needs a distributed worker, since the processes keep offsets in its offset topic"
    return None


class WorkerConfig:
    """A worker's parsed settings. Also has the original properties (`props`).

    `config[name]` is a setting's value. The constructor raises ConfigError if a setting is invalid.
    """

    def __init__(
        self, props: Mapping[str, str], definition: ConfigDef | None = None, resolve: ClassResolver | None = None
    ) -> None:
        self.props = dict(props)
        self.definition = definition or worker_config()
        self.values = self.definition.parse(props, resolve)
        self.kafka: KafkaSettings = kafka_settings(self.client_props())

    def __repr__(self) -> str:
        shown = {name: hidden(name, value) for name, value in self.values.items()}
        return f"<WorkerConfig {shown}>"

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def rest_users(self) -> list[str]:
        """The pairs `user:password` of `rest.auth.users`."""
        return [pair.strip() for pair in self["rest.auth.users"].value.split(",") if pair.strip()]

    def client_props(self) -> dict[str, str]:
        """Return the properties for Kafka's clients: `bootstrap.servers`, and all that are no setting of the worker."""
        own = {name: value for name, value in self.props.items() if name not in self.definition}
        own["bootstrap.servers"] = self.values["bootstrap.servers"]
        return own

    def connector_client_props(self, kind: str, client_id: str, connector: Mapping[str, str]) -> dict[str, Any]:
        """Return the properties of one client for a connector. `kind` is consumer, producer or admin.

        Raises ConfigError if `connector.client.config.override.policy` does not allow an override.
        """
        overrides = with_prefix(connector, f"{kind}.override.")
        policy = self["connector.client.config.override.policy"]
        if rejected := rejected_overrides(policy, overrides):
            names = ", ".join(f"{kind}.override.{name}" for name in rejected)
            raise ConfigError(f"{names}: the override policy {policy} does not allow it")
        return {**self.client_props(), "client.id": client_id, **with_prefix(self.props, f"{kind}."), **overrides}


class StandaloneConfig(WorkerConfig):
    """A standalone worker's settings. The constructor raises ConfigError if they are invalid."""

    def __init__(self, props: Mapping[str, str], resolve: ClassResolver | None = None) -> None:
        """`resolve` returns the class for a name. If it is given, the converters must exist."""
        definition = worker_config().define(
            "offset.storage.file.filename", Type.STRING, NO_DEFAULT, HIGH, "File that stores the source offsets."
        )
        super().__init__(props, definition, resolve)
        if error := isolation_error(self[ISOLATION], self.values):
            raise ConfigError(error)
