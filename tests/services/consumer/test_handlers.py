"""Handlers: loading by name, and calls within a time limit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from penstock.services.consumer.handler_timeouts import CallLimits
from penstock.services.consumer.handlers import Handler, load_decoder, load_handler
from penstock.services.consumer.retry_policy import load_exceptions
from penstock.shared.common.errors import (
    ConfigError,
    HandlerCancelled,
    HandlerExited,
    HandlerTimeout,
    SerializationError,
)
from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from tests import virtual_time

RECORD = ConsumerRecord("clicks", 0, 7, 0, b"k", b"v")

MODULE = """
from __future__ import annotations
import functools
from collections.abc import Collection, Iterable, Sequence
import msgspec
from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from typing_extensions import TypeAliasType

class Click(msgspec.Struct):
    user: str

async def one(record: ConsumerRecord) -> None: ...
async def bare(record): ...
async def optional(record, times=1): ...
async def many(records: Sequence[ConsumerRecord]) -> None: ...
async def listed(records: list[ConsumerRecord]) -> None: ...
async def iterated(records: Iterable[ConsumerRecord]) -> None: ...
async def collected(records: Collection[Nowhere]) -> None: ...
Many = TypeAliasType("Many", Sequence[ConsumerRecord])  # in Python 3.12: type Many = Sequence[ConsumerRecord]
async def aliased(records: Many) -> None: ...
async def unknown_names(records: Sequence[Nowhere]) -> None: ...
async def marked(records): ...
marked.batch = True
class Stateful:
    async def handle(self, record: ConsumerRecord) -> None: ...
    async def __call__(self, records: Sequence[ConsumerRecord]) -> None: ...
stateful = Stateful()
async def pooled(record: ConsumerRecord, pool: object) -> None: ...
partial = functools.partial(pooled, pool=None)
async def pooled_many(pool: object, records: Sequence[ConsumerRecord]) -> None: ...
partial_many = functools.partial(pooled_many, None)
partial_marked = functools.partial(marked)
def blocking(record): ...
blocking_partial = functools.partial(blocking)
async def none(): ...
async def two(a, b): ...
number = 5
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"handlers_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import nowhere_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(
    ("function", "batch"),
    [
        ("one", False), ("bare", False), ("optional", False), ("many", True), ("listed", True), ("unknown_names", True),
        ("aliased", True),
        ("marked", True), ("stateful", True), ("stateful.handle", False), ("iterated", True), ("collected", True),
        ("partial", False), ("partial_many", True), ("partial_marked", True),
    ],
)  # fmt: skip
def test_a_handler_is_found_in_the_current_folder(module: str, function: str, batch: bool) -> None:
    """Functions, methods, callable objects and partials are handlers; the annotation or the attribute
    `batch` makes a batch handler.
    """
    handler = load_handler(f"{module}:{function}")
    assert (handler.name, handler.batch) == (f"{module}:{function}", batch)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("{m}", "expected module:name"),
        ("{m}:", "expected module:name"),
        (".x:one", "'.x:one'"),
        ("no_such_module:one", "no module 'no_such_module'"),
        ("{m}:absent", "has no 'absent'"),
        ("{m}:blocking", "is not an async function"),
        ("{m}:blocking_partial", "is not an async function"),
        ("{m}:number", "is not an async function"),
        ("{m}:Stateful", "is not an async function"),
        ("{m}:none", "must take one argument"),
        ("{m}:two", "must take one argument"),
    ],
)
def test_an_invalid_handler_is_an_error(module: str, spec: str, reason: str) -> None:
    """An invalid name or function is a ConfigError with its reason."""
    with pytest.raises(ConfigError, match="handler: ") as raised:
        load_handler(spec.format(m=module))
    assert reason in str(raised.value)


def test_an_import_error_within_the_module_is_named(module: str) -> None:
    """A missing dependency of the module is not reported as a missing handler, or as one of an extra."""
    with pytest.raises(ConfigError, match=r"handler: .*No module named 'nowhere_at_all'"):
        load_handler(f"{module}_broken:handle")


def test_a_name_that_a_module_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that a handler imports from is there, so it is not reported as missing."""
    (tmp_path / "of_shop").mkdir()
    (tmp_path / "of_shop" / "__init__.py").touch()
    (tmp_path / "of_shop" / "handlers.py").write_text("from of_shop import not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot import name 'not_there' from 'of_shop'"):
        load_handler("of_shop.handlers:handle")


def test_values_are_decoded_as_named(module: str) -> None:
    """Values are decoded as bytes, JSON or a struct; a value that does not fit is a SerializationError."""
    assert load_decoder("bytes")("t", b"{") == b"{"
    assert load_decoder("json")("t", b'{"a":1}') == {"a": 1}
    click = load_decoder(f"{module}:Click")
    assert msgspec.to_builtins(click("t", b'{"user":"ann"}')) == {"user": "ann"}
    with pytest.raises(SerializationError, match="user"):
        click("t", b"{}")
    with pytest.raises(ConfigError, match="value: "):
        load_decoder("xml")
    with pytest.raises(ConfigError, match="value: "):
        load_decoder(f"{module}:number")


async def test_a_handler_receives_a_record_or_a_batch() -> None:
    """A batch handler receives the sequence, another handler the record."""
    seen: list[object] = []

    async def handle(got: object) -> None:
        seen.append(got)

    assert await Handler("h", handle).call([RECORD], CallLimits(1_000)) == ()
    assert await Handler("h", handle, batch=True).call([RECORD], CallLimits(1_000)) == ()
    assert seen == [RECORD, [RECORD]]


async def test_an_exception_is_returned() -> None:
    """An exception is returned as a value, also a TimeoutError of the handler itself."""
    for error in (ValueError("no"), TimeoutError("its own")):

        async def handle(_: object, error: Exception = error) -> None:
            raise error

        assert await Handler("h", handle).call([RECORD], CallLimits(1_000)) is error


async def test_an_exit_is_a_failure() -> None:
    """sys.exit in a handler is a failure and does not end the process, while a KeyboardInterrupt does."""

    async def leave(_: object) -> None:
        raise SystemExit(3)

    error = await Handler("app:leave", leave).call([RECORD], CallLimits(1_000))
    assert isinstance(error, HandlerExited)
    assert str(error) == "app:leave raised SystemExit: 3"

    async def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await Handler("app:interrupt", interrupt).call([RECORD], CallLimits(1_000))


async def test_a_handler_that_hangs_is_cancelled() -> None:
    """After the limit the handler is cancelled and its clean-up has run, and the failure names the limit."""
    cleaned = asyncio.Event()

    async def handle(_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    error = await Handler("app:handle", handle).call([RECORD], CallLimits(5))
    assert isinstance(error, HandlerTimeout)
    assert str(error) == "app:handle was cancelled after 5 ms"
    assert cleaned.is_set()


@pytest.mark.parametrize("then", ["return", "raise"])
async def test_a_handler_cannot_ignore_its_limit(then: str) -> None:
    """A call fails by the timeout although the handler caught the cancellation and returned,
    or raised something else.
    """

    async def handle(_: object) -> object:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if then == "raise":
                raise ValueError("from the cleanup") from None
        return ProducerRecord("alerts", b"half done")

    task = asyncio.current_task()
    assert task is not None
    result = await Handler("app:handle", handle).call([RECORD], CallLimits(5))
    assert isinstance(result, HandlerTimeout)
    assert ("ValueError: from the cleanup" in str(result)) == (then == "raise")
    assert task.cancelling() == 0


def test_exceptions_are_found_by_name(module: str) -> None:
    """Exceptions are found as built-in, as imported, or by module.name; an unknown name is a ConfigError."""
    assert load_exceptions(["ConnectionError", "HandlerTimeout"], "s") == ("ConnectionError", "HandlerTimeout")
    assert load_exceptions(["json.JSONDecodeError"], "s") == (json.JSONDecodeError,)
    for wrong in ("Nonsense", "nowhere.Nonsense", "json.loads", f"{module}_broken.Error"):
        with pytest.raises(ConfigError, match=f"retry.retriable.*'{wrong}'"):
            load_exceptions(["ValueError", wrong], "retry.retriable")


async def test_a_cancellation_of_its_own_is_a_failure() -> None:
    """A handler that raises CancelledError has failed; the runner is not cancelled."""

    async def handle(_: object) -> None:
        raise asyncio.CancelledError

    assert isinstance(await Handler("h", handle).call([RECORD], CallLimits(1_000)), HandlerCancelled)


async def test_a_cancellation_from_outside_ends_the_call() -> None:
    """A cancellation from outside, as after lost ownership, ends the call."""
    started = asyncio.Event()

    async def handle(_: object) -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(Handler("h", handle).call([RECORD], CallLimits(60_000)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_records_that_a_handler_returns() -> None:
    """A handler may return one or several records. Other values are ignored, and a mixture is a failure."""
    one = ProducerRecord("out", b"1")
    returns: list[tuple[object, object]] = [(one, (one,)), ([one, one], (one, one)), (True, ()), (["ok", None], ())]
    for returned, expected in returns:

        async def handle(_: object, returned: object = returned) -> object:
            return returned

        assert await Handler("h", handle).call([RECORD], CallLimits(1_000)) == expected

    async def mixed(_: object) -> object:
        return [one, "two"]

    error = await Handler("app:mixed", mixed).call([RECORD], CallLimits(1_000))
    assert isinstance(error, TypeError)
    assert str(error) == "app:mixed returned str among its records"


async def limited(limits: CallLimits, seconds: float) -> bool:
    """Make a call of this duration and return whether its limit expired."""
    task = asyncio.current_task()
    assert task is not None
    limits.begin(task)
    try:
        await virtual_time.let_pass(seconds)
    except asyncio.CancelledError:
        return limits.end(task)
    return limits.end(task)


def test_each_call_has_its_own_limit() -> None:
    """One timer ends each call when its own limit expires, and no call that ended before."""

    async def scenario() -> None:
        limits = CallLimits(30)
        first, short = asyncio.create_task(limited(limits, 60)), asyncio.create_task(limited(limits, 0))
        await virtual_time.let_pass(0.015)
        began = asyncio.get_running_loop().time()
        second = asyncio.create_task(limited(limits, 60))
        assert await asyncio.gather(first, short, second) == [True, False, True]
        assert asyncio.get_running_loop().time() - began >= 0.028
        assert repr(limits) == "CallLimits(30 ms, 0 calls)"

    virtual_time.run(scenario())


def test_a_call_within_the_limit_is_not_cancelled() -> None:
    """A call that ended in time is not cancelled, and the next call has a timer again."""

    async def scenario() -> None:
        limits = CallLimits(5)
        assert await limited(limits, 0) is False
        await virtual_time.let_pass(0.01)
        assert await limited(limits, 60) is True

    virtual_time.run(scenario())


def test_a_call_that_ignores_its_cancellation_is_cancelled_again() -> None:
    """A call that swallows its cancellation is cancelled again, and no cancellation remains when it ends."""

    async def scenario() -> None:
        limits = CallLimits(5)
        task = asyncio.current_task()
        assert task is not None
        limits.begin(task)
        for _ in range(3):
            with pytest.raises(asyncio.CancelledError):
                await virtual_time.let_pass(60)
        assert task.cancelling() == 3
        assert limits.end(task)
        assert task.cancelling() == 0
        assert await limited(limits, 0) is False

    virtual_time.run(scenario())


def test_the_limit_leaves_no_cancellation_behind() -> None:
    """A task that the limit cancelled may wait again, while a cancellation by another caller stays in force."""

    async def scenario() -> None:
        limits, counts = CallLimits(5), []

        async def calls() -> None:
            task = asyncio.current_task()
            assert task is not None
            assert await limited(limits, 60)
            counts.append(task.cancelling())
            limits.begin(task)
            try:
                await virtual_time.let_pass(60)
            finally:
                task.cancel()
                assert limits.end(task)
                counts.append(task.cancelling())

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(calls())
        assert counts == [0, 1]

    virtual_time.run(scenario())
