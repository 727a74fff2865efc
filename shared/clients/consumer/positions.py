"""Which positions may be committed at any moment, by themselves or on request.

A position goes through three hands: what the current poll returned (`_returned`: the user may be working on it), what
polls before it returned (`_processed`), and what of that went to `OffsetCommits`, by the commit strategy or by the
user (`_registered`). What commits by itself takes `_processed` and no more, and never goes below what was registered.
In an `async for` each record is returned by itself; the rest of its batch is `unread`, and nobody's position has passed
it. A position that the reset policy found, or that moved over offsets without a record, counts like one that was read.

Records that were handed out and not committed when their partition went are `forfeited`: the next commit that covers
them says so, once.

>>> clicks = TopicPartition("clicks", 0)
>>> positions = Positions()
>>> positions.returned({clicks: 3})
>>> positions.processed()
>>> positions.returned({clicks: 6})
>>> positions.uncommitted()[clicks].offset, positions.polled()[clicks].offset
(3, 6)
>>> positions.registered(positions.polled())  # the user commits
>>> positions.uncommitted()
{}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from penstock.shared.clients.connection import NO_EPOCH
from penstock.shared.clients.consumer.fetch_state import Move
from penstock.shared.clients.consumer.unread import Taken, Unread
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

_At = tuple[int, int]  # a position, and the leader epoch of the record before it
_Offsets = dict[TopicPartition, int]


class Positions:
    """Of one consumer; those of partitions that are not read any more are to be forgotten (`forget_except`)."""

    def __init__(self) -> None:
        self._returned: dict[TopicPartition, _At] = {}
        self._processed: dict[TopicPartition, _At] = {}
        self._registered: dict[TopicPartition, int] = {}
        self._handed: dict[TopicPartition, int] = {}
        self._reported: dict[TopicPartition, int] = {}
        self._forfeited: dict[TopicPartition, int] = {}
        self.unread = Unread()
        self.is_one_by_one = False
        """Whether what was returned last is one record, of an iteration."""
        self.has_drifting = False
        """Whether a position was found from the end, or by a time, and not given to `OffsetCommits` yet: a member that
        dies before it is committed leaves its successor to the policy, which then leads past what came meanwhile."""

    def __repr__(self) -> str:
        return f"<Positions returned {self._returned}, processed {self._processed}, registered {self._registered}>"

    def returned(self, positions: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int] = {}) -> None:
        """A poll returned records up to these positions, the last of them of these leader epochs."""
        for tp, position in positions.items():
            self._note_return(tp, position)
            self._returned[tp] = position, epochs.get(tp, NO_EPOCH)
        self._handed.update(positions)
        self.is_one_by_one = False

    def taken(self, taken: Mapping[TopicPartition, Taken]) -> None:
        """Records to be returned one by one."""
        for tp, each in taken.items():
            self._note_return(tp, each.columns.offsets.item(0) + 1)
        self.unread.add(taken)

    def returned_one(self, tp: TopicPartition, position: int, epoch: int) -> None:
        """An iteration returned one of the records that were taken."""
        self._returned[tp] = position, epoch
        self._handed[tp] = position
        self.is_one_by_one = True

    def moved(self, tp: TopicPartition, move: Move) -> None:
        """The position went on without a record handed out, or was found by the reset policy.

        What is unread lies before it, so that this one counts when that has been returned.
        """
        if self.unread.position(tp) is not None:
            return
        self._note_return(tp, move.position)
        self.has_drifting |= move.drifts
        if move.left is not None:
            self._registered.pop(tp, None)
        hand = self._returned if tp in self._returned else self._processed
        hand[tp] = move.position, move.epoch

    def processed(self) -> None:
        """The next poll or record asked for (or close) says that what was returned so far is done."""
        self._processed.update(self._returned)
        self._returned.clear()

    def unprocessed(self) -> None:
        """What was returned last may not be done: from here on `polled` is what is `uncommitted`."""
        self._processed = {tp: self._processed[tp] for tp in self.uncommitted()}
        self._returned.clear()

    def uncommitted(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The processed positions above what was given to `OffsetCommits`."""
        registered = self._registered
        return {
            tp: OffsetAndMetadata(position, "", epoch)
            for tp, (position, epoch) in self._processed.items()
            if position > registered.get(tp, -1)
        }

    def registered(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """`OffsetCommits` has them: what commits by itself stays above."""
        self._registered.update({tp: at.offset for tp, at in offsets.items()})
        self.has_drifting = False

    def polled(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """The positions after everything that was returned, for a commit that the user asks for."""
        return {tp: OffsetAndMetadata(p, "", epoch) for tp, (p, epoch) in (self._processed | self._returned).items()}

    def handed_out(self, partitions: Collection[TopicPartition], committed: Mapping[TopicPartition, int]) -> _Offsets:
        """Of these, the positions after the records handed out that are above what was `committed`."""
        return {tp: at for tp, at in self._handed.items() if tp in partitions and at > committed.get(tp, -1)}

    def reported(self, offsets: Mapping[TopicPartition, int]) -> None:
        """The user was told that these are not committed: once is enough.

        That says nothing of a partition that has gone already: if it comes back, its records are handed out again.
        """
        for tp in offsets.keys() & self._handed.keys():
            self._reported[tp] = max(offsets[tp], self._reported.get(tp, -1))
        self.recovered(offsets)

    def recovered(self, offsets: Mapping[TopicPartition, int]) -> None:
        """These are committed after all: what was forfeited up to there is not."""
        for tp, offset in offsets.items():
            if self._forfeited.get(tp, -1) <= offset:
                self._forfeited.pop(tp, None)

    def forfeit(self, partitions: Collection[TopicPartition], committed: Mapping[TopicPartition, int]) -> None:
        """These go: remember what was handed out of them and not committed, until the user was told."""
        for tp, offset in self.handed_out(partitions, committed).items():
            if offset > self._reported.get(tp, -1):
                self._forfeited[tp] = max(offset, self._forfeited.get(tp, -1))

    def forfeited(self, beyond: Mapping[TopicPartition, int]) -> _Offsets:
        """What was handed out and not committed before its partition went, where that is beyond these offsets."""
        return {tp: offset for tp, offset in self._forfeited.items() if offset > beyond.get(tp, -1)}

    def take_forfeited(self) -> _Offsets:
        """The same of all partitions; the user is told now."""
        forfeited, self._forfeited = self._forfeited, {}
        return forfeited

    def sought(self, tp: TopicPartition, offset: int) -> None:
        """The user's own position: what was read and committed before says nothing any more."""
        self.unread.drop([tp])
        self._handed.pop(tp, None)
        self._reported.pop(tp, None)
        self._returned.pop(tp, None)
        self._registered.pop(tp, None)
        self._processed[tp] = offset, NO_EPOCH

    def forget_except(self, partitions: Iterable[TopicPartition]) -> None:
        """Only these are read now."""
        kept = set(partitions)
        self.unread.keep(kept)
        for hand in (self._returned, self._processed, self._registered, self._handed, self._reported):
            for tp in [tp for tp in hand if tp not in kept]:
                del hand[tp]

    def _note_return(self, tp: TopicPartition, position: int) -> None:
        """A log that was cut, or made anew, is read from further down: so it is committed from there."""
        before = self._returned.get(tp) or self._processed.get(tp)
        if before is not None and position < before[0]:
            self._registered.pop(tp, None)
