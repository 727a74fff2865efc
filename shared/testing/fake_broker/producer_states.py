"""A partition's state of its idempotent producers, and its decision on their next batch.

A producer numbers its records. The partition appends the batch that follows the last one. For one of the last five
batches it repeats its earlier answer. It rejects everything else. A newer epoch starts at zero, an older one is fenced.
From an unknown producer (its records may be lost) a partition accepts any number. An example, with batches of ten:

    sequence 0 -> appended;  10 -> appended;  10 again -> the first one's offset;  30 -> OUT_OF_ORDER_SEQUENCE_NUMBER
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from penstock.shared.testing.fake_broker.broker_batches import Batch, next_sequence
from penstock.shared.testing.fake_broker.protocol import ErrorCode

BATCHES_REMEMBERED = 5
"""The maximum number of batches that a producer may have in flight."""


@dataclass(frozen=True, slots=True)
class Appended:
    """A batch in its position."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    append_time_ms: int


@dataclass(slots=True)
class ProducerState:
    """One producer: its epoch and its last batches."""

    epoch: int
    batches: deque[Appended] = field(default_factory=lambda: deque(maxlen=BATCHES_REMEMBERED))


class ProducerStates:
    """The producers that one partition knows."""

    def __init__(self) -> None:
        self._known: dict[int, ProducerState] = {}

    def __repr__(self) -> str:
        return f"ProducerStates({self._known})"

    def check(self, batch: Batch) -> Appended | ErrorCode:
        """NONE if the batch may be appended, the position of an earlier append of it, or the error code."""
        known = self._known.get(batch.producer_id)
        if known is None:
            return ErrorCode.NONE
        if batch.producer_epoch < known.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if batch.producer_epoch > known.epoch:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER if batch.base_sequence else ErrorCode.NONE
        for one in known.batches:
            if (one.base_sequence, one.last_sequence) == (batch.base_sequence, batch.last_sequence):
                return one
        expected = next_sequence(known.batches[-1].last_sequence) if known.batches else 0
        return ErrorCode.NONE if batch.base_sequence == expected else ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def appended(self, batch: Batch) -> None:
        """Remember a batch that has its offset."""
        known = self._state_of_producer(batch.producer_id, batch.producer_epoch)
        at = batch.base_offset, batch.append_time_ms
        known.batches.append(Appended(batch.base_sequence, batch.last_sequence, *at))

    def fenced(self, producer_id: int, epoch: int) -> None:
        """Remember the epoch of a transaction's marker."""
        self._state_of_producer(producer_id, epoch)

    def _state_of_producer(self, producer_id: int, epoch: int) -> ProducerState:
        known = self._known.get(producer_id)
        if known is None or epoch > known.epoch:
            known = self._known[producer_id] = ProducerState(epoch)
        return known
