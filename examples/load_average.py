"""A source connector: this machine's load average, once per interval."""

import asyncio
import os
from collections.abc import Mapping

from penstock.connect import NO_DEFAULT, ConfigDef, Importance, SourceConnector, SourceRecord, SourceTask, Type


class LoadTask(SourceTask):
    async def start(self, props: Mapping[str, str]) -> None:
        self.topic = props["topic"]
        self.seconds = int(props.get("interval.ms", "1000")) / 1000
        stored = await self.context.offset_storage_reader.offset({"host": "here"})
        self.count = stored["count"] if stored else 0

    async def poll(self) -> list[SourceRecord]:
        await asyncio.sleep(self.seconds)
        self.count += 1
        value = {"count": self.count, "load": os.getloadavg()[0]}
        where = {"host": "here"}
        offset = {"count": self.count}
        return [SourceRecord(self.topic, None, None, None, None, value, source_partition=where, source_offset=offset)]

    async def stop(self) -> None:
        pass


class LoadConnector(SourceConnector):
    task_class = LoadTask

    @classmethod
    def config(cls) -> ConfigDef:
        topic = ConfigDef().define("topic", Type.STRING, NO_DEFAULT, Importance.HIGH, "Where to.")
        return topic.define("interval.ms", Type.INT, 1000, Importance.LOW, "How often.")
