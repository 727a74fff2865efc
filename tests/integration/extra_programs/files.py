"""`penstock[files]`: the files sink writes Parquet to a folder, and lines of JSON to an fsspec file system."""

import asyncio
import sys

import fsspec
import pyarrow.parquet

from penstock import TopicPartition
from penstock.connect import AllowedFiles, SinkRecord, SinkTaskContext
from penstock.connect.connectors import FilesSinkConnector

TP = TopicPartition("orders", 0)


class Context(SinkTaskContext):
    """The context of a sink task that allows these URLs."""

    def __init__(self, *allowed: str) -> None:
        self._files = AllowedFiles(allowed)

    @property
    def files(self) -> AllowedFiles:
        return self._files


async def write(url: str, **settings: str) -> None:
    """Write two records to `url` with a sink task."""
    task = FilesSinkConnector.task_class()
    task.initialize(Context(url))  # type: ignore[abstract]  # the task uses nothing else
    await task.start({"url": url, "topics": TP.topic, "flush.size": "2", **settings})
    await task.open(frozenset({TP}))
    orders = [SinkRecord(TP.topic, TP.partition, None, None, None, {"id": n}, kafka_offset=n) for n in range(2)]
    await task.put(orders)
    await task.stop()


async def main(folder: str) -> None:
    await write(folder)
    print(pyarrow.parquet.read_table(f"{folder}/orders").column("id").to_pylist())
    await write("memory://shop", format="json")
    store = fsspec.filesystem("memory")
    print([store.cat(path) for path in store.find("/shop")])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
