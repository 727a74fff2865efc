"""Misbehaving connectors."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.connect import ConfigDef, SourceConnector, SourceRecord, SourceTask
from penstock.shared.common.log import get_logger
from penstock.shared.connect.config_def import ConfigValue

log = get_logger(__name__)


class BlockingTask(SourceTask):
    """Blocks its event loop while the file of its settings exists, and then returns one record."""

    def __init__(self) -> None:
        self._file = Path()
        self._given = False

    async def start(self, props: Mapping[str, str]) -> None:
        self._file = Path(props["file"])
        log.info("the task's own line")
        if props.get("fails"):
            raise ValueError(props["fails"])

    async def poll(self) -> Sequence[SourceRecord] | None:
        while self._file.exists():
            select.select([], [], [], 0.05)  # blocks the event loop
        if self._given:
            return None
        self._given = True
        record = SourceRecord("t", None, None, None, None, "one", source_partition={"a": 1}, source_offset={"n": 1})
        return [record]

    async def stop(self) -> None:
        return


class BlockingSource(SourceConnector):
    """A source whose tasks block."""

    task_class = BlockingTask

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()

    async def start(self, props: Mapping[str, str]) -> None:
        self._props = dict(props)

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        return [self._props] * max_tasks


class HangingTask(BlockingTask):
    """Blocks its own thread while the file exists."""

    def poll(self) -> None:  # type: ignore[override]
        while self._file.exists():
            select.select([], [], [], 0.05)
        select.select([], [], [], 0.05)


class HangingSource(BlockingSource):
    """A source whose tasks hang."""

    task_class = HangingTask


class FailingSource(BlockingSource):
    """A source that cannot start."""

    async def start(self, props: Mapping[str, str]) -> None:
        raise KeyError("on purpose")


class AwkwardSource(BlockingSource):
    """Does in each method what its settings request, such as `start.does=exit`."""

    def _does(self, what: str, props: Mapping[str, str]) -> None:
        does = props.get(f"{what}.does")
        if does == "block":
            while not Path(props["file"]).exists():
                select.select([], [], [], 0.02)
        elif does == "exit":
            os._exit(3)
        elif does == "leave while" and Path(props["file"]).exists():
            os._exit(4)
        elif does == "fork" and os.fork() == 0:
            self._does("start", {**props, "start.does": "block"})
            os._exit(0)
        elif does == "fail":
            raise ValueError(f"{what} with {props.get('secret')}")
        elif does == "ask":
            asyncio.get_running_loop().call_soon(self.context.request_task_reconfiguration)
        elif does == "leave and ask":
            asyncio.get_running_loop().call_soon(sys.exit, 4)
            self._does(what, {**props, f"{what}.does": "ask"})
        elif does == "raise":
            asyncio.get_running_loop().call_soon(self.context.raise_error, ValueError("by itself"))

    async def start(self, props: Mapping[str, str]) -> None:
        self._does("start", props)
        await super().start(props)

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        self._does("configs", self._props)
        return await super().task_configs(max_tasks)

    async def stop(self) -> None:
        self._does("stop", self._props)

    def validate(self, props: Mapping[str, str]) -> list[ConfigValue]:
        self._does("validate", props)
        errors = [] if props.get("validate.allows") else [f"seen by process {os.getpid()}"]
        return [ConfigValue("file", props.get("file"), errors=errors)]

    async def alter_offsets(self, props: Mapping[str, str], offsets: list[Any]) -> bool:
        self._does("alter", props)
        return all(isinstance(partition, dict) for partition, _ in offsets)
