"""The APIs and versions that the fake broker supports, the frames of requests, and Kafka's error codes.

A request's frame is a header and a body. The header is the API's key, its version, a correlation id that the response
repeats, and the client's id. In flexible versions, the headers of requests and responses end with tagged fields. The
response header of ApiVersions never has them: a client must be able to read it before it knows the broker's versions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from penstock.shared.testing.fake_broker import schemas
from penstock.shared.testing.fake_broker.codec import (
    FLEXIBLE_NEVER,
    MalformedMessage,
    Message,
    MessageSchema,
    read_varint,
)

_HEADER = struct.Struct(">hhi")
_CORRELATION = struct.Struct(">i")
_LENGTH = struct.Struct(">h")


class Api(IntEnum):
    """The supported APIs, with Kafka's keys."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_CONFIGS = 32
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    INCREMENTAL_ALTER_CONFIGS = 44


class ErrorCode(IntEnum):
    """Error codes of Kafka, by Kafka's names."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    MEMBER_ID_REQUIRED = 79
    FENCED_INSTANCE_ID = 82
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    UNKNOWN_TOPIC_ID = 100
    TRANSACTION_ABORTABLE = 120


@dataclass(frozen=True)
class SupportedApi:
    """An API that the fake broker supports: its versions, and the schemas of its request and response."""

    api: Api
    min_version: int
    max_version: int
    flexible: int
    request: MessageSchema
    response: MessageSchema

    def is_flexible(self, version: int) -> bool:
        """Whether the protocol of a version of the API is flexible (KIP-482): it has tagged fields."""
        return version >= self.flexible


def _supported_api(api: Api, low: int, high: int, flexible: int, texts: tuple[str, str]) -> SupportedApi:
    return SupportedApi(api, low, high, flexible, MessageSchema(texts[0], flexible), MessageSchema(texts[1], flexible))


SUPPORTED_APIS: dict[int, SupportedApi] = {
    supported.api: supported
    for supported in (
        _supported_api(Api.PRODUCE, 3, 11, 9, schemas.PRODUCE),
        _supported_api(Api.FETCH, 4, 12, 12, schemas.FETCH),
        _supported_api(Api.LIST_OFFSETS, 1, 7, 6, schemas.LIST_OFFSETS),
        _supported_api(Api.METADATA, 0, 12, 9, schemas.METADATA),
        _supported_api(Api.OFFSET_COMMIT, 2, 8, 8, schemas.OFFSET_COMMIT),
        _supported_api(Api.OFFSET_FETCH, 1, 7, 6, schemas.OFFSET_FETCH),
        _supported_api(Api.FIND_COORDINATOR, 0, 3, 3, schemas.FIND_COORDINATOR),
        _supported_api(Api.JOIN_GROUP, 2, 9, 6, schemas.JOIN_GROUP),
        _supported_api(Api.HEARTBEAT, 0, 4, 4, schemas.HEARTBEAT),
        _supported_api(Api.LEAVE_GROUP, 0, 5, 4, schemas.LEAVE_GROUP),
        _supported_api(Api.SYNC_GROUP, 0, 5, 4, schemas.SYNC_GROUP),
        _supported_api(Api.DESCRIBE_GROUPS, 0, 5, 5, schemas.DESCRIBE_GROUPS),
        _supported_api(Api.LIST_GROUPS, 0, 4, 3, schemas.LIST_GROUPS),
        _supported_api(Api.SASL_HANDSHAKE, 0, 1, FLEXIBLE_NEVER, schemas.SASL_HANDSHAKE),
        _supported_api(Api.API_VERSIONS, 0, 3, 3, schemas.API_VERSIONS),
        _supported_api(Api.CREATE_TOPICS, 2, 7, 5, schemas.CREATE_TOPICS),
        _supported_api(Api.DELETE_TOPICS, 1, 5, 4, schemas.DELETE_TOPICS),
        _supported_api(Api.DELETE_RECORDS, 0, 2, 2, schemas.DELETE_RECORDS),
        _supported_api(Api.INIT_PRODUCER_ID, 0, 4, 2, schemas.INIT_PRODUCER_ID),
        _supported_api(Api.ADD_PARTITIONS_TO_TXN, 0, 3, 3, schemas.ADD_PARTITIONS_TO_TXN),
        _supported_api(Api.ADD_OFFSETS_TO_TXN, 0, 3, 3, schemas.ADD_OFFSETS_TO_TXN),
        _supported_api(Api.END_TXN, 0, 3, 3, schemas.END_TXN),
        _supported_api(Api.TXN_OFFSET_COMMIT, 0, 3, 3, schemas.TXN_OFFSET_COMMIT),
        _supported_api(Api.DESCRIBE_CONFIGS, 1, 4, 4, schemas.DESCRIBE_CONFIGS),
        _supported_api(Api.SASL_AUTHENTICATE, 0, 2, 2, schemas.SASL_AUTHENTICATE),
        _supported_api(Api.CREATE_PARTITIONS, 0, 3, 2, schemas.CREATE_PARTITIONS),
        _supported_api(Api.DELETE_GROUPS, 0, 2, 2, schemas.DELETE_GROUPS),
        _supported_api(Api.INCREMENTAL_ALTER_CONFIGS, 0, 1, 1, schemas.INCREMENTAL_ALTER_CONFIGS),
    )
}


@dataclass(frozen=True)
class Header:
    """The header of a request, and the position of its body."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body_at: int

    @property
    def supported_api(self) -> SupportedApi | None:
        """The API of the request; None if it or the version is not supported."""
        supported = SUPPORTED_APIS.get(self.api_key)
        if supported is None or not supported.min_version <= self.version <= supported.max_version:
            return None
        return supported


def decode_header(frame: bytes) -> Header:
    """The header of a request. Raises MalformedMessage if it is invalid."""
    try:
        key, version, correlation_id = _HEADER.unpack_from(frame)
        length = _LENGTH.unpack_from(frame, 8)[0]
        at = 10 + max(length, 0)
        client_id = frame[10:at].decode() if length >= 0 else None
        supported = SUPPORTED_APIS.get(key)
        if supported is not None and supported.is_flexible(version):
            count, at = read_varint(frame, at)
            for _ in range(count):
                _, at = read_varint(frame, at)
                size, at = read_varint(frame, at)
                at += size
    except (struct.error, IndexError, UnicodeDecodeError) as e:
        raise MalformedMessage(f"a request's header: {e}") from e
    return Header(key, version, correlation_id, client_id, at)


def encode_response(supported: SupportedApi, version: int, correlation_id: int, body: Message) -> bytes:
    """The frame of a response, without the length in front."""
    tags = b"\0" if supported.is_flexible(version) and supported.api is not Api.API_VERSIONS else b""
    return _CORRELATION.pack(correlation_id) + tags + supported.response.encode(body, version)
