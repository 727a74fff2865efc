"""Starts the processes that tests kill. They are forked from one that has imported everything and loaded the kernels:
faster by two seconds.
"""

from __future__ import annotations

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(
    ["tests.integration.chaos_child", "tests.integration.stream_worker_child", "tests.integration.kernels"]
)
