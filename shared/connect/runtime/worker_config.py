"""A worker's settings: Kafka Connect's names and defaults, and additional ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.common.settings import HEAD_BYTES_MIN, KafkaSettings
from penstock.shared.connect.allowed_files import FILES_ALLOWED, are_allowed_files
from penstock.shared.connect.config_def import NO_DEFAULT, ConfigDef, Importance, Type, at_least, one_of
from penstock.shared.connect.config_types import ClassResolver
from penstock.shared.connect.properties import with_prefix
from penstock.shared.connect.redaction import hidden
from penstock.shared.connect.runtime.client_settings import kafka_settings

HIGH, MEDIUM, LOW = Importance.HIGH, Importance.MEDIUM, Importance.LOW

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
"""Additional settings of the worker alone. A connector's configuration that contains one is rejected, since it would
have no effect there."""
JSON_CONVERTER = "org.apache.kafka.connect.json.JsonConverter"
SIMPLE_HEADER_CONVERTER = "org.apache.kafka.connect.storage.SimpleHeaderConverter"


def worker_config() -> ConfigDef:
    """The settings of standalone and distributed workers (org.apache.kafka.connect.runtime.WorkerConfig)."""
    return (
        ConfigDef()
        .define("bootstrap.servers", Type.STRING, "localhost:9092", HIGH, "host:port, comma-separated.")
        .define("key.converter", Type.CLASS, NO_DEFAULT, HIGH, "The converter of keys, where a connector names none.")
        .define("value.converter", Type.CLASS, NO_DEFAULT, HIGH, "The converter of values, likewise.")
        .define("header.converter", Type.CLASS, SIMPLE_HEADER_CONVERTER, LOW, "The converter of headers, likewise.")
        .define("task.shutdown.graceful.timeout.ms", Type.LONG, 5_000, LOW,
                "How long the tasks together may take to end; what then runs is cancelled.", at_least(0))
        .define("offset.flush.interval.ms", Type.LONG, 60_000, LOW, "How often tasks commit offsets.", at_least(1))
        .define("offset.flush.timeout.ms", Type.LONG, 5_000, LOW,
                "How long a commit may take before it counts as failed.", at_least(1))
        .define("listeners", Type.LIST, "http://:8083", LOW, "Where REST is served.")
        .define("rest.advertised.host.name", Type.STRING, None, LOW, "The host that other workers reach this one at.")
        .define("rest.advertised.port", Type.INT, None, LOW, "The port that other workers reach this one at.")
        .define("rest.auth.token", Type.PASSWORD, "", LOW,
                "What REST asks for, as Authorization: Bearer. All workers of a cluster have the same.")
        .define("rest.auth.users", Type.PASSWORD, "", LOW,
                "user:password, comma-separated: who else may ask, by basic auth.")
        .define("rest.max.head.bytes", Type.INT, 65_536, LOW,
                "The longest request line and header fields of a request to REST together; then 431 or 414.",
                at_least(HEAD_BYTES_MIN))
        .define("plugin.path", Type.LIST, "", LOW,
                "Taken for compatibility: plugins are found among the installed packages.")
        .define("config.providers", Type.LIST, "", LOW,
                "Names of config providers, for ${name:path:key}, such as env,file,dir; empty: none.")
        .define(FILES_ALLOWED, Type.LIST, "", HIGH,
                "What file connectors may read and write: absolute folders, and URLs such as s3://bucket/folder, "
                "each with everything below it; empty: nothing.", are_allowed_files)
        .define("connector.client.config.override.policy", Type.STRING, "All", MEDIUM,
                "Which client settings connectors may override: All, None or Principal.",
                one_of("All", "None", "Principal", ignore_case=True))
        .define("topic.tracking.enable", Type.BOOLEAN, True, LOW, "Whether each connector's topics are noted.")
        .define("topic.tracking.allow.reset", Type.BOOLEAN, True, LOW, "Whether that list may be emptied over REST.")
        .define("topic.creation.enable", Type.BOOLEAN, True, LOW, "Whether sources may make their topics.")
        .define("topic.wait.timeout.ms", Type.LONG, 60_000, LOW,
                "How long a source's record waits for a topic that does not exist. After that its task fails.",
                at_least(1))
        .define("exactly.once.source.support", Type.STRING, "disabled", HIGH,
                "enabled: sources write records and offsets in transactions, and older generations are fenced. "
                "preparing: as disabled, for a rolling upgrade.",
                one_of("disabled", "preparing", "enabled", ignore_case=True))
        .define("task.restart.enable", Type.BOOLEAN, True, MEDIUM, "Whether failed tasks are restarted by themselves.")
        .define("task.restart.backoff.ms", Type.LONG, 10_000, LOW,
                "How long after a failure; twice as long after each further one.", at_least(1))
        .define("task.restart.backoff.max.ms", Type.LONG, 300_000, LOW,
                "The longest wait; a task that ran for so long starts from the shortest again.", at_least(1))
        .define(ISOLATION, Type.STRING, "asyncio", LOW,
                "Where connectors run: asyncio: all in the worker's process; process: each with its tasks in a process "
                "of its own, so that one that blocks or dies affects no other. A connector's own setting goes before "
                "it. Only distributed workers have such processes.", one_of(*ISOLATIONS))
        .define("task.stall.timeout.ms", Type.LONG, 300_000, LOW,
                "A task that has been inside one call of its connector for so long is reported as stalled.",
                at_least(1))
    )  # fmt: skip


def isolation_error(isolation: str, worker: Mapping[str, Any]) -> str | None:
    """Returns why a worker with these settings cannot run a connector with this isolation, or None if it can."""
    if isolation not in ISOLATIONS:
        return f"Invalid value {isolation} for configuration {ISOLATION}: String must be one of: asyncio, process"
    if isolation == "process" and "offset.storage.file.filename" in worker:
        return f"{ISOLATION}=process needs a distributed worker, since the processes keep offsets in its offset topic"
    return None


class WorkerConfig:
    """A worker's parsed settings, beside the properties as they were given.

    `config[name]` is a setting's value. Raises one ConfigError that lists all errors.
    """

    def __init__(
        self, props: Mapping[str, str], definition: ConfigDef | None = None, resolve: ClassResolver | None = None
    ) -> None:
        self.props = dict(props)
        self.definition = definition or worker_config()
        self.values = self.definition.parse(props, resolve)
        self.kafka: KafkaSettings = kafka_settings(self.client_props())[0]

    def __repr__(self) -> str:
        shown = {name: hidden(name, value) for name, value in self.values.items()}
        return f"<WorkerConfig {shown}>"

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def client_props(self, prefix: str = "") -> dict[str, str]:
        """Returns the properties for Kafka's clients: the worker's own, overridden by those with `prefix`."""
        own = {name: value for name, value in self.props.items() if name not in self.definition}
        own["bootstrap.servers"] = self.values["bootstrap.servers"]
        return own | with_prefix(self.props, prefix) if prefix else own
