"""Public names: what a class or function says of itself in tracebacks, `help` and dead letters.

User code imports `penstock.clients`; the code lies in `penstock.shared.clients.producer`. A public module ends with
`publish(__name__, ...)`, and its classes and functions are named as user code imports them. Errors and connector
plugins are published where they are defined or loaded: their names are stored in dead letters and configurations,
so that they must not depend on which public modules were imported.

>>> from penstock.clients import Producer
>>> Producer
<class 'penstock.clients.Producer'>
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

PRIVATE = ("penstock.shared.", "penstock.services.")
FIELDS = ("__dataclass_fields__", "_fields", "__struct_fields__", "__pydantic_fields__")
"""Attributes of classes whose annotations are fields: dataclasses, named tuples, msgspec structs, pydantic models."""


def publish(module: str, members: Mapping[str, Any], names: Iterable[str]) -> None:
    """Names the classes and functions of these `names` as the public `module`'s; `members` is that module's namespace.

    Two kinds keep their name:

    1. What is public already: an error is `penstock.errors.…` in `penstock.connect` too.
    2. A dataclass, named tuple, msgspec struct or pydantic model with annotations that `members` cannot resolve. What
       makes, decodes or validates instances of these looks names up in the module that the class names.

    The price: `inspect.getsource` looks for a published class in the public module, and does not find it.
    """
    for name in names:
        each = members[name]
        if not (inspect.isclass(each) or inspect.isfunction(each)) or not each.__module__.startswith(PRIVATE):
            continue
        if inspect.isclass(each):
            if any(hasattr(each, mark) for mark in FIELDS) and not _resolves(each, members):
                continue
            # doctest finds the examples of a class in the module that the class names, or in `__test__`.
            vars(sys.modules[each.__module__]).setdefault("__test__", {})[each.__qualname__] = each
        each.__module__ = module


def _resolves(each: type, namespace: Mapping[str, Any]) -> bool:
    try:
        inspect.get_annotations(each, globals=dict(namespace), eval_str=True)
    except (NameError, AttributeError, TypeError):
        return False
    return True
