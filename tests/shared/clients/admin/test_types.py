"""What the admin takes and gives: topics for event-time data, offsets to reset to."""

from __future__ import annotations

from penstock.shared.clients.admin.types import MemberDescription, event_time_topic


def test_event_time_topic() -> None:
    """Event-time topics never expire and take any time; the caller's own configs win."""
    topic = event_time_topic("t", 4, cleanup_policy="compact", segment_ms="5")
    assert topic.configs == {
        "retention.ms": "-1",
        "segment.ms": "5",
        "message.timestamp.after.max.ms": str(2**63 - 1),
        "cleanup.policy": "compact",
    }
    assert (topic.partitions, topic.replication_factor) == (4, -1)


def test_a_member_is_named_by_all_it_is_known_by() -> None:
    """A member's text has its id, client id and host."""
    assert str(MemberDescription("m", "c", "/10.0.0.1", None, frozenset())) == "m (client c, host /10.0.0.1)"
