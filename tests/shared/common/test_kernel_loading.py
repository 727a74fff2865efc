"""Compiling kernels without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from structlog.testing import capture_logs

from penstock.shared.common import kernel_loading
from penstock.shared.common.kernel_loading import loaded


async def test_a_slow_compilation_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop continues during a slow compilation, which is logged once; one from the cache is not logged."""
    turned = threading.Event()

    def compile_slowly() -> int:
        assert turned.wait(30)
        return 7

    with capture_logs() as logged:
        assert await loaded(lambda: 5, "the quick kernel") == 5
    assert logged == []
    monkeypatch.setattr(kernel_loading, "LOGGED_AFTER_SECONDS", 0)
    with capture_logs() as logged:
        compiling = asyncio.ensure_future(loaded(compile_slowly, "the slow kernel"))
        while not logged:
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
        turned.set()
        assert await compiling == 7
    assert [one["event"] for one in logged] == [
        "compiling the slow kernel: some seconds, and only at the first start on a machine"
    ]


async def test_an_error_of_the_compilation_is_raised() -> None:
    """An error of the compilation is raised unchanged."""

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await loaded(fail, "a kernel")
