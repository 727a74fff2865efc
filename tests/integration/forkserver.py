"""Starts the processes that tests kill. They are forked from one that has imported everything: faster by a second."""

from __future__ import annotations

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.integration.chaos_child", "tests.integration.stream_worker_child"])
