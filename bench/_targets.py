"""Compares figures with their targets."""

from __future__ import annotations

from collections.abc import Mapping

Targets = Mapping[str, tuple[float, str]]
"""The limit of each figure by name, and whether it is the `least` or the `most` allowed."""


def missed(found: Mapping[str, float], targets: Targets) -> list[str]:
    """The figures that miss their targets.

    >>> missed({"rows/s": 1, "s": 3}, {"rows/s": (2, "least"), "s": (4, "most"), "not measured": (1, "least")})
    ['rows/s']
    """
    wrong = []
    for name, (limit, which) in targets.items():
        if name in found and (found[name] < limit if which == "least" else found[name] > limit):
            wrong.append(name)
    return wrong


def show(found: Mapping[str, float], targets: Targets) -> None:
    """Print the figures with their targets."""
    wrong = missed(found, targets)
    for name, value in found.items():
        limit = f"{targets[name][0]:,} at {targets[name][1]}" if name in targets else ""
        print(f"{name:<45} {value:>12,.2f}  {limit}{'  MISSED' if name in wrong else ''}")
