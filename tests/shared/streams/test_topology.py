"""A topology: how its nodes, stores and topics are described, how it is loaded by name, and which are rejected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.lake.column_names import CLOSED_COLUMNS, LATE_COLUMNS, STATE_COLUMNS
from penstock.shared.common.serialization import bytes_deserializer
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import STORES_MAX
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.builder import RESERVED_RESULTS, StreamsBuilder
from penstock.shared.streams.lake_names import require_lake_names
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.result_encoders import encode_json
from penstock.shared.streams.state.store_builder import StoreBuilder
from penstock.shared.streams.topology import ProcessorNode, SinkNode, SourceNode, Topology
from penstock.shared.streams.topology_loading import load_topology


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
    assert small().describe(format="mermaid").splitlines() == [
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
    """Each source topic is listed once. Outputs are sinks, dead-letter topics and, of sources with windows, late
    topics, each once."""
    topology = small()
    topology.add(SinkNode("out-2", "out", encode_json), "work")
    topology.add(source("more", "in2"))
    assert topology.source_topics() == ["in", "in2"]
    assert topology.output_topics() == ["out", "in-dlq", "in-late", "in2-dlq"]
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


def test_an_unknown_format_of_the_description() -> None:
    """`describe` rejects a format other than text and Mermaid."""
    with pytest.raises(ConfigError, match="format must be"):
        small().describe(format="svg")  # type: ignore[arg-type]


def test_mermaid_of_odd_names() -> None:
    """Characters with a meaning in Mermaid are escaped in labels."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(5)
    windows.aggregate('my "s" ] --> <b>#1`\n', n=Count()).on_close().to("out")
    label = "my #34;s#34; #93; --#62; #60;b#62;#35;1#96;#10;"
    assert builder.build().describe(format="mermaid").splitlines() == [
        "flowchart LR",
        '  n0["source-1: in"]',
        f'  n1["{label}"]',
        f'  n1 --- s0[("{label}")]',
        '  n2["sink-2: out"]',
        "  n0 --> n1",
        "  n1 --> n2",
    ]


TOPOLOGIES_MODULE = """
from penstock.shared.streams.dsl.builder import StreamsBuilder

CONSTANT = 3

def build(topic="in", gap="10"):
    builder = StreamsBuilder()
    builder.stream(topic).to(f"{topic}-{gap}")
    return builder.build()

def unfinished():
    return StreamsBuilder()

def empty():
    return StreamsBuilder().build()
"""


@pytest.fixture
def my_topologies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_topologies.py").write_text(TOPOLOGIES_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("my_topologies", None)


@pytest.mark.usefixtures("my_topologies")
def test_a_function_of_the_current_folder() -> None:
    """A module of the current folder is found, and its function gets the options."""
    topology = load_topology("my_topologies:build", {"topic": "clicks", "gap": "5"})
    assert topology.source_topics() == ["clicks"]
    assert "clicks-5" in topology.output_topics()


@pytest.mark.usefixtures("my_topologies")
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module:build", {}, "no_such_module:build: No module named 'no_such_module'"),
        ("my_topologies:biuld", {}, "my_topologies:biuld: module 'my_topologies' has no attribute 'biuld'"),
        ("my_topologies:CONSTANT", {}, "my_topologies:CONSTANT: 'int' object is not callable"),
        ("my_topologies:build", {"gpa": "5"}, "unexpected keyword argument 'gpa'"),
        ("my_topologies:unfinished", {}, "my_topologies:unfinished returned StreamsBuilder, not a Topology"),
        ("my_topologies:empty", {}, "no stream was defined"),
    ],
)
def test_an_invalid_topology_is_rejected_with_the_reason(name: str, options: dict[str, str], message: str) -> None:
    """A module, function or option that does not exist, or a result that is not a topology, raises a ConfigError with
    the reason."""
    with pytest.raises(ConfigError, match="topology: ") as raised:
        load_topology(name, options)
    assert message in str(raised.value)


@pytest.mark.usefixtures("my_topologies")
def test_an_error_of_the_modules_code_is_raised_unchanged(tmp_path: Path) -> None:
    """An AttributeError of the module's own code is no missing function, so it is raised unchanged."""
    (tmp_path / "my_topologies.py").write_text("import json\njson.dump_all\n")
    with pytest.raises(AttributeError, match="dump_all"):
        load_topology("my_topologies:build", {})


def session_stores(*names: str, result: str = "n") -> tuple[StoreSchema, ...]:
    """Return the schemas of session stores with these names, each with one aggregation."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    for name in names:
        stream.group_by_key().session_window(10).aggregate(name, **{result: Count()}).on_close().to("out")
    return builder.build().schemas()


@pytest.mark.parametrize("name", STATE_COLUMNS)
def test_a_store_that_hides_a_column_of_state_is_rejected(name: str) -> None:
    """A store named like a column of `state`, in any case, is rejected. The error names the store and the column."""
    message = f"'{name.title()}': .*table state .*'{name}'"
    with pytest.raises(ConfigError, match=message):
        require_lake_names(session_stores(name.title()))


@pytest.mark.parametrize(
    ("table", "name"),
    [
        *(("closed", name) for name in sorted({*CLOSED_COLUMNS} - RESERVED_RESULTS)),
        *(("late", name) for name in sorted({*LATE_COLUMNS} - {*CLOSED_COLUMNS})),
    ],
)
def test_an_aggregation_that_hides_a_column_of_closed_or_late_is_rejected(table: str, name: str) -> None:
    """An aggregation named like a column of `closed` or `late` is rejected, even if the DSL accepts the name."""
    message = f"'visits': .*{table}/visits .*'{name}'"
    with pytest.raises(ConfigError, match=message):
        require_lake_names(session_stores("visits", result=name))


@pytest.mark.parametrize("name", ["a b", "a=b", "a/b", "a,b", "a;b"])
def test_a_store_name_that_is_not_a_column_name_is_rejected(name: str) -> None:
    """An invalid name of a column is rejected. The error lists the invalid characters."""
    with pytest.raises(ConfigError, match=r"store '.*'.*table state"):
        require_lake_names(session_stores(name))


@pytest.mark.parametrize("name", ["a|b", "x[1]", "95%"])
def test_characters_with_a_meaning_in_a_path_are_for_aggregations_only(name: str) -> None:
    """A store's name is also a folder, an aggregation's only a column."""
    require_lake_names(session_stores("visits", result=name))
    with pytest.raises(ConfigError, match="folder"):
        require_lake_names(session_stores(name))


def test_names_that_differ_in_case_alone_are_rejected() -> None:
    """Store names that differ only in case are rejected, because Delta has one column for both."""
    with pytest.raises(ConfigError, match=r"'Banks'.*'banks'"):
        require_lake_names(session_stores("banks", "Banks"))


def test_names_that_delta_accepts_are_valid() -> None:
    """Columns of the other table are valid names, and so is every character that Delta accepts."""
    require_lake_names(session_stores("day", "clicks-session", "a.b", result="run"))
