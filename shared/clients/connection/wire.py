"""Requests that aiokafka lacks, or has only in versions with fewer fields, each pinned to one version.

Kafka 2.8 up to 4.x all support these versions. Fields are in wire order (Kafka's `common/message/*.json`). A flexible
version ends every struct with its tagged fields, given as `{}`.
"""

from __future__ import annotations

from aiokafka.protocol.types import Array, Boolean, Bytes, CompactArray, Int8, Int16, Int32, Int64

from penstock.shared.clients.connection.wire_types import TAGS, TEXT, TEXT_FLEX, Api, Uuid

THROTTLE = ("throttle_time_ms", Int32)
ERROR = ("error_code", Int16)

# Version 10 has topic ids (KIP-516).
METADATA = Api(
    "Metadata",
    3,
    10,
    (
        ("topics", CompactArray(("topic_id", Uuid), ("name", TEXT_FLEX), TAGS)),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    ),
    (
        THROTTLE,
        ("brokers", CompactArray(("node_id", Int32), ("host", TEXT_FLEX), ("port", Int32), ("rack", TEXT_FLEX), TAGS)),
        ("cluster_id", TEXT_FLEX),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ERROR,
                ("name", TEXT_FLEX),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ERROR,
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline", CompactArray(Int32)),
                        TAGS,
                    ),
                ),
                ("authorized_operations", Int32),
                TAGS,
            ),
        ),
        ("cluster_authorized_operations", Int32),
    ),
    flexible=True,
)

CREATE_TOPICS = Api(
    "CreateTopics",
    19,
    4,
    (
        (
            "topics",
            Array(
                ("name", TEXT),
                ("partitions", Int32),
                ("replication_factor", Int16),
                ("assignments", Array(("partition", Int32), ("brokers", Array(Int32)))),
                ("configs", Array(("name", TEXT), ("value", TEXT))),
            ),
        ),
        ("timeout_ms", Int32),
        ("validate_only", Boolean),
    ),
    (THROTTLE, ("topics", Array(("name", TEXT), ERROR, ("error_message", TEXT)))),
)

DELETE_TOPICS = Api(
    "DeleteTopics",
    20,
    3,
    (("topics", Array(TEXT)), ("timeout_ms", Int32)),
    (THROTTLE, ("topics", Array(("name", TEXT), ERROR))),
)

DESCRIBE_CONFIGS = Api(
    "DescribeConfigs",
    32,
    2,
    (("resources", Array(("type", Int8), ("name", TEXT), ("keys", Array(TEXT)))), ("include_synonyms", Boolean)),
    (
        THROTTLE,
        (
            "results",
            Array(
                ERROR,
                ("error_message", TEXT),
                ("type", Int8),
                ("name", TEXT),
                (
                    "configs",
                    Array(
                        ("name", TEXT),
                        ("value", TEXT),
                        ("read_only", Boolean),
                        ("source", Int8),
                        ("sensitive", Boolean),
                        ("synonyms", Array(("name", TEXT), ("value", TEXT), ("source", Int8))),
                    ),
                ),
            ),
        ),
    ),
)

# AlterConfigs would reset every config that it does not name (KIP-339).
INCREMENTAL_ALTER_CONFIGS = Api(
    "IncrementalAlterConfigs",
    44,
    0,
    (
        (
            "resources",
            Array(
                ("type", Int8),
                ("name", TEXT),
                ("configs", Array(("name", TEXT), ("operation", Int8), ("value", TEXT))),
            ),
        ),
        ("validate_only", Boolean),
    ),
    (THROTTLE, ("resources", Array(ERROR, ("error_message", TEXT), ("type", Int8), ("name", TEXT)))),
)

# From version 5 on a new leader answers OFFSET_NOT_AVAILABLE until its high watermark is known (KIP-207).
LIST_OFFSETS = Api(
    "ListOffsets",
    2,
    5,
    (
        ("replica_id", Int32),
        ("isolation_level", Int8),
        (
            "topics",
            Array(
                ("name", TEXT),
                ("partitions", Array(("partition", Int32), ("leader_epoch", Int32), ("timestamp", Int64))),
            ),
        ),
    ),
    (
        THROTTLE,
        (
            "topics",
            Array(
                ("name", TEXT),
                (
                    "partitions",
                    Array(
                        ("partition", Int32), ERROR, ("timestamp", Int64), ("offset", Int64), ("leader_epoch", Int32)
                    ),
                ),
            ),
        ),
    ),
)

DELETE_RECORDS = Api(
    "DeleteRecords",
    21,
    1,
    (
        ("topics", Array(("name", TEXT), ("partitions", Array(("partition", Int32), ("offset", Int64))))),
        ("timeout_ms", Int32),
    ),
    (
        THROTTLE,
        ("topics", Array(("name", TEXT), ("partitions", Array(("partition", Int32), ("low_watermark", Int64), ERROR)))),
    ),
)

# Version 4 has the states of the groups (KIP-518).
LIST_GROUPS = Api(
    "ListGroups",
    16,
    4,
    (("states", CompactArray(TEXT_FLEX)),),
    (
        THROTTLE,
        ERROR,
        ("groups", CompactArray(("group_id", TEXT_FLEX), ("protocol_type", TEXT_FLEX), ("state", TEXT_FLEX), TAGS)),
    ),
    flexible=True,
)

DESCRIBE_GROUPS = Api(
    "DescribeGroups",
    15,
    4,
    (("groups", Array(TEXT)), ("include_authorized_operations", Boolean)),
    (
        THROTTLE,
        (
            "groups",
            Array(
                ERROR,
                ("group_id", TEXT),
                ("state", TEXT),
                ("protocol_type", TEXT),
                ("protocol", TEXT),
                (
                    "members",
                    Array(
                        ("member_id", TEXT),
                        ("group_instance_id", TEXT),
                        ("client_id", TEXT),
                        ("client_host", TEXT),
                        ("metadata", Bytes),
                        ("assignment", Bytes),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
    ),
)

DELETE_GROUPS = Api(
    "DeleteGroups", 42, 1, (("groups", Array(TEXT)),), (THROTTLE, ("results", Array(("group_id", TEXT), ERROR)))
)

OFFSET_DELETE = Api(
    "OffsetDelete",
    47,
    0,
    (("group_id", TEXT), ("topics", Array(("name", TEXT), ("partitions", Array(Int32))))),
    (ERROR, THROTTLE, ("topics", Array(("name", TEXT), ("partitions", Array(("partition", Int32), ERROR))))),
)

# Version 7 has the instance id of static members (KIP-345).
OFFSET_COMMIT = Api(
    "OffsetCommit",
    8,
    7,
    (
        ("group_id", TEXT),
        ("generation_id", Int32),
        ("member_id", TEXT),
        ("group_instance_id", TEXT),
        (
            "topics",
            Array(
                ("name", TEXT),
                (
                    "partitions",
                    Array(("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", TEXT)),
                ),
            ),
        ),
    ),
    (THROTTLE, ("topics", Array(("name", TEXT), ("partitions", Array(("partition", Int32), ERROR))))),
)

# Version 7 can wait for the offsets of open transactions (KIP-447).
OFFSET_FETCH = Api(
    "OffsetFetch",
    9,
    7,
    (
        ("group_id", TEXT_FLEX),
        ("topics", CompactArray(("name", TEXT_FLEX), ("partitions", CompactArray(Int32)), TAGS)),
        ("require_stable", Boolean),
    ),
    (
        THROTTLE,
        (
            "topics",
            CompactArray(
                ("name", TEXT_FLEX),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", TEXT_FLEX),
                        ERROR,
                        TAGS,
                    ),
                ),
                TAGS,
            ),
        ),
        ERROR,
    ),
    flexible=True,
)

_TXN = (("transactional_id", TEXT), ("producer_id", Int64), ("producer_epoch", Int16))
_TXN_TOPICS = ("topics", Array(("name", TEXT), ("partitions", Array(Int32))))
_TOPIC_ERRORS = ("topics", Array(("name", TEXT), ("partitions", Array(("partition", Int32), ERROR))))

# In these versions the coordinator answers PRODUCER_FENCED. It answered INVALID_PRODUCER_EPOCH before, which a leader
# also answers after a transaction has timed out (KIP-588).
INIT_PRODUCER_ID = Api(
    "InitProducerId",
    22,
    4,
    (
        ("transactional_id", TEXT_FLEX),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
    ),
    (THROTTLE, ERROR, ("producer_id", Int64), ("producer_epoch", Int16)),
    flexible=True,
)
ADD_PARTITIONS_TO_TXN = Api("AddPartitionsToTxn", 24, 2, (*_TXN, _TXN_TOPICS), (THROTTLE, _TOPIC_ERRORS))
ADD_OFFSETS_TO_TXN = Api("AddOffsetsToTxn", 25, 2, (*_TXN, ("group_id", TEXT)), (THROTTLE, ERROR))
END_TXN = Api("EndTxn", 26, 2, (*_TXN, ("committed", Boolean)), (THROTTLE, ERROR))
# Version 3 has the group's generation and member, which fence a consumer that has lost its partitions (KIP-447).
TXN_OFFSET_COMMIT = Api(
    "TxnOffsetCommit",
    28,
    3,
    (
        ("transactional_id", TEXT_FLEX),
        ("group_id", TEXT_FLEX),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", TEXT_FLEX),
        ("group_instance_id", TEXT_FLEX),
        (
            "topics",
            CompactArray(
                ("name", TEXT_FLEX),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", TEXT_FLEX), TAGS
                    ),
                ),
                TAGS,
            ),
        ),
    ),
    (
        THROTTLE,
        (
            "topics",
            CompactArray(("name", TEXT_FLEX), ("partitions", CompactArray(("partition", Int32), ERROR, TAGS)), TAGS),
        ),
    ),
    flexible=True,
)
