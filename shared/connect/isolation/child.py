"""A connector's process: a worker for one connector and its tasks, controlled by the parent worker.

The process has its own clients, reads and writes the offset topic itself, and restarts failed tasks as any worker
does. Its argument is the file descriptor of its socket. When the other end is closed, or the parent worker ends, the
process stops its tasks and its connector, and exits. If that takes too long, the process is killed: by the parent
worker, or by its guard (`child_guard`) if the parent has ended. The process ignores SIGINT and SIGTERM, which the
parent worker handles.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from typing import Any, BinaryIO, NoReturn

import msgspec

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import DataError
from penstock.shared.common.event_loop import contained_runner, run_contained
from penstock.shared.common.gc_tuning import collector_off, spare_the_collector
from penstock.shared.common.log import configure, get_logger
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import LogSettings
from penstock.shared.connect.errors import summary_of
from penstock.shared.connect.herder.distributed_config import DistributedConfig
from penstock.shared.connect.herder.loggers import Loggers
from penstock.shared.connect.isolation.messages import METRICS_MS, Message, error_message, pack, unpack
from penstock.shared.connect.runtime.offset_backing_store import OffsetBackingStore
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, TargetState
from penstock.shared.connect.runtime.status_listener import Id
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.connect.storage.offset_store import KafkaOffsetStore

log = get_logger(__name__)

FAILED = 1
"""The exit status of a process that failed."""


class WorkerLink:
    """The process' end of the socket pair."""

    def __init__(self, connection: socket.socket, lines: BinaryIO) -> None:
        self._connection = connection
        self._lines = lines
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message to the parent worker. Does nothing if that worker has ended."""
        line = pack(message)
        try:
            with self._lock:
                self._connection.sendall(line)
        except OSError:
            return

    def read(self, on_command: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """Read commands on a thread until the worker closes the link or ends."""
        loop = asyncio.get_running_loop()

        def read_commands() -> None:
            # A killed worker can cut a line off (DataError). If it had not read all messages, the connection is reset
            # (OSError). Both are its end, after which a source that went on would write records a second time.
            with contextlib.suppress(DataError, OSError):
                for line in self._lines:
                    loop.call_soon_threadsafe(on_command, unpack(line))
            with contextlib.suppress(RuntimeError):
                # If the loop is closed, the process is already ending.
                loop.call_soon_threadsafe(on_end)

        threading.Thread(target=read_commands, name="commands", daemon=True).start()


class StatusEventSender:
    """A status listener that sends each event to the parent worker. Used topics are collected and sent with the next
    metrics."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self.topics: set[tuple[int, str]] = set()

    def on_event(self, id: Id, event: Event, trace: str | None = None) -> None:
        task = id.task if isinstance(id, ConnectorTaskId) else None
        self._send({"event": event.value, "task": task, "trace": trace})

    def on_topic_used(self, id: ConnectorTaskId, topic: str) -> None:
        self.topics.add((id.task, topic))


class ChildOffsetStore:
    """The `OffsetBackingStore` of a connector's process: the worker's offset topic, with clients of the process' own.

    The clients are opened when a task first reads or writes offsets, so never for a sink.
    """

    def __init__(self, config: DistributedConfig) -> None:
        self._config = config
        self._clients = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._store: OffsetBackingStore | None = None

    @property
    def topic(self) -> str | None:
        return self._config.topic("offset").name

    async def start(self) -> None:
        """Do nothing: the first use opens the child process' clients."""

    async def stop(self) -> None:
        await self._clients.aclose()

    async def get(self, keys: Collection[bytes]) -> dict[bytes, bytes | None]:
        return await (await self._open_offset_store()).get(keys)

    async def set(self, values: Mapping[bytes, bytes | None]) -> None:
        await (await self._open_offset_store()).set(values)

    async def records(self, values: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
        return await (await self._open_offset_store()).records(values)

    async def connector_offsets(self, connector: str) -> dict[bytes, bytes]:
        return await (await self._open_offset_store()).connector_offsets(connector)

    async def _open_offset_store(self) -> OffsetBackingStore:
        async with self._opening:
            # Several tasks may need their offsets at the same time.
            if self._store is None:
                async with AsyncExitStack() as clients:
                    kafka = self._config.kafka
                    admin = await clients.enter_async_context(Admin(kafka))
                    producer = await clients.enter_async_context(Producer(kafka, ProducerSettings(linger_ms=0)))
                    store = KafkaOffsetStore(kafka, admin, producer, self._config.topic("offset"))
                    clients.push_async_callback(store.stop)
                    await store.start()
                    self._store = store
                    self._clients = clients.pop_all()
            return self._store


class Commands:
    """Runs the parent worker's commands for one connector. `send` sends messages to the parent worker."""

    def __init__(self, connector: str, worker: Worker, loggers: Loggers, send: Callable[[Message], None]) -> None:
        self._connector = connector
        self._worker = worker
        self._loggers = loggers
        self._send = send
        self._events = StatusEventSender(send)
        self._running: dict[asyncio.Task[None], str] = {}

    def __repr__(self) -> str:
        return f"<Commands for {self._connector}, {len(self._running)} running>"

    def on_command(self, command: Message) -> None:
        """Start a command. Commands run in parallel, and begin in the order in which they were sent."""
        running = asyncio.create_task(self._run_command(command))
        self._running[running] = command["do"]
        running.add_done_callback(self._running.pop)

    async def close(self) -> None:
        """Stop all work. First waits for the end of a stop in progress."""
        # `shutdown` would not wait for tasks that a stop has removed already.
        stops = [running for running, do in self._running.items() if do == "stop"]
        if stops:
            await asyncio.wait(stops)
        await self._worker.shutdown()

    def send_metrics(self) -> None:
        """Send the metrics of all tasks, and the topics that they have used since the last time."""
        metrics = [(id.task, values) for id, _, values in self._worker.task_metrics()]
        topics = sorted(self._events.topics)
        self._events.topics = set()
        self._send({"metrics": metrics, "topics": topics})

    async def _run_command(self, command: Message) -> None:
        response = {"correlation_id": command.get("correlation_id")}
        try:
            value = await self._execute_command(command)
            if "correlation_id" in command:
                self._send({**response, "value": value})
        # an error of the connector's code, or of a value that is not JSON: the worker handles it
        except Exception as e:
            if "correlation_id" in command:
                self._send({**response, **error_message(e)})
            else:
                log.error("a command failed", command=command["do"], error=summary_of(e))

    async def _execute_command(self, command: Message) -> Any:
        name = self._connector
        worker = self._worker
        events = self._events
        match command["do"]:
            case "start_connector":
                target = TargetState(command["target"])
                return (
                    await worker.start_connector(name, command["config"], target, events, self._request_reconfiguration)
                ).value
            case "start_task":
                spec = msgspec.convert(command["spec"], TaskSpec)
                await worker.start_task(spec, TargetState(command["target"]), events)
            case "stop":
                await worker.stop_tasks(ConnectorTaskId(name, task) for task in command["tasks"] if task is not None)
                if None in command["tasks"]:
                    await worker.stop_connector(name)
                self.send_metrics()
            case "target":
                await worker.set_target_state(name, TargetState(command["target"]))
            case "task_configs":
                return await worker.connector_task_configs(name, command["config"])
            case "validate":
                infos = await worker.validate(command["config"])
                return {"name": infos.name, "groups": infos.groups, "configs": infos.configs}
            case "alter_offsets":
                wanted: Any = [(partition, offset) for partition, offset in command["rows"]]
                if command["sink"]:
                    wanted = {TopicPartition(*partition): offset for partition, offset in wanted}
                return await worker.alter_offsets(command["config"], wanted)
            case "level":
                self._loggers.set_level(command["name"], command["level"])
        return None

    def _request_reconfiguration(self, _name: str) -> None:
        self._send({"reconfigure": True})


async def serve(start: Message, link: WorkerLink) -> None:
    """Run commands until the worker closes the link, or has ended."""
    loggers = Loggers(SYSTEM_CLOCK)
    config = DistributedConfig(start["worker"])
    with collector_off():
        plugins = Plugins.installed()
    for name, level in start["levels"]:
        loggers.set_level(name, level)
    offsets = ChildOffsetStore(config)
    worker = Worker(config, plugins, offsets, TaskFactory(config, plugins, offsets, group_id=config["group.id"]))
    commands = Commands(start["connector"], worker, loggers, link.send)
    over = asyncio.Event()
    link.read(commands.on_command, over.set)
    spare_the_collector()
    while not over.is_set():
        commands.send_metrics()
        try:
            async with asyncio.timeout(METRICS_MS / 1000):
                await over.wait()
        except TimeoutError:
            continue
    await commands.close()


def main() -> NoReturn:
    """Run the process, from the first message on to its end."""
    for own in (signal.SIGINT, signal.SIGTERM):
        signal.signal(own, signal.SIG_IGN)
    status = FAILED
    try:
        connection = socket.socket(fileno=int(sys.argv[1]))
        lines = connection.makefile("rb")
        # Without a first line, the worker has already ended.
        if first := lines.readline():
            start = unpack(first)
            configure(LogSettings.model_validate(start["log"]), "connect")
            with contained_runner() as runner:
                run_contained(runner, serve(start, WorkerLink(connection, lines)))
        status = 0
    except BaseException:
        # The connector's code may raise SystemExit.
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that reads or blocks would delay an ordinary exit.
    os._exit(status)
