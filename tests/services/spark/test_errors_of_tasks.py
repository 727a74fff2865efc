"""Errors of tasks as results."""

from __future__ import annotations

import pytest

from penstock.services.spark.errors import TaskFailure
from penstock.shared.common import errors
from penstock.shared.common.errors import ChangelogHole, CorruptRecord, OffsetOutOfRange, PenstockError


class Own(CorruptRecord):
    """A class that the driver does not know by its name."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [(CorruptRecord("x"), CorruptRecord), (Own("x"), CorruptRecord), (OffsetOutOfRange("x"), ChangelogHole)],
)
def test_an_error_comes_back(error: PenstockError, kind: type[PenstockError]) -> None:
    """As itself, or the first class above it that there is a name for; with where it was."""
    again = TaskFailure.of(error).to_error("partition 3: ")
    assert type(again) is kind
    assert str(again) == f"partition 3: {error}"


@pytest.mark.parametrize("kind", [one for one in vars(errors).values() if isinstance(one, type)])
def test_every_error_takes_a_text(kind: type[PenstockError]) -> None:
    """So that each can come back from a task."""
    assert type(TaskFailure.of(kind("x")).to_error()).__name__ in (kind.__name__, "ChangelogHole")
