"""The common base of source and sink tasks, as the worker runs them.

A task runs in a separate asyncio task: it starts, executes until it is stopped, and closes. If an error ends the task,
its state is FAILED. A cancelled task makes no last commit.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.shared.common.clock import Clock
from penstock.shared.common.log import get_logger
from penstock.shared.connect.errors import summary_of, trace_of
from penstock.shared.connect.redaction import Mask, unmasked
from penstock.shared.connect.runtime.error_handling import RetryWaits
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State, TargetState, after
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.task_thread import TaskThread

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class TaskSpec:
    """A task to run. The configurations are the stored ones, with unresolved variables (`${…}`)."""

    id: ConnectorTaskId
    connector_config: Mapping[str, str]
    task_config: Mapping[str, str]
    tasks: int = 1


class WorkerTask(ABC):
    """Runs one task."""

    def __init__(self, id: ConnectorTaskId, listener: StatusListener, metrics: TaskMetrics, clock: Clock) -> None:
        self.id = id
        self.metrics = metrics
        self._clock = clock
        self.mask: Mask = unmasked
        self.thread = TaskThread(f"task-{id}")
        self._entered_ms: list[int] = []
        """The start of each call of the connector's code that has not returned. `commit` may run beside `poll`."""
        self._waits: RetryWaits | None = None
        self.cancelled = False
        self.state = State.UNASSIGNED
        self.target = TargetState.STARTED
        self.stopping = False
        self._listener = listener
        self._changed = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.state.name}>"

    @abstractmethod
    async def _start_task(self) -> None:
        """Open resources and start the connector's task."""

    @abstractmethod
    async def _execute_task(self) -> None:
        """Work until `stopping`."""

    @abstractmethod
    async def _close_task(self) -> None:
        """Stop the connector's task and release all resources. Called once, also after an error."""

    def stalled_ms(self, now_ms: int) -> int:
        """Return how many ms the task has been inside one call of the connector's code, or has waited in one record's
        conversion.

        Return 0 if neither is in progress.
        """
        begun_ms = list(self._entered_ms)
        if self._waits is not None and self._waits.since_ms is not None:
            begun_ms.append(self._waits.since_ms)
        return now_ms - min(begun_ms, default=now_ms)

    def _bind_retry_waits(self, waits: RetryWaits) -> None:
        """Bind waits to this task: its stop or pause ends them."""
        self._waits = waits
        waits.is_over = lambda: self.stopping or self.should_pause
        waits.mask = lambda text: self.mask(text)

    async def _call_task(
        self, method: Callable[..., Awaitable[T] | T], *args: Any, like: Callable[..., Any] | None = None
    ) -> T:
        """Call the connector's code, as `TaskThread.call` does, and record the start of the call."""
        entered_ms = self._clock.monotonic_ms()
        self._entered_ms.append(entered_ms)
        try:
            return await self.thread.call(method, *args, like=like)
        finally:
            self._entered_ms.remove(entered_ms)

    async def _call_stop(self, stop: Callable[[], Awaitable[None] | None]) -> None:
        """Call the connector's `stop`, after all other calls, and let the thread end."""

        async def stop_task() -> None:
            try:
                await self._call_task(stop)
            except Exception as e:
                # Only logged, as in Kafka Connect: after a failed start, `stop` may lack what it wants to close.
                log.warning("task could not be stopped", task=str(self.id), error=self.mask(summary_of(e)))

        stopping = asyncio.ensure_future(stop_task())
        stopping.add_done_callback(lambda _: self.thread.close())
        # The thread is inside a call that cannot be ended. `stop` runs when that call returns, and is not awaited: a
        # connector's methods never run at the same time.
        if self.cancelled and self.thread.is_busy:
            return
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            if not self.thread.is_busy:
                stopping.cancel()
            raise

    def start(self, target: TargetState) -> asyncio.Task[None]:
        """Start the task. The returned asyncio task ends when the task ends."""
        self.target = target
        self._runner = asyncio.create_task(self._run_lifecycle(), name=f"task-{self.id}")
        return self._runner

    def transition_to(self, target: TargetState) -> None:
        """Request a resume (STARTED) or a pause (PAUSED, STOPPED). After STOPPED the herder also ends the task."""
        self.target = target
        self._changed.set()

    def stop(self) -> None:
        """Request an orderly end, which commits what was delivered."""
        self.stopping = True
        self._changed.set()

    async def until_stopped(self, timeout_ms: float) -> bool:
        """Wait for the end of the task. Returns False if it still runs after `timeout_ms`."""
        if self._runner is None:
            return True
        done, _ = await asyncio.wait([self._runner], timeout=timeout_ms / 1000)
        return bool(done)

    def cancel(self) -> None:
        """Cancel the task without waiting for its end. A call that runs in the task's thread continues.

        From now on the task starts no commit and reports no event.
        """
        self.stopping = True
        self.cancelled = True
        if self._runner is not None:
            self._runner.cancel()

    @property
    def should_pause(self) -> bool:
        return self.target is not TargetState.STARTED

    async def _run_lifecycle(self) -> None:
        try:
            try:
                await self._start_task()
                self.moved(Event.PAUSED if self.should_pause else Event.STARTUP)
                await self._execute_task()
            except BaseException as e:
                await self._close_after_error(e)
                raise
            await self._close_task()
        except asyncio.CancelledError:
            log.warning("task was cancelled", task=str(self.id))
            raise
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as e:
            # Any error fails this task alone. A panic of a converter's Rust library is no Exception.
            self._fail_task(e)
        else:
            self.moved(Event.SHUTDOWN)

    async def _close_after_error(self, error: BaseException) -> None:
        """Close the task. As in Kafka Connect, an error of the close does not replace the error that ended the task."""
        try:
            await self._close_task()
        except Exception as e:
            log.warning("failed task could not be closed", task=str(self.id), error=self.mask(summary_of(e)))
            error.add_note(f"The close failed, too: {summary_of(e)}")

    def moved(self, event: Event) -> None:
        """Change the state as an event requires, and report the event unless the task was cancelled."""
        self.state = after(self.state, event)
        self._report_state(event)

    def _fail_task(self, error: BaseException) -> None:
        log.error("task failed", task=str(self.id), error=self.mask(summary_of(error)))
        self.state = after(self.state, Event.FAILURE)
        self._report_state(Event.FAILURE, self.mask(trace_of(error)))

    def _report_state(self, event: Event, trace: str | None = None) -> None:
        self.metrics.moved(self.state, self._clock.monotonic_ms())
        # The worker does not wait for a cancelled task, and may already run the task again.
        if not self.cancelled:
            self._listener.on_event(self.id, event, trace)
