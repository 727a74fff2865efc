"""The retry policy decides whether and when the handler of a failed record is called again.

The wait grows as in Kafka's ExponentialBackoff (KIP-580): after the n-th failed attempt it is `backoff_ms` times
`multiplier` to the power of n - 1, spread by `jitter` in both directions, at most `backoff_max_ms`. Exception types are
configured as classes or by name (`ConnectionError`, `asyncpg.exceptions.InterfaceError`). The exception's class and
then its bases are looked up in `not_retriable` and `retriable`. The first class that is listed decides. If it is in
both, or if none is listed, the exception is not retried. By default every exception is retried except DataError,
because an invalid record stays invalid.

>>> from penstock.shared.common.errors import SerializationError
>>> policy = RetryPolicy(max_attempts=3, jitter=0)
>>> [policy.decide(ConnectionError("refused"), attempts, random=0.5) for attempts in (1, 2, 3)]
[100, 200, None]
>>> policy.decide(SerializationError("clicks: not JSON"), 1, random=0.5) is None
True
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import ConfigError, DataError

ExceptionType = type[BaseException] | str


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """See the module. `handler_timeout_ms` limits a handler call. The settings check the ranges."""

    max_attempts: int = 5
    backoff_ms: int = 100
    backoff_max_ms: int = 30_000
    multiplier: float = 2.0
    jitter: float = 0.2
    handler_timeout_ms: int = 60_000
    retriable: Sequence[ExceptionType] = (Exception,)
    not_retriable: Sequence[ExceptionType] = (DataError,)

    def decide(self, error: BaseException, attempts: int, random: float) -> int | None:
        """Return the wait before the next attempt, in ms, or None if there is none.

        `attempts` attempts have failed, the last one with `error`. `random` is drawn uniformly from 0 to 1, for the
        jitter of the backoff.
        """
        if attempts >= self.max_attempts or not self.is_retriable(type(error)):
            return None
        return self.backoff_after_ms(attempts, random)

    def backoff_after_ms(self, attempts: int, random: float) -> int:
        """Return the wait after `attempts` failures, in ms."""
        backoff = ExponentialBackoff(self.backoff_ms, self.backoff_max_ms, self.multiplier, self.jitter)
        return round(backoff.wait_ms(attempts, random))

    def is_retriable(self, error: type[BaseException]) -> bool:
        """Return whether an exception class is retriable.

        Of the class and its bases, the first in the method resolution order that the settings name decides. If they
        name none, the class is not retriable.
        """
        for base in error.__mro__:
            if any(_names_exception_class(given, base) for given in self.not_retriable):
                return False
            if any(_names_exception_class(given, base) for given in self.retriable):
                return True
        return False


def _names_exception_class(given: ExceptionType, base: type) -> bool:
    if isinstance(given, str):
        return given in (base.__name__, f"{base.__module__}.{base.__qualname__}")
    return given is base


def load_exceptions(names: Sequence[str], setting: str) -> tuple[ExceptionType, ...]:
    """Return the exceptions that a retry policy names, as classes and names. `setting` is the setting's name, for
    errors.

    The plain name of a class that is already imported stays a name, because several classes may have it. Any other
    name must be `module.name`, and becomes the class. Raises ConfigError if no exception class is found.
    """
    known = {found.__name__ for found in _all_subclasses(BaseException)}
    return tuple(name if name in known else _import_exception_class(name, setting) for name in names)


def _import_exception_class(name: str, setting: str) -> type[BaseException]:
    module_name, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute, None) if module_name else None
    except ImportError:
        found = None
    if not (inspect.isclass(found) and issubclass(found, BaseException)):
        raise ConfigError(f"{setting}: no exception class {name!r}")
    return found


def _all_subclasses(base: type[BaseException]) -> set[type[BaseException]]:
    return {base}.union(*(_all_subclasses(each) for each in type.__subclasses__(base)))
