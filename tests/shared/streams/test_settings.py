"""The stream worker's settings: the limit of keys, missing source offsets and the guarantee."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.settings import StreamsSettings


def test_a_key_must_leave_room_for_the_rest() -> None:
    """`key_bytes_max` must be below `max_request_size`, and is None by default."""
    assert StreamsSettings().key_bytes_max is None
    assert StreamsSettings(key_bytes_max=1_000, max_request_size=1_001).key_bytes_max == 1_000
    with pytest.raises(ConfigError, match=r"key_bytes_max=1000 .*max_request_size=1000"):
        StreamsSettings(key_bytes_max=1_000, max_request_size=1_000)


def test_missing_source_offsets_fail_the_worker_by_default() -> None:
    """By default, a worker fails if source offsets are missing."""
    assert StreamsSettings().on_missing_source_offsets == "fail"


def test_a_raised_guarantee_is_logged_once() -> None:
    """Repartition topics raise at_least_once to exactly_once, with one log line that names them. Otherwise nothing
    changes and nothing is logged."""
    settings = StreamsSettings(processing_guarantee="at_least_once")
    with capture_logs() as lines:
        raised = settings.for_topology(["app-by-user-repartition"])
        assert raised.processing_guarantee == "exactly_once"
        assert raised.for_topology(["app-by-user-repartition"]) is raised
        assert settings.for_topology([]) is settings
    (line,) = lines
    assert "at_least_once" in line["event"]
    assert line["topics"] == ["app-by-user-repartition"]
