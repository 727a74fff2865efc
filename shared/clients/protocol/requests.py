"""Requests that Penstock's clients send. Each one has one fixed version.

Brokers from Kafka 2.8 to 4.x support all of these versions, except those marked as `optional`. Fields are in the order
of the bytes (Kafka's `common/message/*.json`). In a flexible version every struct ends with its tagged fields, here
`{}`. Fetch and Produce are encoded by hand: see fetch.py and produce.py.
"""

from __future__ import annotations

import uuid
from collections import namedtuple
from io import BytesIO
from typing import Any, cast

from aiokafka.protocol.api import RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    Boolean,
    Bytes,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

from penstock.shared.common.errors import UnsupportedVersion

CONSUMER = -1
"""The replica id of a client that is no broker."""
NO_GENERATION = -1
"""The generation of a commit from outside a group, and of a member that is in none."""

TEXT = String("utf-8")
TEXT_FLEX = CompactString("utf-8")
TAGS = ("tags", TaggedFields)


class Uuid:
    """Kafka's uuid: sixteen bytes, as `uuid.UUID`."""

    @classmethod
    def encode(cls, value: uuid.UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> uuid.UUID:
        return uuid.UUID(bytes=data.read(16))

    @classmethod
    def repr(cls, value: uuid.UUID) -> str:
        return str(value)


NO_UUID = uuid.UUID(int=0)


class Row(Schema):  # type: ignore[misc]
    """A struct in an array, decoded to a named tuple.

    >>> Row(("partition", Int32), ("error_code", Int16)).decode(BytesIO(bytes([0, 0, 0, 7, 0, 3]))).error_code
    3
    """

    def __init__(self, *fields: tuple[str, Any]) -> None:
        super().__init__(*fields)
        self._make = cast("Any", namedtuple)("Row", self.names)._make

    def decode(self, data: BytesIO) -> Any:
        return self._make(field.decode(data) for field in self.fields)


def array_of(*fields: tuple[str, Any]) -> Any:
    """Return the type of an array of structs in the definition of a request or response (Java: `ArrayOf`)."""
    return Array(Row(*fields))


def compact_array_of(*fields: tuple[str, Any]) -> Any:
    """Return the type of an array of structs in the definition of a request or response of a flexible version."""
    return CompactArray(Row(*fields))


def supported_version(versions: dict[int, tuple[int, int]], name: str, key: int, oldest: int, newest: int) -> int:
    """Return the newest version from `oldest` to `newest` that the broker supports.

    `versions` has the broker's lowest and highest version by API key. Raises UnsupportedVersion if there is no such
    version.
    """
    low, high = versions.get(key, (0, -1))
    version = min(high, newest)
    if version < max(low, oldest):
        wanted = f"{name} v{oldest}" + (f" to v{newest}" if newest > oldest else "")
        supported = f"supports v{low} to v{high}" if low <= high else "does not support this API"
        raise UnsupportedVersion(f"{wanted}: the broker {supported}")
    return version


class WireRequest:
    """A request of one version. aiokafka's connection calls `prepare` with the broker's versions."""

    def __init__(self, api: ApiVersion, fields: tuple[Any, ...]) -> None:
        self._api = api
        self._fields = fields
        self.name = api.name

    def prepare(self, versions: dict[int, tuple[int, int]]) -> Any:
        supported_version(versions, self._api.name, self._api.key, self._api.version, self._api.version)
        return self._api.struct(*self._fields)

    def __repr__(self) -> str:
        return f"{self._api.name} v{self._api.version}"


class ApiVersion:
    """One version of one of Kafka's APIs. Call it with the request's fields, in their order. It returns the request."""

    def __init__(
        self,
        name: str,
        key: int,
        version: int,
        request: tuple[Any, ...],
        response: tuple[Any, ...],
        *,
        flexible: bool = False,
        optional: bool = False,
    ) -> None:
        """With `optional`, a broker need not support it."""
        self.name = name
        self.key = key
        self.version = version
        self.optional = optional
        if flexible:
            request = (*request, TAGS)
            response = (*response, TAGS)
        common = {"API_KEY": key, "API_VERSION": version}
        response_type = type(f"{name}Response", (Response,), {**common, "SCHEMA": Schema(*response)})
        self.flexible = flexible
        self.struct = type(
            f"{name}Request",
            (RequestStruct,),
            {**common, "FLEXIBLE_VERSION": flexible, "RESPONSE_TYPE": response_type, "SCHEMA": Schema(*request)},
        )

    def __call__(self, *fields: Any) -> WireRequest:
        return WireRequest(self, (*fields, {}) if self.flexible else fields)


THROTTLE = ("throttle_time_ms", Int32)
ERROR = ("error_code", Int16)

# Version 10 has topic ids (KIP-516).
METADATA = ApiVersion(
    "Metadata",
    3,
    10,
    (
        ("topics", compact_array_of(("topic_id", Uuid), ("name", TEXT_FLEX), TAGS)),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    ),
    (
        THROTTLE,
        (
            "brokers",
            compact_array_of(("node_id", Int32), ("host", TEXT_FLEX), ("port", Int32), ("rack", TEXT_FLEX), TAGS),
        ),
        ("cluster_id", TEXT_FLEX),
        ("controller_id", Int32),
        (
            "topics",
            compact_array_of(
                ERROR,
                ("name", TEXT_FLEX),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    compact_array_of(
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

CREATE_TOPICS = ApiVersion(
    "CreateTopics",
    19,
    4,
    (
        (
            "topics",
            array_of(
                ("name", TEXT),
                ("partitions", Int32),
                ("replication_factor", Int16),
                ("assignments", array_of(("partition", Int32), ("brokers", Array(Int32)))),
                ("configs", array_of(("name", TEXT), ("value", TEXT))),
            ),
        ),
        ("timeout_ms", Int32),
        ("validate_only", Boolean),
    ),
    (THROTTLE, ("topics", array_of(("name", TEXT), ERROR, ("error_message", TEXT)))),
)

DELETE_TOPICS = ApiVersion(
    "DeleteTopics",
    20,
    3,
    (("topics", Array(TEXT)), ("timeout_ms", Int32)),
    (THROTTLE, ("topics", array_of(("name", TEXT), ERROR))),
)

CREATE_PARTITIONS = ApiVersion(
    "CreatePartitions",
    37,
    1,
    (
        ("topics", array_of(("name", TEXT), ("count", Int32), ("assignments", Array(Array(Int32))))),
        ("timeout_ms", Int32),
        ("validate_only", Boolean),
    ),
    (THROTTLE, ("topics", array_of(("name", TEXT), ERROR, ("error_message", TEXT)))),
)

DESCRIBE_CONFIGS = ApiVersion(
    "DescribeConfigs",
    32,
    2,
    (("resources", array_of(("type", Int8), ("name", TEXT), ("keys", Array(TEXT)))), ("include_synonyms", Boolean)),
    (
        THROTTLE,
        (
            "results",
            array_of(
                ERROR,
                ("error_message", TEXT),
                ("type", Int8),
                ("name", TEXT),
                (
                    "configs",
                    array_of(
                        ("name", TEXT),
                        ("value", TEXT),
                        ("read_only", Boolean),
                        ("source", Int8),
                        ("sensitive", Boolean),
                        ("synonyms", array_of(("name", TEXT), ("value", TEXT), ("source", Int8))),
                    ),
                ),
            ),
        ),
    ),
)

# AlterConfigs would reset every config that it does not name (KIP-339).
INCREMENTAL_ALTER_CONFIGS = ApiVersion(
    "IncrementalAlterConfigs",
    44,
    0,
    (
        (
            "resources",
            array_of(
                ("type", Int8),
                ("name", TEXT),
                ("configs", array_of(("name", TEXT), ("operation", Int8), ("value", TEXT))),
            ),
        ),
        ("validate_only", Boolean),
    ),
    (THROTTLE, ("resources", array_of(ERROR, ("error_message", TEXT), ("type", Int8), ("name", TEXT)))),
)

# From version 5 on a new leader answers OFFSET_NOT_AVAILABLE until its high watermark is known (KIP-207).
LIST_OFFSETS = ApiVersion(
    "ListOffsets",
    2,
    5,
    (
        ("replica_id", Int32),
        ("isolation_level", Int8),
        (
            "topics",
            array_of(
                ("name", TEXT),
                ("partitions", array_of(("partition", Int32), ("leader_epoch", Int32), ("timestamp", Int64))),
            ),
        ),
    ),
    (
        THROTTLE,
        (
            "topics",
            array_of(
                ("name", TEXT),
                (
                    "partitions",
                    array_of(
                        ("partition", Int32), ERROR, ("timestamp", Int64), ("offset", Int64), ("leader_epoch", Int32)
                    ),
                ),
            ),
        ),
    ),
)

DELETE_RECORDS = ApiVersion(
    "DeleteRecords",
    21,
    1,
    (
        ("topics", array_of(("name", TEXT), ("partitions", array_of(("partition", Int32), ("offset", Int64))))),
        ("timeout_ms", Int32),
    ),
    (
        THROTTLE,
        (
            "topics",
            array_of(("name", TEXT), ("partitions", array_of(("partition", Int32), ("low_watermark", Int64), ERROR))),
        ),
    ),
)

# Version 4 has the states of the groups (KIP-518).
LIST_GROUPS = ApiVersion(
    "ListGroups",
    16,
    4,
    (("states", CompactArray(TEXT_FLEX)),),
    (
        THROTTLE,
        ERROR,
        ("groups", compact_array_of(("group_id", TEXT_FLEX), ("protocol_type", TEXT_FLEX), ("state", TEXT_FLEX), TAGS)),
    ),
    flexible=True,
)

DESCRIBE_GROUPS = ApiVersion(
    "DescribeGroups",
    15,
    4,
    (("groups", Array(TEXT)), ("include_authorized_operations", Boolean)),
    (
        THROTTLE,
        (
            "groups",
            array_of(
                ERROR,
                ("group_id", TEXT),
                ("state", TEXT),
                ("protocol_type", TEXT),
                ("protocol", TEXT),
                (
                    "members",
                    array_of(
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

DELETE_GROUPS = ApiVersion(
    "DeleteGroups", 42, 1, (("groups", Array(TEXT)),), (THROTTLE, ("results", array_of(("group_id", TEXT), ERROR)))
)

OFFSET_DELETE = ApiVersion(
    "OffsetDelete",
    47,
    0,
    (("group_id", TEXT), ("topics", array_of(("name", TEXT), ("partitions", Array(Int32))))),
    (ERROR, THROTTLE, ("topics", array_of(("name", TEXT), ("partitions", array_of(("partition", Int32), ERROR))))),
)

# Version 7 has the instance id of static members (KIP-345).
OFFSET_COMMIT = ApiVersion(
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
            array_of(
                ("name", TEXT),
                (
                    "partitions",
                    array_of(("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", TEXT)),
                ),
            ),
        ),
    ),
    (THROTTLE, ("topics", array_of(("name", TEXT), ("partitions", array_of(("partition", Int32), ERROR))))),
)

# Version 7 can wait for the offsets of open transactions (KIP-447).
OFFSET_FETCH = ApiVersion(
    "OffsetFetch",
    9,
    7,
    (
        ("group_id", TEXT_FLEX),
        ("topics", compact_array_of(("name", TEXT_FLEX), ("partitions", CompactArray(Int32)), TAGS)),
        ("require_stable", Boolean),
    ),
    (
        THROTTLE,
        (
            "topics",
            compact_array_of(
                ("name", TEXT_FLEX),
                (
                    "partitions",
                    compact_array_of(
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
_TXN_TOPICS = ("topics", array_of(("name", TEXT), ("partitions", Array(Int32))))
_TOPIC_ERRORS = ("topics", array_of(("name", TEXT), ("partitions", array_of(("partition", Int32), ERROR))))

# In these versions the coordinator answers PRODUCER_FENCED. It answered INVALID_PRODUCER_EPOCH before, which a leader
# also answers after a transaction has timed out (KIP-588).
INIT_PRODUCER_ID = ApiVersion(
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
ADD_PARTITIONS_TO_TXN = ApiVersion("AddPartitionsToTxn", 24, 2, (*_TXN, _TXN_TOPICS), (THROTTLE, _TOPIC_ERRORS))
ADD_OFFSETS_TO_TXN = ApiVersion("AddOffsetsToTxn", 25, 2, (*_TXN, ("group_id", TEXT)), (THROTTLE, ERROR))
END_TXN = ApiVersion("EndTxn", 26, 2, (*_TXN, ("committed", Boolean)), (THROTTLE, ERROR))
# Version 3 has the group's generation and member, which fence a consumer that has lost its partitions (KIP-447).
TXN_OFFSET_COMMIT = ApiVersion(
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
            compact_array_of(
                ("name", TEXT_FLEX),
                (
                    "partitions",
                    compact_array_of(
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
            compact_array_of(
                ("name", TEXT_FLEX), ("partitions", compact_array_of(("partition", Int32), ERROR, TAGS)), TAGS
            ),
        ),
    ),
    flexible=True,
)

# The sizes of partitions on the brokers' disks.
DESCRIBE_LOG_DIRS = ApiVersion(
    "DescribeLogDirs",
    35,
    1,
    (("topics", array_of(("name", TEXT), ("partitions", Array(Int32)))),),
    (
        THROTTLE,
        (
            "log_dirs",
            array_of(
                ERROR,
                ("log_dir", TEXT),
                (
                    "topics",
                    array_of(
                        ("name", TEXT),
                        (
                            "partitions",
                            array_of(
                                ("partition", Int32), ("size", Int64), ("offset_lag", Int64), ("is_future", Boolean)
                            ),
                        ),
                    ),
                ),
            ),
        ),
    ),
    optional=True,
)

_PARTITIONS = compact_array_of(
    ("topic_id", Uuid), ("topic_name", TEXT_FLEX), ("partitions", CompactArray(Int32)), TAGS
)  # fmt: skip
_MEMBERS = compact_array_of(
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

# Describes a group of the new protocol (KIP-848, `group.protocol=consumer`), which DescribeGroups reports as Dead.
# It needs Kafka 4.0 or newer, and the cluster's feature `group.version=1`.
CONSUMER_GROUP_DESCRIBE = ApiVersion(
    "ConsumerGroupDescribe",
    69,
    0,
    (("group_ids", CompactArray(TEXT_FLEX)), ("include_authorized_operations", Boolean)),
    (
        THROTTLE,
        (
            "groups",
            compact_array_of(
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
    optional=True,
)

# The requests of a group's members, each in the first version with the instance id of static members (KIP-345).
_MEMBER = (("group_id", TEXT), ("generation_id", Int32), ("member_id", TEXT), ("group_instance_id", TEXT))

JOIN_GROUP = ApiVersion(
    "JoinGroup",
    11,
    5,
    (
        ("group_id", TEXT),
        ("session_timeout_ms", Int32),
        ("rebalance_timeout_ms", Int32),
        ("member_id", TEXT),
        ("group_instance_id", TEXT),
        ("protocol_type", TEXT),
        ("protocols", array_of(("name", TEXT), ("metadata", Bytes))),
    ),
    (
        THROTTLE,
        ERROR,
        ("generation_id", Int32),
        ("protocol_name", TEXT),
        ("leader", TEXT),
        ("member_id", TEXT),
        ("members", array_of(("member_id", TEXT), ("group_instance_id", TEXT), ("metadata", Bytes))),
    ),
)

SYNC_GROUP = ApiVersion(
    "SyncGroup",
    14,
    3,
    (*_MEMBER, ("assignments", array_of(("member_id", TEXT), ("assignment", Bytes)))),
    (THROTTLE, ERROR, ("assignment", Bytes)),
)

HEARTBEAT = ApiVersion("Heartbeat", 12, 3, _MEMBER, (THROTTLE, ERROR))

LEAVE_GROUP = ApiVersion(
    "LeaveGroup",
    13,
    3,
    (("group_id", TEXT), ("members", array_of(("member_id", TEXT), ("group_instance_id", TEXT)))),
    (THROTTLE, ERROR, ("members", array_of(("member_id", TEXT), ("group_instance_id", TEXT), ERROR))),
)
