"""The sans-IO core of the producer: records in, the batches of a sender's turn out, responses back in.

There is no socket, no clock and no event loop. `turn` does what `Sender.run_once` does. The test plays the broker and
sets the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.shared.clients.producer.batch_completion import BatchCompletion
from penstock.shared.clients.producer.buffer_pool import BufferPool
from penstock.shared.clients.producer.metrics import ProducerMetrics
from penstock.shared.clients.producer.producer_batch import ProducerBatch, RecordCallback
from penstock.shared.clients.producer.record_accumulator import RecordAccumulator
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transaction_manager import SequenceLedger, Transaction, TxnState
from penstock.shared.clients.protocol.produce import PartitionProduceResponse
from penstock.shared.clients.protocol.record_batches import read_batches, record_size
from penstock.shared.common.errors import BrokerNotAvailable, PenstockError
from penstock.shared.common.records import RecordMetadata, TopicPartition

A, B, C = (TopicPartition("t", number) for number in range(3))

# Error codes of brokers.
CORRUPT = 2
NOT_LEADER = 6
TIMED_OUT = 7
TOO_LARGE = 10
NOT_ENOUGH_REPLICAS = 19
TOPIC_AUTHORIZATION = 29
CLUSTER_AUTHORIZATION = 31
OUT_OF_ORDER = 45
DUPLICATE = 46
OLD_EPOCH = 47
INVALID_TXN_STATE = 48
UNKNOWN_PRODUCER = 59
INVALID_RECORD = 87
FENCED = 90
ABORTABLE = 120

PRODUCER_ID = 7
RETRY_BACKOFF_MS = 100


@dataclass(eq=False)
class Sent:
    """A sent record with its location and its outcomes in the order they were reported."""

    value: bytes
    batch: ProducerBatch
    index: int
    fates: list[RecordMetadata | Exception] = field(default_factory=list)

    @property
    def fate(self) -> RecordMetadata | Exception | None:
        assert len(self.fates) <= 1, f"reported more than once: {self.fates}"
        return self.fates[0] if self.fates else None

    @property
    def offset(self) -> int:
        assert isinstance(self.fate, RecordMetadata), self.fate
        return self.fate.offset

    def cancel(self) -> bool:
        return bool(self.batch.remove(self.index))


class Harness:
    """The core of one producer. Node 1 leads all partitions unless `leaders` differs. Nodes in `down` are unreachable,
    nodes in `busy` accept no further request."""

    def __init__(self, **settings: object) -> None:
        given = {"linger_ms": 0, "delivery_timeout_ms": 10_000, **settings}
        self.settings = ProducerSettings.model_validate(given)
        self.accumulator = RecordAccumulator(self.settings)
        self.memory = BufferPool(self.settings.buffer_memory)
        self.registry = CollectorRegistry()
        self.now_ms = 0
        self.metrics = ProducerMetrics(self.registry, "harness", lambda: self.now_ms, self.memory)
        self.transaction: Transaction | None = None
        if self.settings.transactional_id is not None:
            self.transaction = Transaction(self.settings.transactional_id)
            self.transaction.state = TxnState.IN_TRANSACTION
            self.transaction.added |= {A, B, C}
        self.completion = BatchCompletion(
            self.accumulator, self.memory, self.settings, self.transaction, self.metrics, RETRY_BACKOFF_MS
        )
        if self.settings.enable_idempotence:
            self.ledger.adopt(PRODUCER_ID, 0)
        self.leaders: dict[TopicPartition, int | None] = {}
        self.down: set[int] = set()
        self.busy: set[int] = set()
        self.requests: list[tuple[int, list[ProducerBatch]]] = []
        self.bytes: dict[ProducerBatch, bytes] = {}
        self.leaderless: set[str] = set()

    @property
    def ledger(self) -> SequenceLedger:
        return self.completion.ledger

    def send(self, tp: TopicPartition = A, value: bytes = b"v", key: bytes | None = None) -> Sent:
        """Appends a record as the producer does, to the open batch or to a new one with its own memory."""
        queue = self.accumulator.queue(tp)
        batch = queue.open
        if batch is None or batch.append(batch.count, 1_000, key, value, []) is None:
            memory = max(self.accumulator.batch_size, record_size(key, value, []))
            assert self.memory.try_acquire(memory), "no memory left"
            batch = self.accumulator.open_batch(queue, memory, self.now_ms)
            assert batch.append(0, 1_000, key, value, []) is not None
        sent = Sent(value, batch, batch.count)

        def on_delivery(metadata: RecordMetadata | None, error: Exception | None) -> None:
            fate = metadata or error
            assert fate is not None
            sent.fates.append(fate)

        key_size = -1 if key is None else len(key)
        batch.callbacks.append(RecordCallback(batch.count, 1_000, key_size, len(value), on_delivery))
        batch.count += 1
        return sent

    def turn(self, *, hurry: bool = False) -> list[ProducerBatch]:
        """Expires, resolves and drains until nothing more is due. Returns the sent batches and keeps their bytes."""
        self.completion.expire(self.now_ms)
        self.completion.settle()
        self.requests, self.leaderless = [], set()
        if self.settings.enable_idempotence and not self.ledger.ready:
            return []
        while True:
            drained = self.accumulator.drain(
                self.now_ms,
                lambda tp: self.leaders.get(tp, 1),
                lambda node: node not in self.down | self.busy,
                lambda node: node not in self.down,
                self.completion.may_send,
                hurry,
            )
            self.leaderless |= drained.leaderless
            for batch in drained.emptied:
                self.completion.emptied(batch)
            for node, batches in drained.requests.items():
                for batch in batches:
                    self.bytes[batch] = bytes(self.completion.sent(batch, self.now_ms))
                self.requests.append((node, batches))
            if not drained.requests and not drained.emptied:
                return [batch for _, batches in self.requests for batch in batches]

    def turn_one(self) -> ProducerBatch:
        """Runs a turn that sends exactly one batch."""
        (batch,) = self.turn()
        return batch

    def after(self, ms: int) -> list[ProducerBatch]:
        """Advances the clock, then runs a turn."""
        self.now_ms += ms
        return self.turn()

    def after_backoff(self) -> list[ProducerBatch]:
        """Runs a turn after every backoff has elapsed."""
        return self.after(2 * self.settings.retry_backoff_max_ms)

    def respond(self, batch: ProducerBatch, code: int = 0, offset: int | None = None, **more: Any) -> None:
        """Responds to a batch, by default with offset 0 for a success and none for an error."""
        at = offset if offset is not None else -1 if code else 0
        self.completion.answered(batch, PartitionProduceResponse(code, at, **more), self.now_ms)

    def lose(self, batch: ProducerBatch, error: PenstockError | None = None) -> None:
        """Closes the connection or times the request out without a response."""
        self.completion.unanswered(batch, error or BrokerNotAvailable("connection closed"), self.now_ms)

    def warm_up(self, *partitions: TopicPartition) -> None:
        """Acknowledges a first batch of each partition, so that several may be in flight."""
        for tp in partitions or (A,):
            self.send(tp, b"first")
            self.respond(self.turn_one(), offset=0)

    def delay_ms(self) -> float | None:
        return self.accumulator.delay_ms(self.now_ms, self.completion.waiting)

    def values(self, batch: ProducerBatch) -> list[bytes]:
        """The values in the bytes that were sent last."""
        (found,) = read_batches(self.bytes[batch])
        return [record.value for record in found]

    def state(self, batch: ProducerBatch) -> tuple[int, int]:
        """Epoch and base sequence in the bytes that were sent last."""
        (found,) = read_batches(self.bytes[batch])
        assert found.validate_crc()
        return found.producer_epoch, found.base_sequence

    @property
    def all_memory_is_back(self) -> bool:
        held = sum(self.accumulator.queue(tp).held for tp in (A, B, C))
        return held == 0 and self.memory.available == self.memory.size


def warm(**settings: object) -> Harness:
    """A producer whose partitions have acknowledged a first record each, with one record to a batch."""
    core = Harness(**{"batch_size": 100, "delivery_timeout_ms": 10**6, **settings})
    core.warm_up(A, B)
    return core


def flying(core: Harness, count: int) -> list[ProducerBatch]:
    """Return n batches of one record each, all in flight, in sequence order."""
    for i in range(count):
        core.send(value=b"%d" % i + b"x" * 60)
    batches = core.turn()
    assert [core.state(batch) for batch in batches] == [(0, i + 1) for i in range(count)]
    return batches
