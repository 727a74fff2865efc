"""The names of topics that Penstock writes itself, decided here for those who make them and for those who guard them.

>>> changelog_topic("app"), late_topic("clicks"), dead_letter_topic("clicks")
('app-changelog', 'clicks-late', 'clicks-dlq')
>>> is_internal("clicks-late"), is_internal("__consumer_offsets"), is_internal("late-clicks")
(True, True, False)
"""

from __future__ import annotations

CHANGELOG_SUFFIX = "-changelog"
LATE_SUFFIX = "-late"
DEAD_LETTER_SUFFIX = "-dlq"
KAFKA_PREFIX = "__"


def changelog_topic(application: str) -> str:
    """The changelog of an application's state."""
    return application + CHANGELOG_SUFFIX


def late_topic(topic: str) -> str:
    """Where a source topic's late records go, unless its stream says otherwise."""
    return topic + LATE_SUFFIX


def dead_letter_topic(topic: str) -> str:
    """Where a topic's dead letters go, unless its stream or handler says otherwise."""
    return topic + DEAD_LETTER_SUFFIX


def is_internal(topic: str) -> bool:
    """Whether a topic is Kafka's own, or named as one of these are."""
    return topic.startswith(KAFKA_PREFIX) or topic.endswith((CHANGELOG_SUFFIX, LATE_SUFFIX, DEAD_LETTER_SUFFIX))
