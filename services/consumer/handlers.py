"""Loads the user's handler by its name, and calls it within a time limit. A failure of the handler is a return value.

A handler is `async def handle(record: ConsumerRecord)`. A batch handler takes `Sequence[ConsumerRecord]` (or `list`,
`tuple`, `Iterable`, `Collection`); that annotation or the attribute `handle.batch = True` marks it. A batch holds
records of one partition in offset order. With the value formats `json` and `module:Struct`, the record's `value` is the
decoded value.

A handler returns the records to write to Kafka: a `ProducerRecord`, or a list or tuple of them. A list or tuple that
mixes them with other values fails the call. Any other return value is ignored.

>>> records_in("app:handle", [ProducerRecord("alerts", b"1")])
(ProducerRecord(topic='alerts', value=b'1', key=None, headers=(), partition=None, timestamp=None),)
>>> records_in("app:handle", None), records_in("app:handle", ["done"])
((), ())

A handler that exceeds its limit is cancelled and its end is awaited. Otherwise the next record of its key would be
handled at the same time. Such a call fails, even if the handler catches the cancellation and returns or raises another
exception.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_origin, get_type_hints

from penstock.services.consumer.handler_timeouts import CallLimits
from penstock.shared.common.errors import (
    ConfigError,
    HandlerCancelled,
    HandlerExited,
    HandlerTimeout,
    MissingExtra,
    error_text,
)
from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from penstock.shared.common.serialization import (
    Deserializer,
    bytes_deserializer,
    json_deserializer,
    struct_deserializer,
)
from penstock.shared.common.user_modules import add_to_search_path, lacks_module

Records = tuple[ProducerRecord, ...]

_SEQUENCE_NAMES = ("Sequence", "list", "List", "tuple", "Tuple", "Iterable", "Collection")


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler, and whether it takes a batch or one record."""

    name: str
    function: Callable[[Any], Awaitable[object]]
    batch: bool = False

    async def call(self, records: Sequence[ConsumerRecord], limits: CallLimits) -> Records | Exception:
        """Call the handler with the records (one record, unless it is a batch handler).

        Returns the records to write, or the error of a failed call: the handler's exception, HandlerTimeout,
        HandlerCancelled, HandlerExited, or the TypeError of `records_in`. Raises KeyboardInterrupt, and CancelledError
        if the caller cancelled the task.
        """
        is_over = False
        task = asyncio.current_task()
        assert task is not None
        limits.begin(task)
        try:
            try:
                returned = await self.function(records if self.batch else records[0])
            finally:
                is_over = limits.end(task)
            if is_over:
                return self._timeout_error(limits)
            return () if returned is None else records_in(self.name, returned)
        # Three origins of a cancellation: the caller, the limit, or the handler itself (an inner task was cancelled).
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            if is_over:
                return self._timeout_error(limits)
            return HandlerCancelled(f"{self.name} raised CancelledError without being cancelled")
        except Exception as e:
            return self._timeout_error(limits, e) if is_over else e
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            # A handler must not end the daemon, for example by SystemExit.
            return HandlerExited(f"{self.name} raised {type(e).__name__}: {error_text(e)}")

    def _timeout_error(self, limits: CallLimits, raised: Exception | None = None) -> HandlerTimeout:
        then = "" if raised is None else f", and then raised {type(raised).__name__}: {error_text(raised)}"
        return HandlerTimeout(f"{self.name} was cancelled after {limits.timeout_ms} ms{then}")


def records_in(name: str, returned: object) -> Records:
    """Return the records in a handler's return value, with their headers as pairs.

    Raises TypeError if it mixes records with other values, which must be a mistake.
    """
    if isinstance(returned, ProducerRecord):
        return (returned.with_header_pairs(),)
    if not isinstance(returned, list | tuple):
        return ()
    records = tuple(each.with_header_pairs() for each in returned if isinstance(each, ProducerRecord))
    if records and len(records) < len(returned):
        kinds = sorted({type(each).__name__ for each in returned if not isinstance(each, ProducerRecord)})
        raise TypeError(f"{name} returned {', '.join(kinds)} among its records")
    return records


def load_handler(spec: str) -> Handler:
    """Return the handler named `module:function`. Raises ConfigError if there is none or if it is invalid."""
    function = load_object(spec, "handler")
    inner = function.func if isinstance(function, functools.partial) else function
    called = inner if inspect.isroutine(inner) else getattr(type(inner), "__call__", None)  # noqa: B004 - its kind is wanted, not whether it is there
    if inspect.isclass(inner) or not inspect.iscoroutinefunction(called):
        raise ConfigError(f"handler: {spec} is not an async function")
    parameters = list(inspect.signature(function).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters or len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in needed):
        raise ConfigError(f"handler: {spec} must take one argument: a record, or a sequence of records")
    batch = getattr(function, "batch", getattr(inner, "batch", None))
    return Handler(spec, function, _takes_sequence(called, parameters[0].name) if batch is None else bool(batch))


def load_decoder(value: str) -> Deserializer:
    """Return the decoder for the value format `bytes`, `json` or `module:Struct`.

    Raises ConfigError for another format, or if there is no such struct or JSON cannot be decoded into it.
    """
    if value == "bytes":
        return bytes_deserializer
    if value == "json":
        return json_deserializer
    struct = load_object(value, "value")
    try:
        return struct_deserializer(struct)
    except TypeError as e:
        raise ConfigError(f"value: {value} is not a type that JSON can be decoded into: {e}") from None


def load_object(spec: str, setting: str) -> Any:
    """Return the object `module:name`, also from a module in the current folder.

    Raises ConfigError, which names the setting, if `spec` has another form, if there is no such object, or if the
    import raises ImportError, TypeError or ValueError.
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{setting}: expected module:name, got {spec!r}")
    here = add_to_search_path()
    try:
        found: Any = importlib.import_module(module_name)
    except MissingExtra:
        raise
    except ImportError as e:
        if lacks_module(e, module_name):
            raise ConfigError(f"{setting}: no module {e.name!r} (searched from {here})") from None
        raise ConfigError(f"{setting}: {spec}: {e}") from e
    except (TypeError, ValueError) as e:
        # `import_module` raises TypeError for a relative name. The module itself may raise either error.
        raise ConfigError(f"{setting}: {spec!r}: {e}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{setting}: {module_name} has no {path!r}")
        found = getattr(found, part)
    return found


def _takes_sequence(function: Any, parameter: str) -> bool:
    try:
        annotation = get_type_hints(function).get(parameter)
    except (NameError, TypeError, AttributeError):
        annotation = inspect.signature(function).parameters[parameter].annotation
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] in _SEQUENCE_NAMES
    # An alias of `type X = …` (Python 3.12) may name another one.
    while (aliased := getattr(annotation, "__value__", None)) is not None:
        annotation = aliased
    origin = get_origin(annotation) or annotation
    return origin in (Iterable, Collection) or (inspect.isclass(origin) and issubclass(origin, Sequence))
