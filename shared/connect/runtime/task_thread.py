"""A thread in which the worker calls `def` methods of one task or connector, so that they may block.

A method that blocks there delays no other task. `async def` methods run on the worker's event loop. So do the
constructor and a connector's `initialize`, `version` and `config`, which must not block.

The thread is a daemon thread. The interpreter waits at its end for the threads of a ThreadPoolExecutor, and a call that
never returns would keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from penstock.shared.common.errors import IllegalState, error_text
from penstock.shared.connect.connector import Connector, SinkConnector, SourceConnector
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.task import SinkTask, SourceTask, Task

T = TypeVar("T")


@contextlib.contextmanager
def connector_errors(name: str) -> Iterator[None]:
    """Raise ConnectError for an error of a connector's code that is no Exception. `name` names the code.

    The panic of a Rust library is such an error, and so are SystemExit and KeyboardInterrupt, which must not end the
    worker. The worker handles the signal of Ctrl-C itself. CancelledError is one too, unless the worker has cancelled
    the caller: the code has waited for work of its own that was cancelled.
    """
    try:
        yield
    except (Exception, GeneratorExit):
        raise
    except BaseException as e:
        caller = asyncio.current_task()
        if isinstance(e, asyncio.CancelledError) and (caller is None or caller.cancelling()):
            raise
        raise ConnectError(f"{name} raised {type(e).__name__}: {error_text(e)}") from e


class TaskThread:
    """Calls methods of one task or connector, as `call` describes. The thread runs one call at a time.

    It starts with its first call.
    """

    def __init__(self, name: str = "task") -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = threading.get_ident()
        # Each has one writer: the event loop's thread the first, the task's thread the second.
        self._submitted = 0
        self._ended = 0

    def __repr__(self) -> str:
        return f"<TaskThread {self._name}, {self._submitted - self._ended} calls>"

    @property
    def is_busy(self) -> bool:
        """Return whether a call in the thread has not returned yet, even if its caller was cancelled."""
        return self._submitted != self._ended

    async def call(
        self, method: Callable[..., Awaitable[T] | T], *args: Any, like: Callable[..., Any] | None = None
    ) -> T:
        """Call a method and return its result. If `like` is given, that method decides where `method` runs.

        A `def` method runs in the thread. If the caller is cancelled, a call that has begun continues. An `async def`
        method runs on the event loop when the calls in the thread have returned. A default method of a base class does
        not block, and runs on the event loop at once. The default `pre_commit` runs where `flush` does.

        Raises the method's errors as `connector_errors` does.
        """
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        result: Any
        with connector_errors(getattr(method, "__qualname__", repr(method))):
            if runs_in_thread(like or method):
                result = await asyncio.wrap_future(self._submit_call(method, *args))
            else:
                # A default method does not block, and does not wait for the thread.
                if self.is_busy and not _is_default_method(method):
                    await asyncio.wrap_future(self._submit_call(lambda: None))
                result = method(*args)
            value: T = (await result) if inspect.isawaitable(result) else result
            return value

    @classmethod
    async def call_once(cls, name: str, method: Callable[..., Awaitable[T] | T], *args: Any) -> T:
        """Call one method as `call` does, with a thread for this call alone."""
        thread = cls(name)
        try:
            return await thread.call(method, *args)
        finally:
            thread.close()

    def on_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of the worker on its event loop, from any thread, and return its result.

        A connector may call its context in a thread that it has started, to watch its system.
        """
        if self._loop is None or threading.get_ident() == self._loop_thread:
            return function(*args)

        async def call_on_loop() -> T:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call_on_loop(), self._loop).result()

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Await an awaitable on the event loop and return its result. Raises IllegalState outside the task's
        thread."""
        if self._loop is None or threading.current_thread() is not self._thread:
            if inspect.iscoroutine(awaitable):
                awaitable.close()
            raise IllegalState("wait_for is for methods that are `def`: in an `async def` method, use await")

        async def await_on_loop() -> T:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(await_on_loop(), self._loop).result()

    def close(self) -> None:
        """End the thread when its calls have returned, without waiting for it."""
        self._calls.put(None)

    def _submit_call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_calls, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._submitted += 1
        self._calls.put((future, partial(function, *args)))
        return future

    def _run_calls(self) -> None:
        """Run the submitted calls one after another, in the task's thread, until `close`."""
        while (call := self._calls.get()) is not None:
            future, function = call
            self._run_one(future, function)

    def _run_one(self, future: Future[Any], function: Callable[[], Any]) -> None:
        result: Any = None
        error: BaseException | None = None
        wanted = future.set_running_or_notify_cancel()
        if wanted:
            try:
                result = function()
            except StopIteration as e:
                # An asyncio future cannot hold StopIteration. A coroutine converts it in the same way.
                error = RuntimeError("the task raised StopIteration")
                error.__cause__ = e
            except BaseException as e:
                # The caller gets even SystemExit, which would otherwise end this thread.
                error = e
        self._ended += 1
        if wanted and error is None:
            future.set_result(result)
        elif wanted:
            future.set_exception(error)


_DEFAULT_METHODS = {
    method
    for base in (Task, SourceTask, SinkTask, Connector, SourceConnector, SinkConnector)
    for method in vars(base).values()
    if inspect.isfunction(method)
} - {SinkTask.pre_commit}


def runs_in_thread(method: Callable[..., Any]) -> bool:
    """Return whether a method runs in the task's thread. The default `pre_commit` does if `flush` does."""
    if _is_default_method(method):
        return False
    task = getattr(method, "__self__", None)
    if isinstance(task, SinkTask) and _is_default_pre_commit(method):
        return runs_in_thread(task.flush)
    return not inspect.iscoroutinefunction(method)


def _is_default_method(method: Callable[..., Any]) -> bool:
    """Return whether a method is a default method of a base class of tasks or connectors, which does not block."""
    return getattr(method, "__func__", None) in _DEFAULT_METHODS


def _is_default_pre_commit(method: Callable[..., Any]) -> bool:
    return getattr(method, "__func__", None) is SinkTask.pre_commit
