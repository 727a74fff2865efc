"""`penstock[rocksdb]`: a processor's store on disk has its rows again after a crash."""

import tempfile
from typing import Any

from penstock.streams import Processor, Record, StateDirectory, StreamsBuilder
from penstock.testing import TopologyTestDriver


class Numbered(Processor):
    """Counts the records of each key."""

    def process(self, record: Record[Any, Any]) -> None:
        rows = self.context.store("seen")
        rows.put(record.key, (rows.get(record.key) or 0) + 1)


def main() -> None:
    builder = StreamsBuilder()
    builder.stream("clicks").process_values(Numbered, builder.add_store("seen"))
    with tempfile.TemporaryDirectory() as folder:
        state = StateDirectory(folder, "app", memory_bytes_max=2**24, cache_bytes_max=0)
        state.acquire()
        driver = TopologyTestDriver(builder.build(), state=state)
        driver.pipe("clicks", key=b"ann", value=b"{}")
        driver.pipe("clicks", key=b"ann", value=b"{}")
        driver.crash()
        driver.restore()
        print(driver.store("seen").get("ann"))
        driver.close()


if __name__ == "__main__":
    main()
