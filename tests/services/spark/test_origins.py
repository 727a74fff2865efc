"""Which source records an audit must find."""

from __future__ import annotations

import pytest

from penstock.services.spark.origins import NotAuditable, Origin, first_offsets, require_written, unwritten_below
from penstock.shared.streams.changelog.format import StoreSchema


@pytest.mark.parametrize(
    ("origin", "earliest", "committed", "first"),
    [
        (None, {0: 0, 1: 0}, {0: 9}, {0: 0, 1: 0}),
        (None, {0: 0, 1: 5}, {0: 9}, {0: 0, 1: 0}),  # of which the application has taken nothing
        (Origin(False, {"in": {0: 4, 1: 5}}), {0: 4, 1: 0}, {0: 9, 1: 9}, {0: 4, 1: 5}),
    ],
)
def test_the_first_record_is_where_the_application_began(
    origin: Origin | None, earliest: dict[int, int], committed: dict[int, int], first: dict[int, int]
) -> None:
    """That is the topic's first, or where a backfill began; what came before that may be gone."""
    assert first_offsets(origin, "in", earliest, committed) == first


@pytest.mark.parametrize(
    ("origin", "said"),
    [
        (
            None,
            r"the beginning of in-0 \(offsets 0 to 6\), in-1 \(offsets 0 to 1\) is gone, by .* --began-at",
        ),
        (Origin(False, {"in": {0: 5, 1: 2}}), r"the beginning of in-0 \(offsets 5 to 6\) is gone"),
        (Origin(True), "began with a backfill from files: what its first windows hold is not in in"),
    ],
)
def test_a_beginning_that_is_not_there_is_refused(origin: Origin | None, said: str) -> None:
    """What a stream took and nobody can read any more would make differences of sound windows."""
    with pytest.raises(NotAuditable, match=said):
        first_offsets(origin, "in", {0: 7, 1: 2}, {0: 9, 1: 9})


STORE = StoreSchema("s", "session", "string", 10, 5, "on_close", "in", "out", "in-late", "in-dlq", ())
UNWRITTEN = Origin(False, ends={"in": {0: 5, 1: 0, 2: 7}}, unwritten={"in-late": 48, "other-dlq": 2})


@pytest.mark.parametrize(
    ("origin", "first", "found"),
    [
        (None, {0: 0}, ({}, {})),
        (Origin(False), {0: 0}, ({}, {})),
        (UNWRITTEN, {0: 0, 1: 0, 2: 0}, ({"in-late": 48}, {0: 5, 2: 7})),
        (UNWRITTEN, {0: 5, 1: 0, 2: 0}, ({"in-late": 48}, {2: 7})),
        (UNWRITTEN, {0: 5, 1: 0, 2: 9}, ({}, {})),
        (Origin(False, ends={"in": {0: 5}}, unwritten={"other-dlq": 2}), {0: 0}, ({}, {})),
    ],
)
def test_what_a_backfill_did_not_write_stands_below_its_hand_over(
    origin: Origin | None, first: dict[int, int], found: tuple[dict[str, int], dict[int, int]]
) -> None:
    """It is the audited store's if one of its topics is named, and of no matter to an audit that begins behind it."""
    assert unwritten_below(origin, STORE, first) == found


def test_records_that_are_in_no_topic_are_not_guessed() -> None:
    """The refusal has topic and number, and the time from which on an audit is whole, where there is one."""
    require_written({}, 5)
    with pytest.raises(NotAuditable, match=r"\(--outputs none\), and had some \(in-late: 48\).* --start 7 audits"):
        require_written({"in-late": 48}, 5)
    with pytest.raises(NotAuditable, match=r"Nothing was compared.$"):
        require_written({"in-late": 48}, None)
