"""A sink connector: writes the values of its topics as lines of a file, before their offsets are committed."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from penstock.clients import OffsetAndMetadata, TopicPartition
from penstock.connect import NO_DEFAULT, ConfigDef, Importance, SinkConnector, SinkRecord, SinkTask, Type


class ValueLinesTask(SinkTask):
    async def start(self, props: Mapping[str, str]) -> None:
        self.path = Path(props["file"])
        self.lines: list[str] = []

    async def put(self, records: list[SinkRecord]) -> None:
        self.lines += [f"{r.topic}-{r.kafka_partition}@{r.kafka_offset} {r.value}\n" for r in records]
        if records:
            self.context.request_commit()  # as soon as possible, not at the worker's next interval

    async def flush(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        await asyncio.to_thread(self.write)

    def write(self) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(self.lines)
        self.lines.clear()

    async def stop(self) -> None:
        pass


class ValueLines(SinkConnector):
    task_class = ValueLinesTask

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef().define("file", Type.STRING, NO_DEFAULT, Importance.HIGH, "Where the lines go.")
