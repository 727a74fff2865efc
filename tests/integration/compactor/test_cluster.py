"""Both jobs on a standalone Spark master with one worker, as separate processes from pyspark's own jars."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.compactor.spark import use_java
from services.local.kafka import EmbeddedKafka
from shared.common import lake
from shared.common.java import find_java

START_SECONDS = 90
SPARK_CLASS = Path(sys.executable).parent / "spark-class"
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"

pytestmark = pytest.mark.soak  # four JVMs after each other: more than a minute on two cores


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(arguments: list[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A Spark daemon in a process group of its own, which is killed as a whole at the end."""
    folder.mkdir()
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            [str(SPARK_CLASS), *arguments], cwd=folder, env=environment, stdout=output, stderr=output, process_group=0
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The URL of a master that has one worker: one core, one gigabyte."""
    use_java(find_java())
    port, web = free_port(), free_port()
    url = f"spark://127.0.0.1:{port}"
    own = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(tmp_path / "executors")}
    own["PATH"] = f"{SPARK_CLASS.parent}:{os.environ['PATH']}"  # the launcher asks the Python there where Spark is
    asked = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web)]
    offered = ["--host", "127.0.0.1", "--webui-port", str(free_port()), "--cores", "1", "--memory", "1g", url]
    environment = os.environ | own
    with (
        running([MASTER, *asked], tmp_path / "master", environment) as first,
        running([WORKER, *offered], tmp_path / "worker", environment) as second,
    ):
        deadline = time.monotonic() + START_SECONDS
        while not any(w["state"] == "ALIVE" for w in state(web).get("workers", [])):
            ended = first.poll() is not None or second.poll() is not None
            assert not ended, (tmp_path / "worker" / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "worker" / "log").read_text()
            time.sleep(0.2)
        yield url


def state(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/", timeout=5) as answer:
            return dict(json.loads(answer.read()))
    except (urllib.error.URLError, ConnectionError):
        return {}


def test_compact_and_audit_on_a_cluster(
    simulate: Any, topics: Any, kafka: EmbeddedKafka, master: str, tmp_path: Path
) -> None:
    """The executors are other processes with code of their own: the tables and the audit are as on one machine."""
    simulation = simulate()
    simulation.feed(200, seed=1)
    topics.write(simulation)
    flags = ["--application", simulation.name, "--lake", str(tmp_path / "lake"), "--spark.master", master]
    flags += ["--kafka.bootstrap-servers", kafka.bootstrap_servers]
    flags += ["--spark.conf", "spark.driver.host=127.0.0.1", "--spark.conf", "spark.executor.memory=512m"]

    def job(*command: str) -> dict[str, Any]:
        line = [sys.executable, "-m", "services.cli", *command, *flags]
        environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{done.stdout}"
        return dict(json.loads(done.stdout.splitlines()[-1]))

    compacted = job("compact")
    assert compacted["finals"] == sum(len(task.closed) for task in simulation.tasks)
    assert any((tmp_path / "executors").glob("app-*/0/stderr")), "the work was done in an executor of the worker's"
    told = lake.describe(str(tmp_path / "lake"), simulation.name)
    assert told["live_rows"] == sum(len(task.written) for task in simulation.tasks)
    audit = job("audit", "--json")
    assert audit["audit_ok"], audit
    assert audit["sessions_closed"] == compacted["finals"]
