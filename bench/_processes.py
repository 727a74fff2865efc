"""The CPU time of processes, from Linux' /proc."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """A running process: its parent, its own CPU seconds, and those of its ended children that it has waited for."""

    parent: int
    own_s: float
    waited_s: float


def processes() -> dict[int, Process]:
    """All processes of the machine, by their ids."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        user, system, waited_user, waited_system = (int(field) / TICKS for field in fields[11:15])
        found[int(folder.name)] = Process(int(fields[1]), user + system, waited_user + waited_system)
    return found


def tree_cpu_s(root: int, found: Mapping[int, Process], without: Collection[int] = ()) -> float:
    """CPU seconds of a process and its descendants, ended ones included, except the processes in `without`.

    >>> tree_cpu_s(1, {1: Process(0, 1.0, 2.0), 2: Process(1, 4.0, 0.0), 3: Process(2, 8.0, 0.0)})
    15.0
    >>> tree_cpu_s(1, {1: Process(0, 1.0, 2.0), 2: Process(1, 4.0, 0.0), 3: Process(2, 8.0, 0.0)}, without={2})
    3.0
    """
    children: dict[int, list[int]] = {}
    for pid, process in found.items():
        children.setdefault(process.parent, []).append(pid)
    total, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        if pid in found and pid not in without:
            total += found[pid].own_s + found[pid].waited_s
            waiting += children.get(pid, [])
    return total


def own_tree_cpu_s(*without: int) -> float:
    """CPU seconds of this process and its descendants, except the processes in `without`."""
    return tree_cpu_s(os.getpid(), processes(), without)
