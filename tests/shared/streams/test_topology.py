"""A topology's nodes, stores and topics: how they are described, and which are rejected."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.serialization import bytes_deserializer
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import STORES_MAX
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.result_encoders import encode_json
from penstock.shared.streams.state.store_builder import StoreBuilder
from penstock.shared.streams.topology import ProcessorNode, SinkNode, SourceNode, Topology


def source(name: str, topic: str) -> SourceNode:
    return SourceNode(name, topic, "bytes", bytes_deserializer, f"{topic}-dlq", f"{topic}-late")


def store(name: str) -> StoreBuilder:
    count = (AggregationSchema.of("n", Count()),)
    return StoreBuilder(
        StoreSchema(name, "session", "bytes", 1, 0, "on_close", "in", None, None, None, aggregations=count)
    )


def small() -> Topology:
    topology = Topology()
    topology.add_store(store("s"))
    topology.add(source("from", "in"))
    topology.add(ProcessorNode("work", Processor, ("s",)), "from")
    topology.add(SinkNode("out-1", "out", encode_json), "work", "from")
    return topology


def test_describe() -> None:
    """The text has one line a node, with its topic or stores and its children."""
    assert small().describe().splitlines() == [
        "Source: from (topic: in) --> work, out-1",
        "Processor: work (stores: [s]) --> out-1",
        "Sink: out-1 (topic: out) --> none",
    ]


def test_mermaid() -> None:
    """The flowchart has every node with its stores, and every edge."""
    assert small().mermaid().splitlines() == [
        "flowchart LR",
        '  n0["from: in"]',
        '  n1["work"]',
        '  n1 --- s0[("s")]',
        '  n2["out-1: out"]',
        "  n0 --> n1",
        "  n0 --> n2",
        "  n1 --> n2",
    ]


def test_topics() -> None:
    """Each source topic is listed once. Outputs are sinks, dead-letter topics and, with windows, late topics, each
    once."""
    topology = small()
    topology.add(SinkNode("out-2", "out", encode_json), "work")
    topology.add(source("more", "in2"))
    assert topology.source_topics() == ["in", "in2"]
    assert topology.output_topics() == ["out", "in-dlq", "in-late", "in2-dlq", "in2-late"]
    builder = StreamsBuilder()
    builder.stream("a").to("b")
    assert builder.build().output_topics() == ["b", "a-dlq"]


def test_schemas_are_in_the_order_of_the_stores() -> None:
    """Schemas are in the order in which the stores were added, which is their number in the changelog."""
    topology = small()
    topology.add_store(store("a"))
    assert [schema.name for schema in topology.schemas()] == ["s", "a"]


def test_a_name_is_taken_once() -> None:
    """A second node or store of the same name is rejected."""
    topology = small()
    with pytest.raises(ConfigError, match="name 'work'"):
        topology.add(ProcessorNode("work", Processor), "from")
    with pytest.raises(ConfigError, match="'s'"):
        topology.add_store(store("s"))


def test_a_parent_must_be_there_and_feed() -> None:
    """A node's parent must exist and must not be a sink."""
    topology = small()
    with pytest.raises(ConfigError, match=r"'x'.*'nobody'"):
        topology.add(ProcessorNode("x", Processor), "nobody")
    with pytest.raises(ConfigError, match=r"'out-1'.*'x'"):
        topology.add(ProcessorNode("x", Processor), "out-1")


def test_sources_alone_have_no_parent() -> None:
    """A source with a parent and a processor without one are rejected."""
    topology = small()
    with pytest.raises(ConfigError, match=r"'x' .*no parent"):
        topology.add(source("x", "t"), "from")
    with pytest.raises(ConfigError, match=r"'x' .*a parent"):
        topology.add(ProcessorNode("x", Processor))


def test_a_topic_has_one_source() -> None:
    """A second source of a topic is rejected, because each record would be processed twice."""
    with pytest.raises(ConfigError, match="'in'"):
        small().add(source("again", "in"))


def test_a_topic_is_a_stream_or_a_global_table() -> None:
    """A topic of a stream and of a global table is rejected with the same error in either order."""
    first, second = StreamsBuilder(), StreamsBuilder()
    first.stream("t")
    with pytest.raises(ConfigError, match="'t'") as stream_first:
        first.global_table("t")
    second.global_table("t")
    with pytest.raises(ConfigError, match="'t'") as table_first:
        second.stream("t")
    assert str(stream_first.value) == str(table_first.value)


def test_stores_are_bounded() -> None:
    """The 257th store is rejected, because a store's number is one byte in the changelog."""
    topology = Topology()
    for number in range(STORES_MAX):
        topology.add_store(store(f"s{number}"))
    with pytest.raises(ConfigError, match="more than 256 stores"):
        topology.add_store(store("one-more"))


def test_describe_as_mermaid() -> None:
    """`describe` returns text or Mermaid, and rejects other formats."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    topology = builder.build()
    assert topology.describe(format="mermaid") == topology.mermaid() != topology.describe()
    with pytest.raises(ConfigError, match="format must be"):
        topology.describe(format="svg")  # type: ignore[arg-type]


def test_mermaid_of_odd_names() -> None:
    """Characters with a meaning in Mermaid are escaped in labels."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(5)
    windows.aggregate('my "s" ] --> <b>#1`\n', n=Count()).on_close().to("out")
    label = "my #34;s#34; #93; --#62; #60;b#62;#35;1#96;#10;"
    assert builder.build().mermaid().splitlines() == [
        "flowchart LR",
        '  n0["source-1: in"]',
        f'  n1["{label}"]',
        f'  n1 --- s0[("{label}")]',
        '  n2["sink-2: out"]',
        "  n0 --> n1",
        "  n1 --> n2",
    ]
