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

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any

PRIVATE = ("penstock.shared.", "penstock.services.")


def publish(module: str, members: Mapping[str, Any], names: Iterable[str]) -> None:
    """Names the classes and functions of these `names` as the public `module`'s; `members` is that module's namespace.

    What is public already keeps its name: an error is `penstock.errors.…` in `penstock.connect` too. Annotations that
    are text are resolved here, in the class's own module and in the public one: what reads them later looks names up
    in the module that the class names. One that names neither module's raises `NameError`.

    The price: `inspect.getsource` looks for a published class in the public module, and does not find it.
    """
    for name in names:
        each = members[name]
        if not (inspect.isclass(each) or inspect.isfunction(each)) or not each.__module__.startswith(PRIVATE):
            continue
        if inspect.isclass(each):
            _resolve(each, members)
            # doctest finds the examples of a class in the module that the class names, or in `__test__`.
            vars(sys.modules[each.__module__]).setdefault("__test__", {})[each.__qualname__] = each
        each.__module__ = module


def _resolve(each: type, members: Mapping[str, Any]) -> None:
    """Replaces annotations that are text by what they name, in the fields of a dataclass too."""
    hints = typing.get_type_hints(each, localns=dict(members), include_extras=True)
    each.__annotations__ = {name: hints[name] for name in inspect.get_annotations(each)}
    if dataclasses.is_dataclass(each):
        for field in dataclasses.fields(each):
            field.type = each.__annotations__.get(field.name, field.type)
