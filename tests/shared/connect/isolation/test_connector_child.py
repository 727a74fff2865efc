"""What a connector's process makes of what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.connectors.file import FileStreamSinkConnector
from penstock.shared.connect.isolation.connector_child import ServedConnector, class_at
from penstock.shared.connect.isolation.messages import Message, to_rows
from tests.shared.connect.isolation.blocking import AwkwardSource


class Served:
    """A connector that is asked here, and what it says."""

    def __init__(self, plugin: type = AwkwardSource) -> None:
        self.said: list[Message] = []
        self._said = asyncio.Event()
        self.connector = ServedConnector(plugin, lambda props: {"name": props["name"]}, self._say)

    def _say(self, message: Message) -> None:
        self.said.append(message)
        self._said.set()

    async def ask(self, what: str, **more: Any) -> Message:
        """The answer; what is said before it stays said."""
        number = 1 + len(self.said)
        self.connector.on_question({"ask": number, "do": what, **more})
        while True:
            await self._said.wait()
            self._said.clear()
            for message in self.said:
                if message.get("answer") == number:
                    return message


async def test_a_connector_is_started_divided_and_stopped() -> None:
    """Each with what it takes; what comes of it is the answer."""
    served, props = Served(), {"name": "c"}
    assert (await served.ask("start", props=props))["value"] is None
    assert (await served.ask("task_configs", tasks_max=2))["value"] == [props, props]
    assert repr(served.connector).endswith(", started>")
    await served.ask("stop")
    assert not repr(served.connector).endswith(", started>")


async def test_what_the_connector_raises_is_the_answer() -> None:
    """Its constructor's errors too, and a task configuration that is no JSON."""

    class Broken(AwkwardSource):
        def __init__(self) -> None:
            raise KeyError("made wrong")

    class Odd(AwkwardSource):
        async def task_configs(self, max_tasks: int) -> list[dict[str, Any]]:
            return [{"file": object()}]

    answer = await Served(Broken).ask("start", props={})
    assert (answer["class"], answer["error"]) == ("KeyError", "'made wrong'")
    answer = await Served().ask("start", props={"start.does": "fail"})
    assert (answer["class"], answer["error"]) == ("ValueError", "start with None")
    assert "blocking.py" in answer["trace"]


async def test_what_the_connector_asks_its_worker_is_said() -> None:
    """That tasks be configured anew, or that it has failed by itself."""
    served = Served()
    await served.ask("start", props={"start.does": "ask"})
    await served.ask("stop")
    await served.ask("start", props={"start.does": "raise"})
    await served.ask("stop")
    asked = [message for message in served.said if "answer" not in message]
    assert asked[0] == {"reconfigure": True}
    assert (asked[1]["failed"]["class"], asked[1]["failed"]["error"]) == ("ValueError", "by itself")


async def test_offsets_are_as_the_connectors_kind_has_them() -> None:
    """A source's are partitions and offsets, a sink's are a topic's."""
    seen: list[object] = []

    class Sink(FileStreamSinkConnector):
        async def alter_offsets(self, props: Mapping[str, str], offsets: Mapping[TopicPartition, int | None]) -> bool:
            seen.append(dict(offsets))
            return False

    rows = [[{"file": "a"}, {"at": 1}], [{"file": "b"}, None]]
    answer = await Served().ask("alter_offsets", props={}, rows=rows, sink=False)
    assert answer["value"] is True
    offsets = {TopicPartition("t", 0): 7, TopicPartition("t", 1): None}
    answer = await Served(Sink).ask("alter_offsets", props={}, rows=to_rows(offsets), sink=True)
    assert (answer["value"], seen) == (False, [offsets])


async def test_a_connector_is_not_made_to_be_validated() -> None:
    """Validation has a connector of its own."""
    served = Served()
    assert (await served.ask("validate", props={"name": "c"}))["value"] == {"name": "c"}
    assert "None" in repr(served.connector)


async def test_what_runs_is_stopped_when_the_worker_has_gone() -> None:
    """And what was stopped is not stopped twice."""
    stops: list[int] = []

    class Counting(AwkwardSource):
        async def stop(self) -> None:
            stops.append(1)

    served = Served(Counting)
    await served.connector.close()
    await served.ask("start", props={})
    await served.connector.close()
    assert stops == [1]


def test_a_class_is_found_by_its_place() -> None:
    """One within another too."""
    assert class_at(AwkwardSource.__module__, "AwkwardSource") is AwkwardSource
