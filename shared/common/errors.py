"""What can go wrong, said as it is.

A leaf class says what is true (`ProducerFenced`, `RecordTooLarge`); the base it derives from says what to do:
`RetriableError` may be tried again as it is, `AbortableError` needs the transaction aborted first, `FatalError`
ends the client or task that raised it. `ConfigError` and `DataError` are neither: a person must change a setting
or a record. Names are Kafka's where Kafka has one (org.apache.kafka.common.errors, without the suffix `Exception`).
"""

from __future__ import annotations

from penstock.shared.common.public_names import publish


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose.

    `maybe_written` says, of a record or request that failed with it, that Kafka may hold it all the same: to send it
    again may then store it twice. Who knows better sets it on the error.

    `abortable` says, of an error that a transaction failed with, that the producer can go on once it has aborted, also
    where the class is a FatalError: the principal may not use one topic or group, but it may use others.
    """

    maybe_written: bool = False
    abortable: bool = False


class RetriableError(PenstockError):
    """Passing: the same call may succeed when it is made again."""


class AbortableError(PenstockError):
    """The transaction cannot be committed; abort it, then the work may be done again."""

    abortable = True


class FatalError(PenstockError):
    """The client or task that raised it cannot go on; make a new one."""


class ConfigError(PenstockError):
    """A setting is missing, wrong, or contradicts another. The message names it."""


class MissingExtra(ConfigError, ModuleNotFoundError):
    """A package of an extra is not installed. The message names the extra and the command that installs it."""


class DataError(PenstockError):
    """A value from outside is not what it must be. The message names the value's place."""


class SerializationError(DataError):
    """A key or value could not be turned into bytes, or back."""


class IllegalState(PenstockError):
    """A call that the object's present state does not allow (closed, not started, no transaction)."""


class KafkaTimeout(RetriableError):
    """The deadline of a call passed before the broker answered. What was asked may still have happened."""

    maybe_written = True


class BrokerNotAvailable(RetriableError):
    """No broker could be reached."""


class UnknownTopicOrPartition(RetriableError):
    """The broker does not know the topic or partition (yet)."""


class NotLeaderOrFollower(RetriableError):
    """The broker asked does not lead the partition (any more)."""


class NotEnoughReplicas(RetriableError):
    """Fewer in-sync replicas than `min.insync.replicas`."""


class DeliveryTimeout(PenstockError):
    """A record was not acknowledged within `delivery_timeout_ms` of being handed over; see `maybe_written`."""

    maybe_written = True


class BufferExhausted(RetriableError):
    """No buffer memory became free within `max_block_ms`."""


class RecordTooLarge(DataError):
    """A record is larger than `max_request_size`, or than the broker takes."""


class SendCancelled(PenstockError):
    """A record was taken back before it was sent."""


class InvalidTopic(DataError):
    """A topic name that Kafka does not allow."""


class InvalidTimestamp(DataError):
    """A record's timestamp is outside of what the topic accepts."""


class TopicAlreadyExists(PenstockError):
    """A topic of that name exists."""


class AuthenticationFailed(FatalError):
    """The broker refused the credentials."""


class AuthorizationFailed(FatalError):
    """The principal may not do this on the topic, group or transactional id that the message names."""


class ProducerFenced(FatalError):
    """This producer must not write any more: a newer one with the same transactional id exists, or the coordinator
    aborted a transaction that took longer than `transaction_timeout_ms`."""


class OutOfOrderSequence(FatalError):
    """The broker saw a gap in an idempotent producer's sequence numbers."""


class TransactionAborted(AbortableError):
    """The transaction a record or offset belonged to was aborted."""


class Wakeup(PenstockError):
    """`Consumer.wakeup` was called: the poll that raises this took nothing, and the next one goes on."""


class CommitFailed(PenstockError):
    """Offsets could not be committed since the member no longer owns the partitions; the message says why."""


class IllegalGeneration(CommitFailed):
    """The group has moved to a newer generation."""


class UnknownMember(CommitFailed):
    """The group does not know this member (any more)."""


class RebalanceInProgress(RetriableError):
    """The group is rebalancing; poll to take part, then try again."""


class FencedInstanceId(FatalError):
    """Another member took over this `group_instance_id`."""


class InconsistentGroupProtocol(PenstockError):
    """The group's other members assign partitions in another way than `partition_assignment_strategy` says."""


class GroupMaxSizeReached(PenstockError):
    """The group has as many members as the broker allows (`group.max.size`)."""


class OffsetOutOfRange(PenstockError):
    """An offset outside of what the partition holds, where no reset is allowed."""


class LogTruncation(OffsetOutOfRange):
    """Records that were read are not in the log any more: it was truncated when its leader changed. Seek to go on."""


class NoOffsetForPartition(PenstockError):
    """No committed offset, and `auto_offset_reset` is `none`."""


class GroupNotEmpty(PenstockError):
    """The group has members, so its offsets cannot be changed. The message names them."""


class CorruptRecord(DataError):
    """Bytes that fail their checksum or cannot be parsed; the message names topic, partition and offset."""


class SchemaMismatch(FatalError):
    """Stored state was written by a topology that this one does not match; the message names the difference."""


class ChangelogHole(FatalError):
    """Changelog records that a restore needs are gone; the message says which offsets are missing."""


class StateStoreFailed(FatalError):
    """The state on disk cannot be read or written; the message names the folder and what the system said."""


class SourceTopicChanged(FatalError):
    """A source topic is not the one that the state was made from, or has lost records; the message names both."""


class SourceOffsetsMissing(FatalError):
    """Source records were deleted before they were read; the message says which offsets are missing."""


class CoordinatorNotAvailable(RetriableError):
    """The coordinator of a group or transactional id is loading, moving or unknown."""


class ConcurrentTransactions(RetriableError):
    """The transactional id's last transaction is still being completed."""


class UnstableOffsets(RetriableError):
    """Offsets of the group are part of a transaction that is still open."""


class InvalidTxnState(FatalError):
    """The broker's state of the transaction does not allow the request."""


class InvalidProducerIdMapping(InvalidTxnState):
    """The coordinator does not know the producer id under the transactional id (any more): it has expired."""


class UnsupportedVersion(FatalError):
    """The broker does not speak the version of a request that is needed."""


class InvalidRequest(DataError):
    """The broker refused a request's values (partitions, replication factor, configs); the message says why."""


class GroupNotFound(PenstockError):
    """The coordinator knows no group of that id."""


class BrokerError(PenstockError):
    """The broker answered with an error that has no class of its own here; the message gives Kafka's name for it."""


class JarsUnavailable(ConfigError):
    """Jars are not in the cache and could not be put there; the message says why and what to do."""


class JavaNotFound(ConfigError):
    """No Java at any of the places looked at."""


class WrongJava(ConfigError):
    """There is a Java, but none of a version that does; the message says which version is where."""


class LakeUnavailable(RetriableError):
    """The table cannot be read: storage that does not answer, or files that an upkeep has removed meanwhile."""


class NotASnapshot(FatalError):
    """There is a Delta table, but not one that this release can read as a snapshot; the message says why."""


class WriterFenced(FatalError):
    """Another writer has appended under the same application's name."""


class LakeNotRemoved(RetriableError):
    """Files of a lake could not be listed or removed; the message names the first, and why. What is left can be tried
    again."""


class ProcessingFailed(FatalError):
    """A record, a punctuation or a state cannot be handled to its end, and the worker stops; the message names it.

    Nothing of it was committed: the next start restores the state of the last commit, meets the same record and fails
    again. The way on is another program or setting. Where the stage's exception handler is `fail`, `dead_letter` goes
    on without the record, or behind a store without the output. Where a node raised after it had changed a store, mend
    it, or have it raise before; for what is too large raise `max_request_size` and the topic's `max.message.bytes`.
    """


class RecordTooSlow(PenstockError):
    """A record takes longer than the group waits for a heartbeat, so that nothing of it is ever committed."""


class HandlerTimeout(RetriableError):
    """The handler was cancelled: it ran longer than `handler_timeout_ms`."""


class HandlerExited(RetriableError):
    """The handler raised what is meant to end a process or thread (SystemExit, GeneratorExit); it ends neither."""


class HandlerCancelled(RetriableError):
    """Something within the handler was cancelled, and it let the cancellation through."""


publish("penstock.errors", globals(), [name for name, each in globals().items() if isinstance(each, type)])
