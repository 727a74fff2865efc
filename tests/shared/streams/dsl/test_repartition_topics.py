"""The repartition topics that the DSL inserts before a grouping or join with a changed key."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from penstock.shared.common.errors import ConfigError, SchemaMismatch
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.record import Record
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.window_result import WindowResult
from penstock.shared.testing.topology_test_driver import APPLICATION, TopologyTestDriver


class Order(msgspec.Struct):
    """A value."""

    user: str
    amount: int = 0


def driver_of(builder: StreamsBuilder) -> TopologyTestDriver:
    return TopologyTestDriver(builder.build(), errors=ErrorHandlers())


def by_user() -> StreamsBuilder:
    builder = StreamsBuilder()
    orders = builder.stream("orders", Order).key_by(lambda record: record.value.user, name="by-user")
    orders.group_by_key().tumbling_window(10).aggregate("w", n=Count(), sum=Sum("amount")).on_close().to("out")
    return builder


def test_a_changed_key_goes_through_a_topic_before_it_is_grouped() -> None:
    """Records are grouped by the new key, with their timestamps and types, also after a crash."""
    driver = driver_of(by_user())
    for at, user in ((1, "ann"), (2, "bob"), (3, "ann"), (12, "ann")):
        value = msgspec.json.encode({"user": user, "amount": at})
        driver.pipe("orders", key=b"order-%d" % at, value=value, timestamp=at)
        driver.crash()
        driver.restore()
    got = [msgspec.json.decode(record.value or b"") for record in driver.read("out")]
    assert [(r["key"], r["n"], r["sum"]) for r in got] == [("ann", 2, 4), ("bob", 1, 2)]
    assert driver.task.sources == {"orders": 4, f"{APPLICATION}-by-user-repartition": 4}


def test_the_topic_is_the_applications_own() -> None:
    """The repartition topic has the application's name as prefix. It is read as a source and is not an output."""
    topology = by_user().build()
    assert topology.internal_topics() == ["by-user-repartition"]
    named = topology.of_application("shop")
    assert named.internal_topics() == ["shop-by-user-repartition"]
    assert named.of_application("other") is named
    assert named.source_topics() == ["orders", "shop-by-user-repartition"]
    assert named.output_topics() == ["out", "orders-dlq", "orders-late"]
    (schema,) = named.schemas()
    assert (schema.source, schema.late, schema.upstream) == ("shop-by-user-repartition", "orders-late", ("source-4",))


def test_it_is_described_in_parts() -> None:
    """The text description has a paragraph for each sub-topology. The flowchart has a dotted arrow between them."""
    topology = by_user().build()
    assert topology.describe().splitlines() == [
        "Sub-topology 0:",
        "  Source: source-1 (topic: orders) --> by-user",
        "  Processor: by-user (stores: []) --> keyed-2",
        "  Processor: keyed-2 (stores: []) --> sink-3",
        "  Sink: sink-3 (topic: by-user-repartition) --> none",
        "Sub-topology 1:",
        "  Source: source-4 (topic: by-user-repartition) --> w",
        "  Processor: w (stores: [w]) --> sink-5",
        "  Sink: sink-5 (topic: out) --> none",
    ]
    assert "  n3 -.-> n4" in topology.describe(format="mermaid").splitlines()


def test_nodes_that_share_a_store_are_one_part() -> None:
    """Nodes that read and write the same store cannot be separated, whatever topics they read."""
    builder = StreamsBuilder()
    builder.add_store("s")
    for topic in ("a", "b", "c"):
        builder.stream(topic).process(Processor, *(["s"] if topic != "b" else []), name=f"from-{topic}")
    assert builder.build().sub_topologies() == [["source-1", "from-a", "source-3", "from-c"], ["source-2", "from-b"]]


def test_one_topic_serves_all_that_comes_after_it() -> None:
    """A changed stream that is grouped twice passes one topic once. A stream with its original key passes none."""
    builder = StreamsBuilder()
    stream = builder.stream("in").select_key(lambda record: "k")
    for name in ("a", "b"):
        stream.group_by_key().tumbling_window(10).aggregate(name, n=Count()).on_close().to("out")
    assert builder.build().internal_topics() == ["key_by-2-repartition"]
    stream.filter(lambda record: True).group_by_key()
    assert len(builder.build().internal_topics()) == 2
    other = StreamsBuilder()
    other.stream("in").map_values(lambda value: value).group_by_key()
    assert other.build().internal_topics() == []


def test_a_named_change_of_the_key_names_the_topic() -> None:
    """The name of `key_by`, `map`, `flat_map` or `process` stays the topic's name if nodes follow it. The last change
    of the key counts. Two merged streams with different names have the name of the merge."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    key_by = stream.key_by(lambda record: "k", name="key")
    key_by.filter(bool).map_values(str).group_by_key()
    stream.map(lambda record: record, name="map").filter(bool).merge(key_by).group_by_key()
    stream.flat_map(lambda record: [], name="flat_map").branch(bool)[0].group_by_key()
    stream.process(Processor, name="process").peek(print).repartition().key_by(str).group_by_key()
    assert [topic.rpartition("-")[0] for topic in builder.build().internal_topics()] == [
        "key",
        "merge-8",
        "flat_map",
        "process",
        "key_by-20",
    ]


def test_a_topic_of_an_earlier_topology_can_be_kept() -> None:
    """The name of an unnamed node of an earlier topology can be passed as `name`, also before a new node gets it."""
    builder = StreamsBuilder()
    builder.stream("in").key_by(lambda record: "k", name="filter-2").filter(bool).group_by_key()
    assert builder.build().internal_topics() == ["filter-2-repartition"]


def test_the_remedy_for_a_renamed_topic_of_a_store_works() -> None:
    """After a node is inserted before an unnamed `key_by`, a store cannot be restored, although all records are read.
    The part of the old topic's name as `name` restores it."""

    def build(*, name: str | None = None, filtered: bool = True) -> Topology:
        builder = StreamsBuilder()
        stream = builder.stream("in")
        stream = stream.filter(lambda record: True) if filtered else stream
        stream.key_by(lambda record: "k", name=name).group_by_key().aggregate("s", n=Count()).to_stream().to("out")
        return builder.build().of_application(APPLICATION)

    driver = TopologyTestDriver(build(filtered=False), errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=1)
    driver.topology = build()
    with pytest.raises(SchemaMismatch, match=f"{APPLICATION}-key_by-2-repartition"):
        driver.restore()
    driver.topology = build(name="key_by-2")
    driver.restore()
    driver.pipe("in", key=b"a", value=b"{}", timestamp=2)
    assert [msgspec.json.decode(record.value or b"")["n"] for record in driver.read("out")] == [1, 2]


def test_a_named_topic_has_the_records_of_one_node() -> None:
    """A second stream of the same named `key_by` needs a name of its own."""
    builder = StreamsBuilder()
    stream = builder.stream("in").key_by(lambda record: "k", name="key")
    stream.filter(bool).group_by_key()
    other = stream.filter_not(bool)
    for use in (other.group_by_key, lambda: other.left_join(builder.table("t"), max)):
        with pytest.raises(ConfigError, match=r"'key-repartition'.*'filter-2'.*'filter_not-\d'"):
            use()
    other.key_by(lambda record: record.key, name="other").group_by_key()
    assert builder.build().internal_topics() == ["key-repartition", "other-repartition"]


def test_the_remedy_for_a_second_topic_of_a_name_works_for_keys_of_bytes() -> None:
    """The error's `key_by` keeps the type of the keys. With the default, bytes would be rejected as keys."""
    builder = StreamsBuilder()
    stream = builder.stream("in").key_by(lambda record: b"k", key="bytes", name="key")
    stream.filter(bool).group_by_key().aggregate("first", n=Count()).to_stream().to("out")
    other = stream.filter_not(bool)
    with pytest.raises(ConfigError, match=re.escape('key_by(lambda record: record.key, key="bytes", name=...)')):
        other.group_by_key()


def test_map_and_flat_map_change_the_key() -> None:
    """Records are grouped by keys from `map`, `flat_map`, `group_by` or a processor."""

    class Swap(Processor):
        """Replaces the key with the value's user."""

        def process(self, record: Record) -> None:
            self.context.forward(record._replace(key=record.value["user"]))

    def swap(record: Record) -> Record:
        return record._replace(key=record.value["user"])

    builder = StreamsBuilder()
    stream = builder.stream("in")
    grouped = {
        "map": stream.map(swap).group_by_key(),
        "flat_map": stream.flat_map(lambda record: [swap(record)] * 2).group_by_key(),
        "group_by": stream.group_by(lambda record: record.value["user"]),
        "process": stream.process(Swap).group_by_key(),
        "repartition": stream.map(swap).repartition().group_by_key(),
    }
    for name, one in grouped.items():
        one.tumbling_window(10).aggregate(f"w-{name}", n=Count()).on_update().to(name)
    driver = driver_of(builder)
    driver.pipe("in", key=b"x", value=b'{"user":"ann"}')
    counts = {name: msgspec.json.decode(driver.read(name)[-1].value or b"") for name in grouped}
    assert {name: (one["key"], one["n"]) for name, one in counts.items()} == {
        name: ("ann", 2 if name == "flat_map" else 1) for name in grouped
    }


def test_records_without_a_key_go_no_further() -> None:
    """A record whose new key is None is skipped before the topic, and counted."""
    builder = StreamsBuilder()
    builder.stream("in").group_by(lambda record: None).tumbling_window(10).aggregate("w", n=Count()).on_update().to("o")
    driver = driver_of(builder)
    driver.pipe("in", key=b"x", value=b"{}")
    assert (driver.read("o"), driver.task.metrics.skipped_total) == ([], 1)


@pytest.mark.parametrize(("key", "made"), [("string", 7), ("string", b"k"), ("bytes", "k")])
def test_a_key_of_another_type_is_a_dead_letter(key: str, made: object) -> None:
    """The key function must return the declared type: text or bytes."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by(lambda record: made, key=key)  # type: ignore[arg-type]
    grouped.tumbling_window(10).aggregate("w", n=Count()).on_update().to("out")
    driver = driver_of(builder)
    driver.pipe("in", key=b"x", value=b"{}")
    assert len(driver.read("in-dlq")) == 1


def test_both_sides_of_a_join_are_brought_together() -> None:
    """A stream with a changed key joins one with its original key, and also joins a table."""
    builder = StreamsBuilder()
    orders = builder.stream("orders").key_by(lambda record: record.value["user"], name="by-user")
    orders.join(builder.stream("visits"), lambda a, b: [a["n"], b], JoinWindows.of(10), name="j").to("joined")
    orders.join(builder.table("users"), lambda a, b: [a["n"], b]).to("known")
    driver = driver_of(builder)
    driver.pipe("users", key=b"ann", value=b'"Oslo"', timestamp=0)
    driver.pipe("visits", key=b"ann", value=b'"home"', timestamp=1)
    driver.pipe("orders", key=b"1", value=b'{"user":"ann","n":7}', timestamp=2)
    assert [record.value for record in driver.read("joined")] == [b'[7,"home"]']
    assert [record.value for record in driver.read("known")] == [b'[7,"Oslo"]']


def test_bytes_stay_bytes() -> None:
    """Keys and values that are bytes pass the topic unchanged."""
    builder = StreamsBuilder()
    builder.stream("in", bytes, key="bytes").key_by(lambda r: r.value, key="bytes").repartition().to("out")
    driver = driver_of(builder)
    driver.pipe("in", key=b"x", value=b"\xff\x00")
    assert [(record.key, record.value) for record in driver.read("out")] == [(b"\xff\x00", b"\xff\x00")]


def test_streams_of_different_keys_do_not_merge() -> None:
    """A merged stream has one key type. A changed key on either side requires the topic."""
    builder = StreamsBuilder()
    with pytest.raises(ConfigError, match=r"string.*bytes"):
        builder.stream("a").merge(builder.stream("b", key="bytes"))
    builder.stream("c").merge(builder.stream("d").key_by(lambda r: "k")).group_by_key()
    assert builder.build().internal_topics() == ["merge-6-repartition"]


@pytest.mark.parametrize("emit", ["on_close", "on_update"])
def test_windows_of_windows(emit: str) -> None:
    """A windowed result with a new key passes a repartition topic and is decoded as a WindowResult again."""
    builder = StreamsBuilder()
    windows = builder.stream("c", key="bytes").group_by_key().session_window(10).aggregate("s", n=Count())
    seen: list[Any] = []
    keyed = getattr(windows, emit)().key_by(lambda r: r.key.key.decode(), name="k")
    results = keyed.filter(lambda r: r.value is not None)
    counts = results.repartition().peek(lambda r: seen.append(r.value)).map_values(lambda v: v.results)
    counts.group_by_key().tumbling_window(100).aggregate("t", n=Sum("n")).on_update().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (1, 5, 90):
        driver.pipe("c", key=b"a", value=b"{}", timestamp=at)
    expected = [WindowResult(b"a", 1, 5, {"n": 2})]
    if emit == "on_update":
        expected = [WindowResult(b"a", 1, 1, {"n": 1}), *expected, WindowResult(b"a", 90, 90, {"n": 1})]
    assert seen == expected
    assert driver.read("out") != []
    assert driver.read("c-dlq") == []


def test_windows_join_a_table() -> None:
    """A windowed result under its record's key is joined with that key's row."""
    builder = StreamsBuilder()
    windows = builder.stream("c").group_by_key().session_window(10).aggregate("s", n=Count()).on_close()
    users = builder.table("users")
    windows.key_by(lambda r: r.key.key, name="k").join(users, lambda w, user: [w.results, user]).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("users", key=b"a", value=b'{"q":1}', timestamp=0)
    for at in (1, 100):
        driver.pipe("c", key=b"a", value=b"{}", timestamp=at)
    assert [record.value for record in driver.read("out")] == [b'[{"n":1},{"q":1}]']


@pytest.mark.parametrize("grouped_first", [False, True])
def test_a_left_join_keeps_records_without_a_key(grouped_first: bool) -> None:
    """A left join forwards a record without a key unmatched, after the repartition topic. A grouping of the same stream
    skips it."""
    builder = StreamsBuilder()
    orders = builder.stream("orders").key_by(lambda record: record.value["user"], name="by-user")
    if grouped_first:
        orders.group_by_key().tumbling_window(10).aggregate("w", n=Count()).on_update().to("counts")
    orders.left_join(builder.table("users"), lambda order, user: [order["user"], user]).to("out")
    driver = driver_of(builder)
    for user in (b"null", b'"ann"'):
        driver.pipe("orders", key=b"k", value=b'{"user":%s}' % user, timestamp=5)
    assert [record.value for record in driver.read("out")] == [b"[null,null]", b'["ann",null]']
    assert not grouped_first or len(driver.read("counts")) == 1
    assert driver.task.metrics.skipped_total == grouped_first
