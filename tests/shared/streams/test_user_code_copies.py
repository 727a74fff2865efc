"""Detached values: copies where something could change them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.streams.user_code import user_copy


class Point(msgspec.Struct):
    """A value that can be changed."""

    x: list[int]


@pytest.mark.parametrize("value", [None, True, 1, 1.5, "text", b"bytes"])
def test_immutable_values_are_not_copied(value: Any) -> None:
    """Numbers, text and bytes are not copied."""
    assert user_copy(value) is value


@pytest.mark.parametrize("value", [[1, [2]], {"a": {"b": [1]}}, {1, 2}, Point([1]), (1, [2]), [Point([1])]])
def test_mutable_values_are_copied_deeply(value: Any) -> None:
    """A copy is equal and of the same type, and shares nothing that can be changed."""
    copied, before = user_copy(value), repr(value)
    assert (copied, type(copied)) == (value, type(value))
    spoil(copied)
    assert repr(value) == before


def spoil(value: Any) -> None:
    """Change all that can be changed."""
    match value:
        case Point():
            spoil(value.x)
        case list() | tuple():
            for item in value:
                spoil(item)
            if isinstance(value, list):
                value.append(9)
        case dict():
            for item in value.values():
                spoil(item)
            value["new"] = 9
        case set():
            value.add(9)
