"""The worker's side of a connector in a process of its own: a connector like every other (an edge).

Each call of the worker is a question over the link. The process is started with the first question and stays until it
is closed. If it ends unexpectedly, the connector has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.config_def import ConfigDef
from penstock.shared.connect.connector import Connector, Props, SinkConnector
from penstock.shared.connect.errors import PenstockError
from penstock.shared.connect.isolation.messages import error_of, to_rows
from penstock.shared.connect.isolation.process import END_MS, ProcessEnded, Processes
from penstock.shared.connect.isolation.questions import Questions
from penstock.shared.connect.runtime.validation import ConfigInfos

log = get_logger(__name__)

CHILD = "penstock.shared.connect.isolation.connector_child"


class ProcessConnector(Connector):
    """The worker's side of the connector."""

    def __init__(self, name: str, plugin: type[Connector], processes: Processes, grace_ms: int) -> None:
        """`grace_ms` is the time that the connector has to stop if the worker has ended."""
        self._name, self._plugin, self._grace_ms = name, plugin, grace_ms
        self._process = processes.make(CHILD, f"connector {name}")
        self._questions = Questions(self._process.say)
        self._hearing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ProcessConnector {self._name}, pid {self.pid}>"

    @property
    def pid(self) -> int | None:
        """The process' id, or None before it is started."""
        return self._process.pid

    @classmethod
    def config(cls) -> ConfigDef:
        """Returns no settings: the class in the process has them."""
        return ConfigDef()

    async def start(self, props: Props) -> None:
        await self._ask("start", props=dict(props))

    async def stop(self) -> None:
        """Stops the connector. Does nothing if the process has ended."""
        if self._hearing is not None and not self._hearing.done():
            await self._ask("stop")

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        made: list[dict[str, str]] = await self._ask("task_configs", tasks_max=max_tasks)
        return made

    async def validated(self, props: Props) -> ConfigInfos:
        """Runs `validate_connector` in the process."""
        return ConfigInfos(**await self._ask("validate", props=dict(props)))

    async def alter_offsets(self, props: Props, offsets: Any) -> bool:
        """Calls `alter_offsets` of the source or sink in the process."""
        is_sink = issubclass(self._plugin, SinkConnector)
        wanted: Mapping[TopicPartition, int | None] = offsets if is_sink else {}
        rows = to_rows(wanted) if is_sink else [list(row) for row in offsets]
        return bool(await self._ask("alter_offsets", props=dict(props), rows=rows, sink=is_sink))

    async def close(self, timeout_ms: int = END_MS) -> None:
        """Ends the process. Kills it if it still runs after `timeout_ms`."""
        self._questions.end(ProcessEnded(f"connector {self._name} was stopped"))
        if self._hearing is not None:
            self._hearing.cancel()
        await self._process.end(timeout_ms)

    async def _ask(self, what: str, **more: Any) -> Any:
        if self._hearing is None:
            place = [self._plugin.__module__, self._plugin.__qualname__]
            await self._process.start({"connector_class": place, "grace_ms": self._grace_ms})
            self._hearing = asyncio.create_task(self._hear(), name=f"hear-{self._name}")
        return (await self._questions.ask({"do": what, **more}))["value"]

    async def _hear(self) -> None:
        while True:
            try:
                message = await self._process.hear()
            except PenstockError as e:
                self._questions.end(e)
                self._fail(e)
                return
            if "answer" in message:
                self._questions.on_answer(message)
            elif "reconfigure" in message:
                self.context.request_task_reconfiguration()
            else:
                self._fail(error_of(message["failed"]))

    def _fail(self, error: Exception) -> None:
        """Reports the error to the context, if there is one. Otherwise the caller gets it as the answer."""
        if hasattr(self, "context"):
            self.context.raise_error(error)
