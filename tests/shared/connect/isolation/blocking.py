"""Connectors that do in a task what a task should not."""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.common.log import get_logger
from shared.connect import ConfigDef, SourceConnector, SourceRecord, SourceTask

log = get_logger(__name__)


class BlockingTask(SourceTask):
    """Blocks its event loop as soon as the file that its settings name is there; then it gives records no more."""

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
            select.select([], [], [], 0.05)  # blocks: what the worker must not suffer from
        if self._given:
            return None
        self._given = True
        record = SourceRecord("t", None, None, None, None, "one", source_partition={"a": 1}, source_offset={"n": 1})
        return [record]

    async def stop(self) -> None:
        return


class BlockingSource(SourceConnector):
    """Its tasks block."""

    task_class = BlockingTask

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef()

    async def start(self, props: Mapping[str, str]) -> None:
        self._props = dict(props)

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        return [self._props] * max_tasks


class FailingSource(BlockingSource):
    """Cannot start."""

    async def start(self, props: Mapping[str, str]) -> None:
        raise KeyError("on purpose")
