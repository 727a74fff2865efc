"""Topologies that both type checkers accept, with the types that each step carries on."""

# pyright: strict
from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, assert_type

import msgspec

from penstock import Count, JoinWindows, Mean, Processor, ProducerRecord, PunctuationType, Record, StreamsBuilder
from penstock.clients import json_deserializer, string_deserializer, struct_deserializer
from penstock.streams import (
    GlobalTable,
    GroupedStream,
    KeyValueStore,
    ProcessorContext,
    Stream,
    Table,
    WindowedGroup,
    WindowedTable,
    WindowKey,
    WindowResult,
)
from penstock.testing import TopologyTestDriver


class Click(msgspec.Struct):
    """An event."""

    user: str | None
    ms: float


class User(msgspec.Struct):
    """A row."""

    name: str


class Opened(msgspec.Struct, tag=True):
    """One kind of a union."""


class Closed(msgspec.Struct, tag=True):
    """The other kind."""


Event = Opened | Closed


def sources(builder: StreamsBuilder, something: Any, kind: Literal["string", "bytes"]) -> None:
    """`key` and `value` determine the types: a class its own, a deserializer its result's."""
    assert_type(builder.stream("clicks", value=Click), Stream[str, Click])
    assert_type(builder.stream("clicks", Click, key="bytes"), Stream[bytes, Click])
    assert_type(builder.stream("clicks", value=Click, key=kind), Stream[str, Click] | Stream[bytes, Click])
    assert_type(builder.stream("clicks", value=bytes), Stream[str, bytes])
    assert_type(builder.stream("clicks", value=list[Click]), Stream[str, list[Click]])
    assert_type(builder.stream("clicks", value=struct_deserializer(Click)), Stream[str, Click])
    assert_type(builder.stream("clicks", value=string_deserializer, key="bytes"), Stream[bytes, str])
    assert_type(builder.table("users", value=User), Table[str, User])
    assert_type(builder.table("users", value=User, key="bytes").to_stream(), Stream[bytes, User | None])
    assert_type(builder.global_table("users", value=User), GlobalTable[str, User])
    # Any JSON, a union, and what is not known.
    assert_type(builder.stream("clicks"), Stream[str, Any])
    assert_type(builder.stream("clicks", value=dict, key="bytes"), Stream[bytes, Any])
    assert_type(builder.stream("clicks", value=json_deserializer), Stream[str, Any])
    assert_type(builder.stream("clicks", value=Event), Stream[str, Any])
    assert_type(builder.stream("clicks", value=something), Stream[str, Any])
    assert_type(builder.table("users"), Table[str, Any])
    assert_type(builder.global_table("users", key="bytes"), GlobalTable[bytes, Any])
    events: Stream[str, Opened | Closed] = builder.stream("events", value=Event)
    print(events)


def names_alone(stream: Stream, table: Table, record: Record, store: KeyValueStore) -> None:
    """Every type parameter has a default."""
    assert_type(stream, Stream[Any, Any])
    assert_type(table, Table[Any, Any])
    assert_type(record.value, Any)
    assert_type(store.get("ann"), Any | None)
    assert_type(stream.group_by_key(), GroupedStream[Any, Any])


def steps(clicks: Stream[str, Click], others: Stream[bytes, User]) -> None:
    """Each step's result is what its function returns."""
    assert_type(clicks.filter(lambda record: record.value.ms < 5), Stream[str, Click])
    assert_type(clicks.filter_not(lambda record: record.key == "ann"), Stream[str, Click])
    assert_type(clicks.map_values(lambda click: click.ms), Stream[str, float])
    assert_type(clicks.flat_map_values(lambda click: [click.user]), Stream[str, str | None])
    assert_type(clicks.map(lambda r: Record(b"x", r.value.ms, r.timestamp), key="bytes"), Stream[bytes, float])
    assert_type(clicks.map(lambda record: record._replace(timestamp=0)), Stream[str, Click])
    assert_type(clicks.flat_map(lambda r: [Record(r.key, r.value.ms, 0)]), Stream[str, float])
    assert_type(clicks.key_by(lambda record: record.value.user), Stream[str | None, Click])
    assert_type(clicks.select_key(lambda record: record.key.encode(), key="bytes"), Stream[bytes, Click])
    assert_type(clicks.peek(lambda record: print(record.value.ms)), Stream[str, Click])
    assert_type(clicks.branch(lambda record: record.value.ms < 5, lambda record: True), list[Stream[str, Click]])
    assert_type(clicks.merge(clicks), Stream[str, Click])
    assert_type(clicks.merge(others), Stream[str | bytes, Click | User])
    assert_type(clicks.repartition(), Stream[str, Click])
    clicks.foreach(lambda record: print(record.value.ms))
    clicks.to("copies", encode=lambda record: (record.key.encode(), None))


def windows(clicks: Stream[str, Click]) -> None:
    """A grouping drops what has no key; results have their windows as keys, and None for a retracted window."""
    assert_type(clicks.group_by_key(), GroupedStream[str, Click])
    assert_type(clicks.key_by(lambda record: record.value.user).group_by_key(), GroupedStream[str, Click])
    grouped = clicks.group_by(lambda record: record.value.user)
    assert_type(grouped, GroupedStream[str, Click])
    assert_type(grouped.session_window(timedelta(minutes=30), grace=300_000), WindowedGroup[str, Click])
    assert_type(grouped.tumbling_window(1_000), WindowedGroup[str, Click])
    assert_type(grouped.hopping_window(1_000, advance=timedelta(seconds=0.5)), WindowedGroup[str, Click])
    table = grouped.sliding_window(1_000).aggregate("visits", n=Count(), ms=Mean("ms"))
    assert_type(table, WindowedTable[str])
    assert_type(table.on_update(), Stream[WindowKey[str], WindowResult[str] | None])
    closed = table.on_close()
    assert_type(closed, Stream[WindowKey[str], WindowResult[str]])
    assert_type(closed.key_by(lambda record: record.key.key), Stream[str, WindowResult[str]])
    assert_type(closed.map_values(lambda result: result.end), Stream[WindowKey[str], int])


def aggregates(clicks: Stream[str, Click], orders: Stream[str, User]) -> None:
    """Without a window a grouped stream is a table of results by name."""
    table = clicks.group_by_key().aggregate("totals", n=Count(), ms=Mean("ms"))
    assert_type(table, Table[str, dict[str, Any]])
    assert_type(table.to_stream(), Stream[str, dict[str, Any] | None])
    assert_type(orders.join(table, lambda user, row: f"{user.name} {row['n']}"), Stream[str, str])
    by_user = clicks.group_by(lambda record: record.value.user)
    assert_type(by_user.aggregate(n=Count()), Table[str, dict[str, Any]])


def joins(clicks: Stream[str, Click], users: Table[str, User], everyone: GlobalTable[str, User]) -> None:
    """The joiner has both sides; without a match a left join has None for the other."""

    def named(click: Click, user: User | None) -> str:
        return "nobody" if user is None else user.name

    assert_type(clicks.join(users, lambda click, user: (click.ms, user.name)), Stream[str, tuple[float, str]])
    assert_type(clicks.left_join(users, named), Stream[str, str])
    by_user = clicks.join(everyone, lambda click, user: user.name, key=lambda record: record.value.user)
    assert_type(by_user, Stream[str, str])
    assert_type(clicks.left_join(everyone, named, key=lambda record: record.key), Stream[str, str])
    summed = clicks.join(clicks, lambda one, other: one.ms + other.ms, JoinWindows.of(timedelta(seconds=5)))
    assert_type(summed, Stream[str, float])
    alone = clicks.left_join(clicks, lambda one, other: other is None, JoinWindows.of(5), name="alone")
    assert_type(alone, Stream[str, bool])


class Greets(Processor[str, Click, str, User]):
    """Forwards the user of each click."""

    users: KeyValueStore[str, User]

    def init(self, context: ProcessorContext[str, User]) -> None:
        super().init(context)
        self.users = context.store("users")
        context.schedule(timedelta(minutes=1), PunctuationType.WALL_CLOCK_TIME, self.tick)

    def process(self, record: Record[str, Click]) -> None:
        assert_type(record.value.ms, float)
        user = self.users.get(record.key)
        assert_type(user, User | None)
        if user is not None:
            self.context.forward(Record(record.key, user, record.timestamp))

    def tick(self, now_ms: int) -> None:
        assert_type([user.name for _, user in self.users.items()], list[str])


class Repeats(Processor):
    """A processor without types takes and forwards anything; its argument may have any name."""

    def process(self, one: Record) -> None:
        self.context.forward(one)


def processors(clicks: Stream[str, Click], stream: Stream) -> None:
    """A processor's own types are those of the stream after it."""
    assert_type(clicks.process(Greets, "users"), Stream[str, User])
    assert_type(clicks.process(lambda: Greets(), "users"), Stream[str, User])
    assert_type(clicks.process_values(Greets, "users"), Stream[str, User])
    assert_type(clicks.process(Repeats), Stream[Any, Any])
    assert_type(stream.process(Greets, "users"), Stream[str, User])


def driven(builder: StreamsBuilder) -> None:
    """The test driver pipes and reads bytes, as a topic holds them."""
    driver = TopologyTestDriver(builder.build())
    driver.pipe("clicks", key=b"ann", value=None, timestamp=5, headers={"trace": b"1"})
    assert_type(driver.read("visits"), list[ProducerRecord])
    store: KeyValueStore[str, User] = driver.store("users")
    assert_type(store.get("ann"), User | None)
