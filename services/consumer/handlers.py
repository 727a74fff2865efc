"""The user's handler: found by name, called within a time limit, its failure returned as a value.

A handler is `async def handle(record: ConsumerRecord)`; a batch handler takes `Sequence[ConsumerRecord]` (or `list`,
`tuple`), seen by that annotation or by the mark `handle.batch = True`. A batch holds records of one partition in offset
order. Under the value formats `json` and `module:Struct` the record's `value` is the decoded one.

What a handler has to write to Kafka it returns: a `ProducerRecord`, or a list or tuple of them. Whatever else it
returns is left alone.

>>> records_in("app:handle", [ProducerRecord("alerts", b"1")])
(ProducerRecord(topic='alerts', value=b'1', key=None, headers=(), partition=None, timestamp=None),)
>>> records_in("app:handle", None), records_in("app:handle", ["done"])
((), ())

A handler that outlives its limit is cancelled, and its end awaited: were it left behind, the next record of its key
would run beside it. It has failed then, whatever it makes of the cancellation: returns, or raises something else.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from penstock.services.consumer.call_limits import CallLimits
from penstock.shared.clients.consumer.dead_letters import message_of
from penstock.shared.common.errors import ConfigError, HandlerCancelled, HandlerExited, HandlerTimeout
from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from penstock.shared.common.serialization import (
    Deserializer,
    bytes_deserializer,
    json_deserializer,
    struct_deserializer,
)

Records = tuple[ProducerRecord, ...]


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler and how it wants its records."""

    name: str
    function: Callable[[Any], Awaitable[object]]
    batch: bool = False

    async def call(
        self, records: Sequence[ConsumerRecord], limits: CallLimits, task: asyncio.Task[Any] | None = None
    ) -> Records | Exception:
        """Hand the records over (one, unless it is a batch handler); gives the records to write, or what it raised.

        `task` is the running one, for those who have it at hand.
        """
        is_over, task = False, task or asyncio.current_task()
        assert task is not None
        limits.begin(task)
        try:
            try:
                returned = await self.function(records if self.batch else records[0])
            finally:
                is_over = limits.end(task)
            if is_over:
                return self._over(limits)
            return () if returned is None else records_in(self.name, returned)
        except TimeoutError as e:
            return self._over(limits) if is_over else e
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            if is_over:
                return self._over(limits)
            return HandlerCancelled(f"{self.name} let a cancellation through that was not asked for")
        except Exception as e:
            return self._over(limits, e) if is_over else e
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            return HandlerExited(f"{self.name} raised {type(e).__name__}: {message_of(e)}")

    def _over(self, limits: CallLimits, raised: Exception | None = None) -> HandlerTimeout:
        then = "" if raised is None else f", and then raised {type(raised).__name__}: {message_of(raised)}"
        return HandlerTimeout(f"{self.name} was cancelled after {limits.timeout_ms} ms{then}")


def records_in(name: str, returned: object) -> Records:
    """The records in what a handler returned; TypeError for records among other things, which must be a mistake."""
    if isinstance(returned, ProducerRecord):
        return (returned,)
    if not isinstance(returned, list | tuple):
        return ()
    records = tuple(each for each in returned if isinstance(each, ProducerRecord))
    if records and len(records) < len(returned):
        kinds = sorted({type(each).__name__ for each in returned if not isinstance(each, ProducerRecord)})
        raise TypeError(f"{name} returned {', '.join(kinds)} among its records")
    return records


def load_handler(spec: str) -> Handler:
    """The handler named `module:function`; ConfigError says what is wrong with it."""
    function = load_object(spec, "handler")
    called = function if inspect.isroutine(function) else getattr(type(function), "__call__", None)  # noqa: B004 - its kind is wanted, not whether it is there
    if inspect.isclass(function) or not inspect.iscoroutinefunction(called):
        raise ConfigError(f"handler: {spec} is not an async function")
    parameters = list(inspect.signature(function).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters or len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY for p in needed):
        raise ConfigError(f"handler: {spec} must take one argument: a record, or a sequence of records")
    batch = getattr(function, "batch", None)
    return Handler(spec, function, _takes_sequence(called, parameters[0].name) if batch is None else bool(batch))


def load_exceptions(names: Sequence[str], setting: str) -> tuple[type[BaseException] | str, ...]:
    """Exception classes by `module.name`, or by the plain name of one that is built in or has been imported.

    A plain name stays one, as several classes may have it. ConfigError for a name that no class has: it would never
    match, and nobody would hear of it.
    """
    known = {found.__name__ for found in _subclasses(BaseException)}
    return tuple(name if name in known else _exception(name, setting) for name in names)


def load_decoder(value: str) -> Deserializer:
    """The decoder for the value format `bytes`, `json` or `module:Struct`."""
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
    """The object `module:name`, modules of the current folder included; ConfigError names the setting."""
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{setting}: expected module:name, got {spec!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module_name}.".startswith(f"{e.name}."):
            raise
        raise ConfigError(f"{setting}: no module {e.name!r} (searched from {here})") from None
    except (TypeError, ValueError) as e:  # a relative or empty name
        raise ConfigError(f"{setting}: {spec!r}: {e}") from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{setting}: {module_name} has no {path!r}")
        found = getattr(found, part)
    return found


def _exception(name: str, setting: str) -> type[BaseException]:
    module_name, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute, None) if module_name else None
    except ImportError:
        found = None
    if not (inspect.isclass(found) and issubclass(found, BaseException)):
        raise ConfigError(f"{setting}: no exception class {name!r}")
    return found


def _subclasses(base: type[BaseException]) -> set[type[BaseException]]:
    return {base}.union(*(_subclasses(each) for each in type.__subclasses__(base)))


def _takes_sequence(function: Any, parameter: str) -> bool:
    try:
        annotation = get_type_hints(function).get(parameter)
    except (NameError, TypeError, AttributeError):
        annotation = inspect.signature(function).parameters[parameter].annotation
    if isinstance(annotation, str):
        return annotation.partition("[")[0].rpartition(".")[2] in ("Sequence", "list", "List", "tuple", "Tuple")
    origin = get_origin(annotation) or annotation
    return inspect.isclass(origin) and issubclass(origin, Sequence)
