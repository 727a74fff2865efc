"""The errors that Penstock raises.

A leaf class says what happened (`ProducerFenced`, `RecordTooLarge`). Five base classes say what to do. After a
`RetriableError` the same call may be repeated. After an `AbortableError` the transaction must be aborted first. After a
`FatalError` that is not `abortable` the client or task that raised it cannot continue. For a `ConfigError` or
`DataError` a person must change a setting or a record. Most names are Kafka's (org.apache.kafka.common.errors, without
the suffix `Exception`).
"""

from __future__ import annotations

from penstock.shared.common.public_names import publish


class PenstockError(Exception):
    """Base of Penstock's errors. An argument of a wrong type or value may raise TypeError or ValueError instead.

    `maybe_written` is True if Kafka may have stored the record, or carried out the request, despite the error. Sending
    it again may then store it twice.

    `abortable` is True for an AbortableError. It is also True for a FatalError if the producer can continue after it
    has aborted the transaction: for example, the principal is not authorized for one topic, but may be for others.
    """

    maybe_written: bool = False
    abortable: bool = False


class RetriableError(PenstockError):
    """A temporary failure: the same call may succeed when it is made again."""


class AbortableError(PenstockError):
    """The transaction cannot be committed. Abort it; then repeat its work in a new transaction."""

    abortable = True


class FatalError(PenstockError):
    """The client or task that raised it cannot continue: make a new one. If it is `abortable`, an abort is enough."""


class ConfigError(PenstockError):
    """A setting or an argument is missing, wrong, or contradicts another, or what it names cannot be used.

    The message says what is wrong.
    """


class MissingExtra(ConfigError, ModuleNotFoundError):
    """A package of an extra is not installed. The message names the extra and the command that installs it."""


class DataError(PenstockError):
    """A value from outside is invalid. The message says which value and why."""


class SerializationError(DataError):
    """A key, value, header or protocol message could not be encoded or decoded."""


class IllegalState(PenstockError):
    """A call that the object's present state does not allow (closed, not started, no transaction)."""


class KafkaTimeout(RetriableError):
    """A call was not completed before its deadline. A request that it sent may still have been carried out."""

    maybe_written = True


class BrokerNotAvailable(RetriableError):
    """No broker could be reached, or the broker cannot serve the request now."""


class UnknownTopicOrPartition(RetriableError):
    """The broker does not know the topic or partition (yet)."""


class NotLeaderOrFollower(RetriableError):
    """The partition has no leader, or the broker that received the request cannot serve it (yet, or any more)."""


class NotEnoughReplicas(RetriableError):
    """Fewer in-sync replicas than `min.insync.replicas`."""


class DeliveryTimeout(PenstockError):
    """A record was not acknowledged within `delivery_timeout_ms` of its batch's creation; see `maybe_written`."""

    maybe_written = True


class BufferExhausted(RetriableError):
    """A limit on memory is reached: for example, no buffer memory became free within `max_block_ms`."""


class RecordTooLarge(DataError):
    """A record is larger than `max_request_size` or `buffer_memory`, or than the broker accepts."""


class SendCancelled(PenstockError):
    """A record was cancelled before it was acknowledged."""


class InvalidTopic(DataError):
    """Kafka does not allow the topic, or no topic is named."""


class InvalidTimestamp(DataError):
    """A record's timestamp is invalid, or outside the range that the topic accepts."""


class TopicAlreadyExists(PenstockError):
    """A topic of that name already exists."""


class AuthenticationFailed(FatalError):
    """The TLS or SASL handshake with a broker failed, for example because the broker rejected the credentials."""


class AuthorizationFailed(FatalError):
    """The principal may not do this on the resource (topic, group, cluster, …) that the message names."""


class ProducerFenced(FatalError):
    """This producer must not write any more. If the error is `abortable`, it can continue after an abort.

    A newer producer uses its transactional id, or the coordinator aborted a transaction that took longer than
    `transaction_timeout_ms`. Streams raises it if another owner has taken over a changelog partition.
    """


class OutOfOrderSequence(FatalError):
    """The broker saw a gap in an idempotent producer's sequence numbers, or has lost the producer's state."""


class TransactionAborted(AbortableError):
    """The transaction of a record or offset was aborted, or can only be aborted."""


class Wakeup(PenstockError):
    """`Consumer.wakeup` was called. The poll that raises this error loses no records: poll again to continue."""


class CommitFailed(PenstockError):
    """Offsets could not be committed, mostly because the member lost the partitions; the message says why."""


class IllegalGeneration(CommitFailed):
    """The group has moved to a newer generation."""


class UnknownMember(CommitFailed):
    """The group does not know this member (any more), or has not assigned anything to it yet."""


class RebalanceInProgress(RetriableError):
    """The group is rebalancing; poll to take part, then try again."""


class FencedInstanceId(FatalError):
    """Another member took over this `group_instance_id`."""


class InconsistentGroupProtocol(PenstockError):
    """The group's other members use another assignment protocol than this member."""


class GroupMaxSizeReached(PenstockError):
    """The group has as many members as the broker allows (`group.max.size`)."""


class OffsetOutOfRange(PenstockError):
    """An offset is outside the partition's range, and no reset is allowed."""


class LogTruncation(OffsetOutOfRange):
    """Records that were read are no longer in the log: it was truncated when its leader changed. Seek to continue."""


class NoOffsetForPartition(PenstockError):
    """There is no committed offset, and `auto_offset_reset` is `none`."""


class GroupNotEmpty(PenstockError):
    """A group has members that prevent the call, for example its deletion or a change of its offsets.

    The message names the members, unless they have left meanwhile.
    """


class CorruptRecord(DataError):
    """Bytes that fail their checksum or cannot be parsed; the message says where they are."""


class SchemaMismatch(FatalError):
    """Stored data does not match this topology or release; the message names the difference."""


class ChangelogHole(FatalError):
    """Changelog records that a restore or a compaction needs are gone; the message gives the details."""


class StateStoreFailed(FatalError):
    """The state on disk cannot be read or written; the message names the folder or the store, and the cause."""


class SourceTopicChanged(FatalError):
    """A source topic was replaced or has lost records since the state was made from it; the message names the topic."""


class SourceOffsetsMissing(FatalError):
    """Source records were deleted before they were read; the message says which offsets are missing."""


class CoordinatorNotAvailable(RetriableError):
    """The coordinator of a group or transactional id is loading, moving, unknown or unreachable."""


class ConcurrentTransactions(RetriableError):
    """The transactional id's last transaction is still being completed."""


class UnstableOffsets(RetriableError):
    """Offsets of the group are part of a transaction that is still open."""


class InvalidTxnState(FatalError):
    """The broker's state of the transaction does not allow the request."""


class InvalidProducerIdMapping(InvalidTxnState):
    """The coordinator does not know the producer id under the transactional id (any more): it has expired."""


PRODUCER_LOST = (ProducerFenced, InvalidTxnState, OutOfOrderSequence)
"""Errors after which a new producer can continue from the last commit."""


class UnsupportedVersion(FatalError):
    """The broker does not support a version of a request that is needed."""


class InvalidRequest(DataError):
    """A request or a record has invalid values, or the broker's configuration forbids it; the message says why."""


class GroupNotFound(PenstockError):
    """The coordinator knows no group with that id, or the group has no committed offsets."""


class BrokerError(PenstockError):
    """An error of the broker or of aiokafka that has no class of its own here; the message has its name or number."""


class JarsUnavailable(ConfigError):
    """Jars are not in the cache and could not be put there; the message says why."""


class JavaNotFound(ConfigError):
    """No Java that runs was found in the searched locations."""


class WrongJava(ConfigError):
    """Java was found, but no supported version; the message lists which version is where."""


class LakeUnavailable(RetriableError):
    """The table cannot be read or written now: it is missing, the storage fails, or files were removed meanwhile."""


class NotASnapshot(FatalError):
    """A Delta table exists, but this release cannot read it as a snapshot; the message says why."""


class WriterFenced(FatalError):
    """The Delta table has another version of a transaction identifier (`appId`) than this writer expects.

    Another writer has appended, or the table was restored, or deleted and created again.
    """


class LakeNotRemoved(RetriableError):
    """The files of a lake could not be listed, or some could not be removed.

    The message names the folder, or the first file that could not be removed, and the reason. Repeat the call to
    remove the remaining files.
    """


class ProcessingFailed(FatalError):
    """A record, a punctuation or a state cannot be processed, so the worker stops. The message names it.

    The worker has committed nothing of it. The next start reads the same record and fails again, unless the program or
    a setting changes. Three causes can be fixed:

    1. The exception handler of the stage is `fail`. With `dead_letter` the worker writes a dead letter, leaves out the
       record and continues. If a store has already taken the record, only the input of the failing node is left out.
    2. A node raised an error after it had changed a store. Fix the node, or let it raise before the change.
    3. A record or state is too large. Raise `max_request_size` and the topic's `max.message.bytes`.
    """


class HandlerTimeout(RetriableError):
    """The handler ran longer than `handler_timeout_ms` and was cancelled."""


class HandlerExited(RetriableError):
    """The handler raised an error that would end the process or thread (SystemExit, GeneratorExit). Neither ends."""


class HandlerCancelled(RetriableError):
    """A cancellation within the handler was not caught by the handler."""


def error_text(error: BaseException) -> str:
    """Return the text of an error, even if its `__str__` raises, as that of a user's class may.

    >>> class Mute(Exception):
    ...     def __str__(self) -> str:
    ...         raise KeyError("no text")
    >>> error_text(Mute()), error_text(KeyError("user"))
    ('(its text cannot be had: KeyError)', "'user'")
    """
    try:
        return str(error)
    except Exception as e:
        return f"(its text cannot be had: {type(e).__name__})"


publish("penstock.errors", globals(), [name for name, each in globals().items() if isinstance(each, type)])
