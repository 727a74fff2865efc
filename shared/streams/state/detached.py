"""Copies of values that users' code may change.

A store and an aggregation keep Python values, and pass copies to users' code. If the code changed the original in place
and did not put it back, memory and changelog would differ. A record that is rejected midway would leave traces.

>>> kept = {"n": [1]}
>>> handed_out = detached(kept)
>>> handed_out["n"].append(2); kept
{'n': [1]}
"""

from __future__ import annotations

import copy
from typing import Any

_UNCHANGEABLE = frozenset((type(None), bool, int, float, str, bytes))


def detached(value: Any) -> Any:
    """Return the value itself if it is immutable, else a deep copy of the same types.

    Raises the errors of copying a user's own type.
    """
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is dict:  # JSON's own types are copied here, several times as fast as by `deepcopy`
        return {key: item if type(item) in _UNCHANGEABLE else detached(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _UNCHANGEABLE else detached(item) for item in value]
    return copy.deepcopy(value)
