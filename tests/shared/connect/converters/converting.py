"""Converting with a converter that asks a registry, as a task does: what it needs is fetched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.shared.connect.errors import MoreNeeded

T = TypeVar("T")


async def fetching(convert: Callable[[], T]) -> T:
    """What the conversion gives in the end."""
    for _ in range(10):
        try:
            return convert()
        except MoreNeeded as needed:
            await needed.fetch()
    raise AssertionError("still more is needed")
