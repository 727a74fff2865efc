"""Names of topics, and of Penstock's internal topics."""

from __future__ import annotations

import pytest

from penstock.services.local.connect_worker import worker_properties
from penstock.services.local.settings import ConnectWorkerSettings
from penstock.shared.common.errors import InvalidTopic
from penstock.shared.common.topic_names import (
    CONNECT_STORAGE_TOPICS,
    TOPIC_NAME_MAX,
    changelog_topic,
    check_topic_name,
    dead_letter_topic,
    is_internal,
    is_topic_name,
    late_topic,
)
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.settings import StreamsSettings


def test_default_topics_of_a_topology_are_internal() -> None:
    """The topics that a topology writes to by default are internal."""
    builder = StreamsBuilder()
    builder.stream("clicks").to("out")
    (source,) = builder.build().sources()
    names = {source.late, source.dead_letters, StreamsSettings(application_id="clicks").changelog_topic}
    assert names == {late_topic("clicks"), dead_letter_topic("clicks"), changelog_topic("clicks")}
    assert all(map(is_internal, names))


def test_storage_topics_of_the_local_connect_worker_are_internal() -> None:
    """The topics in which the worker of `penstock up` stores configs, offsets and statuses are internal."""
    properties = worker_properties(ConnectWorkerSettings())
    assert {properties[f"{store}.storage.topic"] for store in ("config", "offset", "status")} == CONNECT_STORAGE_TOPICS
    assert all(map(is_internal, CONNECT_STORAGE_TOPICS))


@pytest.mark.parametrize("topic", ["clicks", "late", "dlq-clicks", "clicks-late-2", "_clicks"])
def test_other_topics_are_not_internal(topic: str) -> None:
    """A name that only resembles an internal one is not internal."""
    assert not is_internal(topic)


@pytest.mark.parametrize("name", ["a", "...", "A.b_c-9", "x" * TOPIC_NAME_MAX])
def test_valid_topic_names(name: str) -> None:
    """Letters, digits, dots, dashes and underscores are valid, up to Kafka's length."""
    assert is_topic_name(name)
    check_topic_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "ä", "a\n", "x" * (TOPIC_NAME_MAX + 1), b"a", None, 5])
def test_invalid_topic_names(name: object) -> None:
    """An invalid name is InvalidTopic with the name, which is shortened if it is long."""
    assert not is_topic_name(name)
    with pytest.raises(InvalidTopic) as raised:
        check_topic_name(name)
    assert repr(name)[:TOPIC_NAME_MAX] in str(raised.value)
    assert len(str(raised.value)) < 2 * TOPIC_NAME_MAX
