"""Peers in the benchmark of sessions, in another Python environment: they are not dependencies of Penstock.

Each peer that can be imported there runs in its own process (`_session_peers`); the others are reported as missing.
They are slower by an order of magnitude, so they get their own topic with fewer records of the same kind.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench._session_peers import PEERS
from bench._side_by_side import Figures

SCRIPT = Path(__file__).with_name("_session_peers.py")
TIMEOUT_SECONDS = 600


def available(python: str) -> list[str]:
    """The peers that this Python can import, by name; empty if it is not a Python."""
    try:
        done = subprocess.run([python, str(SCRIPT), "--list"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as e:
        print(f"peers: {python} cannot be run: {e.strerror}", file=sys.stderr)
        return []
    return [line for line in done.stdout.splitlines() if line in PEERS]


def absent(python: str, found: Sequence[str]) -> list[str]:
    """A line for each missing peer."""
    return [
        f"{name}: not measured, {python} has no {module} (pip install {module} into an environment of its own, and "
        "name its Python with --peers-python)"
        for name, module in PEERS.items()
        if name not in found
    ]


async def race(python: str, names: Sequence[str], servers: str, topic: str, records: int) -> dict[str, Figures]:
    """One round of each peer. A peer that fails has no figures."""
    figures: dict[str, Figures] = {}
    for name in names:
        own = ["--one", name, "--servers", servers, "--topic", topic, "--records", str(records)]
        if (of := await measured(name, [python, str(SCRIPT), *own])) is not None:
            figures[name] = of
    return figures


async def measured(name: str, command: Sequence[str]) -> Figures | None:
    """The figures that a peer's process prints as its last line. If it fails, its last line of output is printed."""
    try:
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True
        )
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as e:
        lines = (getattr(e, "stderr", "") or str(e)).strip().splitlines()
        print(f"{name}: not measured: {lines[-1] if lines else type(e).__name__}", file=sys.stderr)
        return None
    return figures
