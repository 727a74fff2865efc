"""Errors of tasks that would come again: a task gives them as its result, so that Spark does not try it again."""

from __future__ import annotations

import msgspec

from penstock.shared.common import errors
from penstock.shared.common.errors import ChangelogHole, OffsetOutOfRange, PenstockError


class Failure(msgspec.Struct, frozen=True):
    """An error: the names of its classes, its own first, and what it says."""

    names: tuple[str, ...]
    said: str

    @classmethod
    def of(cls, error: PenstockError) -> Failure:
        """Records of a changelog that are gone while they are read are a hole of it."""
        kind = ChangelogHole if isinstance(error, OffsetOutOfRange) else type(error)
        return cls(tuple(one.__name__ for one in kind.__mro__), str(error))

    def error(self, where: str = "") -> PenstockError:
        """The error again, of its first class in `errors`; each of them takes a text."""
        kinds = (getattr(errors, name, None) for name in self.names)
        kind: type[PenstockError] = next(kind for kind in kinds if kind is not None)
        return kind(f"{where}{self.said}")
