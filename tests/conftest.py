"""Fixtures for all tests.

Async tests run on asyncio alone. A Hypothesis example has no time limit. Each test begins with default logging.
Collecting the tests runs without the garbage collector, which would take a third of its time and find little.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from anyio.from_thread import start_blocking_portal
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from penstock.services.local.broker_config import QUICK_START, EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka

gc.disable()  # until all tests are collected

# The time of an example depends on what else the machine does.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

BROKER_PROPERTIES = {
    "group.min.session.timeout.ms": "100",
    "log.cleaner.backoff.ms": "200",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}
SPARK_TESTS = "tests/integration/spark/"
SPARK_JOBS = ("test_audit", "test_batch")
"""How the files begin that share one Spark session. The others in SPARK_TESTS share another one."""
QUIETED = ("httpx", "httpcore", "uvicorn.access", "py4j")
"""The loggers that a service's logging configuration silences."""


class ByFile(LoadScopeScheduling):
    """Keeps the tests of a file in one process, and so the files that share a Spark session."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if not file.startswith(SPARK_TESTS):
            return file
        return f"{SPARK_TESTS}{file.removeprefix(SPARK_TESTS).startswith(SPARK_JOBS)}"


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


def pytest_collection_finish() -> None:
    """Turn the garbage collector on, which need not look at what the collection has left."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def kafka_settings() -> EmbeddedKafkaSettings:
    """Broker settings with short timeouts.

    With the quick compiler alone, a broker's start takes half the CPU time.
    """
    return EmbeddedKafkaSettings(properties=BROKER_PROPERTIES, jvm_options=QUICK_START)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory, kafka_settings: EmbeddedKafkaSettings) -> Iterator[EmbeddedKafka]:
    """One broker for all tests of the process; use its `bootstrap_servers`.

    It runs on an event loop in another thread, so that synchronous and asynchronous tests can share it. Do not pause,
    kill or restart it.
    """
    broker = EmbeddedKafka(tmp_path_factory.mktemp("kafka"), kafka_settings)
    with start_blocking_portal("asyncio") as portal, portal.wrap_async_context_manager(broker):
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
