"""Worker processes in the benchmark of sessions: the measurements that need no broker."""

from __future__ import annotations

import os
import time

from bench import _sessions_workers


def test_cpu_of_processes_is_what_they_used() -> None:
    """The CPU time of a process agrees with Python's. Several processes are added up."""
    before, used = _sessions_workers.cpu_seconds([os.getpid()]), time.process_time()
    while time.process_time() < used + 0.2:
        pass
    grown = _sessions_workers.cpu_seconds([os.getpid()]) - before
    assert 0.15 < grown < 1.0
    alone = _sessions_workers.cpu_seconds([os.getpid()])
    assert _sessions_workers.cpu_seconds([os.getpid(), os.getppid()]) >= alone


def test_the_topology_is_loaded_by_its_name() -> None:
    """The topology function counts the sessions of one topic."""
    topology = _sessions_workers.topology(topic="clicks", results="sessions")
    assert [source.topic for source in topology.sources()] == ["clicks"]
    assert set(topology.stores) == {"sessions"}
