"""The names of topics: which Kafka allows, and which Penstock writes itself, decided here for those who make topics and
for those who guard them.

>>> changelog_topic("app"), late_topic("clicks"), dead_letter_topic("clicks")
('app-changelog', 'clicks-late', 'clicks-dlq')
>>> is_internal("clicks-late"), is_internal("__consumer_offsets"), is_internal("late-clicks")
(True, True, False)
"""

from __future__ import annotations

import re

from penstock.shared.common.errors import InvalidTopic

CHANGELOG_SUFFIX = "-changelog"
LATE_SUFFIX = "-late"
DEAD_LETTER_SUFFIX = "-dlq"
REPARTITION_SUFFIX = "-repartition"
INSTANCES_SUFFIX = "-instances"
KAFKA_PREFIX = "__"
TOPIC_NAME_MAX = 249
APPLICATION_ID = r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$"
"""What an application can be called: it names topics, and folders too, so that `..` would be another's."""
APPLICATION_ID_MAX = 200
_NAME = re.compile(rf"(?!\.{{1,2}}$)[a-zA-Z0-9._-]{{1,{TOPIC_NAME_MAX}}}")


def is_topic_name(name: object) -> bool:
    """Whether a topic can be called so (org.apache.kafka.common.internals.Topic).

    >>> is_topic_name("flights-late"), is_topic_name("a/b"), is_topic_name(".."), is_topic_name(b"flights")
    (True, False, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_topic_name(name: object) -> None:
    """InvalidTopic for what no topic can be called, so that it is not looked for."""
    if not is_topic_name(name):
        raise InvalidTopic(
            f"topic {repr(name)[:TOPIC_NAME_MAX]}: a name has 1 to {TOPIC_NAME_MAX} of a-z, A-Z, 0-9, '.', '_' and '-'"
        )


def changelog_topic(application: str) -> str:
    """The changelog of an application's state."""
    return application + CHANGELOG_SUFFIX


def instances_topic(application: str) -> str:
    """Where an application's instances say what they have."""
    return application + INSTANCES_SUFFIX


def is_repartition_topic(topic: str, application: str) -> bool:
    """Whether a topic is named as one between two parts of an application's topology is.

    >>> is_repartition_topic("shop-by-user-repartition", "shop"), is_repartition_topic("shop-changelog", "shop")
    (True, False)
    """
    return topic.startswith(f"{application}-") and topic.endswith(REPARTITION_SUFFIX)


def late_topic(topic: str) -> str:
    """Where a source topic's late records go, unless its stream says otherwise."""
    return topic + LATE_SUFFIX


def dead_letter_topic(topic: str) -> str:
    """Where a topic's dead letters go, unless its stream or handler says otherwise."""
    return topic + DEAD_LETTER_SUFFIX


OWN_SUFFIXES = (CHANGELOG_SUFFIX, LATE_SUFFIX, DEAD_LETTER_SUFFIX, REPARTITION_SUFFIX, INSTANCES_SUFFIX)


def is_internal(topic: str) -> bool:
    """Whether a topic is Kafka's own, or named as one of these are."""
    return topic.startswith(KAFKA_PREFIX) or topic.endswith(OWN_SUFFIXES)
