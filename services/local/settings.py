"""The settings of the commands of a local set-up."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from penstock.api.settings import GuardedSettings, Pointer
from penstock.services.consumer.settings import Names
from penstock.services.local.broker_config import DEFAULT_DATA_DIR, EmbeddedKafkaSettings
from penstock.services.producer.settings import ProducerServiceSettings
from penstock.shared.common.settings import (
    CommandSettings,
    DaemonSettings,
    HttpSettings,
    KafkaSettings,
    LogSettings,
    NonEmptyPath,
    Port,
    PositiveMs,
)
from penstock.shared.common.time_text import TimeUnit


class UpSettings(DaemonSettings):
    """Kafka and every service on this machine."""

    http: HttpSettings = HttpSettings(port=8080)
    log: LogSettings = LogSettings(level="warning")
    shutdown_timeout_ms: PositiveMs = Field(default=30_000, description="time limit of each service's shutdown")
    data_dir: NonEmptyPath = Field(
        default=Path(".penstock"), description="folder of Kafka's data, the lake, connectors' files and the logs"
    )
    broker: EmbeddedKafkaSettings = EmbeddedKafkaSettings()
    topic: str = Field(default="events", description="topic of the events; created with event-time configs if missing")
    partitions: int = Field(default=4, gt=0, description="number of partitions of that topic if it is created")
    key: tuple[Pointer, ...] = Field(default=("/key",), description="JSON pointers to the parts of an event's key")
    time: Pointer | None = Field(default=None, description="JSON pointer to an event's time; default: its arrival")
    time_unit: TimeUnit = Field(
        default="ms", description="unit of numeric event times: s, ms, us or ns since the epoch"
    )
    topology: str = "penstock.services.local.topologies:sessions"
    topology_options: dict[str, str] = Field(default={}, description="keyword arguments for the topology's function")
    workers: int = Field(
        default=1, gt=0, description="number of the aggregator's processes, which share the topic's partitions"
    )
    topics: Names = Field(
        default=("sessions",), description="topics that the consumer handles, comma-separated", min_length=1
    )
    handler: str = "penstock.services.local.log_handler:log_record"
    group_id: str = "handler"
    connect_worker: bool = Field(default=True, description="whether to run a Connect worker")
    connect_port: Port = Field(
        default=8083,
        description="port of the Connect worker's REST API, at http.host; 0: a free one. It must differ from http.port "
        "and broker.port, and these from each other, whatever their hosts",
    )

    def listening(self) -> dict[str, tuple[str, int]]:
        """Return the host and port of each listener whose port is set, by the port's setting."""
        found = {
            "http.port": (self.http.host, self.http.port),
            "broker.port": (self.broker.host, self.broker.port),
            "connect_port": (self.http.host, self.connect_port if self.connect_worker else 0),
        }
        return {setting: (host, port) for setting, (host, port) in found.items() if port}

    @model_validator(mode="after")
    def _check_ports_differ(self) -> Self:
        settings: dict[int, str] = {}
        for setting, (_, port) in self.listening().items():
            if (other := settings.setdefault(port, setting)) != setting:
                raise ValueError(f"{other} and {setting} are both {port}: choose another port, or 0 for a free one")
        return self


class GatewaySettings(ProducerServiceSettings):
    """The gateway of a local set-up: ingest, admin and dashboard at one address."""

    # Not `services`, which a settings file may have for `penstock admin`: dictionaries of all sources are merged.
    gateway_services: dict[str, str] = Field(
        default={}, description="addresses of the other services by name: dashboard, `/health`, their routes"
    )
    services_timeout_ms: PositiveMs = Field(default=2_000, description="time limit of a request to another service")


class ConnectWorkerSettings(GuardedSettings):
    """The Connect worker of a local set-up.

    If `credentials` is set, something must protect the worker's REST: `auth_token`, a credential with the scope admin,
    or in `connect` the setting `rest.auth.token` or `rest.auth.users`.
    """

    connect: dict[str, str] = Field(default={}, description="settings of the worker, by Kafka Connect's names")
    connect_files: NonEmptyPath | None = Field(
        default=None, description="folder that file connectors may use, unless connect sets connect.files.allowed"
    )

    @model_validator(mode="after")
    def _check_rest_auth(self) -> Self:
        has_own = bool({"rest.auth.token", "rest.auth.users"} & self.connect.keys())
        if self.credentials and not has_own and "admin" not in self.tokens_by_scope():
            raise ValueError(
                "credentials: the Connect worker needs auth_token, a credential with the scope admin, or in connect "
                "rest.auth.token or rest.auth.users (or set connect_worker=false)"
            )
        return self


class DoctorSettings(CommandSettings):
    """Checks Kafka, its topics and this machine, and reports problems and how to fix them."""

    # The consumer's topics, in the same file or environment, are others.
    FLAGS_ONLY = frozenset({"topics"})

    log: LogSettings = LogSettings(level="warning")
    kafka: KafkaSettings = KafkaSettings(request_timeout_ms=10_000)
    topics: Names = Field(
        default=(), description="topics with event times, comma-separated; default: all topics are checked"
    )
    data_dir: NonEmptyPath = Field(default=DEFAULT_DATA_DIR, description="data folder of an embedded Kafka")
