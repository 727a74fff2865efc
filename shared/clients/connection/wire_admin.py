"""Requests of the admin client alone, which a broker need not support.

`wire` has the requests that every broker must support. ConsumerGroupDescribe describes a group of the new protocol
(KIP-848, `group.protocol=consumer`), which DescribeGroups reports as Dead. Brokers support it from Kafka 4.0 on.
DescribeLogDirs returns the sizes of partitions on the brokers' disks.
"""

from __future__ import annotations

from aiokafka.protocol.types import Array, Boolean, CompactArray, Int32, Int64

from penstock.shared.clients.connection.wire import ERROR, THROTTLE
from penstock.shared.clients.connection.wire_types import TAGS, TEXT, TEXT_FLEX, Api, Uuid

DESCRIBE_LOG_DIRS = Api(
    "DescribeLogDirs",
    35,
    1,
    (("topics", Array(("name", TEXT), ("partitions", Array(Int32)))),),
    (
        THROTTLE,
        (
            "log_dirs",
            Array(
                ERROR,
                ("log_dir", TEXT),
                (
                    "topics",
                    Array(
                        ("name", TEXT),
                        (
                            "partitions",
                            Array(("partition", Int32), ("size", Int64), ("offset_lag", Int64), ("is_future", Boolean)),
                        ),
                    ),
                ),
            ),
        ),
    ),
)

_PARTITIONS = CompactArray(
    ("topic_id", Uuid), ("topic_name", TEXT_FLEX), ("partitions", CompactArray(Int32)), TAGS
)  # fmt: skip
_MEMBERS = CompactArray(
    ("member_id", TEXT_FLEX),
    ("instance_id", TEXT_FLEX),
    ("rack_id", TEXT_FLEX),
    ("member_epoch", Int32),
    ("client_id", TEXT_FLEX),
    ("client_host", TEXT_FLEX),
    ("subscribed_topic_names", CompactArray(TEXT_FLEX)),
    ("subscribed_topic_regex", TEXT_FLEX),
    ("assignment_topics", _PARTITIONS),
    ("assignment_tags", TAGS[1]),
    ("target_topics", _PARTITIONS),
    ("target_tags", TAGS[1]),
    TAGS,
)

CONSUMER_GROUP_DESCRIBE = Api(
    "ConsumerGroupDescribe",
    69,
    0,
    (("group_ids", CompactArray(TEXT_FLEX)), ("include_authorized_operations", Boolean)),
    (
        THROTTLE,
        (
            "groups",
            CompactArray(
                ERROR,
                ("error_message", TEXT_FLEX),
                ("group_id", TEXT_FLEX),
                ("group_state", TEXT_FLEX),
                ("group_epoch", Int32),
                ("assignment_epoch", Int32),
                ("assignor_name", TEXT_FLEX),
                ("members", _MEMBERS),
                ("authorized_operations", Int32),
                TAGS,
            ),
        ),
    ),
    flexible=True,
)
