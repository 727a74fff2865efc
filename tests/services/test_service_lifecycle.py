"""The life of a service: start-up, main loop and shutdown, and the restarts of a child process.

Signals are tested with processes elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.services import service_lifecycle
from penstock.services.exit_status import StartFailed
from penstock.services.supervision import keep_running
from penstock.shared.common import log
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import BrokerNotAvailable, ConfigError
from penstock.shared.common.settings import DaemonSettings, LogSettings
from tests import virtual_time
from tests.services.stuck_thread import StuckThread

LIMIT_MS = 50

Step = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    pass


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def _unavailable() -> None:
    raise BrokerNotAvailable("no broker at localhost:1")


async def _broken() -> None:
    raise ZeroDivisionError


async def _timed_out() -> None:
    raise TimeoutError("its own")


async def _stubborn() -> None:
    """Ignore the first cancellation."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()


class Service:
    """Records its calls; each step can be replaced."""

    def __init__(self, startup: Step = _nothing, main_loop: Step = _nothing, shutdown: Step = _nothing) -> None:
        self._startup, self._main_loop, self._shutdown = startup, main_loop, shutdown
        self.called: list[str] = []

    async def startup(self) -> None:
        self.called.append("startup")
        await self._startup()

    async def main_loop(self) -> None:
        self.called.append("main_loop")
        await self._main_loop()

    async def shutdown(self) -> None:
        self.called.append("shutdown")
        await self._shutdown()


def run(service: Service) -> int:
    return asyncio.run(service_lifecycle.run(service, LIMIT_MS))


async def _odd() -> None:
    raise BaseExceptionGroup("of a library", [GeneratorExit()])


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_unavailable, "BrokerNotAvailable: no broker at localhost:1"),
        (_broken, "ZeroDivisionError: "),
        (_nothing, "IllegalState: the background task 'beside' has ended"),
        (_odd, "IllegalState: the background task 'beside' has ended"),
    ],
)
async def test_an_ended_background_task_is_an_error(step: Step, message: str) -> None:
    """If a background task ended in any way, its error is raised; while all run, nothing is raised."""
    other = asyncio.create_task(_for_ever(), name="other")

    async def beside() -> None:
        await step()

    task = asyncio.create_task(beside(), name="beside")
    service_lifecycle.require_running([other, task])
    await asyncio.wait({task})
    with pytest.raises(Exception) as raised:
        service_lifecycle.require_running([other, task])
    other.cancel()
    assert f"{type(raised.value).__name__}: {raised.value}".startswith(message)


def test_a_main_loop_that_returns() -> None:
    """A main loop that returns is status 0, and each step ran once, in order."""
    service = Service()
    assert run(service) == 0
    assert service.called == ["startup", "main_loop", "shutdown"]


@pytest.mark.parametrize("error", [_unavailable, _broken, _timed_out])
def test_a_failed_startup(error: Step, capfd: pytest.CaptureFixture[str]) -> None:
    """An error of the start-up is logged and is status 1; the shutdown runs and the main loop does not."""
    log.configure(LogSettings(format="json"), "test")
    service = Service(startup=error)
    assert run(service) == 1
    assert service.called == ["startup", "shutdown"]
    expected = {_unavailable: "no broker at localhost:1", _broken: "ZeroDivisionError", _timed_out: "its own"}[error]
    assert expected in capfd.readouterr().err


@pytest.mark.parametrize("error", [_unavailable, _broken])
def test_a_failed_main_loop(error: Step) -> None:
    """An error of the main loop is status 1, after one shutdown."""
    service = Service(main_loop=error)
    assert run(service) == 1
    assert service.called == ["startup", "main_loop", "shutdown"]


def test_a_failed_shutdown() -> None:
    """An error of the shutdown is status 1."""
    assert run(Service(shutdown=_broken)) == 1


def test_a_shutdown_over_its_limit() -> None:
    """A shutdown that exceeds its limit is ended with status 1."""
    assert run(Service(shutdown=_for_ever)) == 1


async def _port_in_use() -> None:
    raise ConfigError("http.port: port 1 is taken")


async def _start_failed() -> None:
    raise StartFailed(4, BrokerNotAvailable("no broker"))


async def _unavailable_in_a_group() -> None:
    async with asyncio.TaskGroup() as outer:
        outer.create_task(_for_ever())
        async with asyncio.TaskGroup() as inner:
            inner.create_task(_for_ever())
            inner.create_task(_unavailable())


def test_an_invalid_setting_at_start_up_is_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    """A ConfigError at start-up, such as for a port in use, is status 2 and one line."""
    log.configure(LogSettings(format="json"), "test")
    assert run(Service(startup=_port_in_use)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "http.port: port 1 is taken" in line


def test_a_failed_start_may_have_a_status_of_its_own() -> None:
    """The exit status is that of StartFailed."""
    assert run(Service(startup=_start_failed)) == 4


def test_an_error_in_a_task_group_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """An expected error of a task in a group is one line without a traceback."""
    log.configure(LogSettings(format="json"), "test")
    assert run(Service(main_loop=_unavailable_in_a_group)) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "no broker at localhost:1" in line
    assert "Traceback" not in line


class Settings(DaemonSettings):
    """Settings of a service for tests."""


def _serve(make: Callable[[Settings], Service], *arguments: str) -> int:
    return service_lifecycle.serve("penstock test", Settings, make, arguments)


def test_serve_runs_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of the arguments are passed to the service, which runs in an event loop."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def make(settings: Settings) -> Service:
        asyncio.get_running_loop()
        seen.append((settings.http.port, service := Service()))
        return service

    assert _serve(make, "--http.port=7") == 0
    ((port, service),) = seen
    assert port == 7
    assert service.called == ["startup", "main_loop", "shutdown"]


def test_an_invalid_setting_ends_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ConfigError while the service is created is one line with the program's name, and status 2."""
    monkeypatch.chdir(tmp_path)

    def make(settings: Settings) -> Service:
        raise ConfigError("handler: no module named app")

    assert _serve(make) == 2
    assert capsys.readouterr().err == "penstock test: handler: no module named app\n"


def test_a_thread_delays_the_exit_only_for_a_grace_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thread has not ended after the shutdown, the process ends without it, with the daemon's status."""
    monkeypatch.chdir(tmp_path)
    stuck = StuckThread(monkeypatch)
    _serve(lambda settings: Service(main_loop=stuck.start, shutdown=_broken))
    assert stuck.exits == [1]


def test_sys_exit_in_a_task_is_an_error_of_that_task() -> None:
    """SystemExit in a task is raised where the task is awaited, and ends the process only if the work itself raises
    it. The same applies to a task that the end of the work cancels."""
    beside = list[asyncio.Task[None]]()

    async def leave() -> None:
        sys.exit(4)

    async def leave_if_cancelled() -> None:
        try:
            await _for_ever()
        finally:
            sys.exit(5)

    async def work(*, is_contained: bool) -> int:
        beside.append(asyncio.create_task(leave_if_cancelled()))
        try:
            await asyncio.wait_for(asyncio.create_task(leave()), 1)
        except SystemExit:
            if not is_contained:
                raise
        return 7

    assert service_lifecycle.run_process(work(is_contained=True)) == 7
    with pytest.raises(SystemExit, match="4"):
        service_lifecycle.run_process(work(is_contained=False))
    assert [repr(task.exception()) for task in beside] == ["SystemExit(5)"] * 2


async def test_a_child_is_restarted_until_its_settings_are_invalid() -> None:
    """Any end but that of an invalid setting restarts the child, after a pause that doubles."""
    statuses = iter([0, 1, -9, 2])
    ends = list[tuple[int, int]]()
    starts = 0

    async def wait() -> int:
        return next(statuses)

    async def restart() -> None:
        nonlocal starts
        starts += 1

    with pytest.raises(ConfigError, match=r"the child .*: its topology"):
        await keep_running(
            "the child",
            wait,
            restart,
            on_end=lambda status, pause_ms: ends.append((status, pause_ms)),
            reason=lambda: "its topology is unknown",
            backoff=ExponentialBackoff(1, 60_000),
        )
    assert (ends, starts) == ([(0, 1), (1, 2), (-9, 4)], 3)


def test_a_restart_that_fails_is_tried_again() -> None:
    """If a child cannot be started again, its next start comes after the next pause."""
    statuses = iter([1, 2])
    failures = iter([ConfigError("the child cannot be started: no memory"), OSError("too many open files")])
    starts: list[float] = []

    async def wait() -> int:
        return next(statuses)

    async def restart() -> None:
        starts.append(asyncio.get_running_loop().time())
        for error in failures:
            raise error

    keeping = keep_running(
        "the child",
        wait,
        restart,
        on_end=lambda status, pause_ms: None,
        reason=lambda: "its topology is unknown",
        backoff=ExponentialBackoff(1_000, 60_000, jitter=0),
    )
    with pytest.raises(ConfigError, match="its topology"):
        virtual_time.run(keeping)
    assert [round(second - first) for first, second in pairwise(starts)] == [2, 4]
