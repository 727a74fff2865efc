"""The embedded broker's jars, class archive, server.properties and log4j configuration.

One node is both broker and controller (KRaft). Replication factors are one, internal topics have few partitions, and
memory is bounded, since the machine also runs everything else. The paths that are set here in server.properties and the
log4j configuration are relative to the data folder, which is the broker's working directory. An absolute path could
contain a comma, which separates paths in `log.dirs`, or characters outside ASCII, which a JVM in the C locale cannot
open.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from penstock.services.local.ports import address_text
from penstock.shared.common.java.class_archive import archive_path
from penstock.shared.common.java.installed_java import Java
from penstock.shared.common.java.jars import read_jar_set
from penstock.shared.common.settings import Port, PositiveMs, Section

KAFKA_JARS = read_jar_set(Path(__file__).with_name("kafka_jars.json"))
DEFAULT_DATA_DIR = Path(".penstock/kafka")
CLIENT_LISTENER = "PLAINTEXT"
CONTROLLER_LISTENER = "CONTROLLER"
NODE_ID = 1
LOG_FOLDER = "log"
BROKER_LOG = "broker.log"
CONSOLE_LOG = "console.log"
FORMAT_LOG = "format.log"
PROPERTIES_FILE = "server.properties"
LOG4J_FILE = "log4j2.xml"
# Properties that tie the process to its ports and folder are set here.
RESERVED_PROPERTIES = frozenset(
    (
        "process.roles",
        "node.id",
        "listeners",
        "advertised.listeners",
        "listener.security.protocol.map",
        "controller.quorum.voters",
        "controller.listener.names",
        "inter.broker.listener.name",
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
    )
)

DEFAULT_PROPERTIES: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    # Kafka deletes by record timestamp: a week would delete old event times within minutes. The hours are set, since
    # log.retention.minutes and log.retention.ms of the user then take precedence.
    "log.retention.hours": "-1",
    # 128 MiB by default, a quarter of the heap.
    "log.cleaner.dedupe.buffer.size": "16777216",
    # After a crash the new broker can register once the old one's session has ended: 9 s by default.
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "4",
}

QUICK_START = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""JVM options of a broker that runs for minutes: the second compiler and G1 would cost more time than they save."""

HeapMb = Annotated[int, Field(ge=128, le=65_536)]


class EmbeddedKafkaSettings(Section):
    """The single-node Kafka that Penstock starts itself."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on and to advertise")
    port: Port = Field(default=0, description="port of the plaintext listener; 0: a free one, printed at start-up")
    heap_mb: HeapMb = Field(default=512, description="maximum size of the broker's heap, in MiB")
    jvm_options: tuple[str, ...] = ()
    start_timeout_ms: PositiveMs = Field(
        default=60_000,
        description="time without a log line after which a start fails; also the time limit of formatting",
    )
    stop_timeout_ms: PositiveMs = Field(default=4_000, description="time limit of a graceful stop; then SIGKILL")
    listeners: dict[str, str] = Field(
        default_factory=dict,
        description="additional listeners on free ports: security protocol (SSL, SASL_SSL, …) by name",
    )
    properties: dict[str, str] = Field(
        default_factory=dict, description="Kafka broker properties, as in server.properties"
    )

    @field_validator("host")
    @classmethod
    def _host_can_be_advertised(cls, host: str) -> str:
        if host == "0.0.0.0":  # noqa: S104 - compared, not bound
            raise ValueError(f"{host} cannot be advertised to clients: name the address that clients use")
        return host

    @field_validator("properties")
    @classmethod
    def _reject_reserved_broker_properties(cls, properties: dict[str, str]) -> dict[str, str]:
        if reserved := sorted(RESERVED_PROPERTIES & properties.keys()):
            raise ValueError(f"{', '.join(reserved)} cannot be set for the embedded broker")
        return properties

    @field_validator("listeners")
    @classmethod
    def _names_are_free(cls, listeners: dict[str, str]) -> dict[str, str]:
        if taken := sorted({CLIENT_LISTENER, CONTROLLER_LISTENER} & listeners.keys()):
            raise ValueError(f"{', '.join(taken)} is a listener of the embedded broker already: choose another name")
        return listeners


def broker_properties(settings: EmbeddedKafkaSettings, ports: Mapping[str, int]) -> dict[str, str]:
    """Return server.properties as a mapping. `ports` has each listener's port, including PLAINTEXT and CONTROLLER."""
    addresses = {name: address_text(settings.host, port) for name, port in ports.items()}
    listeners = {name: f"{name}://{address}" for name, address in addresses.items()}
    protocols = {CLIENT_LISTENER: "PLAINTEXT", CONTROLLER_LISTENER: "PLAINTEXT", **settings.listeners}
    return {
        **DEFAULT_PROPERTIES,
        **settings.properties,
        "process.roles": "broker,controller",
        "node.id": str(NODE_ID),
        "controller.quorum.voters": f"{NODE_ID}@{addresses[CONTROLLER_LISTENER]}",
        "controller.listener.names": CONTROLLER_LISTENER,
        "inter.broker.listener.name": CLIENT_LISTENER,
        "listeners": ",".join(listeners.values()),
        "advertised.listeners": ",".join(text for name, text in listeners.items() if name != CONTROLLER_LISTENER),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "log.dirs": LOG_FOLDER,
    }


def log4j_config() -> str:
    """Return log4j's file: one log of at most 30 MiB, one line for each event, stack traces cut to 12 lines."""
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<Configuration status="ERROR" shutdownHook="disable">
  <Appenders>
    <RollingFile name="file" fileName="{BROKER_LOG}" filePattern="{BROKER_LOG}.%i">
      <PatternLayout pattern="%d %p %m (%c)%n%throwable{{12}}"/>
      <Policies><SizeBasedTriggeringPolicy size="10MB"/></Policies>
      <DefaultRolloverStrategy max="2"/>
    </RollingFile>
  </Appenders>
  <Loggers>
    <Root level="INFO"><AppenderRef ref="file"/></Root>
    <Logger name="kafka.server.KafkaConfig" level="WARN"/>
    <Logger name="org.apache.kafka.common.config.AbstractConfig" level="WARN"/>
  </Loggers>
</Configuration>
"""


def broker_archive_path(java: Java, jars: Path) -> Path:
    """Return the path of the broker's class archive for this Java and these jars, whether or not it exists."""
    return archive_path(jars.parent, jars.name, java, sorted(jars.glob("*.jar")))
