"""The sequence ledger: which producer id, epoch and sequence number a batch carries.

Several batches of a partition may be in flight, so numbers are handed out when a batch is first drained. A retry keeps
its number: by it the broker tells a repeated batch from a new one, and what it answers decides what becomes of a hole.

- A batch that is refused as out of order while no earlier one is pending shows a gap: an earlier batch never reached
  the log, so neither did this one nor any after it. All that is queued may get new numbers in a new epoch (KIP-360).
- A batch that was given up leaves a hole. Batches after it that have numbers are tried as they are: they are
  acknowledged (then it reached the log after all) or show the gap.
- Where none is left, `settle` decides before a new number is handed out: numbers that were surely refused are used
  again; a batch that may still arrive costs an epoch, which also makes the broker refuse it.

Other partitions go over to a new epoch when they have nothing under way. Under a new producer id or epoch a partition
has one batch under way until the first is acknowledged (`may_assign`).

>>> ledger = SequenceLedger()
>>> ledger.adopt(7, 0)
>>> tp = TopicPartition("clicks", 0)
>>> first, second = ledger.assign(tp, 10), ledger.assign(tp, 5)
>>> second
ProducerState(producer_id=7, epoch=0, base_sequence=10)
>>> ledger.acknowledged(tp, first, 10)
>>> ledger.given_up(tp, lost=False)
>>> ledger.settle(tp)
>>> ledger.assign(tp, 1).base_sequence
10
"""

from __future__ import annotations

from penstock.shared.clients.producer.batch import ProducerState
from penstock.shared.common.records import TopicPartition

EPOCH_MAX = 2**15 - 1
SEQUENCES = 2**31
"""Sequence numbers wrap to 0 after 2^31 - 1."""


class _Sequences:
    """One partition's numbers under one producer id and epoch: `next` to hand out, `expected` by the broker."""

    __slots__ = ("epoch", "expected", "gap", "known", "lost", "next", "producer_id")

    def __init__(self, producer_id: int, epoch: int) -> None:
        self.producer_id, self.epoch = producer_id, epoch
        self.next = self.expected = 0
        self.known = False
        self.lost = self.gap = False


class SequenceLedger:
    """The numbers of each partition, and the producer id and epoch in force."""

    def __init__(self) -> None:
        self.producer_id = -1
        self.epoch = -1
        self._partitions: dict[TopicPartition, _Sequences] = {}
        self._troubled: dict[TopicPartition, None] = {}

    def __repr__(self) -> str:
        return f"<SequenceLedger producer {self.producer_id} epoch {self.epoch}, {len(self._partitions)} partitions>"

    @property
    def ready(self) -> bool:
        """Whether there is a producer id."""
        return self.producer_id >= 0

    def adopt(self, producer_id: int, epoch: int) -> None:
        """Use a producer id and epoch that the broker gave."""
        self.producer_id, self.epoch = producer_id, epoch

    def forget(self) -> None:
        """Drop the numbers of every partition; nothing may be under way."""
        self._partitions.clear()
        self._troubled.clear()

    def bump(self) -> None:
        """Go to the next epoch; after the last one a new producer id is needed (`ready` is False)."""
        if self.epoch >= EPOCH_MAX:
            self.producer_id, self.epoch = -1, -1
        else:
            self.epoch += 1

    def assign(self, tp: TopicPartition, count: int) -> ProducerState:
        """The state of a partition's next new batch, of `count` records."""
        assert self.ready, "no producer id yet"
        known = self._partitions.get(tp)
        if known is None or (
            known.next == known.expected and (known.producer_id, known.epoch) != (self.producer_id, self.epoch)
        ):
            known = self._partitions[tp] = _Sequences(self.producer_id, self.epoch)
        state = ProducerState(known.producer_id, known.epoch, known.next)
        known.next = (known.next + count) % SEQUENCES
        return state

    def acknowledged(self, tp: TopicPartition, state: ProducerState, count: int) -> None:
        """The broker has `count` records under `state`, and so all before them."""
        known = self._partitions.get(tp)
        if known is None or (known.producer_id, known.epoch) != (state.producer_id, state.epoch):
            return
        known.known = True
        after = (state.base_sequence + count) % SEQUENCES
        if (after - known.expected) % SEQUENCES < SEQUENCES // 2:
            known.expected = after

    def given_up(self, tp: TopicPartition, *, lost: bool) -> None:
        """A batch that has a number ended without being acknowledged; `lost` if it may be in the log all the same."""
        if (known := self._partitions.get(tp)) is not None:
            self._troubled[tp] = None
            known.lost |= lost

    def gap_shown(self, tp: TopicPartition) -> None:
        """The broker refused a batch as out of order though none before it is pending."""
        if (known := self._partitions.get(tp)) is not None:
            self._troubled[tp] = None
            known.gap = True

    def may_assign(self, tp: TopicPartition) -> bool:
        """Whether a new number may be handed out: not before `settle` where there is trouble.

        And under a new producer id or epoch one batch at a time, until the first one is acknowledged: a broker that
        does not know a producer takes whatever number comes first, and would so take the second batch without the
        first.
        """
        if not self.ready or tp in self._troubled:
            return False
        known = self._partitions.get(tp)
        return known is None or known.known or known.next == known.expected

    def is_troubled(self, tp: TopicPartition) -> bool:
        """Whether `settle` is to be called once nothing of the partition is out."""
        return tp in self._troubled

    def troubled(self) -> list[TopicPartition]:
        """The partitions that `settle` is to be called for."""
        return list(self._troubled)

    def has_gap(self, tp: TopicPartition) -> bool:
        """Whether `settle` will take the numbers of what is queued."""
        known = self._partitions.get(tp)
        return known is not None and known.gap

    def settle(self, tp: TopicPartition) -> None:
        """Resolve a partition's trouble; nothing of it is out, and nothing queued has a number that is to be kept.

        Several partitions in trouble share one bump: an epoch that is newer than the partition's own is enough.
        """
        del self._troubled[tp]
        known = self._partitions[tp]
        if known.gap or (known.lost and known.next != known.expected):
            del self._partitions[tp]
            if (known.producer_id, known.epoch) == (self.producer_id, self.epoch):
                self.bump()
        else:
            known.next = known.expected
            known.lost = False
