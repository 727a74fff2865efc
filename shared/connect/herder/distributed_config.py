"""The settings of a distributed worker (`DistributedConfig`): Kafka Connect's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.shared.common.errors import ConfigError
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
from penstock.shared.connect.group.connect_protocol import EAGER, SETTINGS_NAMES
from penstock.shared.connect.herder.session_keys import HASHES
from penstock.shared.connect.properties import with_prefix
from penstock.shared.connect.runtime.worker_config import WorkerConfig, worker_config
from penstock.shared.connect.storage.kafka_based_log import LogTopic

MANAGED_TOPIC_CONFIGS = ("cleanup.policy", "partitions", "replication.factor")
"""Names for which `<store>.storage.<name>` is no config of the topic: the worker decides these, or they have their own
setting."""


def distributed_config() -> ConfigDef:
    """Return a distributed worker's settings (org.apache.kafka.connect.runtime.distributed.DistributedConfig)."""
    definition = (
        worker_config()
        .define("group.id", Type.STRING, NO_DEFAULT, HIGH,
                "Identifies the Connect cluster: all its workers have the same id.")
        .define("session.timeout.ms", Type.INT, 10_000, HIGH,
                "Time without a heartbeat after which the coordinator removes a worker from the group.", at_least(1))
        .define("rebalance.timeout.ms", Type.INT, 60_000, HIGH,
                "Maximum time for each worker to join the group once a rebalance has begun. After the same time, a "
                "worker that cannot read the configs of its assignment leaves the group.", at_least(1))
        .define("heartbeat.interval.ms", Type.INT, 3_000, HIGH,
                "Interval between heartbeats to the group coordinator.", at_least(1))
        .define("connect.protocol", Type.STRING, "sessioned", LOW,
                "Rebalance protocol. eager: all work stops. compatible: incremental cooperative rebalancing. "
                "sessioned: as compatible, with signed requests between workers.",
                one_of(*SETTINGS_NAMES, ignore_case=True))
        .define("scheduled.rebalance.max.delay.ms", Type.INT, 300_000, LOW,
                "Maximum time that the work of a departed worker waits for its return.", at_least(0))
        .define("worker.sync.timeout.ms", Type.INT, 3_000, MEDIUM,
                "Maximum time for a worker to read the configs of its assignment, before it retries.", at_least(1))
        .define("worker.unsync.backoff.ms", Type.INT, 300_000, MEDIUM,
                "Accepted for compatibility: a worker that left the group joins again once it has read the configs.")
        .define("inter.worker.key.generation.algorithm", Type.STRING, "HmacSHA256", LOW,
                "Algorithm of the session key.", one_of(*HASHES))
        .define("inter.worker.key.size", Type.INT, None, LOW,
                "Accepted for compatibility: session keys have 256 bits.")
        .define("inter.worker.key.ttl.ms", Type.INT, 3_600_000, LOW,
                "Lifetime of a session key. The leader then generates a new one.", at_least(1))
        .define("inter.worker.signature.algorithm", Type.STRING, "HmacSHA256", LOW,
                "Algorithm with which this worker signs requests to the leader. It must be one of "
                "inter.worker.verification.algorithms.", one_of(*HASHES))
        .define("inter.worker.verification.algorithms", Type.LIST, "HmacSHA256", LOW,
                "Signature algorithms that are accepted in requests between workers.")
    )  # fmt: skip
    for store, partitions in (("config", None), ("offset", 25), ("status", 5)):
        definition.define(
            f"{store}.storage.topic", Type.STRING, NO_DEFAULT, HIGH, f"Topic that stores the {store} records."
        )
        definition.define(
            f"{store}.storage.replication.factor",
            Type.SHORT,
            3,
            LOW,
            f"Replication factor of the {store} topic if the worker creates it. -1: the broker's default.",
        )
        if partitions is not None:
            definition.define(
                f"{store}.storage.partitions",
                Type.INT,
                partitions,
                LOW,
                f"Number of partitions of the {store} topic if the worker creates it.",
                at_least(-1),
            )
    return definition


class DistributedConfig(WorkerConfig):
    """A distributed worker's settings. The constructor raises ConfigError if they are invalid."""

    def __init__(self, props: Mapping[str, str], resolve: ClassResolver | None = None) -> None:
        """`resolve` returns the class for a name. If it is given, the converters must exist."""
        super().__init__(props, distributed_config(), resolve)
        if self["heartbeat.interval.ms"] >= self["session.timeout.ms"]:
            raise ConfigError(
                f"heartbeat.interval.ms={self['heartbeat.interval.ms']} must be below "
                f"session.timeout.ms={self['session.timeout.ms']}"
            )
        signature = self["inter.worker.signature.algorithm"]
        accepted = self["inter.worker.verification.algorithms"]
        if signature not in accepted:
            raise ConfigError(
                f"inter.worker.signature.algorithm={signature} must be one of "
                f"inter.worker.verification.algorithms={','.join(accepted)}"
            )
        topics = [self[f"{store}.storage.topic"] for store in ("config", "offset", "status")]
        if len(set(topics)) != len(topics):
            raise ConfigError(f"config, offset and status storage must use different topics, got {', '.join(topics)}")

    @property
    def exactly_once(self) -> bool:
        """Whether source tasks write in transactions and older generations of them are fenced."""
        return bool(self["exactly.once.source.support"].lower() == "enabled")

    @property
    def transactional_leader(self) -> bool:
        """Whether the leader writes configs in transactions: if exactly-once is `enabled` or `preparing`."""
        return bool(self["exactly.once.source.support"].lower() != "disabled")

    @property
    def offered_versions(self) -> tuple[int, ...]:
        """The versions of the group's protocol that this worker offers, newest first."""
        return tuple(range(SETTINGS_NAMES[self["connect.protocol"].lower()], EAGER - 1, -1))

    def topic(self, store: str) -> LogTopic:
        """Return the topic of a store: `config`, `offset` or `status`."""
        prefix = f"{store}.storage."
        given = with_prefix(self.props, prefix)
        configs = {
            name: value
            for name, value in given.items()
            if name not in ("topic", *MANAGED_TOPIC_CONFIGS) and f"{prefix}{name}" not in self.definition
        }
        is_single = store == "config"
        partitions = 1 if is_single else int(self[f"{prefix}partitions"])
        return LogTopic(
            self[f"{prefix}topic"], partitions, int(self[f"{prefix}replication.factor"]), configs, is_single=is_single
        )

    @property
    def leader_transactional_id(self) -> str:
        """The transactional id of the leader's producer."""
        return f"connect-cluster-{self['group.id']}"
