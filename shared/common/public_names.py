"""Public names of classes and functions, as tracebacks, `help` and dead letters show them.

User code imports `penstock.clients`; the code lies in `penstock.shared.clients.producer`. A public module ends with
`publish(__name__, ...)`, which renames its classes and functions to the names that user code imports. Errors and
connector plugins are published where they are defined or loaded: their names are stored in dead letters and
configurations, and must not depend on which public modules were imported.

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
    """Set the module of the classes and functions in `names` to the public module `module`.

    `members` is the namespace in which the names are looked up. A class or function that is already public keeps its
    module. A class's annotations that are text are resolved in the class's own module and in `members`. Raises
    NameError for an annotation that neither can resolve. `inspect.getsource` does not find a published class.
    """
    for name in names:
        each = members[name]
        # An error is `penstock.errors.…` in `penstock.connect` too.
        if not (inspect.isclass(each) or inspect.isfunction(each)) or not each.__module__.startswith(PRIVATE):
            continue
        if inspect.isclass(each):
            # `typing.get_type_hints` looks names up in the class's `__module__`, which is about to change.
            _resolve_public_annotations(each, members)
            # doctest finds a class's examples only in the class's `__module__` or in `__test__`.
            vars(sys.modules[each.__module__]).setdefault("__test__", {})[each.__qualname__] = each
        each.__module__ = module


def _resolve_public_annotations(each: type, members: Mapping[str, Any]) -> None:
    """Replace a published class's annotations that are text by the objects they name, also in dataclass fields."""
    hints = typing.get_type_hints(each, localns=dict(members), include_extras=True)
    each.__annotations__ = {name: hints[name] for name in inspect.get_annotations(each)}
    if dataclasses.is_dataclass(each):
        for field in dataclasses.fields(each):
            field.type = each.__annotations__.get(field.name, field.type)
