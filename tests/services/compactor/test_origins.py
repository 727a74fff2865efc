"""Which source records an audit must find."""

from __future__ import annotations

import pytest

from services.compactor.origins import NotAuditable, Origin, first_offsets


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
