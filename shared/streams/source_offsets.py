"""Where a task reads on in a source partition, and whether that can be true.

A position is an offset of one topic: it says nothing about a topic of the same name that was made later, and records
that were deleted before they were read are gone. A client that resets its position to the beginning or the end, as
Kafka's do unless they are told otherwise, goes on as if nothing had happened; here both are said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from shared.common.errors import ChangelogHole, SchemaMismatch, SourceOffsetsMissing, SourceTopicChanged
from shared.common.records import TopicPartition
from shared.common.topic_names import REPARTITION_SUFFIX, is_repartition_topic
from shared.streams.changelog_reader import RENAMED

OnMissing = Literal["fail", "skip"]
START_AFRESH = (
    "The state goes with the old topic's records. To start afresh, give the application another application_id, or "
    "stop all its instances and run `penstock streams reset`: it forgets the group's offsets, the changelog, the "
    "repartition topics and the tables in the lake."
)

EMPTY_AGAIN = (
    "state was lost, or the offset was set by hand. To start with empty state, delete the group's offsets, or set "
    "streams.start_from_group_offsets to go on at them."
)
STATE_OF_THEN = (
    "commits were lost or left out by streams.skip_changelog_records, or the offset was set by hand. To go on at "
    "{known} with the state of then, stop all instances and set the group's offset of this partition back to it, by "
    'the admin\'s POST /v1/groups/{group}/offsets of {{"to": {{"offset": {known}}}, "topics": {{"{topic}": '
    "[{partition}]}}}} or Kafka's `kafka-consumer-groups.sh --reset-offsets --to-offset {known} --execute --topic "
    "{topic}:{partition} --group {group}`: records from {known} on are processed again, so that their results may come "
    "twice."
)


class Held(NamedTuple):
    """What a source partition holds: its topic's id, its first offset, and the one after its last."""

    topic_id: str
    first: int
    end: int


class Start(NamedTuple):
    """Where to read on; `skipped` offsets before it were deleted unread."""

    offset: int
    skipped: int = 0


def position_of(
    at: TopicPartition, group: str, known: int | None, committed: int | None, *, from_group: bool
) -> int | None:
    """The position by the changelog (`known`), else by the group's offset where `from_group` allows it, else None.

    ChangelogHole where the group's offset says that more was done than the changelog knows of. Both are written
    together; a group that is ahead means that state was lost, that a record which confirmed it was left out by name,
    or that somebody set its offsets.
    """
    if committed is not None and committed > (known or 0) and (known or not from_group):
        raise ChangelogHole(
            f"{at}: group {group} has committed offset {committed}, but the changelog knows of {known or 0} only: "
            + (EMPTY_AGAIN if known is None else STATE_OF_THEN.format(known=known, group=group, **at._asdict()))
        )
    return committed if known is None else known


def left_topics(sources: Mapping[str, int], read: Collection[str], application: str) -> list[str]:
    """The application's own topics of which there is a position, and which its topology does not read any more.

    >>> left_topics({"clicks": 7, "app-key_by-2-repartition": 5}, ["clicks", "app-key_by-3-repartition"], "app")
    ['app-key_by-2-repartition']
    """
    return sorted(topic for topic in sources.keys() - set(read) if is_repartition_topic(topic, application))


def refuse_unread(at: TopicPartition, position: int, read: Collection[str], application: str) -> None:
    """Raise SchemaMismatch: a topic that the topology has left holds records from `position` on."""
    now = sorted(topic for topic in read if is_repartition_topic(topic, application))
    name = at.topic.removeprefix(f"{application}-").removesuffix(REPARTITION_SUFFIX)
    raise SchemaMismatch(
        f"{at} holds records from offset {position} on that were not read, and the topology does not read it any more; "
        f"its own topics are {', '.join(now) or 'none'}. A key_by without a name is named after its place: {RENAMED} "
        f"Here that is name={name!r}."
    )


def start_of(
    at: TopicPartition, position: int | None, known_id: str | None, held: Held, on_missing: OnMissing
) -> Start:
    """Where to read on from `position`, None for a partition that was never read; `known_id` is the topic it is of.

    Raises SourceTopicChanged where the topic is another one or ends before the position, and SourceOffsetsMissing
    where records at the position are gone, unless `on_missing` is `skip`.
    """
    if known_id is not None and known_id != held.topic_id:
        raise SourceTopicChanged(
            f"{at.topic} was deleted and made again: its id is {held.topic_id}, the state was made from the topic with "
            f"id {known_id}. {START_AFRESH}"
        )
    if position is None:
        return Start(held.first)
    if position > held.end:
        raise SourceTopicChanged(
            f"{at}: the position is {position}, but the partition ends at {held.end}: the topic was deleted and made "
            f"again, or it lost records. {START_AFRESH}"
        )
    if position >= held.first:
        return Start(position)
    if on_missing == "fail":
        raise SourceOffsetsMissing(
            f"{at}: offsets {position} to {held.first - 1} were deleted before they were read, by the topic's "
            "retention or by hand. To go on without them, set streams.on_missing_source_offsets to skip."
        )
    return Start(held.first, held.first - position)
