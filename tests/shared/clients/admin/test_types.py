"""The types of the admin client: topics for event-time data, and targets of an offset reset."""

from __future__ import annotations

from penstock.shared.clients.admin.types import MemberDescription, event_time_topic


def test_event_time_topic() -> None:
    """Event-time topics never expire and accept any timestamp. The caller's own configs take precedence."""
    topic = event_time_topic("t", 4, cleanup_policy="compact", segment_ms="5")
    assert topic.configs == {
        "retention.ms": "-1",
        "segment.ms": "5",
        "message.timestamp.after.max.ms": str(2**63 - 1),
        "cleanup.policy": "compact",
    }
    assert (topic.partitions, topic.replication_factor) == (4, -1)


def test_text_of_a_member_has_id_client_id_and_host() -> None:
    """A member's text has its id, client id and host."""
    assert str(MemberDescription("m", "c", "/10.0.0.1", None, frozenset())) == "m (client c, host /10.0.0.1)"
