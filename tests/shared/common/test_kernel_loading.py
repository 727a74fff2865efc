"""Compiling kernels without blocking the event loop, and the cache of compiled code."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from pathlib import Path
from types import ModuleType

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
    (line,) = logged
    assert line["what"] == "the slow kernel"
    assert "takes long" in line["event"]


async def test_an_error_of_the_compilation_is_raised() -> None:
    """An error of the compilation is raised unchanged."""

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await loaded(fail, "a kernel")


def import_kernels(folder: Path, **texts: str) -> ModuleType:
    """Write modules into a folder, and import the last one as a new process does."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(f"from penstock.shared.common.compiled import compiled\n{text}\n")
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.mark.skipif(not kernel_loading.IS_COMPILED, reason="without numba there is no cache")
def test_cached_code_has_the_imported_constants_and_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled again if a constant changes that another module's kernel imports, and only then."""
    monkeypatch.syspath_prepend(tmp_path)
    inner = "from of_constant import SIZE\n@compiled\ndef size():\n    return SIZE"
    outer = "from of_inner import size\n@compiled\ndef twice():\n    return 2 * size()"
    for constant, expected, hits in (("SIZE = 1", 2, 0), ("SIZE = 10", 20, 0), ("SIZE = 10 # same", 20, 1)):
        module = import_kernels(tmp_path, of_constant=constant, of_inner=inner, of_outer=outer)
        assert (module.twice(), sum(module.twice.stats.cache_hits.values())) == (expected, hits)
