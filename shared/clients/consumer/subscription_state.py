"""The subscription and the positions of a consumer (Java: `SubscriptionState`), without I/O.

`SubscriptionState` is the subscription: topics, a pattern of topics, or partitions. `ResetPolicy` is where a partition
without a valid position begins. `ConsumedPositions` are the positions that a commit may contain. `UnreadRecords` are
records that were taken from the fetcher and are not handed out yet.

Java's `SubscriptionState` also has the assigned partitions, and the positions from which records are handed out. Here
`fetcher` (`Fetcher`) has both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.shared.clients.protocol.fetch import NO_EPOCH, NO_OFFSET
from penstock.shared.common.errors import ConfigError, IllegalState
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, TopicPartition
from penstock.shared.common.time_text import DIGITS_MAX, SHOWN_MAX, duration_ms

RESET_POLICIES = ("earliest", "latest", "none")
BY_DURATION = "by_duration:"
_ISO = re.compile(
    r"P(?:(?P<d>\d+)D)?(?:T(?=\d)(?:(?P<h>\d+)H)?(?:(?P<m>\d+)M)?(?:(?P<s>\d+(?:\.\d{1,3})?)S)?)?", re.IGNORECASE
)
_UNITS_MS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000}

_At = tuple[int, int]
"""A position, and the leader epoch of the record before it."""
_Offsets = dict[TopicPartition, int]


class SubscriptionState:
    """The subscription of one consumer: topics, a pattern of topics, or partitions that the user assigns."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._mode: Literal["topics", "pattern", "partitions"] | None = None
        self._pattern: re.Pattern[str] | None = None
        self.topics: frozenset[str] = frozenset()
        """The subscribed topics; those that match the pattern, if there is one."""

    def __repr__(self) -> str:
        return f"<SubscriptionState {self._mode}, topics {sorted(self.topics)}>"

    @property
    def is_subscribed(self) -> bool:
        """Whether there is a subscription, or the user has assigned partitions."""
        return self._mode is not None

    @property
    def is_by_topic(self) -> bool:
        """Whether the consumer subscribes to topics, by name or pattern. Then the group, if there is one, assigns the
        partitions."""
        return self._mode in ("topics", "pattern")

    def subscribe(self, topics: Sequence[str] | re.Pattern[str]) -> None:
        """Subscribe to these topics, or to all whose whole name matches a pattern.

        Raises IllegalState if another kind of subscription is in use.
        """
        if isinstance(topics, re.Pattern):
            self._change_mode("pattern")
            self._pattern = topics
            return
        self._change_mode("topics")
        self.topics = frozenset(topics)

    def assign(self) -> None:
        """Note that the user assigns the partitions. Raises IllegalState if the consumer subscribes to topics."""
        self._change_mode("partitions")

    def match(self, topics: Iterable[str]) -> None:
        """Apply the pattern, if there is one, to the topics of the cluster."""
        if self._pattern is not None:
            self.topics = frozenset(topic for topic in topics if self._pattern.fullmatch(topic))

    def wants(self, topic: str) -> bool:
        """Return whether the topic is listed, or matches the pattern."""
        return topic in self.topics if self._pattern is None else self._pattern.fullmatch(topic) is not None

    def _change_mode(self, mode: Literal["topics", "pattern", "partitions"]) -> None:
        if self._mode not in (None, mode):
            raise IllegalState(f"client {self._client_id}: {mode} and {self._mode} cannot be subscribed to together")
        self._mode = mode


@dataclass(frozen=True, slots=True)
class ResetPolicy:
    """A reset policy (`auto_offset_reset`): where a consumer begins if its position is missing or not in the log.

    `duration_ms` is set under `by_duration` alone.

    >>> ResetPolicy.parse("earliest").spec(now_ms=0)
    'earliest'
    >>> ResetPolicy.parse("by_duration:PT1H30M").spec(now_ms=10_000_000)
    4600000
    >>> ResetPolicy.parse("by_duration:7d").duration_ms
    604800000
    """

    name: str
    duration_ms: int | None = None

    @classmethod
    def parse(cls, text: str) -> ResetPolicy:
        """Parse a reset policy: `earliest`, `latest`, `none`, or `by_duration:` with a duration.

        The duration is in ISO 8601, from days down to seconds (`P7D`, `PT1H30M`), or like `90m`.

        Raises ConfigError for anything else. `by_duration` is KIP-1106.
        """
        if text in RESET_POLICIES:
            return cls(text)
        if not text.startswith(BY_DURATION):
            raise ConfigError(f"{text!r} is none of {', '.join(RESET_POLICIES)} and {BY_DURATION}<duration>")
        return cls("by_duration", _duration_ms(text.removeprefix(BY_DURATION)))

    @property
    def is_none(self) -> bool:
        """Whether the policy finds no position, so that a missing one is an error."""
        return self.name == "none"

    def spec(self, now_ms: int) -> str | int:
        """Return what to look up: `earliest`, `latest`, or a time in ms (the first record at or after it)."""
        return self.name if self.duration_ms is None else max(0, now_ms - self.duration_ms)


def _duration_ms(text: str) -> int:
    if text[:1] not in ("P", "p"):
        return duration_ms(text)
    match = _ISO.fullmatch(text)
    numbers = {} if match is None else {unit: n for unit, n in match.groupdict().items() if n}
    if not numbers or max(map(len, numbers.values())) > DIGITS_MAX:
        raise ConfigError(f"{text[:SHOWN_MAX]!r} is not a duration: write one such as P7D, PT1H30M or 90m")
    return sum(round(float(n) * _UNITS_MS[unit]) for unit, n in numbers.items())


EARLIEST = ResetPolicy("earliest")
LATEST = ResetPolicy("latest")


@dataclass(frozen=True, slots=True)
class Move:
    """A change of a position without a record handed out: past offsets without records, to an offset that a reset
    policy found, or to where a truncated log diverges.

    `reason` is why the fetcher reset the position. It is empty for all other moves, also those of `seek_to_beginning`
    and `seek_to_end`. `replaced` is the position that was no longer valid, or None. A move `drifts` if its offset
    was looked up from the end of the log or by a time: the same lookup may find a higher offset later.
    """

    position: int
    epoch: int = NO_EPOCH
    replaced: int | None = None
    reason: str = ""
    drifts: bool = False


class ConsumedPositions:
    """The positions that a consumer may commit now, automatically or on request.

    A position goes through three stages:

    1. `_returned`: the current poll returned the records before it. The user may still process them.
    2. `_processed`: an earlier poll returned them.
    3. `_registered`: the commit strategy or the user has registered the position for a commit.

    An automatic commit takes positions from `_processed` alone, and only those above `_registered`. A commit of the
    user takes those from `_returned` too.

    In an `async for` each record is returned separately. The rest of its batch is `unread`, and the position lies
    before these unread records. A position that the reset policy found, or that moved past offsets without records,
    counts as processed. But if the current poll returned records of its partition, such a position counts as returned.

    A partition may be lost to another member before records that were handed out are committed. Its position is then
    `forfeited`. Under `commit_strategy` `none` a revocation forfeits it too. Under the others, a revocation
    commits first. An error reports a forfeited position once. It comes from the user's next commit of all positions, or
    from the next poll unless `commit_strategy` is `none`.

    Call `retain` when the consumer no longer reads some partitions.

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
        self.drifting: set[TopicPartition] = set()
        """The partitions with a position that was found from the end, or by a time, and is not registered for a commit
        yet. If the member dies before the commit, its successor uses the policy again, which then skips the records
        that arrived meanwhile."""

    def __repr__(self) -> str:
        return (
            f"<ConsumedPositions returned {self._returned}, processed {self._processed}, registered {self._registered}>"
        )

    def returned(self, positions: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int] = {}) -> None:
        """Note that a poll returned records up to these positions; `epochs` are the last records' leader epochs."""
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
        """Note that a position moved past offsets without records, or was reset.

        If the partition has unread records, the move is not noted: the user's position is still before these records,
        and advances with each that is returned.
        """
        if self.unread.position(tp) is not None:
            return
        self._note_return(tp, move.position)
        if move.drifts:
            self.drifting.add(tp)
        # A reset may find a lower offset than the registered one. Commits must follow it, or a restart would skip the
        # records in between.
        if move.replaced is not None:
            self._registered.pop(tp, None)
        # The move comes after records of the current poll, if it returned some. It is not committed before these are
        # processed.
        hand = self._returned if tp in self._returned else self._processed
        hand[tp] = move.position, move.epoch

    def processed(self, partitions: Collection[TopicPartition] | None = None) -> None:
        """Note that the returned records of `partitions`, by default of all, are processed: the next poll or record was
        requested, close was called, or `assign` no longer includes the partitions."""
        if partitions is None:
            self._processed.update(self._returned)
            self._returned.clear()
            return
        for tp in self._returned.keys() & partitions:
            self._processed[tp] = self._returned.pop(tp)

    def unprocessed(self) -> None:
        """Note that the last returned records may be unprocessed: drop all positions except the `uncommitted` ones."""
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
        self.drifting.difference_update(offsets)

    def all_consumed(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the consumed positions after all returned records, for a commit that the user requests."""
        return {tp: OffsetAndMetadata(p, "", epoch) for tp, (p, epoch) in (self._processed | self._returned).items()}

    def handed_out(self, partitions: Collection[TopicPartition], committed: Mapping[TopicPartition, int]) -> _Offsets:
        """Return these partitions' positions after the records handed out, where they are above the committed ones."""
        return {tp: at for tp, at in self._handed.items() if tp in partitions and at > committed.get(tp, NO_OFFSET)}

    def reported(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note that an error has reported these offsets as not committed, so that no second error reports them.

        Forfeited positions up to these offsets are dropped. For an owned partition with records handed out, the offset
        is stored, and `forfeit` skips positions up to it. For a partition that is no longer owned it is not stored: if
        the partition is assigned again, its records are handed out again. If it is then lost before they are
        committed, an error must report this again.
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
        self.drifting &= kept
        for hand in (self._returned, self._processed, self._registered, self._handed, self._reported):
            for tp in [tp for tp in hand if tp not in kept]:
                del hand[tp]

    def _note_return(self, tp: TopicPartition, position: int) -> None:
        """If a truncated or recreated log is read at a lower position, allow commits from there."""
        before = self._returned.get(tp) or self._processed.get(tp)
        if before is not None and position < before[0]:
            self._registered.pop(tp, None)


@dataclass(frozen=True, slots=True)
class PolledRecords:
    """Records of one partition from the fetcher, and the position after them."""

    columns: Columns[Any, Any]
    position: int


@dataclass(slots=True)
class _UnreadRest:
    """The records of a batch from an index on."""

    polled: PolledRecords
    index: int = 0

    @property
    def position(self) -> int:
        """The offset of the next unread record; after the last one, the position after the records."""
        columns = self.polled.columns
        return columns.offsets.item(self.index) if self.index < len(columns) else self.polled.position


class UnreadRecords:
    """Records that a consumer took from its fetcher and has not handed out yet: the rest of batches that are read one
    by one.

    They are kept by partition, in the order taken. A partition's position lies before its unread records. So a seek
    drops them, and a pause keeps them.

    >>> clicks = TopicPartition("clicks", 0)
    >>> unread = UnreadRecords()
    >>> columns = Columns.of([ConsumerRecord("clicks", 0, offset, 0, None, None) for offset in (3, 5)])
    >>> unread.add({clicks: PolledRecords(columns, 9)})  # offsets 6 to 8 hold nothing that is handed out
    >>> [(record.offset, position) for record, position, _ in (unread.next(()), unread.next(()))], unread.next(())
    ([(3, 5), (5, 9)], None)
    """

    def __init__(self) -> None:
        self._rests: dict[TopicPartition, _UnreadRest] = {}

    def __repr__(self) -> str:
        return f"<UnreadRecords {self._rests}>"

    def add(self, polled: Mapping[TopicPartition, PolledRecords]) -> None:
        """Add new records of partitions that have no unread ones."""
        for tp, each in polled.items():
            self._rests[tp] = _UnreadRest(each)

    def has_next(self, held: Collection[TopicPartition]) -> bool:
        """Whether a partition that is not held has unread records."""
        return any(tp not in held for tp in self._rests)

    def next(self, held: Collection[TopicPartition]) -> tuple[ConsumerRecord[Any, Any], int, int] | None:
        """Return the next unread record of a partition that is not held, the position after it and its leader epoch."""
        for tp, rest in self._rests.items():
            if tp in held:
                continue
            columns = rest.polled.columns
            record = columns.record(rest.index)
            rest.index += 1
            position = rest.position
            if rest.index == len(columns):
                del self._rests[tp]
            return record, position, columns.leader_epoch
        return None

    def take(self, max_records: int | None, held: Collection[TopicPartition]) -> dict[TopicPartition, PolledRecords]:
        """Return the first unread records of each partition that is not held, at most `max_records` in all."""
        polled: dict[TopicPartition, PolledRecords] = {}
        left = max_records
        for tp in [tp for tp in self._rests if tp not in held]:
            rest = self._rests[tp]
            columns = rest.polled.columns
            end = len(columns) if left is None else min(len(columns), rest.index + left)
            part = columns[rest.index : end]
            rest.index = end
            polled[tp] = PolledRecords(part, rest.position)
            if end == len(columns):
                del self._rests[tp]
            left = None if left is None else left - len(part)
            if left == 0:
                break
        return polled

    def position(self, tp: TopicPartition) -> int | None:
        """Return the offset of the partition's next unread record. Returns None if there is none."""
        return self._rests[tp].position if tp in self._rests else None

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._rests.pop(tp, None)

    def retain(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the unread records of all partitions except these."""
        self.drop([tp for tp in self._rests if tp not in partitions])
