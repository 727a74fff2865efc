"""Whether a task is at work: between two moments of it, a processor's context answers to nobody.

A processor may keep its context and hand it on, to a thread or a callback of another library. What is forwarded or
scheduled from there belongs to no record, is part of no commit and would be lost or done twice; so a context asks
`is_at_work` before it acts. The methods of a task that call users' code are named where its class is made.

>>> @at_work("process")
... class Task:
...     def process(self): return is_at_work(self)
>>> task = Task()
>>> task.process(), is_at_work(task)
(True, False)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

Made = TypeVar("Made", bound=type)

_task: ContextVar[object] = ContextVar("task at work", default=None)


def is_at_work(task: object) -> bool:
    """Whether one of the task's named methods is running, in this thread."""
    return _task.get() is task


def at_work(*methods: str) -> Callable[[Made], Made]:
    """The class with these methods marked as its work."""

    def mark(made: Made) -> Made:
        for name in methods:
            setattr(made, name, _marked(getattr(made, name)))
        return made

    return mark


def _marked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def marked(self: object, *args: Any, **named: Any) -> Any:
        token = _task.set(self)
        try:
            return method(self, *args, **named)
        finally:
            _task.reset(token)

    return marked
