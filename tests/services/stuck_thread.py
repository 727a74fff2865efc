"""A thread that does not end while its service shuts down."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from penstock.services import service_lifecycle

WAIT_S = 5


class StuckThread:
    """The thread runs until the process would exit without it. `exits` has the exit statuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exits: list[int] = []
        self._ended = threading.Event()
        self._started: list[asyncio.Task[bool]] = []
        monkeypatch.setattr(service_lifecycle, "EXIT_GRACE_MS", 1)
        monkeypatch.setattr(os, "_exit", self._exit)

    async def start(self) -> None:
        """Start the thread from a task that nothing awaits."""
        self._started.append(asyncio.create_task(asyncio.to_thread(self._ended.wait, WAIT_S)))

    def _exit(self, status: int) -> None:
        self.exits.append(status)
        self._ended.set()
