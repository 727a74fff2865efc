"""What the audit takes and what it refuses by name."""

from __future__ import annotations

import msgspec
import pytest

from services.compactor.audit_inputs import NotAuditable, require_auditable, require_time_by_records
from shared.streams.aggregations import Count
from shared.streams.changelog_format import IdleTime, Progress
from shared.streams.dsl import StreamsBuilder


def test_only_sessions_are_audited() -> None:
    """Windows that the audit cannot make anew are refused with their kind; sessions straight from a topic are taken."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    grouped.session_window(10).aggregate("s", n=Count()).on_close().to("a")
    grouped.hopping_window(10, 5).aggregate("h", n=Count()).on_close().to("b")
    sessions, hopping = builder.build().schemas()
    require_auditable(sessions)
    with pytest.raises(NotAuditable, match="store 'h' cannot be audited: it has hopping windows"):
        require_auditable(hopping)
    with pytest.raises(NotAuditable, match="filter-2 stands before its window"):
        require_auditable(msgspec.structs.replace(sessions, upstream=("filter-2",)))


def test_time_that_moved_by_itself_is_not_audited() -> None:
    """Where time was moved on without records, the partitions are named and nothing is compared."""
    plain = Progress("app", "exactly_once", {"in": 5}, 10, {"s": 10}, {}, (), 0)
    require_time_by_records({0: plain})
    with pytest.raises(NotAuditable, match="partitions 1 was moved on while their topics were idle"):
        require_time_by_records({0: plain, 1: msgspec.structs.replace(plain, idle=IdleTime(7))})
