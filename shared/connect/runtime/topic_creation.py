"""The settings of a source's new topics: `topic.creation.*`.

>>> groups = TopicCreationGroups.of({
...     "topic.creation.groups": "compacted", "topic.creation.compacted.include": "state-.*",
...     "topic.creation.compacted.cleanup.policy": "compact", "topic.creation.default.partitions": "6",
...     "topic.creation.default.replication.factor": "-1",
... })
>>> groups.topic("state-users")
NewTopic(name='state-users', partitions=6, replication_factor=-1, configs={'cleanup.policy': 'compact'})
>>> groups.topic("clicks").configs
{}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.shared.clients.admin import NewTopic
from penstock.shared.connect.properties import parse_aliases, with_prefix

DEFAULT_GROUP = "default"
OWN = ("include", "exclude", "partitions", "replication.factor")


@dataclass(frozen=True)
class TopicCreationGroup:
    """A named group of topics, selected by patterns, with the settings to create them."""

    name: str
    include: tuple[re.Pattern[str], ...]
    exclude: tuple[re.Pattern[str], ...]
    partitions: int
    replication_factor: int
    configs: dict[str, str] = field(default_factory=dict)

    def matches(self, topic: str) -> bool:
        """Return whether the group's patterns include the topic, and none excludes it."""
        return not any(p.fullmatch(topic) for p in self.exclude) and any(p.fullmatch(topic) for p in self.include)


class TopicCreationGroups:
    """A connector's groups. A topic gets the settings of the first group that matches it, or those of the default
    group."""

    def __init__(self, groups: list[TopicCreationGroup]) -> None:
        self.groups = groups

    def __repr__(self) -> str:
        return f"<TopicCreationGroups {', '.join(group.name for group in self.groups)}>"

    @classmethod
    def of(cls, props: Mapping[str, str]) -> TopicCreationGroups | None:
        """Return the topic groups of a validated configuration, or None if it does not configure new topics."""
        fallback = with_prefix(props, f"topic.creation.{DEFAULT_GROUP}.")
        if "partitions" not in fallback or "replication.factor" not in fallback:
            return None
        groups = []
        names = dict.fromkeys(parse_aliases(props, "topic.creation.groups"))
        for name in [*(name for name in names if name != DEFAULT_GROUP), DEFAULT_GROUP]:
            own = with_prefix(props, f"topic.creation.{name}.")
            groups.append(
                TopicCreationGroup(
                    name,
                    # As in Kafka Connect (KIP-158), the group default matches every topic.
                    _compile_topic_patterns(".*" if name == DEFAULT_GROUP else own.get("include", "")),
                    _compile_topic_patterns("" if name == DEFAULT_GROUP else own.get("exclude", "")),
                    int(own.get("partitions", fallback["partitions"])),
                    int(own.get("replication.factor", fallback["replication.factor"])),
                    {key: value for key, value in own.items() if key not in OWN},
                )
            )
        return cls(groups)

    def topic(self, name: str) -> NewTopic:
        """Return the definition of a new topic."""
        group = next(group for group in self.groups if group.matches(name) or group.name == DEFAULT_GROUP)
        return NewTopic(name, group.partitions, group.replication_factor, dict(group.configs))


def _compile_topic_patterns(text: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern.strip()) for pattern in text.split(",") if pattern.strip())
