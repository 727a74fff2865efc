"""Whether a task is at work: between two moments of it, a processor's context answers to nobody.

A processor may keep its context and hand it on, to a thread, an asyncio task or a callback of another library. What is
forwarded or scheduled from there belongs to no record, is part of no commit and would be lost or done twice; so a
context asks `is_at_work` before it acts. The methods of a task that call users' code are named where its class is made;
what is created while one of them runs, to run later, has a copy of its context, and so finds that this work is done.

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


class _Work:
    """One call of a marked method."""

    __slots__ = ("goes_on", "task")

    def __init__(self, task: object) -> None:
        self.task, self.goes_on = task, True


_work: ContextVar[_Work | None] = ContextVar("work of a task", default=None)


def is_at_work(task: object) -> bool:
    """Whether one of the task's named methods is running, and this is called from it."""
    work = _work.get()
    return work is not None and work.goes_on and work.task is task


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
        work = _Work(self)
        token = _work.set(work)
        try:
            return method(self, *args, **named)
        finally:
            work.goes_on = False
            _work.reset(token)

    return marked
