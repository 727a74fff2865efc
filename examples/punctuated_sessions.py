"""Session windows that merge, and a processor that forwards its records at multiples of ten minutes of stream time.

python examples/punctuated_sessions.py
"""

from __future__ import annotations

import json

from penstock.streams import (
    Count,
    KeyValueStore,
    Processor,
    ProcessorContext,
    PunctuationType,
    Record,
    StreamsBuilder,
    Topology,
)
from penstock.testing import TopologyTestDriver

MINUTE = 60_000


class EveryTenMinutes(Processor):
    """Holds records until stream time reaches the next multiple of ten minutes.

    The records are in a store, by offset. Their offsets are committed, so an attribute would lose them at a restart.
    """

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self.held: KeyValueStore = context.store("held-clicks")
        context.schedule(10 * MINUTE, PunctuationType.STREAM_TIME, self.punctuate, name="ten minutes")

    def process(self, record: Record) -> None:
        metadata = self.context.record_metadata
        assert metadata is not None  # it is None only outside `process`
        self.held.put(f"{metadata.offset:019}", [record.key, record.value, record.timestamp])

    def punctuate(self, now_ms: int) -> None:
        for offset, (key, value, timestamp) in sorted(self.held.items()):
            self.held.delete(offset)
            self.context.forward(Record(key, value, timestamp))


def topology() -> Topology:
    builder = StreamsBuilder()
    clicks = builder.stream("clicks")
    clicks.process(EveryTenMinutes, builder.add_store("held-clicks"), name="held").to("held")
    sessions = clicks.group_by_key().session_window(gap=10 * MINUTE, grace=5 * MINUTE)
    sessions.aggregate("sessions", n=Count()).on_update().to("sessions")
    return builder.build()


def main() -> None:
    driver = TopologyTestDriver(topology())
    for minute in (1, 4, 15, 8, 40, 12):  # 8 joins two sessions; 12 is late
        driver.pipe("clicks", key=b"ann", value=b"{}", timestamp=minute * MINUTE)
        print(f"minute {minute}: {len(driver.read('held'))} forwarded")
    for record in driver.read("sessions"):
        window = json.loads(record.key or b"")
        count = "is replaced" if record.value is None else f"has {json.loads(record.value)['n']}"
        print(f"{window['start'] // MINUTE} to {window['end'] // MINUTE} {count}")
    print(f"late: {[record.timestamp // MINUTE for record in driver.read('clicks-late')]}")


if __name__ == "__main__":
    main()
# late: [12]
