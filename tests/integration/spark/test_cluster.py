"""All jobs on a standalone Spark master with two workers, as separate processes from pyspark's own jars."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from deltalake import DeltaTable

from penstock.services.local import ports
from penstock.services.spark.spark_session import use_java
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.lake import window_queries
from tests.shared_broker import Broker

START_SECONDS = 180
WORKERS = 2
TOPOLOGY = """
import time
from pathlib import Path

from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder


def build(topic):
    builder = StreamsBuilder()
    keyed = builder.stream(topic, late=f"{topic}-late-again", dead_letters=f"{topic}-dlq-again").group_by_key()
    keyed.session_window(100, 50).aggregate("banks", count=Count(), total=Sum("delay")).on_close()
    return builder.build()


def slow(topic, mark):
    # The process that handles the first record waits until it is killed, or until a file exists.
    def see(value):
        if Path(mark).exists():
            return value
        try:
            Path(mark + "-waits").touch(exist_ok=False)
        except FileExistsError:
            return value
        while not Path(mark).exists():
            time.sleep(0.01)
        return value

    builder = StreamsBuilder()
    stream = builder.stream(topic, late=f"{topic}-late-slow", dead_letters=f"{topic}-dlq-slow")
    keyed = stream.map_values(see).group_by_key()
    keyed.session_window(100, 50).aggregate("banks", count=Count(), total=Sum("delay")).on_close()
    return builder.build()
"""
SPARK_CLASS = Path(sys.executable).parent / "spark-class"
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"

pytestmark = pytest.mark.soak  # nine JVMs: more than a minute on two cores


@contextlib.contextmanager
def running(arguments: list[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A Spark daemon in its own process group, which is killed as a whole at the end."""
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


class Cluster(NamedTuple):
    """The URL of a Spark master, and its two workers, each with one core and one gigabyte."""

    url: str
    workers: list[subprocess.Popen[bytes]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A master with two registered workers."""
    use_java(find_java())
    port, web, *worker_webs = ports.pick("127.0.0.1", 2 + WORKERS)
    url = f"spark://127.0.0.1:{port}"
    own = {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
    own["PATH"] = f"{SPARK_CLASS.parent}:{os.environ['PATH']}"  # the launcher asks the Python there where Spark is
    options_of_master = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web)]
    offered = ["--host", "127.0.0.1", "--cores", "1", "--memory", "1g"]
    environment = os.environ | own
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(running([MASTER, *options_of_master], tmp_path / "master", environment))]
        for number in range(WORKERS):
            work = ["--work-dir", str(executors(tmp_path, number)), "--webui-port", str(worker_webs[number])]
            line = [WORKER, *offered, *work, url]
            daemons.append(stack.enter_context(running(line, tmp_path / f"worker-{number}", environment)))
        deadline = time.monotonic() + START_SECONDS
        while [w["state"] for w in state(web).get("workers", [])] != ["ALIVE"] * WORKERS:
            logs = "\n".join(file.read_text() for file in tmp_path.glob("worker-*/log"))
            assert all(daemon.poll() is None for daemon in daemons), logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.2)
        yield Cluster(url, daemons[1:])


def executors(folder: Path, worker: int) -> Path:
    """The folder of a worker's executors."""
    return folder / f"executors-{worker}"


def applications(folder: Path, worker: int) -> set[str]:
    """The Spark applications for which a worker had an executor."""
    return {file.parent.parent.name for file in executors(folder, worker).glob("app-*/*/stderr")}


def closed_rows(folder: Path, application: str) -> list[tuple[Any, ...]]:
    rows = DeltaTable(str(folder / "lake" / application / "closed" / "banks")).to_pyarrow_table().to_pylist()
    return sorted((r["partition"], r["key"], r["window_start"], r["window_end"], r["count"], r["total"]) for r in rows)


def state(port: int) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/", timeout=5) as response:
            return dict(json.loads(response.read()))
    except OSError:  # not there yet, or too busy to answer in time
        return {}


def test_compact_audit_and_batch_on_a_cluster(
    simulate: Any,
    topics: Any,
    kafka: Broker,
    cluster: Cluster,
    aggregations: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The executors are other processes: tables, audit and batch are as on one machine. Then a worker is killed, with
    its executor, while a batch runs: the other worker finishes it, and the windows are the same."""
    simulation = simulate()
    monkeypatch.delitem(aggregations, "last")
    for task in simulation.tasks:
        task.store = msgspec.structs.replace(task.store, aggregations=task.store.aggregations[:-1])
    simulation.feed(200, seed=1)
    topics.write(simulation)
    (tmp_path / "replayed.py").write_text(TOPOLOGY)
    flags = ["--lake", str(tmp_path / "lake"), "--spark.master", cluster.url]
    flags += ["--kafka.bootstrap-servers", kafka.bootstrap_servers]
    flags += ["--spark.conf", "spark.driver.host=127.0.0.1", "--spark.conf", "spark.executor.memory=512m"]
    # Both executors are there before the first task is handed out.
    flags += ["--spark.conf", "spark.scheduler.minRegisteredResourcesRatio=1.0"]
    flags += ["--spark.conf", "spark.scheduler.maxRegisteredResourcesWaitingTime=120s"]

    def start(*command: str, application: str = simulation.name) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "penstock.services.cli", *command, "--application", application, *flags]
        environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
        return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
        printed, logged = process.communicate(timeout=START_SECONDS)
        assert process.returncode == 0, f"{logged}\n{printed}"
        return dict(json.loads(printed.splitlines()[-1]))

    def job(*command: str, application: str = simulation.name) -> dict[str, Any]:
        return finish(start(*command, application=application))

    compacted = job("compact")
    assert compacted["closed_rows"] == sum(len(task.closed) for task in simulation.tasks)
    for worker in range(WORKERS):
        assert len(applications(tmp_path, worker)) == 1, f"worker {worker} had no executor"
    counts = window_queries.count_windows(str(tmp_path / "lake"), simulation.name)
    assert counts.live == sum(len(task.written) for task in simulation.tasks)
    topology = ("--topology", "replayed:build", "--topology-options", json.dumps({"topic": simulation.name}))
    again = f"{simulation.name}-again"
    job("batch", *topology, application=again)
    for worker in range(WORKERS):
        assert len(applications(tmp_path, worker)) == 2, f"worker {worker} had no executor of the batch"
    assert window_queries.count_windows(str(tmp_path / "lake"), again) == counts
    audit = job("audit", "--json", application=again)
    assert audit["audit_ok"], audit
    assert audit["windows_closed"] == compacted["closed_rows"]

    killed, mark = f"{simulation.name}-killed", tmp_path / "mark"
    options = json.dumps({"topic": simulation.name, "mark": str(mark)})
    process = start("batch", "--topology", "replayed:slow", "--topology-options", options, application=killed)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not Path(f"{mark}-waits").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(cluster.workers[0].pid, signal.SIGKILL)
        mark.touch()
        finish(process)
    finally:
        process.kill()
    assert closed_rows(tmp_path, killed) == closed_rows(tmp_path, again)
    assert window_queries.count_windows(str(tmp_path / "lake"), killed).live == counts.live
