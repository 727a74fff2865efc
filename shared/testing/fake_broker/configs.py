"""The configs that the fake broker knows, with their defaults, and the check of a value.

A topic may have any of `TOPIC_CONFIGS`, which are all those of Kafka. The configs of deletion, compaction and tiered
storage are stored and returned, but nothing is ever deleted, compacted or copied. The exception is `retention.bytes`,
which limits the memory of a long test. `BROKER_CONFIGS` are the cluster's own. The defaults are Kafka's, except that
topics are not created automatically and a group's first rebalance is not delayed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.shared.common.records import INT64_MAX

TOPIC_CONFIGS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.type": "producer",
    "compression.zstd.level": "3",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": str(INT64_MAX),
    "flush.ms": str(INT64_MAX),
    "follower.replication.throttled.replicas": "",
    "index.interval.bytes": "4096",
    "leader.replication.throttled.replicas": "",
    "local.retention.bytes": "-2",
    "local.retention.ms": "-2",
    "max.compaction.lag.ms": str(INT64_MAX),
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": str(INT64_MAX),
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "remote.log.copy.disable": "false",
    "remote.log.delete.on.disable": "false",
    "remote.storage.enable": "false",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.index.bytes": "10485760",
    "segment.jitter.ms": "0",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}

BROKER_CONFIGS: Mapping[str, str] = {
    "auto.create.topics.enable": "false",
    "default.replication.factor": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.max.session.timeout.ms": "1800000",
    "group.min.session.timeout.ms": "6000",
    "num.partitions": "1",
    "offset.metadata.max.bytes": "4096",
    "transaction.max.timeout.ms": "900000",
}

_BOOLEANS = {
    "preallocate",
    "remote.log.copy.disable",
    "remote.log.delete.on.disable",
    "remote.storage.enable",
    "unclean.leader.election.enable",
}
_CHOICES = {
    "cleanup.policy": {"delete", "compact"},
    "compression.gzip.level": {"-1", *map(str, range(1, 10))},
    "compression.type": {"producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"},
    "message.timestamp.type": {"CreateTime", "LogAppendTime"},
}
_THROTTLED = re.compile(r"\*|(\d+:\d+(,\d+:\d+)*)?")
"""The value of a config of throttled replicas: all, or pairs of a partition and a broker."""

_DIRTY_RATIO = "min.cleanable.dirty.ratio"
"""The only topic config with a fraction."""
_INT32 = {"index.interval.bytes", "max.message.bytes", "min.insync.replicas", "segment.bytes", "segment.index.bytes"}
"""The whole numbers of 32 bits; all others have 64."""
_AT_LEAST = {
    "compression.lz4.level": 1,
    "compression.zstd.level": -(1 << 17),
    "flush.messages": 1,
    "local.retention.bytes": -2,
    "local.retention.ms": -2,
    "max.compaction.lag.ms": 1,
    "min.insync.replicas": 1,
    "retention.bytes": -(1 << 63),
    "retention.ms": -1,
    "segment.bytes": 1 << 20,
    "segment.index.bytes": 4,
    "segment.ms": 1,
}
"""The lowest value of a number, if it is not 0; as in Kafka's `LogConfig`."""
_AT_MOST = {_DIRTY_RATIO: 1, "compression.lz4.level": 17, "compression.zstd.level": 22}
"""The highest value of a number, if it is not that of its type."""


def wrong_topic_config(name: str, value: str | None) -> str | None:
    """The reason why a topic cannot have this config; None if it can.

    >>> wrong_topic_config("retention.ms", "soon")
    'Invalid value soon for configuration retention.ms'
    >>> wrong_topic_config("retention.ms", "-1")
    >>> wrong_topic_config("min.insync.replicas", "0.5")
    'Invalid value 0.5 for configuration min.insync.replicas'
    """
    if name not in TOPIC_CONFIGS:
        return f"Unknown topic config name: {name}"
    if value is None:
        return f"Null value not supported for topic configs: {name}"
    if name in _BOOLEANS:
        fits = value.strip().lower() in ("true", "false")
    elif name.endswith("throttled.replicas"):
        fits = _THROTTLED.fullmatch(value) is not None
    elif name in _CHOICES:
        words = value.split(",") if name == "cleanup.policy" else [value]
        fits = all(word.strip() in _CHOICES[name] for word in words)
    else:
        number = float if name == _DIRTY_RATIO else int
        most = _AT_MOST.get(name, (1 << 31) - 1 if name in _INT32 else INT64_MAX)
        try:
            # Python's numbers may have underscores, Java's may not.
            fits = "_" not in value and _AT_LEAST.get(name, 0) <= number(value) <= most
        except ValueError:
            fits = False
    return None if fits else f"Invalid value {value} for configuration {name}"
