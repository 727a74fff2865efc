"""Tracks whether a task is calling user code, because a processor's context may only be used during such a call.

A processor may pass its context to a thread, an asyncio task or a callback of another library. A record that is
forwarded from there belongs to no source record and to no commit, so it would be lost or duplicated. Therefore
`forward` and `schedule` of the context check `is_in_callback`. The decorator `in_callback` names the methods of a task
that call user code, except `close`, after which no commit follows. For code that was started during such a call and
runs after it, `is_in_callback` is False.

>>> @in_callback("process")
... class Task:
...     def process(self): return is_in_callback(self)
>>> task = Task()
>>> task.process(), is_in_callback(task)
(True, False)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

Made = TypeVar("Made", bound=type)


class _Call:
    """One call of a decorated method."""

    __slots__ = ("is_active", "task")

    def __init__(self, task: object) -> None:
        self.task = task
        self.is_active = True


_current_call: ContextVar[_Call | None] = ContextVar("work of a task", default=None)


def is_in_callback(task: object) -> bool:
    """Return whether this is called from within one of the task's decorated methods."""
    call = _current_call.get()
    return call is not None and call.is_active and call.task is task


def in_callback(*methods: str) -> Callable[[Made], Made]:
    """Return a class decorator that marks these methods as callbacks."""

    def mark_methods(made: Made) -> Made:
        for name in methods:
            setattr(made, name, _mark_as_callback(getattr(made, name)))
        return made

    return mark_methods


def _mark_as_callback(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call_as_callback(self: object, *args: Any, **named: Any) -> Any:
        call = _Call(self)
        token = _current_call.set(call)
        try:
            return method(self, *args, **named)
        finally:
            call.is_active = False
            _current_call.reset(token)

    return call_as_callback
