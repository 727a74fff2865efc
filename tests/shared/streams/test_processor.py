"""Headers of records that processors forward."""

from __future__ import annotations

from penstock.streams import Processor, Record, StreamsBuilder
from penstock.testing import TopologyTestDriver


class Tagging(Processor):
    def process(self, record: Record) -> None:
        assert record.headers == (("trace", b"1"),)
        self.context.forward(Record(record.key, record.value, record.timestamp, {"tag": b"2", "none": None}))


class Reading(Processor):
    def process(self, record: Record) -> None:
        assert record.headers == (("tag", b"2"), ("none", None))
        self.context.forward(record)


def test_headers_may_be_a_dict() -> None:
    """The next processor and the sink read pairs."""
    builder = StreamsBuilder()
    builder.stream("clicks").process(Tagging).process(Reading).to("tagged")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("clicks", key=b"ann", value=b"1", headers={"trace": b"1"})
    driver.commit()
    (record,) = driver.read("tagged")
    assert record.headers == (("tag", b"2"), ("none", None))
