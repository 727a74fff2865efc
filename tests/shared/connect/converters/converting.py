"""Runs conversions of converters that use a registry, and fetches schemas as a task does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.shared.connect.errors import MoreNeeded

T = TypeVar("T")


async def fetching(convert: Callable[[], T]) -> T:
    """Repeat a conversion until it has all schemas, and return its result."""
    for _ in range(10):
        try:
            return convert()
        except MoreNeeded as needed:
            await needed.fetch()
    raise AssertionError("still more is needed")
