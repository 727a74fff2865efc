"""The commands of a connector's process, run in this process, and the messages that carry them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError, DataError, KafkaTimeout
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.connectors.file_stream import FileStreamSinkConnector
from penstock.shared.connect.errors import (
    ConnectError,
    ConnectorNotFound,
    FailedThere,
    TooManyTasks,
    summary_of,
    trace_of,
)
from penstock.shared.connect.herder.loggers import Loggers
from penstock.shared.connect.isolation.child import Commands, WorkerLink
from penstock.shared.connect.isolation.messages import Message, error_message, error_of, pack, unpack
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.worker_task import TaskSpec
from tests.shared.connect.harness import Mute, RecordingSink, RecordingSinkTask, Running, running
from tests.shared.connect.isolation.blocking import AwkwardSource

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


class Commanded:
    """A worker in this process with its commands, and the messages that they send."""

    def __init__(self, run: Running) -> None:
        self.run = run
        self.sent: list[Message] = []
        self.commands = Commands("c", run.worker, Loggers(SYSTEM_CLOCK), self.sent.append)

    def config(self, plugin: type, **more: str) -> dict[str, str]:
        given = {name.replace("_", "."): value for name, value in more.items()}
        name = f"{plugin.__module__}.{plugin.__name__}"
        self.run.worker.plugins.add(plugin, name)
        return {"name": "c", "connector.class": name, "topics": "t", **given}

    async def request(self, do: str, **more: Any) -> Message:
        """Run a command and return its response."""
        self.commands.on_command({"do": do, "correlation_id": 7, **more})
        await self.run.until(lambda: any(message.get("correlation_id") == 7 for message in self.sent))
        [response] = [message for message in self.sent if message.get("correlation_id") == 7]
        self.sent.remove(response)
        return response


@asynccontextmanager
async def commanded() -> AsyncIterator[Commanded]:
    async with running() as run:
        yield Commanded(run)


async def test_commands_control_a_connector_and_a_task() -> None:
    """Each state change is an event, and a command's response follows its events."""
    async with commanded() as run:
        config = run.config(RecordingSink)
        assert await run.request("start_connector", config=config, target="STARTED") == {
            "correlation_id": 7,
            "value": "RUNNING",
        }
        assert [task["topics"] for task in (await run.request("task_configs", config=config))["value"]] == ["t"]
        spec = {"id": {"connector": "c", "task": 0}, "connector_config": config, "task_config": config}
        run.commands.on_command({"do": "start_task", "spec": spec, "target": "PAUSED"})
        await run.run.until(lambda: len(run.sent) == 2)
        await run.request("target", target="STARTED")
        await run.run.until(lambda: len(run.sent) == 3)
        await run.request("stop", tasks=[0, None])
        events = [(message["event"], message["task"]) for message in run.sent if "event" in message]
        assert events == [
            ("startup", None), ("paused", 0), ("running", 0), ("shutdown", 0), ("shutdown", None),
        ]  # fmt: skip
        assert RecordingSinkTask.made[0].calls[-1] == "stop"
        assert (run.run.worker.task_ids(), run.run.worker.connector_names()) == (frozenset(), frozenset())


async def test_closing_waits_for_stopping_tasks() -> None:
    """Closing the commands waits for tasks that are stopping."""
    going = asyncio.Event()

    class SlowTask(RecordingSinkTask):
        async def stop(self) -> None:
            await going.wait()
            await super().stop()

    class Slow(RecordingSink):
        task_class = SlowTask

    async with commanded() as run:
        config = run.config(Slow)
        spec = {"id": {"connector": "c", "task": 0}, "connector_config": config, "task_config": config}
        run.commands.on_command({"do": "start_task", "spec": spec, "target": "STARTED"})
        await run.run.until(lambda: run.sent)
        run.commands.on_command({"do": "stop", "tasks": [0]})
        await run.run.until(lambda: not run.run.worker.task_ids())
        closing = asyncio.ensure_future(run.commands.close())
        assert not (await asyncio.wait([closing], timeout=0.05))[0]
        going.set()
        await closing
        assert RecordingSinkTask.made[0].calls[-1] == "stop"
        assert "shutdown" in [message.get("event") for message in run.sent]


async def test_metrics_and_topics_are_sent_together() -> None:
    """Metrics are sent with the topics that were used since the last time."""
    async with commanded() as run:
        config = run.config(RecordingSink)
        spec = TaskSpec(ConnectorTaskId("c", 0), config, config)
        run.commands.on_command({"do": "start_task", "spec": spec, "target": "STARTED"})
        run.commands._events.on_topic_used(spec.id, "t")
        await run.run.until(lambda: run.run.worker.task_ids())
        for topics in ([(0, "t")], []):
            run.commands.send_metrics()
            assert run.sent[-1]["topics"] == topics
            [(task, values)] = run.sent[-1]["metrics"]
            assert (task, values["sink_record_read_total"]) == (0, 0)


async def test_an_error_is_the_response() -> None:
    """An error of the connector's code or of a value without JSON is the command's response."""

    class Odd(AwkwardSource):
        async def alter_offsets(self, props: Mapping[str, str], offsets: list[Any]) -> bool:
            raise KeyError("odd")

    async with commanded() as run:
        response = await run.request("alter_offsets", config=run.config(Odd), rows=[], sink=False)
        assert (response["class"], response["error"], response["kind"]) == ("KeyError", "'odd'", "other")
        assert "test_process_commands.py" in response["trace"]
        response = await run.request("task_configs", config=run.config(Odd))
        assert response["kind"] == "not found"


async def test_offsets_depend_on_the_connectors_type() -> None:
    """A source's offsets are pairs of partition and offset, and a sink's are by topic partition."""
    seen: list[object] = []

    class Sink(FileStreamSinkConnector):
        async def alter_offsets(self, props: Mapping[str, str], offsets: Mapping[TopicPartition, int | None]) -> bool:
            seen.append(dict(offsets))
            return False

    class Source(AwkwardSource):
        async def alter_offsets(self, props: Mapping[str, str], offsets: list[Any]) -> bool:
            seen.append(offsets)
            return True

    async with commanded() as run:
        rows = [[{"file": "a"}, {"at": 1}], [{"file": "b"}, None]]
        response = await run.request("alter_offsets", config=run.config(Source), rows=rows, sink=False)
        assert (response["value"], seen.pop()) == (True, [({"file": "a"}, {"at": 1}), ({"file": "b"}, None)])
        rows = [[["t", 0], 7], [["t", 1], None]]
        response = await run.request("alter_offsets", config=run.config(Sink), rows=rows, sink=True)
        assert (response["value"], seen) == (False, [{TopicPartition("t", 0): 7, TopicPartition("t", 1): None}])


async def test_the_end_of_the_worker_is_the_end_of_the_commands() -> None:
    """When the worker ends, also in the middle of a command, the link ends."""
    for cut_off in (b"", b'{"do": "st'):
        ours, theirs = socket.socketpair()
        commands: list[Message] = []
        over = asyncio.Event()
        with ours, theirs, theirs.makefile("rb") as lines:
            WorkerLink(theirs, lines).read(commands.append, over.set)
            ours.sendall(pack({"do": "stop", "tasks": []}) + cut_off)
            ours.shutdown(socket.SHUT_WR)
            await over.wait()
            assert commands == [{"do": "stop", "tasks": []}]
            ours.close()
            WorkerLink(theirs, lines).send({"event": "shutdown"})  # nobody is there to take it


async def test_a_killed_worker_that_had_not_read_all_messages_has_ended() -> None:
    """The connection is reset then. The process must end, or a source would go on without its worker."""
    ours, theirs = socket.socketpair()
    commands: list[Message] = []
    over = asyncio.Event()
    with theirs, theirs.makefile("rb") as lines:
        link = WorkerLink(theirs, lines)
        link.send({"event": "running"})
        ours.close()
        link.read(commands.append, over.set)
        async with asyncio.timeout(10):
            await over.wait()
    assert commands == []


@given(st.dictionaries(st.text(), JSON))
def test_a_message_is_one_line(message: dict[str, object]) -> None:
    """A message is one line, even if a value contains line breaks."""
    line = pack(message)
    assert line.count(b"\n") == 1
    assert unpack(line) == message


def test_invalid_messages_are_errors() -> None:
    """An invalid or truncated message is a DataError, also if it is not UTF-8 or is nested too deep."""
    too_deep = b'{"do": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    for line in (b'{"do": "st', b"[1]\n", b"", b'{"do": "\xff"}\n', too_deep):
        with pytest.raises(DataError):
            unpack(line)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (ConfigError("no such column"), ConfigError),
        (ConnectorNotFound("c"), ConnectorNotFound),
        (TooManyTasks("3"), TooManyTasks),
        (ConnectError("no"), ConnectError),
        (KafkaTimeout("slow"), FailedThere),
        (KeyError("k"), FailedThere),
        (ValueError("caf\udce9"), FailedThere),
        (Mute(), FailedThere),
    ],
)
def test_errors_round_trip(error: Exception, base: type[Exception]) -> None:
    """An error is decoded with its message, class name, trace and base class."""
    try:
        raise error
    except Exception as raised:
        message = error_message(raised)
    again = error_of(unpack(pack(message)))
    assert isinstance(again, base)
    assert (summary_of(again), trace_of(again)) == (summary_of(error), trace_of(error))
    assert "test_process_commands.py" in again.trace


def test_task_specs_round_trip() -> None:
    """A TaskSpec is decoded unchanged."""
    spec = TaskSpec(ConnectorTaskId("c", 1), {"a": "${env:B}"}, {"task.class": "x"}, 2)
    assert msgspec.convert(unpack(pack({"spec": spec}))["spec"], TaskSpec) == spec
