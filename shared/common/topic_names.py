"""The names of topics: which names Kafka allows, and which topics Penstock writes itself.

>>> changelog_topic("app"), late_topic("clicks"), dead_letter_topic("clicks")
('app-changelog', 'clicks-late', 'clicks-dlq')
>>> is_internal("clicks-late"), is_internal("__consumer_offsets"), is_internal("late-clicks")
(True, True, False)
>>> is_internal("connect-configs"), is_internal("connect-clicks")
(True, False)
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.shared.common.errors import InvalidTopic

CHANGELOG_SUFFIX = "-changelog"
LATE_SUFFIX = "-late"
DEAD_LETTER_SUFFIX = "-dlq"
REPARTITION_SUFFIX = "-repartition"
INSTANCES_SUFFIX = "-instances"
OWN_SUFFIXES = (CHANGELOG_SUFFIX, LATE_SUFFIX, DEAD_LETTER_SUFFIX, REPARTITION_SUFFIX, INSTANCES_SUFFIX)
CONNECT_STORAGE_TOPICS = frozenset({"connect-configs", "connect-offsets", "connect-status"})
"""The usual names of a Connect cluster's three storage topics. A record in the first one creates a connector."""
KAFKA_PREFIX = "__"
TOPIC_NAME_MAX = 249
APPLICATION_ID = r"^[A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*$"
"""The form of an application id. It names topics and folders, so `..` is not allowed: it would be another folder."""
APPLICATION_ID_MAX = 200
_NAME = re.compile(rf"(?!\.{{1,2}}$)[a-zA-Z0-9._-]{{1,{TOPIC_NAME_MAX}}}")


def is_topic_name(name: object) -> bool:
    """Whether Kafka allows this name for a topic (org.apache.kafka.common.internals.Topic).

    >>> is_topic_name("flights-late"), is_topic_name("a/b"), is_topic_name(".."), is_topic_name(b"flights")
    (True, False, False, False)
    """
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_topic_name(name: object) -> None:
    """Raise InvalidTopic for a name that Kafka does not allow, before a request is sent."""
    if not is_topic_name(name):
        raise InvalidTopic(
            f"topic {repr(name)[:TOPIC_NAME_MAX]}: a name has 1 to {TOPIC_NAME_MAX} of a-z, A-Z, 0-9, '.', '_' and '-'"
        )


def checked_topic_names(names: Iterable[str]) -> list[str]:
    """Return the names. Raises InvalidTopic for the first one that Kafka does not allow."""
    checked = list(names)
    for name in checked:
        check_topic_name(name)
    return checked


def changelog_topic(application: str) -> str:
    """The changelog of an application's state."""
    return application + CHANGELOG_SUFFIX


def instances_topic(application: str) -> str:
    """The topic in which an application's instances register their partitions."""
    return application + INSTANCES_SUFFIX


def is_repartition_topic(topic: str, application: str) -> bool:
    """Whether a topic is named like a topic between two sub-topologies of an application.

    >>> is_repartition_topic("shop-by-user-repartition", "shop"), is_repartition_topic("shop-changelog", "shop")
    (True, False)
    """
    return topic.startswith(f"{application}-") and topic.endswith(REPARTITION_SUFFIX)


def late_topic(topic: str) -> str:
    """The topic of a source topic's late records, unless its stream names another."""
    return topic + LATE_SUFFIX


def dead_letter_topic(topic: str) -> str:
    """The topic of a topic's dead letters, unless its stream or handler names another."""
    return topic + DEAD_LETTER_SUFFIX


def is_internal(topic: str) -> bool:
    """Whether a topic is internal by its name.

    Such a name has Kafka's prefix (`__`) or a suffix of Penstock's own topics, or is one of CONNECT_STORAGE_TOPICS.
    """
    return topic.startswith(KAFKA_PREFIX) or topic.endswith(OWN_SUFFIXES) or topic in CONNECT_STORAGE_TOPICS
