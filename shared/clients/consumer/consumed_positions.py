"""The positions that a consumer may commit now, automatically or on request.

A position goes through three stages:

1. `_returned`: the current poll returned the records before it. The user may still process them.
2. `_processed`: an earlier poll returned them.
3. `_registered`: the commit strategy or the user has registered the position for a commit.

An automatic commit takes positions from `_processed` alone, and never one below `_registered`. In an `async for` each
record is returned separately. The rest of its batch is `unread`, and the position lies before it. A position found by
the reset policy, or moved past offsets without records, counts like one of returned records.

A partition may be taken away while records of it were handed out and not committed. Its position is then `forfeited`.
The next commit that covers the position reports it, once.

>>> clicks = TopicPartition("clicks", 0)
>>> positions = ConsumedPositions()
>>> positions.returned({clicks: 3})
>>> positions.processed()
>>> positions.returned({clicks: 6})
>>> positions.uncommitted()[clicks].offset, positions.all_consumed()[clicks].offset
(3, 6)
>>> positions.registered(positions.all_consumed())  # the user commits
>>> positions.uncommitted()
{}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from penstock.shared.clients.consumer.fetcher import Move
from penstock.shared.clients.consumer.unread_records import PolledRecords, UnreadRecords
from penstock.shared.clients.protocol.fetch import NO_EPOCH, NO_OFFSET
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

_At = tuple[int, int]  # a position, and the leader epoch of the record before it
_Offsets = dict[TopicPartition, int]


class ConsumedPositions:
    """The consumed positions of one consumer. Call `retain` when the consumer no longer reads some partitions."""

    def __init__(self) -> None:
        self._returned: dict[TopicPartition, _At] = {}
        self._processed: dict[TopicPartition, _At] = {}
        self._registered: dict[TopicPartition, int] = {}
        self._handed: dict[TopicPartition, int] = {}
        self._reported: dict[TopicPartition, int] = {}
        self._forfeited: dict[TopicPartition, int] = {}
        self.unread = UnreadRecords()
        self.is_one_by_one = False
        """Whether the last return was one record of an iteration."""
        self.has_drifting = False
        """Whether a position was found from the end, or by a time, and is not registered for a commit yet. If the
        member dies before the commit, its successor uses the policy again, which then skips the records that arrived
        meanwhile."""

    def __repr__(self) -> str:
        return (
            f"<ConsumedPositions returned {self._returned}, processed {self._processed}, registered {self._registered}>"
        )

    def returned(self, positions: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int] = {}) -> None:
        """Note that a poll returned records up to these positions, the last records with these leader epochs."""
        for tp, position in positions.items():
            self._note_return(tp, position)
            self._returned[tp] = position, epochs.get(tp, NO_EPOCH)
        self._handed.update(positions)
        self.is_one_by_one = False

    def add_unread(self, polled: Mapping[TopicPartition, PolledRecords]) -> None:
        """Keep the records of a poll for an `async for`, which returns them one by one. The positions still lie before
        them."""
        for tp, each in polled.items():
            self._note_return(tp, each.columns.offsets.item(0) + 1)
        self.unread.add(polled)

    def returned_one(self, tp: TopicPartition, position: int, epoch: int) -> None:
        """Note that an iteration returned one of the unread records, with this position after it."""
        self._returned[tp] = position, epoch
        self._handed[tp] = position
        self.is_one_by_one = True

    def moved(self, tp: TopicPartition, move: Move) -> None:
        """Note that a position moved past offsets without records, or was found by the reset policy.

        The move is ignored while the partition has unread records. The position lies after these, and counts once they
        are returned.
        """
        if self.unread.position(tp) is not None:
            return
        self._note_return(tp, move.position)
        self.has_drifting |= move.drifts
        # A reset may find a lower offset than the registered one. Commits must follow it, or a restart would skip the
        # records in between.
        if move.replaced is not None:
            self._registered.pop(tp, None)
        # The move comes after records of the current poll, if it returned some. It is not committed before these are
        # processed.
        hand = self._returned if tp in self._returned else self._processed
        hand[tp] = move.position, move.epoch

    def processed(self) -> None:
        """Note that all returned records are processed: the next poll or record was requested, or close was called."""
        self._processed.update(self._returned)
        self._returned.clear()

    def unprocessed(self) -> None:
        """Note that the last returned records may be unprocessed: from now on `all_consumed` equals `uncommitted`."""
        self._processed = {tp: self._processed[tp] for tp in self.uncommitted()}
        self._returned.clear()

    def uncommitted(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the processed positions above the registered ones."""
        registered = self._registered
        return {
            tp: OffsetAndMetadata(position, "", epoch)
            for tp, (position, epoch) in self._processed.items()
            if position > registered.get(tp, NO_OFFSET)
        }

    def registered(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Note offsets that are to be committed: automatic commits stay above them."""
        self._registered.update({tp: at.offset for tp, at in offsets.items()})
        self.has_drifting = False

    def all_consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the consumed positions after all returned records, for a commit that the user requests."""
        return {tp: OffsetAndMetadata(p, "", epoch) for tp, (p, epoch) in (self._processed | self._returned).items()}

    def handed_out(self, partitions: Collection[TopicPartition], committed: Mapping[TopicPartition, int]) -> _Offsets:
        """Return these partitions' positions after the records handed out, where they are above the committed ones."""
        return {tp: at for tp, at in self._handed.items() if tp in partitions and at > committed.get(tp, NO_OFFSET)}

    def reported(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note that an error has reported these offsets as not committed, so that no second error reports them.

        A partition that is no longer owned is not marked. If it is assigned again, its records are handed out again.
        """
        # `_handed` has only owned partitions. Marking another one would hide the loss of records that are handed out
        # again.
        for tp in offsets.keys() & self._handed.keys():
            self._reported[tp] = max(offsets[tp], self._reported.get(tp, NO_OFFSET))
        self.recovered(offsets)

    def recovered(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note that these offsets are committed after all: positions up to them are no longer forfeited."""
        for tp, offset in offsets.items():
            # A lower commit leaves records uncommitted, so the position stays forfeited.
            if self._forfeited.get(tp, NO_OFFSET) <= offset:
                self._forfeited.pop(tp, None)

    def forfeit(self, partitions: Collection[TopicPartition], committed: Mapping[TopicPartition, int]) -> None:
        """Remember these partitions' positions that were handed out and not committed, until they are reported."""
        for tp, offset in self.handed_out(partitions, committed).items():
            # Positions up to the reported one have raised an error already.
            if offset > self._reported.get(tp, NO_OFFSET):
                self._forfeited[tp] = max(offset, self._forfeited.get(tp, NO_OFFSET))

    def forfeited(self, beyond: Mapping[TopicPartition, int]) -> _Offsets:
        """Return the forfeited positions beyond these offsets."""
        return {tp: offset for tp, offset in self._forfeited.items() if offset > beyond.get(tp, NO_OFFSET)}

    def take_forfeited(self) -> _Offsets:
        """Return all forfeited positions and forget them, since they are now reported."""
        forfeited = self._forfeited
        self._forfeited = {}
        return forfeited

    def sought(self, tp: TopicPartition, offset: int) -> None:
        """Note the user's own seek: earlier reads and commits of the partition no longer count."""
        self.unread.drop([tp])
        self._handed.pop(tp, None)
        self._reported.pop(tp, None)
        self._returned.pop(tp, None)
        self._registered.pop(tp, None)
        # The new position counts as processed: nothing before it is left to process, and a commit without further
        # records stores it.
        self._processed[tp] = offset, NO_EPOCH

    def retain(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget the consumed positions of all partitions except these."""
        kept = set(partitions)
        self.unread.retain(kept)
        for hand in (self._returned, self._processed, self._registered, self._handed, self._reported):
            for tp in [tp for tp in hand if tp not in kept]:
                del hand[tp]

    def _note_return(self, tp: TopicPartition, position: int) -> None:
        """If a truncated or recreated log is read at a lower position, allow commits from there."""
        before = self._returned.get(tp) or self._processed.get(tp)
        if before is not None and position < before[0]:
            self._registered.pop(tp, None)
