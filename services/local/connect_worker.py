"""A Connect worker as one service of a local set-up, configured by the settings that all services share.

Its `group.id` is `connect`, and the names of its three internal topics begin with that. Its converters read and write
keys as text and values as JSON without schemas, as ingest and topologies do. `PENSTOCK_CONNECT` sets or overrides any
setting of a worker, by Kafka Connect's names: `PENSTOCK_CONNECT='{"offset.flush.interval.ms": "10000"}'`.
"""

from __future__ import annotations

import sys

from penstock.services import service_lifecycle
from penstock.services.connect.daemon import ConnectDaemon
from penstock.services.connect.worker_command_line import CommandLine
from penstock.services.local.ports import address_text
from penstock.services.local.settings import ConnectWorkerSettings
from penstock.shared.connect.allowed_files import FILES_ALLOWED
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.connect.runtime.plugins import Plugins

PROGRAM = "penstock connect"
CLUSTER = "connect"
JSON_CONVERTER = "org.apache.kafka.connect.json.JsonConverter"
STRING_CONVERTER = "org.apache.kafka.connect.storage.StringConverter"


def worker_properties(settings: ConnectWorkerSettings) -> dict[str, str]:
    """Return the properties of the Connect worker, by Kafka Connect's names.

    `rest.auth.token` is `auth_token`, or else the secret of the first credential with the scope admin. Settings in
    `connect` override these properties.

    >>> worker_properties(ConnectWorkerSettings(connect={"group.id": "mine"}))["group.id"]
    'mine'
    """
    http = settings.http
    token = settings.tokens_by_scope().get("admin")
    return {
        "bootstrap.servers": settings.kafka.bootstrap_servers,
        "group.id": CLUSTER,
        **{f"{store}.storage.topic": f"{CLUSTER}-{store}s" for store in ("config", "offset")},
        "status.storage.topic": f"{CLUSTER}-status",
        **{f"{store}.storage.replication.factor": "1" for store in ("config", "offset", "status")},
        "offset.storage.partitions": "5",
        "key.converter": STRING_CONVERTER,
        "value.converter": JSON_CONVERTER,
        "value.converter.schemas.enable": "false",
        "scheduled.rebalance.max.delay.ms": "0",
        "listeners": f"http://{address_text(http.host, http.port)}",
        **({} if settings.connect_files is None else {FILES_ALLOWED: str(settings.connect_files)}),
        "rest.max.head.bytes": str(http.max_head_bytes),
        **({} if token is None else {"rest.auth.token": token}),
        **settings.connect,
    }


def make_connect_worker(settings: ConnectWorkerSettings) -> ConnectDaemon:
    """Return the Connect worker of a local set-up. Raises ConfigError if its settings are invalid."""
    props = worker_properties(settings)
    config = DistributedConfig(props, Plugins.of_worker(props).converter_class)
    return ConnectDaemon(CommandLine(config, {}, settings.log))


def main(arguments: list[str]) -> int:
    """Run the Connect worker of a local set-up until SIGTERM or SIGINT. Returns the exit status."""
    return service_lifecycle.serve(PROGRAM, ConnectWorkerSettings, make_connect_worker, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
