"""The error table: translates exceptions of aiokafka and error codes of brokers to Penstock's errors.

The message of a translated error starts with `where`, for example the topic and partition that the error is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiokafka import errors as kafka

from penstock.shared.common import errors as e

CODES: dict[int, tuple[str, type[e.PenstockError]]] = {
    -1: ("UNKNOWN_SERVER_ERROR", e.BrokerError),
    1: ("OFFSET_OUT_OF_RANGE", e.OffsetOutOfRange),
    2: ("CORRUPT_MESSAGE", e.CorruptRecord),
    3: ("UNKNOWN_TOPIC_OR_PARTITION", e.UnknownTopicOrPartition),
    5: ("LEADER_NOT_AVAILABLE", e.NotLeaderOrFollower),
    6: ("NOT_LEADER_OR_FOLLOWER", e.NotLeaderOrFollower),
    7: ("REQUEST_TIMED_OUT", e.KafkaTimeout),
    8: ("BROKER_NOT_AVAILABLE", e.BrokerNotAvailable),
    9: ("REPLICA_NOT_AVAILABLE", e.NotLeaderOrFollower),
    10: ("MESSAGE_TOO_LARGE", e.RecordTooLarge),
    12: ("OFFSET_METADATA_TOO_LARGE", e.InvalidRequest),
    14: ("COORDINATOR_LOAD_IN_PROGRESS", e.CoordinatorNotAvailable),
    15: ("COORDINATOR_NOT_AVAILABLE", e.CoordinatorNotAvailable),
    16: ("NOT_COORDINATOR", e.CoordinatorNotAvailable),
    17: ("INVALID_TOPIC_EXCEPTION", e.InvalidTopic),
    18: ("RECORD_LIST_TOO_LARGE", e.RecordTooLarge),
    19: ("NOT_ENOUGH_REPLICAS", e.NotEnoughReplicas),
    20: ("NOT_ENOUGH_REPLICAS_AFTER_APPEND", e.NotEnoughReplicas),
    22: ("ILLEGAL_GENERATION", e.IllegalGeneration),
    23: ("INCONSISTENT_GROUP_PROTOCOL", e.InconsistentGroupProtocol),
    24: ("INVALID_GROUP_ID", e.InvalidRequest),
    25: ("UNKNOWN_MEMBER_ID", e.UnknownMember),
    26: ("INVALID_SESSION_TIMEOUT", e.ConfigError),
    27: ("REBALANCE_IN_PROGRESS", e.RebalanceInProgress),
    28: ("INVALID_COMMIT_OFFSET_SIZE", e.InvalidRequest),
    29: ("TOPIC_AUTHORIZATION_FAILED", e.AuthorizationFailed),
    30: ("GROUP_AUTHORIZATION_FAILED", e.AuthorizationFailed),
    31: ("CLUSTER_AUTHORIZATION_FAILED", e.AuthorizationFailed),
    32: ("INVALID_TIMESTAMP", e.InvalidTimestamp),
    33: ("UNSUPPORTED_SASL_MECHANISM", e.AuthenticationFailed),
    34: ("ILLEGAL_SASL_STATE", e.AuthenticationFailed),
    35: ("UNSUPPORTED_VERSION", e.UnsupportedVersion),
    36: ("TOPIC_ALREADY_EXISTS", e.TopicAlreadyExists),
    37: ("INVALID_PARTITIONS", e.InvalidRequest),
    38: ("INVALID_REPLICATION_FACTOR", e.InvalidRequest),
    39: ("INVALID_REPLICA_ASSIGNMENT", e.InvalidRequest),
    40: ("INVALID_CONFIG", e.InvalidRequest),
    # Retriable: the next attempt looks up the controller again.
    41: ("NOT_CONTROLLER", e.BrokerNotAvailable),
    42: ("INVALID_REQUEST", e.InvalidRequest),
    44: ("POLICY_VIOLATION", e.InvalidRequest),
    45: ("OUT_OF_ORDER_SEQUENCE_NUMBER", e.OutOfOrderSequence),
    47: ("INVALID_PRODUCER_EPOCH", e.ProducerFenced),
    48: ("INVALID_TXN_STATE", e.InvalidTxnState),
    49: ("INVALID_PRODUCER_ID_MAPPING", e.InvalidProducerIdMapping),
    50: ("INVALID_TRANSACTION_TIMEOUT", e.ConfigError),
    51: ("CONCURRENT_TRANSACTIONS", e.ConcurrentTransactions),
    53: ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", e.AuthorizationFailed),
    55: ("OPERATION_NOT_ATTEMPTED", e.BrokerError),
    # The disk of the leader failed: the partition gets another leader (KIP-112).
    56: ("KAFKA_STORAGE_ERROR", e.NotLeaderOrFollower),
    58: ("SASL_AUTHENTICATION_FAILED", e.AuthenticationFailed),
    # The broker has lost the producer's state. As after a gap, a new epoch helps (KIP-360).
    59: ("UNKNOWN_PRODUCER_ID", e.OutOfOrderSequence),
    65: ("DELEGATION_TOKEN_AUTHORIZATION_FAILED", e.AuthorizationFailed),
    67: ("INVALID_PRINCIPAL_TYPE", e.InvalidRequest),
    68: ("NON_EMPTY_GROUP", e.GroupNotEmpty),
    69: ("GROUP_ID_NOT_FOUND", e.GroupNotFound),
    73: ("TOPIC_DELETION_DISABLED", e.InvalidRequest),
    # Client and broker know different leader epochs of the partition (KIP-320): one of them has stale metadata.
    74: ("FENCED_LEADER_EPOCH", e.NotLeaderOrFollower),
    75: ("UNKNOWN_LEADER_EPOCH", e.NotLeaderOrFollower),
    76: ("UNSUPPORTED_COMPRESSION_TYPE", e.ConfigError),
    # A new leader does not know its high watermark yet (KIP-207).
    78: ("OFFSET_NOT_AVAILABLE", e.NotLeaderOrFollower),
    79: ("MEMBER_ID_REQUIRED", e.UnknownMember),
    81: ("GROUP_MAX_SIZE_REACHED", e.GroupMaxSizeReached),
    82: ("FENCED_INSTANCE_ID", e.FencedInstanceId),
    86: ("GROUP_SUBSCRIBED_TO_TOPIC", e.GroupNotEmpty),
    87: ("INVALID_RECORD", e.InvalidRequest),
    88: ("UNSTABLE_OFFSET_COMMIT", e.UnstableOffsets),
    # Retriable: the quota on changes of topics (KIP-599) is free again later.
    89: ("THROTTLING_QUOTA_EXCEEDED", e.BrokerNotAvailable),
    90: ("PRODUCER_FENCED", e.ProducerFenced),
    113: ("STALE_MEMBER_EPOCH", e.IllegalGeneration),
    114: ("MISMATCHED_ENDPOINT_TYPE", e.InvalidRequest),
    # After this error it is enough to abort the transaction (KIP-890).
    120: ("TRANSACTION_ABORTABLE", e.TransactionAborted),
}

CODE_OF = {name: code for code, (name, _) in CODES.items()}
"""The error codes by name."""


def codes_of(*names: str) -> frozenset[int]:
    """Return the codes of these names. Raises KeyError for a name that the table lacks.

    >>> sorted(codes_of("INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED"))
    [47, 90]
    """
    return frozenset(CODE_OF[name] for name in names)


NO_ERROR = 0
DUPLICATE_SEQUENCE_NUMBER = 46
"""Not in the table, since it is no error for the producer: the batch is in the log already."""
MAYBE_APPENDED = codes_of(
    "UNKNOWN_SERVER_ERROR",
    "UNKNOWN_TOPIC_OR_PARTITION",
    "LEADER_NOT_AVAILABLE",
    "NOT_LEADER_OR_FOLLOWER",
    "REQUEST_TIMED_OUT",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
    "KAFKA_STORAGE_ERROR",
)
"""Codes after which a produced batch may still be in the log. A leader may append the batch, and then lose the
partition or its disk before it answers."""

# Ordered from the special to the general: the first matching class decides.
CLASSES: tuple[tuple[type[BaseException], type[e.PenstockError]], ...] = (
    (kafka.AuthenticationFailedError, e.AuthenticationFailed),
    (kafka.AuthenticationMethodNotSupported, e.AuthenticationFailed),
    (kafka.IncompatibleBrokerVersion, e.UnsupportedVersion),
    (kafka.UnrecognizedBrokerVersion, e.UnsupportedVersion),
    (kafka.NoOffsetForPartitionError, e.NoOffsetForPartition),
    (kafka.RecordTooLargeError, e.RecordTooLarge),
    (kafka.ProducerFenced, e.ProducerFenced),
    (kafka.CommitFailedError, e.CommitFailed),
    (kafka.KafkaTimeoutError, e.KafkaTimeout),
    (kafka.IllegalStateError, e.IllegalState),
    (kafka.IllegalOperation, e.IllegalState),
    (kafka.ConsumerStoppedError, e.IllegalState),
    (kafka.UnsupportedCodecError, e.ConfigError),
    (kafka.KafkaConnectionError, e.BrokerNotAvailable),
    (kafka.NodeNotReadyError, e.BrokerNotAvailable),
    (kafka.NoBrokersAvailable, e.BrokerNotAvailable),
    (kafka.KafkaUnavailableError, e.BrokerNotAvailable),
    (kafka.StaleMetadata, e.BrokerNotAvailable),
    (kafka.KafkaProtocolError, e.BrokerNotAvailable),
    (kafka.KafkaError, e.BrokerError),
    (TimeoutError, e.KafkaTimeout),
    (OSError, e.BrokerNotAvailable),
)


def name_of(code: int) -> str:
    """Return Kafka's name of an error code. A code that the table lacks becomes the text `error code <number>`."""
    return CODES[code][0] if code in CODES else f"error code {code}"


def error_for_code(code: int, where: str, detail: str | None = None) -> e.PenstockError:
    """Return the error for a broker's (non-zero) error code."""
    kind = CODES[code][1] if code in CODES else e.BrokerError
    return kind(f"{where}: {name_of(code)}" + (f": {detail}" if detail else ""))


def translate(error: BaseException, where: str) -> e.PenstockError:
    """Return Penstock's error for an exception of aiokafka or of its socket.

    Penstock's own errors are returned unchanged.
    """
    if isinstance(error, e.PenstockError):
        return error
    # A broker's error code: `errno` is the code, and the text after aiokafka's prefix is the broker's own.
    if isinstance(error, kafka.BrokerResponseError):
        own = str(error).removeprefix(f"[Error {error.errno}] ").removeprefix(type(error).__name__).lstrip(": ")
        return error_for_code(error.errno, where, own or None)
    for kind, ours in CLASSES:
        if isinstance(error, kind):
            return ours(f"{where}: {str(error) or type(error).__name__}")
    return e.BrokerError(f"{where}: {type(error).__name__}: {error}")


@contextmanager
def translating_errors(where: str, client_id: str) -> Iterator[None]:
    """Translate errors of aiokafka and of the socket in the block, with `where` before the message.

    A note with the client id is added to them. Penstock's own errors get the note if they have none.
    """
    note = f"client {client_id}"
    try:
        yield
    except (kafka.KafkaError, kafka.IllegalOperation, kafka.ConsumerStoppedError, OSError) as error:
        ours = translate(error, where)
        ours.add_note(note)
        raise ours from error
    except e.PenstockError as error:
        if not hasattr(error, "__notes__"):
            error.add_note(note)
        raise
