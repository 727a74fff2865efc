"""Fixtures for all tests.

Async tests run on asyncio alone. Each test begins with default logging.
Collecting the tests runs without the garbage collector, which would take a third of its time and find little.
"""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.by_file import SPARK_TESTS, ByFile
from tests.property_tests import register_profiles
from tests.shared_broker import SharedBroker, running_broker

gc.disable()  # until all tests are collected
GC_THRESHOLDS = (20_000, 20, 50)  # Python's thresholds take a twentieth of the time of the tests

register_profiles()

INTEGRATION_TESTS = "tests/integration/"
QUIETED = ("httpx", "httpcore", "uvicorn.access", "py4j")
"""The loggers that a service's logging configuration silences."""
BOOTSTRAP_SERVERS = "bootstrap_servers"
BROKER = pytest.StashKey[SharedBroker]()


class OneName:
    """Fails imports of `shared`, `services` and `api`. Under `penstock` they would be imported a second time."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in {"shared", "services", "api"}:
            raise ImportError(f"import penstock.{name}, not {name}", name=name)


sys.meta_path.insert(0, OneName)  # type: ignore[arg-type]  # a finder needs only find_spec


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Start the broker before the first of several processes, and tell each process its address."""
    stash = node.config.stash
    if BROKER not in stash:
        running = ExitStack()
        node.config.add_cleanup(running.close)
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="penstock-tests-"))
        stash[BROKER] = running.enter_context(running_broker(Path(folder) / "kafka"))
    node.workerinput[BOOTSTRAP_SERVERS] = stash[BROKER].bootstrap_servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run Spark's tests first, which one process runs one after the other.

    The other integration tests, which often wait for brokers and JVMs, are spread evenly among the remaining tests, so
    that the processor is seldom idle. The last files in the alphabet come first, because some of them take a minute.
    """
    files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
    waiting = [file for file in reversed(files) if file.startswith(INTEGRATION_TESTS)]
    computing = [file for file in files if not file.startswith(INTEGRATION_TESTS)]
    places = {file: at / len(kind) for kind in (waiting, computing) for at, file in enumerate(kind)}
    places |= {file: -1 for file in waiting if file.startswith(SPARK_TESTS)}
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


def pytest_collection_finish() -> None:
    """Turn the garbage collector on, which need not look at what the collection has left."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedBroker]:
    """The broker of all tests, which they must not pause, kill or restart."""
    given = getattr(request.config, "workerinput", {}).get(BOOTSTRAP_SERVERS)
    if given is not None:
        yield SharedBroker(given)
    else:
        with running_broker(tmp_path_factory.mktemp("kafka")) as broker:
            yield broker


@pytest.fixture(autouse=True)
def _default_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root, configure = logging.getLogger(), structlog.configure

    def configure_for_one_test(**given: Any) -> None:
        configure(**{**given, "cache_logger_on_first_use": False})  # otherwise a logger keeps its first configuration

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
