"""Soak: a compaction that is killed at any of ten points, and two at once, leave the same tables as one without
faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.services.exit_status import ExitStatus
from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.settings import KafkaSettings
from tests.integration.spark.crashing_child import OVERTAKEN, POINTS
from tests.integration.spark.test_compact import is_right
from tests.shared_broker import Broker

CHILD = Path(__file__).with_name("crashing_child.py")
START_SECONDS = 300
pytestmark = pytest.mark.soak


@pytest.fixture
def flags(kafka: Broker, tmp_path: Path) -> Callable[[Any], list[str]]:
    """The job's flags for a simulation."""

    def make(simulation: Any) -> list[str]:
        more = ["--lake", str(tmp_path), "--delete-covered", "--spark.master", "local[1]"]
        return ["--application", simulation.name, "--kafka.bootstrap-servers", kafka.bootstrap_servers, *more]

    return make


@pytest.fixture
def compact(spark: Any, kafka: Broker, tmp_path: Path) -> Callable[[Any], Any]:
    """A compaction without faults."""
    broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)

    def run(simulation: Any) -> Any:
        settings = CompactSettings(application=simulation.name, lake=str(tmp_path), kafka=broker, delete_covered=True)
        return CompactionJob(spark, settings, print).run()

    return run


@pytest.mark.parametrize("point", sorted(POINTS))
def test_the_next_job_completes_a_killed_one(
    simulate: Any, topics: Any, flags: Callable[..., list[str]], compact: Any, tmp_path: Path, point: str
) -> None:
    """After a job is killed at any point, the next one leaves every window once, and later ones continue from there."""
    simulation = simulate()
    for seed in (1, 2):
        simulation.feed(120, seed)
        topics.write(simulation)
        if seed == 1:
            compact(simulation)
    command = [sys.executable, str(CHILD), point, *flags(simulation)]
    killed = subprocess.run(command, process_group=0, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    for seed in (3, None):
        compact(simulation)
        if seed is not None:
            simulation.feed(60, seed)
            topics.write(simulation)
    assert is_right(tmp_path, simulation)


@pytest.mark.parametrize("point", sorted(OVERTAKEN))
def test_of_two_jobs_at_once_one_wins(
    simulate: Any, topics: Any, flags: Callable[..., list[str]], compact: Any, tmp_path: Path, point: str
) -> None:
    """Of two processes with the same plan, the slower one ends with status 3, and each row is there once.

    With `WithClosed` the faster one finds rows that the slower one has committed to `closed`, as after a crash. The
    faster one rewrites `state` as well.
    """
    simulation = simulate()
    for seed in (3, 4):
        simulation.feed(100, seed)
        topics.write(simulation)
        compact(simulation)
    simulation.feed(200, seed=5)
    topics.write(simulation)
    files = {name: tmp_path / name for name in ("THERE", "OVERTAKEN")}
    environment = os.environ | {name: str(file) for name, file in files.items()}
    slow = [sys.executable, str(CHILD), point, *flags(simulation)]
    loser = subprocess.Popen(slow, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not files["THERE"].exists():
            assert loser.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        fast = [sys.executable, "-m", "penstock.services.cli", "compact", *flags(simulation)]
        fast += ["--optimize-files-max", "1"]
        winner = subprocess.run(fast, capture_output=True, text=True, timeout=START_SECONDS, check=False)
        assert winner.returncode == ExitStatus.OK, winner.stderr
        files["OVERTAKEN"].touch()
        _, errors = loser.communicate(timeout=START_SECONDS)
    finally:
        loser.kill()
    report = json.loads(winner.stdout.splitlines()[-1])
    assert report["rewritten_partitions"] == len(simulation.tasks)
    assert loser.returncode == ExitStatus.COMMIT_CONFLICT, errors
    assert "another job" in errors
    assert is_right(tmp_path, simulation)
