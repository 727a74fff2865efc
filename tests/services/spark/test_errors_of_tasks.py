"""An error of a Spark task is returned as its own class, with its text."""

from __future__ import annotations

import pytest

from penstock.services.spark.errors import TaskFailure
from penstock.shared.common import errors
from penstock.shared.common.errors import CorruptRecord, OffsetOutOfRange, PenstockError


class Own(CorruptRecord):
    """A class whose name the driver does not know."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [(CorruptRecord("x"), CorruptRecord), (Own("x"), CorruptRecord), (OffsetOutOfRange("x"), OffsetOutOfRange)],
)
def test_an_error_comes_back(error: PenstockError, kind: type[PenstockError]) -> None:
    """It returns as its own class, or as its first base that `errors` has, with its partition."""
    again = TaskFailure.of(error).to_error("partition 3: ")
    assert type(again) is kind
    assert str(again) == f"partition 3: {error}"


@pytest.mark.parametrize("kind", [one for one in vars(errors).values() if isinstance(one, type)])
def test_every_error_takes_a_text(kind: type[PenstockError]) -> None:
    """Each error can therefore be returned from a task."""
    assert type(TaskFailure.of(kind("x")).to_error()) is kind
