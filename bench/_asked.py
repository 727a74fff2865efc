"""Compares figures with their targets."""

from __future__ import annotations

from collections.abc import Mapping

Asked = Mapping[str, tuple[float, str]]
"""The limit of each figure by name, and whether it is the `least` or the `most` allowed."""


def missed(found: Mapping[str, float], asked: Asked) -> list[str]:
    """The figures that miss their targets.

    >>> missed({"rows/s": 1, "s": 3}, {"rows/s": (2, "least"), "s": (4, "most"), "not measured": (1, "least")})
    ['rows/s']
    """
    wrong = []
    for name, (limit, which) in asked.items():
        if name in found and (found[name] < limit if which == "least" else found[name] > limit):
            wrong.append(name)
    return wrong


def show(found: Mapping[str, float], asked: Asked) -> None:
    """Print the figures with their targets."""
    wrong = missed(found, asked)
    for name, value in found.items():
        limit = f"{asked[name][0]:,} at {asked[name][1]}" if name in asked else ""
        print(f"{name:<45} {value:>12,.2f}  {limit}{'  MISSED' if name in wrong else ''}")
