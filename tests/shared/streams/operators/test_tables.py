"""Tables: rows from a topic or an aggregation without windows, joins with them, and stores of processors."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, SchemaMismatch
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.common.serialization import bytes_deserializer, struct_deserializer
from penstock.shared.streams.aggregations.aggregation import Aggregate, Aggregation, Count, Max, Mean, Min, Sum
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.first_last import Last
from penstock.shared.streams.changelog.store_schema import check_schema
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.tables import RowValue
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples


class User(msgspec.Struct):
    """A row."""

    city: str


def pair(value: Any, row: Any) -> Any:
    return {"value": value, "city": None if row is None else row.city}


def joined(*, left: bool) -> TopologyTestDriver:
    builder = StreamsBuilder()
    clicks, users = builder.stream("clicks"), builder.table("users", User)
    (clicks.left_join(users, pair) if left else clicks.join(users, pair)).to("out")
    return TopologyTestDriver(builder.build(), errors=ErrorHandlers())


def out(driver: TopologyTestDriver) -> list[Any]:
    return [msgspec.json.decode(record.value or b"null") for record in driver.read("out")]


@pytest.mark.parametrize("left", [False, True])
def test_a_stream_looks_up_the_row_of_its_key(left: bool) -> None:
    """A join uses the row as of its record. Without a row, a left join passes None and an inner join has no result."""
    driver = joined(left=left)
    driver.pipe("clicks", key=b"ann", value=b"1", timestamp=5)
    driver.pipe("users", key=b"ann", value=b'{"city":"Oslo"}', timestamp=6)
    driver.pipe("clicks", key=b"ann", value=b"2", timestamp=7)
    driver.crash()
    driver.restore()
    driver.pipe("clicks", key=b"ann", value=b"3", timestamp=8)
    driver.pipe("users", key=b"ann", value=None, timestamp=9)
    driver.pipe("clicks", key=b"ann", value=b"4", timestamp=10)
    found = [(row["value"], row["city"]) for row in out(driver)]
    lone = [(1, None)] if left else []
    assert found == [*lone, (2, "Oslo"), (3, "Oslo"), *([(4, None)] if left else [])]


def test_records_without_key_or_value_are_skipped() -> None:
    """A stream record without a key or value, and a table record without a key, are skipped and counted."""
    driver = joined(left=False)
    driver.pipe("clicks", key=None, value=b"1")
    driver.pipe("clicks", key=b"k", value=None)
    driver.pipe("users", key=None, value=b'{"city":"Oslo"}')
    assert (out(driver), driver.task.metrics.skipped_total, len(driver.task.stores["users"])) == ([], 3, 0)


def test_a_left_join_keeps_what_has_no_key() -> None:
    """A left join passes None for a record without a key. A record without a value is skipped."""
    driver = joined(left=True)
    driver.pipe("clicks", key=None, value=b"1")
    driver.pipe("clicks", key=None, value=None)
    assert (out(driver), driver.task.metrics.skipped_total) == ([{"value": 1, "city": None}], 1)


@pytest.mark.parametrize("left", [False, True])
def test_a_key_function_is_not_called_without_a_value(left: bool) -> None:
    """A record without a value is skipped and counted before the key function, which may read the value, is called."""
    builder = StreamsBuilder()
    stream, users = builder.stream("in"), builder.global_table("users", User)
    (stream.left_join if left else stream.join)(users, pair, key=lambda record: record.value["user"]).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=None)
    assert (driver.metrics()["skipped_records"], driver.read("in-dlq"), driver.read("out")) == (1, [], [])


def test_a_row_that_cannot_be_read_is_a_dead_letter() -> None:
    """A table record that cannot be decoded becomes a dead letter, and the old row stays."""
    driver = joined(left=False)
    driver.pipe("users", key=b"k", value=b'{"city":"Oslo"}')
    driver.pipe("users", key=b"k", value=b'{"city":7}')
    driver.pipe("clicks", key=b"k", value=b"1", timestamp=1)
    assert (len(driver.read("users-dlq")), out(driver)) == (1, [{"value": 1, "city": "Oslo"}])


def test_changes_of_a_table_are_a_stream() -> None:
    """A table's stream has a record for each new row and each deletion."""
    builder = StreamsBuilder()
    builder.table("users", bytes, name="people").to_stream().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for value in (b"a", b"b", None):
        driver.pipe("users", key=b"k", value=value)
    assert [record.value for record in driver.read("out")] == [b"a", b"b", None]
    assert driver.topology.output_topics() == ["out", "users-dlq"]


def test_a_table_rejects_state_of_another_topic() -> None:
    """A table rejects state that was written for another source topic."""

    def schemas(topic: str) -> Any:
        builder = StreamsBuilder()
        builder.table(topic, name="t")
        return builder.build().schemas()

    check_schema(schemas("a"), schemas("a"))
    with pytest.raises(SchemaMismatch, match=r"'a'.*'b'"):
        check_schema(schemas("a"), schemas("b"))


def test_a_processors_own_store() -> None:
    """A processor reads and writes its own store by key, also after a crash. A second store of the same name is
    rejected."""

    class Numbered(Processor):
        """Numbers each key's records."""

        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            self.store = context.store("numbers")

        def process(self, record: Record) -> None:
            number = (self.store.get(record.key) or 0) + 1
            self.store.put(record.key, number if number < 3 else None)
            self.context.forward(record._replace(value=number))

    builder = StreamsBuilder()
    builder.stream("in").process(Numbered, builder.add_store("numbers", int)).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for _ in range(5):
        driver.pipe("in", key=b"k", value=b"{}")
        driver.crash()
        driver.restore()
    assert out(driver) == [1, 2, 3, 1, 2]
    with pytest.raises(ConfigError, match="'numbers' exists already"):
        builder.add_store("numbers")


@pytest.mark.parametrize("value", ["text", bytearray(b"raw")])
def test_a_store_of_bytes_takes_bytes_only(value: Any) -> None:
    """`put` of another value makes the record a dead letter, and the task continues."""

    class Keeping(Processor):
        def process(self, record: Record) -> None:
            self.context.store("raw").put(record.key, value if record.value["bad"] else b"raw")

    builder = StreamsBuilder()
    builder.stream("in").process(Keeping, builder.add_store("raw", bytes))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for bad in (b"true", b"false"):
        driver.pipe("in", key=b"k", value=b'{"bad":%s}' % bad)
    assert len(driver.read("in-dlq")) == 1
    assert driver.store("raw").get("k") == b"raw"


class Ratio(msgspec.Struct):
    """A value with a float."""

    x: float


@pytest.mark.parametrize(
    ("value_type", "good", "bad"),
    [
        (Ratio, Ratio(1.0), Ratio(float("nan"))),
        (Ratio, Ratio(1.0), {"y": 1.0}),
        (Ratio, Ratio(1.0), {"x": 1.0}),
        (float, 1.0, float("inf")),
        (float | None, 1.0, float("nan")),
        (int, 1, 1.5),
        (dict[str, Any], {"x": [1]}, {"x": (1,)}),
        (dict, {"x": [1, 0.5, True, None, "a", {}]}, {"x": (1,)}),
        (dict, [1], (1,)),
        (dict, 0.5, float("nan")),
        (dict, {"1": "a"}, {1: "a"}),
        (dict, {"x": 1.0}, Ratio(1.0)),
        (dict, {"at": "2026-01-01T00:00:00"}, {"at": datetime(2026, 1, 1)}),
        (dict, [{"raw": "eA=="}], [{"raw": b"x"}]),
    ],
)
def test_a_store_takes_only_values_that_can_be_restored(value_type: Any, good: Any, bad: Any) -> None:
    """`put` of a value that a restore would not give back makes the record a dead letter. The row stays as it was."""

    class Keeping(Processor):
        def process(self, record: Record) -> None:
            self.context.store("mine").put(record.key, bad if record.value["bad"] else good)

    builder = StreamsBuilder()
    builder.stream("in").process(Keeping, builder.add_store("mine", value_type))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for is_bad in (b"false", b"true"):
        driver.pipe("in", key=b"k", value=b'{"bad":%s}' % is_bad)
    driver.crash()
    driver.restore()
    assert len(driver.read("in-dlq")) == 1
    assert driver.store("mine").get("k") == good


@pytest.mark.parametrize("value_type", [dict, dict[str, int]])
def test_a_store_holds_the_types_that_a_restore_gives(value_type: Any) -> None:
    """A value of a subclass of `dict` is a plain `dict` at once, and not only after a restart."""

    class Keeping(Processor):
        def process(self, record: Record) -> None:
            self.context.store("mine").put(record.key, defaultdict(int, record.value))

    builder = StreamsBuilder()
    builder.stream("in").process(Keeping, builder.add_store("mine", value_type))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b'{"n":1}')
    before = driver.store("mine").get("k")
    driver.crash()
    driver.restore()
    after = driver.store("mine").get("k")
    assert [before, after] == [{"n": 1}] * 2
    assert [type(before), type(after)] == [dict] * 2


@pytest.mark.parametrize(
    ("value", "data", "row"),
    [(struct_deserializer(User), b'{"city":"Oslo"}', User("Oslo")), (bytes_deserializer, b"\xff", b"\xff")],
)
def test_a_table_keeps_the_type_of_its_deserializer(value: Any, data: bytes, row: Any) -> None:
    """The rows of a table that is read with `struct_deserializer` or `bytes_deserializer` have their type after a
    restart."""
    builder = StreamsBuilder()
    users = builder.table("users", value)
    found: list[Any] = []
    builder.stream("clicks").join(users, lambda click, user: found.append(user))
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("users", key=b"ann", value=data)
    for _ in range(2):
        driver.pipe("clicks", key=b"ann", value=b"1")
        driver.crash()
        driver.restore()
    assert found == [row, row]


@pytest.mark.parametrize("value", [dict, User, User | None, list[User], struct_deserializer(User)])
def test_a_json_null_deletes_a_row_of_every_type(value: Any) -> None:
    """A writer whose serializer writes `null` for None deletes rows as one that writes no value."""
    builder = StreamsBuilder()
    builder.table("users", value)
    builder.global_table("cities", value)
    driver = TopologyTestDriver(builder.build())
    for topic in ("users", "cities"):
        driver.pipe(topic, key=b"ann", value=b'[{"city":"Oslo"}]' if value == list[User] else b'{"city":"Oslo"}')
        assert driver.store(topic).get("ann") is not None
        driver.pipe(topic, key=b"ann", value=b"null")
        assert driver.store(topic).get("ann") is None


def test_the_error_for_a_value_that_never_equals_its_copy_names_the_cause() -> None:
    """A class without comparison by value is declared, and its copy looks the same. So the message names `eq`."""

    class Place(msgspec.Struct, eq=False):
        city: str

    builder = StreamsBuilder()
    builder.table("users", Place)
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("users", key=b"ann", value=b'{"city":"Oslo"}')
    (dead_letter,) = driver.read("users-dlq")
    message = dict(dead_letter.headers)["penstock.dlq.message"]
    assert b"Place(city='Oslo')" in message
    assert b"eq=False" in message


def test_a_table_rejects_objects_of_a_users_deserializer() -> None:
    """A user's deserializer has no type for a restore. A record whose value is not plain JSON becomes a dead letter."""
    builder = StreamsBuilder()
    builder.table("users", lambda _topic, data: User(data.decode()) if data != b"plain" else {"city": "Oslo"})
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for data in (b"plain", b"Bergen"):
        driver.pipe("users", key=b"ann", value=data)
    (dead_letter,) = driver.read("users-dlq")
    assert (dead_letter.value, driver.store("users").get("ann")) == (b"Bergen", {"city": "Oslo"})
    assert b"User" in dict(dead_letter.headers)["penstock.dlq.message"]


def test_a_rows_value_is_read_back_as_its_type() -> None:
    """A value is restored as its declared type, and bytes stay unchanged. The last value replaces earlier ones."""
    typed, raw = RowValue(User), RowValue(bytes)
    assert typed.from_columns(typed.to_columns(User("Oslo"))) == User("Oslo")
    assert raw.from_columns(raw.to_columns(b"\xff")) == b"\xff"
    assert typed.result(typed.merge(typed.initial(), typed.add(None, 1))) == typed.merge(1, None) == 1


INT64 = range(-(2**63), 2**63)
NUMBERS: dict[str, Aggregation[Any]] = {
    "count": Count(), "total": Sum("n"), "mean": Mean("ms"), "low": Min("ms"), "high": Max("n")
}  # fmt: skip
OBJECTS: dict[str, Aggregation[Any]] = {"last": Last("n"), "all": CollectList("n", limit=5)}


def add_small(state: list[int], value: Any) -> list[int]:
    state.append(value.n)
    if value.n == 3:
        raise ValueError("not three")
    return state[-4:]


OWN: dict[str, Aggregation[Any]] = {"own": Aggregate(list, add_small, lambda a, b: a + b)}
SETS = {"numbers": NUMBERS, "objects": NUMBERS | OBJECTS, "own": NUMBERS | OBJECTS | OWN}


class Value(msgspec.Struct):
    """A value with a field of each kind."""

    n: int
    ms: float | None = None


Piped = tuple[bytes | None, bytes | None, int]


@dataclass
class Model:
    """The expected rows, computed record by record."""

    aggregations: frozenset[str]
    taken: dict[str, list[tuple[int, Value]]] = field(default_factory=dict)
    rejected: int = 0
    skipped: int = 0
    out: list[tuple[bytes, Any, int]] = field(default_factory=list)
    """Every update: key, row and time."""

    def take(self, key: bytes | None, value: bytes | None, timestamp: int) -> None:
        try:
            text = None if key is None else key.decode()
            own = None if value is None else msgspec.json.decode(value, type=Value)
            if timestamp < 0:
                raise ValueError
            if text is None or own is None:
                self.skipped += 1
                return
            if own.n not in INT64 or ("own" in self.aggregations and own.n == 3):
                raise ValueError
            before = self.taken.get(text, [])
            if sum(v.n for _, v in before) + own.n not in INT64:
                raise ValueError
        except ValueError:
            self.rejected += 1
            return
        self.taken[text] = [*before, (timestamp, own)]
        self.out.append((text.encode(), self.row(text), self.latest(text)))

    def latest(self, key: str) -> int:
        return max(at for at, _ in self.taken[key])

    def row(self, key: str) -> dict[str, Any]:
        values = [v for _, v in self.taken[key]]
        n, ms = [v.n for v in values], [v.ms for v in values if v.ms is not None]
        last = max(enumerate(self.taken[key]), key=lambda one: (one[1][0], one[0]))[1][1].n
        mean = sum(ms) / len(ms) if ms else None
        row = {"key": key, "count": len(n), "total": sum(n), "mean": mean, "low": min(ms, default=None)}
        row |= {"high": max(n), "last": last, "all": n[:5], "own": n[-4:]}
        return {name: row[name] for name in ("key", *self.aggregations)}

    def rows(self) -> dict[str, Any]:
        return {key: self.row(key) for key in self.taken}


def aggregated(aggregations: dict[str, Aggregation[Any]], name: str = "s") -> Topology:
    builder = StreamsBuilder()
    table = builder.stream("in", value=Value).group_by_key().aggregate(name, **aggregations)
    table.to_stream().to("out")
    return builder.build()


@contextmanager
def folder(is_on_disk: bool) -> Iterator[StateDirectory | None]:
    """The folder of state on disk, with hardly any rows in memory."""
    with tempfile.TemporaryDirectory() as path:
        yield StateDirectory(path, "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=0) if is_on_disk else None


def written(driver: TopologyTestDriver) -> list[tuple[bytes, Any, int]]:
    out = driver.read("out")
    return [(r.key or b"", msgspec.json.decode(r.value or b""), r.timestamp or 0) for r in out]


keys = st.sampled_from([b"a", b"a", b"b", b"c", b"", None, b"\xff"])
numbers = st.one_of(st.integers(-9, 9), st.sampled_from([2**62, -(2**62), 2**63 - 1, 2**63]))
values = st.one_of(
    st.builds(lambda n, ms: b'{"n":%d,"ms":%s}' % (n, ms), numbers, st.sampled_from([b"null", b"0.5", b"-4", b"8.25"])),
    st.sampled_from([None, b"{", b"{}", b'{"n":"x"}']),
)
piped = st.tuples(keys, st.one_of(values, values, st.just(b'{"n":1}')), st.integers(-1, 60))
batches = st.lists(
    st.tuples(st.lists(piped, max_size=30), st.sampled_from(["commit", "commit", "nothing", "crash", "torn"])),
    max_size=8,
)


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("named", sorted(SETS))
@settings(max_examples=examples(30), deadline=None)
@given(plan=batches, deduplicate=st.booleans(), columns_min=st.sampled_from([1, 4, 1 << 30]))
def test_rows_are_those_of_a_dict(
    named: str, is_on_disk: bool, plan: list[Any], deduplicate: bool, columns_min: int
) -> None:
    """Rows, updates, rejected and skipped records agree for any batches, after crashes, in memory and on disk."""
    aggregations = SETS[named]
    with folder(is_on_disk) as state:
        driver = TopologyTestDriver(
            aggregated(aggregations),
            commit_each=False,
            deduplicate_updates=deduplicate,
            columns_min=columns_min,
            errors=ErrorHandlers(),
            state=state,
        )
        assert ("in" in driver.task.vectorized_executors) == (deduplicate and named != "own")
        model = Model(frozenset(aggregations))
        for records, then in plan:
            driver.pipe_columns("in", records)
            if then in ("crash", "torn"):  # what was not committed is taken again
                driver.crash(torn_entries=2 if then == "torn" else 0)
                driver.restore()
            for record in records:
                model.take(*record)
            assert dict(driver.store("s").items()) == model.rows()
            assert len(driver.store("s")) == len(model.taken)
            if then == "nothing":
                continue
            driver.commit()
            updates, model.out = model.out, []
            if deduplicate:
                updates = list({key: (key, row, at) for key, row, at in updates}.values())
                got = written(driver)
                assert [at for _, _, at in got] == sorted(at for _, _, at in got)
                assert sorted(got, key=repr) == sorted(updates, key=repr)
            else:
                assert written(driver) == updates
            assert len(driver.read("in-dlq")) == model.rejected
            model.rejected = 0
        driver.commit()
        driver.close()
        again = TopologyTestDriver(aggregated(aggregations), errors=ErrorHandlers())
        again.changelog = list(driver.changelog)
        again.restore()
        assert dict(again.store("s").items()) == model.rows()


def test_a_table_skips_null_keys_and_takes_what_is_out_of_order() -> None:
    """No record is late. A row is written with the highest timestamp of its key, also after a restart."""
    driver = TopologyTestDriver(aggregated(NUMBERS))
    for key, at in ((b"a", 50), (None, 99), (b"b", 7), (b"a", 3)):
        driver.pipe("in", key=key, value=b'{"n":1}', timestamp=at)
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"a", value=b'{"n":1}', timestamp=4)
    assert [(key, row["count"], at) for key, row, at in written(driver)] == [
        *((b"a", 1, 50), (b"b", 1, 7), (b"a", 2, 50), (b"a", 3, 50)),
    ]
    (operator,) = driver.task.times.operators
    assert (driver.metrics()["late_records"], operator.stream_time_ms, operator.close_time_ms) == (0, 50, None)


@pytest.mark.parametrize("columns_min", [1, 1 << 30], ids=["in batches", "one by one"])
@pytest.mark.parametrize("value", [bytes, dict, Value, "mapped"])
def test_an_aggregate_without_windows_skips_records_without_a_value(value: Any, columns_min: int) -> None:
    """They are counted, change no row and do not advance its time. JSON `null` and None from a function are no value
    either."""
    builder = StreamsBuilder()
    stream = builder.stream("in", value=dict if value == "mapped" else value)
    if value == "mapped":
        stream = stream.map_values(lambda found: found if found["n"] else None)
    stream.group_by_key().aggregate("s", n=Count())
    driver = TopologyTestDriver(builder.build(), deduplicate_updates=True, columns_min=columns_min)
    assert "in" in driver.task.vectorized_executors
    without = {dict: b"null", "mapped": b'{"n":0}'}.get(value)
    times = range(0, 90, 10)
    driver.pipe_columns("in", [(b"a", without if at % 20 else b'{"n":1}', at) for at in times])
    driver.pipe_columns("in", [(b"b", without, 99)])
    assert dict(driver.store("s").items()) == {"a": {"key": "a", "n": 5}}
    (operator,) = driver.task.times.operators
    assert (driver.task.metrics.skipped_total, operator.stream_time_ms, driver.task.stream_time_ms) == (5, 80, 99)


def test_a_rejected_record_moves_no_time_and_leaves_nothing() -> None:
    """A sum that would leave 64 bits, and a user function that raises, make a dead letter, no row and no advance of
    time."""
    driver = TopologyTestDriver(aggregated(SETS["own"]), errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b'{"n":%d}' % (2**63 - 1), timestamp=5)
    before = dict(driver.store("s").items())
    for key, n in ((b"a", 1), (b"a", 3), (b"b", 3)):
        driver.pipe("in", key=key, value=b'{"n":%d}' % n, timestamp=90)
    assert (dict(driver.store("s").items()), len(driver.read("in-dlq"))) == (before, 3)
    assert (driver.task.stream_time_ms, driver.task.times.operators[0].stream_time_ms) == (5, 5)


def test_rows_are_returned_as_copies() -> None:
    """A function or processor that changes a row does not change the store."""
    builder = StreamsBuilder()
    table = builder.stream("in").group_by_key().aggregate("s", last=Last("x"))

    def spoil(row: Any) -> Any:
        row["last"]["y"] = 5
        return row

    table.to_stream().map_values(spoil).to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"a", value=b'{"x":{"y":1}}')
    spoil(driver.store("s").get("a"))
    assert (driver.store("s").get("a"), written(driver)) == (
        {"key": "a", "last": {"y": 1}},
        [(b"a", {"key": "a", "last": {"y": 5}}, 0)],
    )


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["in memory", "on disk"])
@pytest.mark.parametrize("left", [False, True])
def test_a_stream_looks_up_the_aggregate_of_its_key(left: bool, is_on_disk: bool) -> None:
    """The join gets the row as of the record, whether it is committed or not. Without a row a left join gets None."""
    builder = StreamsBuilder()
    table = builder.stream("in").group_by_key().aggregate("s", n=Count(), total=Sum("x"))
    orders = builder.stream("orders")
    joiner = lambda value, row: [value, row]  # noqa: E731
    (orders.left_join(table, joiner) if left else orders.join(table, joiner)).to("out")
    with folder(is_on_disk) as state:
        driver = TopologyTestDriver(builder.build(), deduplicate_updates=True, commit_each=False, state=state)
        driver.pipe("orders", key=b"ann", value=b"1", timestamp=5)
        driver.pipe("in", key=b"ann", value=b'{"x":2.5}', timestamp=6)
        driver.pipe("orders", key=b"ann", value=b"2", timestamp=7)
        driver.commit()
        driver.crash()
        driver.restore()
        driver.pipe_columns("in", [(b"ann", b'{"x":1}', 8), (b"bob", b'{"x":9}', 8)] * 20)
        driver.pipe("orders", key=b"ann", value=b"3", timestamp=9)
        driver.pipe("orders", key=b"cat", value=b"4", timestamp=9)
        driver.commit()
        rows = [msgspec.json.decode(r.value or b"") for r in driver.read("out")]
        driver.close()
    found = [[2, {"key": "ann", "n": 1, "total": 2.5}], [3, {"key": "ann", "n": 21, "total": 22.5}]]
    assert rows == ([[1, None], *found, [4, None]] if left else found)


def test_a_stream_that_feeds_a_table_and_is_joined_with_it_sees_its_own_record() -> None:
    """The table comes first in the topology, so it has the record before the join looks the key up."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    table = stream.group_by_key().aggregate("s", n=Count())
    stream.join(table, lambda value, row: row["n"]).to("out")
    driver = TopologyTestDriver(builder.build(), deduplicate_updates=True, columns_min=1)
    driver.pipe_columns("in", [(b"a", b"{}", 1), (b"a", b"{}", 2), (b"b", b"{}", 3)])
    assert [r.value for r in driver.read("out")] == [b"1", b"2", b"1"]


class Reads(Processor):
    """Asks the table for a key, and for all of them."""

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self.table = context.store("s")

    def process(self, record: Record) -> None:
        rows = sorted((key, row["n"]) for key, row in self.table.items())
        self.context.forward(record._replace(value=[self.table.get(record.key), rows, self.table.get(7)]))


@pytest.mark.parametrize("is_on_disk", [False, True], ids=["in memory", "on disk"])
def test_keys_of_bytes(is_on_disk: bool) -> None:
    """A processor reads rows by the record's bytes key. The row contains the key in base64, as in JSON."""
    builder = StreamsBuilder()
    table = builder.stream("in", key="bytes").group_by_key().aggregate("s", n=Count())
    table.to_stream().to("out")
    builder.stream("requests", key="bytes").process(Reads, table.store).to("answers")
    with folder(is_on_disk) as state:
        driver = TopologyTestDriver(builder.build(), state=state)
        driver.pipe("in", key=b"\xff\x00", value=b"{}", timestamp=4)
        driver.pipe("requests", key=b"\xff\x00", value=b"{}", timestamp=5)
        row = {"key": "/wA=", "n": 1}
        assert written(driver) == [(b"\xff\x00", row, 4)]
        assert [msgspec.json.decode(r.value or b"") for r in driver.read("answers")] == [[row, [["/wA=", 1]], None]]
        driver.close()


def test_rows_behind_a_repartition_topic() -> None:
    """Grouped by another key before the table, and by a third one after it: fields of a row are aggregated as any."""
    builder = StreamsBuilder()
    users = builder.stream("in").group_by(lambda r: r.value["user"], name="by-user").aggregate("users", n=Count())
    by_size = users.to_stream().group_by(lambda r: r.value["key"][0], name="by-letter")
    by_size.aggregate("letters", rows=Count(), high=Max("n")).to_stream().to("out")
    driver = TopologyTestDriver(builder.build())
    for user in ("ann", "bob", "al", "ann"):
        driver.pipe("in", key=b"k", value=msgspec.json.encode({"user": user}))
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"k", value=b'{"user":"ann"}')
    assert driver.store("users").get("ann") == {"key": "ann", "n": 3}
    assert dict(driver.store("letters").items()) == {
        "a": {"key": "a", "rows": 4, "high": 3.0},
        "b": {"key": "b", "rows": 1, "high": 1.0},
    }


def test_windows_behind_a_table_move_on_while_nothing_comes() -> None:
    """A table forwards idle time as a source does, but not beyond a row that no commit has forwarded."""
    builder = StreamsBuilder()
    table = builder.stream("in").group_by_key().aggregate("s", n=Count())
    windows = table.to_stream().group_by_key().tumbling_window(100)
    windows.aggregate("w", rows=Count(), high=Max("n")).on_close().to("out")
    driver = TopologyTestDriver(
        builder.build(), deduplicate_updates=True, commit_each=False, idle_timeout_ms=1_000, now_ms=10_000
    )
    driver.pipe("in", key=b"z", value=b"{}", timestamp=120)
    driver.commit()
    driver.pipe("in", key=b"a", value=b"{}", timestamp=130)
    driver.advance_wall_clock(5_000)
    table_, windows_ = driver.task.times.operators
    assert (table_.stream_time_ms, windows_.stream_time_ms) == (5_130, 130)
    driver.commit()
    driver.advance_wall_clock(2_000)
    driver.commit()
    assert windows_.stream_time_ms == 7_130
    assert sorted(msgspec.json.decode(r.value or b"")["key"] for r in driver.read("out")) == ["a", "z"]


def test_a_row_that_a_node_cannot_take_is_left_out() -> None:
    """The store keeps the row. The failed output is a dead letter that names the store."""
    builder = StreamsBuilder()
    table = builder.stream("in").group_by_key().aggregate("s", n=Count())
    table.to_stream().map_values(lambda row: 1 // (row["n"] - 2)).to("out")
    for deduplicate in (False, True):
        driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers(), deduplicate_updates=deduplicate)
        for _ in range(3):
            driver.pipe("in", key=b"a", value=b"{}")
        assert ([r.value for r in driver.read("out")], driver.store("s").get("a")) == (
            [b"-1", b"1"],
            {"key": "a", "n": 3},
        )
        (dead_letter,) = driver.read("in-dlq")
        assert (dead_letter.value, dict(dead_letter.headers)["penstock.dlq.store"]) == (b'{"key":"a","n":2}', b"s")


def task_of(topology: Topology, **given: Any) -> StreamTask:
    """A task that has processed a small list of ann, a large one of bob, and another one of ann."""
    task = StreamTask(topology, 0, application="app", **given)
    task.initialize(0)
    values = (("ann", 5), ("bob", 40_000), ("ann", 6))
    records = [
        ConsumerRecord("in", 0, at, at, key.encode(), b'{"x":"%s"}' % (b"x" * size))
        for at, (key, size) in enumerate(values)
    ]
    task.process(Columns.of(records), 0)
    return task


def of_lists() -> Topology:
    builder = StreamsBuilder()
    table = builder.stream("in").group_by_key().aggregate("s", n=Count(), all=CollectList("x"))
    table.to_stream().to("out")
    return builder.build()


@pytest.mark.parametrize("columns_min", [1, 1 << 30])
def test_the_record_that_makes_a_state_too_large_is_rejected(columns_min: int) -> None:
    """A record that would make a state too large is a dead letter. An existing row stays unchanged, and no new row is
    created."""
    task = task_of(of_lists(), record_bytes_max=30_000, columns_min=columns_min)
    assert [(r.topic, r.key) for r in task.prepare_commit(0).outputs] == [("in-dlq", b"bob"), ("out", b"ann")]
    store: Any = task.stores["s"]
    assert (store.get("bob"), store.get("ann")["n"], len(store)) == (None, 2, 1)


def test_a_key_that_no_result_could_hold_is_rejected() -> None:
    """A record whose key is too large for a result becomes a dead letter and is not stored, in a batch too."""
    driver = TopologyTestDriver(aggregated(NUMBERS), errors=ErrorHandlers(), deduplicate_updates=True, columns_min=1)
    large = b"k" * 600_000
    driver.pipe_columns("in", [(large, b'{"n":1}', 1), *[(b"a", b'{"n":1}', 2)] * 40])
    assert (len(driver.read("in-dlq")), driver.store("s").get("a")["count"], len(driver.store("s"))) == (1, 40, 1)


def test_only_aggregations_may_be_added_to_a_store() -> None:
    """Aggregations may be added and begin empty. Another kind or source is rejected."""
    first = TopologyTestDriver(aggregated({"n": Count()}))
    first.pipe("in", key=b"a", value=b'{"n":4}')
    more = TopologyTestDriver(aggregated({"n": Count(), "total": Sum("n")}))
    more.changelog = list(first.changelog)
    more.restore()
    assert more.store("s").get("a") == {"key": "a", "n": 1, "total": None}
    stored = first.topology.schemas()
    for what, changed in (("source", "other"), ("kind", "table"), ("key", "bytes")):
        with pytest.raises(SchemaMismatch, match=what):
            check_schema(stored, (msgspec.structs.replace(stored[0], **{what: changed}),))
    with pytest.raises(SchemaMismatch, match="total"):
        check_schema(more.topology.schemas(), stored)


def test_the_dsl_rejects_invalid_aggregates() -> None:
    """The DSL rejects reserved result names, an aggregate without aggregations, and an existing store name."""
    grouped = StreamsBuilder().stream("in").group_by_key()
    for name in ("key", "start", "latest_ms"):
        with pytest.raises(ConfigError, match=name):
            grouped.aggregate("s", **{name: Count()})
    with pytest.raises(ConfigError, match="at least one"):
        grouped.aggregate("s")
    assert grouped.aggregate(n=Count()).store == "in-aggregate"
    with pytest.raises(ConfigError, match="in-aggregate"):
        grouped.aggregate(n=Count())


def test_a_table_alone_has_no_late_topic() -> None:
    """An aggregation without windows has no late topic."""
    assert aggregated(NUMBERS).output_topics() == ["out", "in-dlq"]
