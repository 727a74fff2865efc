"""The built-in predicates."""

from __future__ import annotations

from penstock.shared.connect.record import Header
from penstock.shared.connect.transforms.predicates import HasHeaderKey, RecordIsTombstone, TopicNameMatches
from tests.shared.connect.transforms.transforming import record


def test_builtin_predicates() -> None:
    """The predicates test a header's name, a tombstone, and a whole topic name."""
    has, tombstone, topic = HasHeaderKey(), RecordIsTombstone(), TopicNameMatches()
    has.configure(has.config().parse({"name": "a"}))
    topic.configure(topic.config().parse({"pattern": "cl.*"}))
    assert has.test(record(headers=(Header("a", 1),)))
    assert not has.test(record(headers=(Header("b", 1),)))
    assert tombstone.test(record(None))
    assert not tombstone.test(record(0))
    assert topic.test(record(1))
    assert not topic.test(record(1).with_topic("x-clicks"))
