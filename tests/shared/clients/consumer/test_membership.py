"""A member's assignments and generations, and how the listener is told of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shared.clients.consumer.committer import Committer
from shared.clients.consumer.fetching import Fetching
from shared.clients.consumer.membership import Membership
from shared.clients.consumer.metrics import ConsumerMetrics
from shared.clients.consumer.settings import ConsumerSettings
from shared.common.clock import SYSTEM_CLOCK
from shared.common.records import GroupMetadata, OffsetAndMetadata, TopicPartition
from shared.common.settings import KafkaSettings

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def membership() -> Membership:
    settings = ConsumerSettings(group_id="g")
    fetching = Fetching(KafkaSettings(), ConsumerSettings(group_id="g"))
    metrics = ConsumerMetrics(CollectorRegistry(), "g")
    committer = Committer(
        fetching.connection,
        lambda: GroupMetadata("g"),
        metrics,
        SYSTEM_CLOCK,
        is_managed=lambda: True,
        require_stable=False,
    )
    return Membership(fetching, committer, settings, metrics)


def test_what_the_current_poll_returned_is_not_processed_yet() -> None:
    """A position may be committed by itself only after the next poll; a commit on request takes it at once."""
    positions = membership()
    positions.returned({A: 5})
    assert positions.uncommitted() == {}
    assert positions.polled() == {A: OffsetAndMetadata(5)}
    positions.processed()
    positions.returned({A: 9})
    assert positions.uncommitted() == {A: OffsetAndMetadata(5)}


def test_a_position_is_handed_over_once() -> None:
    """What the committer has is not handed to it again until it changes."""
    positions = membership()
    positions.returned({A: 5, B: 2})
    positions.processed()
    positions.registered(positions.uncommitted())
    assert positions.uncommitted() == {}
    positions.returned({B: 4})
    positions.processed()
    assert positions.uncommitted() == {B: OffsetAndMetadata(4)}


def test_a_seek_replaces_what_was_read() -> None:
    """After a seek the position that was asked for counts, even below one that was processed."""
    positions = membership()
    positions.returned({A: 5})
    positions.sought(A, 1)
    assert positions.uncommitted() == {A: OffsetAndMetadata(1)}
    assert positions.polled() == {A: OffsetAndMetadata(1)}


def test_partitions_that_are_gone_are_forgotten() -> None:
    """Positions of partitions that are not read any more are not committed."""
    positions = membership()
    positions.returned({A: 5, B: 2})
    positions.processed()
    positions.forget_except([B])
    assert positions.uncommitted() == {B: OffsetAndMetadata(2)}


def test_leader_epochs_go_with_the_positions() -> None:
    """Until a seek, after which it is not known under which leader the record before was written."""
    positions = membership()
    positions.returned({A: 5, B: 2}, {A: 7})
    assert {tp: at.leader_epoch for tp, at in positions.polled().items()} == {A: 7, B: -1}
    positions.processed()
    assert positions.uncommitted()[A].leader_epoch == 7
    positions.sought(A, 1)
    assert positions.uncommitted()[A].leader_epoch == -1
