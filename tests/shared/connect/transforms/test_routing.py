"""RegexRouter, TimestampRouter and Filter, and the built-in predicates."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import DataError
from penstock.shared.connect.record import Header
from penstock.shared.connect.transforms.predicates import HasHeaderKey, RecordIsTombstone, TopicNameMatches
from penstock.shared.connect.transforms.routing import Filter, RegexRouter, TimestampRouter
from tests.shared.connect.transforms.transforming import applied, configured, record


def test_topics_are_renamed_if_the_whole_name_matches() -> None:
    """RegexRouter must match the whole topic; groups are replaced, and backslashes are literal."""
    assert applied(RegexRouter, 1, regex="(cl)icks", replacement="$1-$1\\x").topic == "cl-cl\\x"
    assert applied(RegexRouter, 1, regex="(?P<head>cl)icks", replacement="${head}ub").topic == "club"
    assert applied(RegexRouter, 1, regex="click", replacement="x").topic == "clicks"
    with pytest.raises(DataError, match="does not fit"):
        applied(RegexRouter, 1, regex="clicks", replacement="$1")


def test_topics_are_named_by_time() -> None:
    """TimestampRouter uses the record's timestamp in UTC; without one it is a DataError."""
    router = configured(TimestampRouter, topic_format="${topic}_${timestamp}", timestamp_format="yyyy-MM")
    routed = router.apply(record(1, timestamp=1704164645678))
    assert routed is not None
    assert routed.topic == "clicks_2024-01"
    with pytest.raises(DataError, match="Timestamp missing"):
        router.apply(record(1))


def test_a_filter_drops() -> None:
    """Filter drops every record."""
    assert configured(Filter).apply(record(1)) is None


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
