"""What a changelog's first records say of a backfill."""

from __future__ import annotations

from penstock.services.spark.marks import Marks, marks_of
from penstock.shared.streams.changelog.format import Takeover, encode_takeover

MARK = encode_takeover(1, Takeover("app", "backfill", 0, rests_on="lake/app"))
OWNER = encode_takeover(1, Takeover("app", "instance", 0))


def test_a_changelog_of_marks_alone_is_not_begun() -> None:
    """Also where a backfill was killed before it had marked all, or a mark was written twice."""
    assert marks_of([(0, MARK), (0, MARK)], {0: 2, 1: 0}) == Marks("lake/app")
    assert marks_of([], {0: 0}) == Marks()


def test_anything_beside_marks_has_begun_it() -> None:
    """An owner's takeover, a foreign record, one without a value; and what lies further than the first ones."""
    for value in (OWNER, b"{}", None):
        assert marks_of([(0, MARK), (1, MARK), (1, value)], {0: 1, 1: 2}) == Marks("lake/app", (1,))
        assert marks_of([(0, value)], {0: 1}) == Marks(None, (0,))
    assert marks_of([(0, MARK)], {0: 4}) == Marks("lake/app", (0,))
