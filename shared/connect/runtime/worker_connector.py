"""A connector as the worker runs it. A separate asyncio task starts, pauses, resumes and stops it, one change at a
time.

A pause stops the connector, as a stop does, so that it no longer watches its system. A resume starts it again. Neither
has an effect on a connector that has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.shared.common.log import get_logger
from penstock.shared.connect.connector import Connector, Props
from penstock.shared.connect.errors import ConnectorNotFound, summary_of, trace_of
from penstock.shared.connect.redaction import Mask, unmasked
from penstock.shared.connect.runtime.states import Event, State, TargetState, after
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.task_thread import TaskThread, connector_errors

log = get_logger(__name__)

EVENT_OF = {TargetState.PAUSED: Event.PAUSED, TargetState.STOPPED: Event.STOPPED}


class WorkerConnector:
    """Runs one connector. It is also the context that is passed to the connector."""

    def __init__(
        self,
        name: str,
        connector: Connector,
        props: Props,
        listener: StatusListener,
        on_reconfiguration: Callable[[str], None],
        *,
        mask: Mask = unmasked,
    ) -> None:
        """`mask` takes secrets out of the connector's errors."""
        self.name = name
        self.connector = connector
        self.props = props
        self._mask = mask
        self.state = State.UNASSIGNED
        self._listener = listener
        self._on_reconfiguration = on_reconfiguration
        self._wanted: asyncio.Queue[tuple[TargetState | None, asyncio.Future[State]]] = asyncio.Queue()
        self._started = False
        self._stop_call: asyncio.Future[None] | None = None
        self._ended = False
        self._runner: asyncio.Task[None] | None = None
        self._thread = TaskThread(f"connector-{name}")
        self._asking = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<WorkerConnector {self.name} {self.state.name}>"

    def request_task_reconfiguration(self) -> None:
        self._thread.on_loop(self._request_reconfiguration)

    def _request_reconfiguration(self) -> None:
        if self.state is State.RUNNING:
            self._on_reconfiguration(self.name)

    def raise_error(self, error: Exception) -> None:
        self._thread.on_loop(self._fail_connector, error)

    async def transition_to(self, target: TargetState | None) -> State:
        """Bring the connector to the target state; None stops it for good. Returns the state that it reached: FAILED if
        the connector raised."""
        if self._runner is None:
            self._runner = asyncio.create_task(self._run_requested_transitions(), name=f"connector-{self.name}")
        done: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._wanted.put_nowait((target, done))
        return await done

    async def shutdown(self, timeout_ms: float) -> None:
        """Stop the connector. After `timeout_ms` it is cancelled and abandoned, and its later events are not reported.

        If a `def` method of an abandoned connector other than `stop` still runs, `stop` is called when it returns.
        Requests that still wait return the connector's state."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self.transition_to(None)
        except TimeoutError:
            log.warning("connector did not stop in time and is abandoned", connector=self.name)
            # Three cases:
            # 1. A `def` method other than `stop` still runs in the thread: `stop` is called when it returns.
            # 2. `stop` runs or waits in the thread: it continues.
            # 3. An `async def stop` does not end: it is cancelled.
            if self._thread.is_busy:
                if self._started:
                    self._begin_stop()
            elif self._stop_call is not None:
                self._stop_call.cancel()
        self._ended = True
        if self._runner is not None:
            self._runner.cancel()
        while not self._wanted.empty():
            _, done = self._wanted.get_nowait()
            if not done.done():
                done.set_result(self.state)
        if self._stop_call is None:
            self._thread.close()
        else:
            self._stop_call.add_done_callback(lambda _: self._thread.close())

    async def task_configs(self, tasks_max: int) -> list[dict[str, str]]:
        """Return the connector's task configurations. Raises any error that the connector raises.

        The connector is asked once at a time, so that the newest answer is the last one. Raises ConnectorNotFound if it
        was paused or stopped before its turn.
        """
        async with self._asking:
            # Also since a thread that has ended would never answer.
            if not self._started:
                raise ConnectorNotFound(f"Connector {self.name} is paused or was stopped")
            return await self._thread.call(self.connector.task_configs, tasks_max)

    async def _run_requested_transitions(self) -> None:
        """Run the requested transitions one after another, in their order: `start` and `stop` never overlap."""
        # An `async def task_configs` may run beside them.
        while not self._ended:
            target, done = await self._wanted.get()
            try:
                await (self._shut_down_connector() if target is None else self._change_target_state(target))
            except Exception as e:
                # Any error of the connector fails this connector alone.
                self._fail_connector(e)
            finally:
                if not done.done():
                    done.set_result(self.state)
            if target is None:
                return

    def _has_failed(self) -> bool:
        return self.state is State.FAILED

    async def _change_target_state(self, target: TargetState) -> None:
        # As in WorkerConnector: FAILED is final. A restart makes a new instance.
        if self._has_failed():
            return
        if target is not TargetState.STARTED:
            await self._stop_connector_if_started()
            self._move_connector_state(EVENT_OF[target])
        elif not self._started:
            first = self.state is State.UNASSIGNED
            with connector_errors("initialize"):
                self.connector.initialize(self)
            self._started = True
            try:
                await self._thread.call(self.connector.start, self.props)
            except Exception:
                self._started = False
                raise
            # `raise_error` may have failed it while it started.
            if not self._has_failed():
                self._move_connector_state(Event.STARTUP if first else Event.RUNNING)

    async def _stop_connector_if_started(self) -> None:
        if self._started:
            await asyncio.shield(self._begin_stop())

    def _begin_stop(self) -> asyncio.Future[None]:
        self._started = False
        self._stop_call = asyncio.ensure_future(self._thread.call(self.connector.stop))
        return self._stop_call

    async def _shut_down_connector(self) -> None:
        failed = self.state is State.FAILED
        await self._stop_connector_if_started()
        if not failed:
            self._move_connector_state(Event.SHUTDOWN)

    def _move_connector_state(self, event: Event) -> None:
        self.state = after(self.state, event)
        self._report_state(event)

    def _fail_connector(self, error: Exception) -> None:
        if self.state is not State.FAILED:
            log.error("connector failed", connector=self.name, error=self._mask(summary_of(error)))
            self.state = after(self.state, Event.FAILURE)
            self._report_state(Event.FAILURE, self._mask(trace_of(error)))

    def _report_state(self, event: Event, trace: str | None = None) -> None:
        # The worker does not wait for an abandoned connector, and may already run the connector again.
        if not self._ended:
            self._listener.on_event(self.name, event, trace)
