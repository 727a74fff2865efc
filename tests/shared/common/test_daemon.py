"""The life of a service, without signals: those need a process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.common import daemon, log
from shared.common.errors import BrokerNotAvailable
from shared.common.settings import LogSettings

LIMIT_MS = 50

Step = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    pass


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def _refused() -> None:
    raise BrokerNotAvailable("no broker at localhost:1")


async def _broken() -> None:
    raise ZeroDivisionError


async def _timed_out() -> None:
    raise TimeoutError("its own")


async def _stubborn() -> None:
    """Goes on when it is cancelled, once."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()


class Service:
    """Notes what was called; each step can be replaced."""

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
    return asyncio.run(daemon.run(service, LIMIT_MS))


def test_work_that_is_done() -> None:
    """A main loop that returns is a success; each step ran once, in order."""
    service = Service()
    assert run(service) == 0
    assert service.called == ["startup", "main_loop", "shutdown"]


@pytest.mark.parametrize("error", [_refused, _broken, _timed_out])
def test_a_failed_startup(error: Step, capfd: pytest.CaptureFixture[str]) -> None:
    """An error of start-up is status 1: no main loop, but the shutdown, and the error is said."""
    log.configure(LogSettings(format="json"), "test")
    service = Service(startup=error)
    assert run(service) == 1
    assert service.called == ["startup", "shutdown"]
    said = {_refused: "no broker at localhost:1", _broken: "ZeroDivisionError", _timed_out: "its own"}[error]
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("error", [_refused, _broken])
def test_a_failed_main_loop(error: Step) -> None:
    """An error of the main loop is status 1, after one shutdown."""
    service = Service(main_loop=error)
    assert run(service) == 1
    assert service.called == ["startup", "main_loop", "shutdown"]


def test_a_failed_shutdown() -> None:
    """An error of the shutdown is status 1."""
    assert run(Service(shutdown=_broken)) == 1


def test_a_shutdown_over_its_limit() -> None:
    """A shutdown that does not end is cut off at the limit, with status 1."""
    assert run(Service(shutdown=_for_ever)) == 1
