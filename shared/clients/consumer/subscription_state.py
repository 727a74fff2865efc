"""The state of a subscription (Java: `SubscriptionState`): the topics, the positions to commit, and the unread records.

`Fetcher` has the assigned partitions and the positions that it reads at. `Positions` has those that may be committed at
any moment, automatically or on request. A position passes three stages. 1. The current poll returned it (`_returned`):
the user may still process the records. 2. An earlier poll returned it (`_processed`). 3. It is registered for a commit,
by the commit strategy or by the user (`_registered`). An automatic commit takes only `_processed`, and never goes below
`_registered`. In an `async for` each record is returned separately. The rest of its batch is `unread`, and no position
has passed it. A position that the reset policy found, or that moved over offsets without a record, counts like one that
was read.

If records were handed out and not committed when their partition was taken away, their positions are `forfeited`. The
next commit that covers them reports them, once.

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

`Unread` has the records that were taken from the fetcher and not handed out yet: the rest of a batch that is read
record by record. The position of a partition follows the records handed out. So every change of a position (a seek,
another assignment) drops its unread records, and a pause holds them.

>>> from penstock.shared.common.records import ConsumerRecord
>>> unread = Unread()
>>> columns = Columns.of([ConsumerRecord("clicks", 0, offset, 0, None, None) for offset in (3, 5)])
>>> unread.add({clicks: Polled(columns, 9)})  # offsets 6 to 8 hold nothing that is handed out
>>> [(record.offset, position) for record, position, _ in (unread.next(()), unread.next(()))], unread.next(())
([(3, 5), (5, 9)], None)
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.shared.clients.consumer.fetcher import Move
from penstock.shared.clients.protocol.fetch import NO_EPOCH, NO_OFFSET
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, TopicPartition


class SubscriptionState:
    """The subscription of one consumer: topics, a pattern of topics, or partitions that the user assigns."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._mode: Literal["none", "topics", "pattern", "partitions"] = "none"
        self._pattern: re.Pattern[str] | None = None
        self.topics: frozenset[str] = frozenset()
        """The subscribed topics; those that match the pattern, if there is one."""

    def __repr__(self) -> str:
        return f"<SubscriptionState {self._mode}, topics {sorted(self.topics)}>"

    @property
    def is_subscribed(self) -> bool:
        """Whether there is a subscription, or the user has assigned partitions."""
        return self._mode != "none"

    @property
    def is_by_topic(self) -> bool:
        """Whether topics are subscribed to. Then the group, if there is one, assigns the partitions."""
        return self._mode in ("topics", "pattern")

    def subscribe(self, topics: Sequence[str] | re.Pattern[str]) -> None:
        """Subscribe to these topics, or to all whose whole name matches a pattern.

        Raises IllegalState if another kind of subscription is in use, ValueError without a topic.
        """
        if isinstance(topics, re.Pattern):
            self._change_mode("pattern")
            self._pattern = topics
            return
        if not topics:
            raise ValueError("subscribe needs a topic")
        self._change_mode("topics")
        self.topics = frozenset(topics)

    def assign(self) -> None:
        """Note that the user assigns the partitions. Raises IllegalState if topics are subscribed to."""
        self._change_mode("partitions")

    def match(self, topics: Iterable[str]) -> None:
        """Apply the pattern, if there is one, to the topics of the cluster."""
        if self._pattern is not None:
            self.topics = frozenset(topic for topic in topics if self._pattern.fullmatch(topic))

    def _change_mode(self, mode: Literal["topics", "pattern", "partitions"]) -> None:
        if self._mode not in ("none", mode):
            raise IllegalState(f"client {self._client_id}: {mode} and {self._mode} cannot be subscribed to together")
        self._mode = mode


@dataclass(frozen=True, slots=True)
class Polled:
    """Records of one partition, and the position after them."""

    columns: Columns[Any, Any]
    position: int


@dataclass(slots=True)
class _Rest:
    polled: Polled
    index: int = 0

    @property
    def position(self) -> int:
        """The offset of the next record; after the last one, the position after the records."""
        columns = self.polled.columns
        return columns.offsets.item(self.index) if self.index < len(columns) else self.polled.position


class Unread:
    """The unread records by partition, in the order in which they were taken."""

    def __init__(self) -> None:
        self._rests: dict[TopicPartition, deque[_Rest]] = {}

    def __repr__(self) -> str:
        return f"<Unread {self._rests}>"

    def add(self, polled: Mapping[TopicPartition, Polled]) -> None:
        """Add records that were fetched, or taken from here before. They come before the partition's other unread
        records.

        A partition is not fetched while it has unread records.
        """
        for tp, each in polled.items():
            self._rests.setdefault(tp, deque()).appendleft(_Rest(each))

    def next(self, held: Collection[TopicPartition]) -> tuple[ConsumerRecord[Any, Any], int, int] | None:
        """Return the next record of a partition that is not held, the position after it and its leader epoch."""
        for tp, rests in self._rests.items():
            if tp in held:
                continue
            rest = rests[0]
            columns = rest.polled.columns
            record = columns.record(rest.index)
            rest.index += 1
            position = rest.position
            if rest.index == len(columns):
                self._drop_first_rest(tp)
            return record, position, columns.leader_epoch
        return None

    def take(self, max_records: int | None, held: Collection[TopicPartition]) -> dict[TopicPartition, Polled]:
        """Return records as `next` does, but as columns: the first ones of each partition, `max_records` in all."""
        polled: dict[TopicPartition, Polled] = {}
        left = max_records
        for tp in [tp for tp in self._rests if tp not in held]:
            rest = self._rests[tp][0]
            columns = rest.polled.columns
            end = len(columns) if left is None else min(len(columns), rest.index + left)
            part = columns[rest.index : end]
            rest.index = end
            polled[tp] = Polled(part, rest.position)
            if end == len(columns):
                self._drop_first_rest(tp)
            left = None if left is None else left - len(part)
            if left == 0:
                break
        return polled

    def position(self, tp: TopicPartition) -> int | None:
        """Return the offset of the partition's next unread record. Returns None if there is none."""
        return self._rests[tp][0].position if tp in self._rests else None

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._rests.pop(tp, None)

    def retain(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the records of all partitions except these."""
        self.drop([tp for tp in self._rests if tp not in partitions])

    def _drop_first_rest(self, tp: TopicPartition) -> None:
        self._rests[tp].popleft()
        if not self._rests[tp]:
            del self._rests[tp]


_At = tuple[int, int]  # a position, and the leader epoch of the record before it
_Offsets = dict[TopicPartition, int]


class Positions:
    """The positions of one consumer. Call `retain` when partitions are no longer read."""

    def __init__(self) -> None:
        self._returned: dict[TopicPartition, _At] = {}
        self._processed: dict[TopicPartition, _At] = {}
        self._registered: dict[TopicPartition, int] = {}
        self._handed: dict[TopicPartition, int] = {}
        self._reported: dict[TopicPartition, int] = {}
        self._forfeited: dict[TopicPartition, int] = {}
        self.unread = Unread()
        self.is_one_by_one = False
        """Whether the last return was one record of an iteration."""
        self.has_drifting = False
        """Whether a position was found from the end, or by a time, and is not registered for a commit yet. If the
        member dies before the commit, its successor uses the policy again, which then skips the records that arrived
        meanwhile."""

    def __repr__(self) -> str:
        return f"<Positions returned {self._returned}, processed {self._processed}, registered {self._registered}>"

    def returned(self, positions: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int] = {}) -> None:
        """Note that a poll returned records up to these positions, the last records with these leader epochs."""
        for tp, position in positions.items():
            self._note_return(tp, position)
            self._returned[tp] = position, epochs.get(tp, NO_EPOCH)
        self._handed.update(positions)
        self.is_one_by_one = False

    def polled_batches(self, polled_batches: Mapping[TopicPartition, Polled]) -> None:
        """Note records that are to be returned one by one."""
        for tp, each in polled_batches.items():
            self._note_return(tp, each.columns.offsets.item(0) + 1)
        self.unread.add(polled_batches)

    def returned_one(self, tp: TopicPartition, position: int, epoch: int) -> None:
        """Note that an iteration returned one of the taken records."""
        self._returned[tp] = position, epoch
        self._handed[tp] = position
        self.is_one_by_one = True

    def moved(self, tp: TopicPartition, move: Move) -> None:
        """Note that the position passed offsets without a record, or was found by the reset policy.

        It is ignored while the partition has unread records: it lies after them, and counts once they are returned.
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
        """Note that the last returned records may be unprocessed: from now on `polled` equals `uncommitted`."""
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

    def polled(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the positions after all returned records, for a commit that the user requests."""
        return {tp: OffsetAndMetadata(p, "", epoch) for tp, (p, epoch) in (self._processed | self._returned).items()}

    def handed_out(self, partitions: Collection[TopicPartition], committed: Mapping[TopicPartition, int]) -> _Offsets:
        """Return the positions of these partitions after the records handed out, if they are above `committed`."""
        return {tp: at for tp, at in self._handed.items() if tp in partitions and at > committed.get(tp, NO_OFFSET)}

    def reported(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note that the user got an error for these uncommitted offsets, so that it is raised only once.

        A partition that is no longer owned is not marked: if it is assigned again, its records are handed out again.
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
        """Forget all partitions except these."""
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
