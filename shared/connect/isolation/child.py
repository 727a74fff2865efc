"""A task's process: `python -m shared.connect.isolation.child FD`, where FD is its end of a socket pair (an edge).

It makes the task as the worker would have, and drives it. What the worker says is read by a thread, so that the end of
the worker is noticed also by a task that blocks: then the task has its graceful time, and the process ends. Signals for
the whole group are the worker's to answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

from shared.common.clock import SYSTEM_CLOCK
from shared.common.collector import spare_the_collector
from shared.common.log import configure
from shared.common.settings import LogSettings
from shared.connect.config_provider import ConfigTransformer, Mask, unmasked
from shared.connect.herder.loggers import Loggers
from shared.connect.herder.settings import DistributedConfig, StandaloneConfig
from shared.connect.isolation.messages import STATS_MS, Message, pack, unpack
from shared.connect.isolation.remote_offsets import RemoteOffsets
from shared.connect.plugins import Plugins
from shared.connect.states import ConnectorTaskId, TargetState
from shared.connect.status_listener import Id
from shared.connect.task_factory import TaskFactory
from shared.connect.worker_config import WorkerConfig
from shared.connect.worker_connector import trace_of
from shared.connect.worker_task import TaskSpec, WorkerTask

ORPHANED = 70
"""The exit status of a process whose worker has gone and whose task did not end."""


class Link:
    """The process' end of the socket pair."""

    def __init__(self, connection: socket.socket, lines: BinaryIO) -> None:
        self._connection, self._lines = connection, lines
        self._lock = threading.Lock()

    def say(self, message: Message) -> None:
        """Tell the worker; nothing where it has gone."""
        try:
            with self._lock:
                self._connection.sendall(pack(message))
        except OSError:
            return

    def read(self, on_message: Callable[[Message], None], on_end: Callable[[], None], grace_ms: int) -> None:
        """Until the worker has gone, and the task has had its time: of a thread, which ends the process then."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            for line in self._lines:
                loop.call_soon_threadsafe(on_message, unpack(line))
            try:
                loop.call_soon_threadsafe(on_end)
            except RuntimeError:  # the loop is closed: all is over
                return
            time.sleep(grace_ms / 1000)
            os._exit(ORPHANED)

        threading.Thread(target=run, name="worker", daemon=True).start()


class Telling:
    """A status listener that tells the worker."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def on_startup(self, id: Id) -> None:
        self._link.say({"event": "startup"})

    def on_running(self, id: Id) -> None:
        self._link.say({"event": "running"})

    def on_paused(self, id: Id) -> None:
        self._link.say({"event": "paused"})

    def on_stopped(self, id: Id) -> None:
        self._link.say({"event": "stopped"})

    def on_failure(self, id: Id, trace: str) -> None:
        self._link.say({"event": "failure", "trace": trace})

    def on_shutdown(self, id: Id) -> None:
        self._link.say({"event": "shutdown"})

    def on_restart(self, id: Id) -> None:
        self._link.say({"event": "restart"})

    def on_deletion(self, id: Id) -> None:
        self._link.say({"event": "deletion"})

    def on_topic_used(self, id: ConnectorTaskId, topic: str) -> None:
        self._link.say({"topic": topic})


def config_of(start: Message, plugins: Plugins) -> WorkerConfig:
    """The worker's settings, of its kind."""
    props = start["worker"]
    if start["config"] == "distributed":
        return DistributedConfig(props)
    return StandaloneConfig(props) if start["config"] == "standalone" else WorkerConfig(props, resolve=plugins.any_kind)


async def drive(start: Message, link: Link) -> None:
    """Make the task, and run it to its end."""
    plugins, listener, loggers = Plugins.installed(), Telling(link), Loggers(SYSTEM_CLOCK)
    for name, level in start["levels"]:
        loggers.set_level(name, level)
    id = ConnectorTaskId(start["connector"], start["task"])
    spec = TaskSpec(id, start["connector_config"], start["task_config"], start["generation"], start["tasks"])
    store = RemoteOffsets(link.say, start["offset_topic"])
    mask: Mask = unmasked
    try:
        config = config_of(start, plugins)
        transformer = ConfigTransformer.of_worker(config["config.providers"], config.props)
        mask = transformer.masking({**spec.connector_config, **spec.task_config})
        task = TaskFactory(config, plugins, store, group_id=start["group_id"])(spec, listener)
    except Exception as e:  # of the connector's constructor too
        listener.on_failure(id, mask(trace_of(e)))
        return

    def on_message(message: Message) -> None:
        if "answer" in message:
            store.on_answer(message)
        elif "target" in message:
            task.transition_to(TargetState(message["target"]))
        elif "level" in message:
            loggers.set_level(*message["level"])
        elif "stop" in message:
            task.stop()

    link.read(on_message, task.stop, config["task.shutdown.graceful.timeout.ms"])
    spare_the_collector()
    running = task.start(TargetState(start["target"]))
    telling = asyncio.create_task(tell_stats(task, link), name="stats")
    await asyncio.wait([running])
    telling.cancel()
    say_stats(task, link)


async def tell_stats(task: WorkerTask, link: Link) -> None:
    """Every now and then; a loop that is held up says nothing."""
    while True:
        say_stats(task, link)
        await asyncio.sleep(STATS_MS / 1000)


def say_stats(task: WorkerTask, link: Link) -> None:
    now_ms = time.monotonic_ns() // 1_000_000
    link.say({"stats": task.metrics.values(now_ms), "call_ms": task.stalled_ms(now_ms)})


def main(arguments: list[str]) -> int:
    """The process, from the first message on."""
    for own in (signal.SIGINT, signal.SIGTERM):
        signal.signal(own, signal.SIG_IGN)
    connection = socket.socket(fileno=int(arguments[0]))
    lines = connection.makefile("rb")
    first = lines.readline()
    if not first:  # the worker has gone already
        return ORPHANED
    start = unpack(first)
    configure(LogSettings.model_validate(start["log"]), "connect")
    asyncio.run(drive(start, Link(connection, lines)))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # and not by an ordinary end, which the thread that reads would hold up
