"""Values that can be changed without what they were taken from.

A store and an aggregation keep Python values. What they hand to a user's code is a copy: changed in place there, and
not put back, it would be one thing in memory and another in the changelog, and a record that is refused halfway would
leave its traces.

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
    """The value itself where nothing can change it, else a deep copy of the same types.

    Raises what the copying of a user's own type raises.
    """
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    if kind is dict:  # JSON's own types are copied here: several times as fast as `deepcopy`
        return {key: item if type(item) in _UNCHANGEABLE else detached(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _UNCHANGEABLE else detached(item) for item in value]
    return copy.deepcopy(value)
