"""A task's process: it makes the task as the worker would have, and runs it (an edge)."""

from __future__ import annotations

import asyncio
import time

from penstock.shared.common.collector import spare_the_collector
from penstock.shared.connect.config_provider import ConfigTransformer, Mask, unmasked
from penstock.shared.connect.errors import trace_of
from penstock.shared.connect.isolation.child import Link, config_of, loggers_of, run
from penstock.shared.connect.isolation.messages import STATS_MS, Message
from penstock.shared.connect.isolation.questions import Questions
from penstock.shared.connect.isolation.remote_offsets import RemoteOffsets
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.runtime.status_listener import Id
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.worker_task import TaskSpec, WorkerTask


class Telling:
    """A status listener that sends each event to the worker."""

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


async def drive(start: Message, link: Link) -> None:
    """Makes the task, and runs it to its end."""
    plugins, listener, loggers = Plugins.installed(), Telling(link), loggers_of(start)
    id = ConnectorTaskId(start["connector"], start["task"])
    spec = TaskSpec(id, start["connector_config"], start["task_config"], start["generation"], start["tasks"])
    questions = Questions(link.say)
    store = RemoteOffsets(questions, start["offset_topic"])
    mask: Mask = unmasked
    try:
        config = config_of(start, plugins)
        transformer = ConfigTransformer.of_worker(config["config.providers"], config.props)
        mask = transformer.masking({**spec.connector_config, **spec.task_config})
        task = TaskFactory(config, plugins, store, group_id=start["group_id"])(spec, listener)
    except Exception as e:  # also an error of the connector's constructor
        listener.on_failure(id, mask(trace_of(e)))
        return

    def on_message(message: Message) -> None:
        if "answer" in message:
            questions.on_answer(message)
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
    """Sends the metrics at intervals. A blocked loop sends nothing."""
    while True:
        say_stats(task, link)
        await asyncio.sleep(STATS_MS / 1000)


def say_stats(task: WorkerTask, link: Link) -> None:
    now_ms = time.monotonic_ns() // 1_000_000
    link.say({"stats": task.metrics.values(now_ms), "call_ms": task.stalled_ms(now_ms)})


if __name__ == "__main__":
    run(drive)
