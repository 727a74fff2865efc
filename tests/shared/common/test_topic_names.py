"""The names of Penstock's own topics."""

from __future__ import annotations

import pytest

from shared.common.topic_names import changelog_topic, dead_letter_topic, is_internal, late_topic
from shared.streams.dsl import StreamsBuilder
from shared.streams.settings import StreamsSettings


def test_what_a_topology_writes_by_default_is_internal() -> None:
    """Every default name of the streams is guarded, and every name that is guarded is one that is used."""
    builder = StreamsBuilder()
    builder.stream("clicks").to("out")
    (source,) = builder.build().sources()
    names = {source.late, source.dead_letters, StreamsSettings(application_id="clicks").changelog_topic}
    assert names == {late_topic("clicks"), dead_letter_topic("clicks"), changelog_topic("clicks")}
    assert all(map(is_internal, names))


@pytest.mark.parametrize("topic", ["clicks", "late", "dlq-clicks", "clicks-late-2", "_clicks"])
def test_other_topics_are_not_internal(topic: str) -> None:
    """A name that only resembles one of ours is a user's."""
    assert not is_internal(topic)
