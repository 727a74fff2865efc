"""The boundary to users' code: checks of the functions that a task calls, and copies of the values it hands out.

A task never awaits, so a user's function must have done its work when it returns. A coroutine function or a generator
function returns at once and its body never runs, so the record would be lost without a trace. Such a function is
rejected before it is called, if possible when the topology is defined. Only a function that returns several values may
be a generator function. A plain function may also return a coroutine of another function. That is an error of the
current record, as if the function had raised. In the initializer of an `Aggregate`, it is a ConfigError.

>>> plain("filter: predicate", 3)
Traceback (most recent call last):
    ...
penstock.errors.ConfigError: filter: predicate must be callable, got 3

Stores and aggregations keep Python values, and pass copies of them to users' code. If the code could change the
original in place, without a `put`, memory and changelog would differ. The change would also remain if the record was
rejected.

>>> kept = {"n": [1]}
>>> handed_out = user_copy(kept)
>>> handed_out["n"].append(2); kept
{'n': [1]}
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, ParamSpec, TypeVar

from penstock.shared.common.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

SHOWN_MAX = 100
"""The characters of an invalid value that a message shows."""

GENERATOR = "a generator function"

_UNCHANGEABLE = frozenset((type(None), bool, int, float, str, bytes))


def require_callable(argument: str, value: Any, *, may_yield: bool = False) -> None:
    """Raise ConfigError unless the value is callable and not async; a generator function needs `may_yield`."""
    if not callable(value):
        raise ConfigError(f"{argument} must be callable, got {repr(value)[:SHOWN_MAX]}")
    kind = _describe_async_function(value)
    if kind is not None and not (may_yield and kind == GENERATOR):
        raise ConfigError(
            f"{argument} must be a plain function, got {kind} ({repr(value)[:SHOWN_MAX]}): a task awaits nothing, so "
            "it would never run"
        )


def require_no_arguments(argument: str, function: Callable[..., Any]) -> None:
    """Raise ConfigError if the function cannot be called without arguments.

    >>> require_no_arguments("process: supplier", lambda record: record)
    Traceback (most recent call last):
        ...
    penstock.errors.ConfigError: process: supplier is called without arguments: missing a required argument: 'record'
    """
    try:
        # A decorated function has the arguments of its wrapper, which may fill in those of the wrapped one.
        inspect.signature(function, follow_wrapped=False).bind()
    except TypeError as e:
        raise ConfigError(f"{argument} is called without arguments: {e}") from None
    # Some functions written in C have no signature.
    except ValueError:
        pass


def require_plain_methods(owner: str, made: Any, methods: tuple[str, ...]) -> None:
    """Raise ConfigError if one of these methods, of a class or an instance, is async or a generator."""
    for name in methods:
        method = getattr(made, name, None)
        if method is not None:
            require_callable(f"{owner}: {name}()", method)


def plain(argument: str, function: Callable[P, R], *, may_yield: bool = False) -> Callable[P, R]:
    """Return the function wrapped so that a call raises TypeError if it returns an awaitable or a generator.

    A generator is allowed with `may_yield`. Raises ConfigError as `require_callable`.
    """
    require_callable(argument, function, may_yield=may_yield)
    is_wrong: Callable[[Any], bool] = _is_awaitable_type if may_yield else _is_awaitable_or_generator_type

    def call_checked(*args: P.args, **named: P.kwargs) -> R:
        returned = function(*args, **named)
        if is_wrong(type(returned)):
            raise _unfinished_result_error(argument, returned)
        return returned

    return call_checked


def require_done(call: str, returned: Any) -> None:
    """Raise TypeError if a call returned an awaitable or a generator."""
    kind: Any = type(returned)
    if _is_awaitable_or_generator_type(kind):
        raise _unfinished_result_error(call, returned)


def _describe_async_function(function: Any) -> str | None:
    while isinstance(function, functools.partial):
        function = function.func
    for one in (function, None if isinstance(function, type) else type(function).__call__):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            return "an async one"
        if inspect.isgeneratorfunction(one):
            return GENERATOR
    return None


@functools.lru_cache(maxsize=1024)
def _is_awaitable_type(kind: Any) -> bool:
    return hasattr(kind, "__await__") or issubclass(kind, AsyncGenerator)


@functools.lru_cache(maxsize=1024)
def _is_awaitable_or_generator_type(kind: Any) -> bool:
    return _is_awaitable_type(kind) or issubclass(kind, Generator)


def _unfinished_result_error(argument: str, returned: Any) -> TypeError:
    if inspect.iscoroutine(returned):
        # Otherwise Python would also warn that the coroutine was never awaited.
        returned.close()
    return TypeError(f"{argument} returned a {type(returned).__name__}, which has yet to run: a task awaits nothing")


def user_copy(value: Any) -> Any:
    """Return a deep copy of a value that users' code passes in or gets; None, numbers, text and bytes are not copied.

    Raises any error that copying an object of a user's own class raises.
    """
    kind = type(value)
    if kind in _UNCHANGEABLE:
        return value
    # For dicts and lists this is several times as fast as `deepcopy`.
    if kind is dict:
        return {key: item if type(item) in _UNCHANGEABLE else user_copy(item) for key, item in value.items()}
    if kind is list:
        return [item if type(item) in _UNCHANGEABLE else user_copy(item) for item in value]
    return copy.deepcopy(value)


def belongs_to_engine(processor: object) -> bool:
    """Return whether a processor's class belongs to the engine, and is no user's code."""
    return type(processor).__module__.startswith("penstock.shared.streams.")
