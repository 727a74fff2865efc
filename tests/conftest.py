"""What every test shares: asyncio alone as anyio's backend, no limit on the time of one Hypothesis example, and logging
that is set up anew: what one test configured says nothing in the next."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

COMPACTOR = "tests/integration/spark/"
QUIETED = ("httpx", "httpcore", "uvicorn.access", "py4j")
"""What a service's logging keeps quiet."""


class ByFile(LoadScopeScheduling):
    """Where processes share the tests, a file's stay together, and so do all of the compactor's, for one Spark."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return COMPACTOR if file.startswith(COMPACTOR) else file


class OneName:
    """Fails imports of `shared`, `services` and `api`: they are in `penstock`, and would be there twice."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in {"shared", "services", "api"}:
            raise ImportError(f"import penstock.{name}, not {name}", name=name)


sys.meta_path.insert(0, OneName)  # type: ignore[arg-type]  # a finder needs find_spec alone


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root, configure = logging.getLogger(), structlog.configure

    def configure_for_one_test(**given: Any) -> None:
        configure(**{**given, "cache_logger_on_first_use": False})  # or a logger keeps what it was used with first

    monkeypatch.setattr(structlog, "configure", configure_for_one_test)
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in QUIETED:
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.getLogger("aiokafka").setLevel(logging.NOTSET)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
