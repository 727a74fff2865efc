"""The sequence ledger: which producer id, epoch and sequence number a batch carries.

A partition has one batch in flight, so its next number moves only when the broker has acknowledged the one before: a
batch that the broker refused leaves no gap. Only a batch whose fate is unknown when it is given up leaves its numbers
unresolved; then the epoch is bumped (KIP-360) and every partition starts again at 0 with its next new batch, which also
makes the broker refuse the lost one should it still arrive.

>>> ledger = SequenceLedger()
>>> ledger.adopt(7, 0)
>>> tp = TopicPartition("clicks", 0)
>>> ledger.state(tp)
ProducerState(producer_id=7, epoch=0, base_sequence=0)
>>> ledger.acknowledged(tp, ledger.state(tp), 10)
>>> ledger.state(tp).base_sequence
10
>>> ledger.bump()
>>> ledger.state(tp)
ProducerState(producer_id=7, epoch=1, base_sequence=0)
"""

from __future__ import annotations

from shared.clients.producer.batch import ProducerState
from shared.common.records import TopicPartition

EPOCH_MAX = 2**15 - 1
SEQUENCES = 2**31
"""Sequence numbers wrap to 0 after 2^31 - 1."""


class SequenceLedger:
    """The next sequence number of each partition under the producer id and epoch in force."""

    def __init__(self) -> None:
        self.producer_id = -1
        self.epoch = -1
        self._next: dict[TopicPartition, ProducerState] = {}

    def __repr__(self) -> str:
        return f"<SequenceLedger producer {self.producer_id} epoch {self.epoch}, {len(self._next)} partitions>"

    @property
    def ready(self) -> bool:
        """Whether there is a producer id."""
        return self.producer_id >= 0

    def adopt(self, producer_id: int, epoch: int) -> None:
        """Use a producer id and epoch that the broker gave."""
        self.producer_id, self.epoch = producer_id, epoch

    def bump(self) -> None:
        """Go to the next epoch; after the last one a new producer id is needed (`ready` is False)."""
        if self.epoch >= EPOCH_MAX:
            self.producer_id, self.epoch = -1, -1
        else:
            self.epoch += 1

    def state(self, tp: TopicPartition) -> ProducerState:
        """What a partition's next new batch carries."""
        assert self.ready, "no producer id yet"
        known = self._next.get(tp)
        if known is None or (known.producer_id, known.epoch) != (self.producer_id, self.epoch):
            known = self._next[tp] = ProducerState(self.producer_id, self.epoch, 0)
        return known

    def acknowledged(self, tp: TopicPartition, state: ProducerState, count: int) -> None:
        """The broker has `count` records under `state`."""
        known = self._next.get(tp)
        if known is None or (known.producer_id, known.epoch) == (state.producer_id, state.epoch):
            self._next[tp] = state._replace(base_sequence=(state.base_sequence + count) % SEQUENCES)
