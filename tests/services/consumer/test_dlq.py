"""How `penstock dlq` finds the dead-letter topic."""

from __future__ import annotations

import pytest

from penstock.services.consumer.dlq import find_dead_letter_topic
from penstock.shared.common.errors import UnknownTopicOrPartition


@pytest.mark.parametrize(
    ("named", "existing", "taken"),
    [
        ("clicks", ["clicks", "clicks-dlq"], "clicks-dlq"),
        ("clicks", ["clicks-dlq"], "clicks-dlq"),
        ("clicks-dlq", ["clicks", "clicks-dlq"], "clicks-dlq"),
        ("clicks-dlq", ["clicks-dlq", "clicks-dlq-dlq"], "clicks-dlq-dlq"),
    ],
)
def test_the_source_or_its_dead_letter_topic_may_be_named(named: str, existing: list[str], taken: str) -> None:
    """A source names its dead-letter topic; a dead-letter topic names itself, unless it has a dead-letter topic too."""
    assert find_dead_letter_topic(named, existing) == taken


def test_an_unknown_topic_is_an_error_with_the_existing_ones() -> None:
    """The error names the expected topic, asks for a source, and lists the existing dead-letter topics."""
    with pytest.raises(UnknownTopicOrPartition, match=r"click-dlq.*clicks-dlq"):
        find_dead_letter_topic("click", ["clicks", "clicks-dlq"])
    with pytest.raises(UnknownTopicOrPartition, match="ends in -dlq"):
        find_dead_letter_topic("clicks-dlq", ["clicks"])
    many = [f"t{n:02}-dlq" for n in range(11)]
    with pytest.raises(UnknownTopicOrPartition, match=r"t09-dlq, …\)"):
        find_dead_letter_topic("clicks", many)
