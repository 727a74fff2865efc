"""RegexRouter, TimestampRouter and Filter."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import DataError
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
