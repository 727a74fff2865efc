"""Example events made from a topology's types and aggregations."""

from __future__ import annotations

import enum
from datetime import date, datetime
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

import msgspec
import pytest

from penstock.services.local.sample_event import (
    KEY,
    TIME,
    TIME_MS,
    sample_event,
    sample_event_fields,
    sample_event_type,
)
from penstock.shared.streams.aggregations.aggregation import Count, CountDistinct, Mean
from penstock.shared.streams.dsl.builder import StreamsBuilder


class Color(enum.Enum):
    RED = "red"


class Place(msgspec.Struct, tag="place"):
    name: str


class Order(msgspec.Struct, rename="camel"):
    order_id: int
    placed_at: datetime
    on_day: date
    paid: bool
    total: float | None
    color: Color
    kind: Literal["new", "old"]
    place: Place
    tags: list[str]
    more: dict[str, int]
    note: str = ""


class Measured(msgspec.Struct):
    at: int
    sensor: int


class Strict(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(pattern="^x+$")]


class Zoned(msgspec.Struct):
    zone: str

    def __post_init__(self) -> None:
        ZoneInfo(self.zone)


@pytest.mark.parametrize("value_type", [dict, Order, Measured, Any])
def test_a_sample_is_decodable(value_type: Any) -> None:
    """The source's type decodes the sample, which has key and time at the pointers."""
    event = msgspec.json.decode(sample_event(("/user/id",), "/when", value_type))
    assert event["user"]["id"] == KEY
    assert event["when"] == TIME
    msgspec.json.decode(msgspec.json.encode(event), type=value_type)


def test_a_pointer_at_a_number_keeps_a_number() -> None:
    """A time that the type declares as an integer is in the topic's unit, and a numeric key stays a number."""
    event = msgspec.json.decode(sample_event(("/sensor",), "/at", Measured))
    assert event == {"at": TIME_MS, "sensor": 1}
    event = msgspec.json.decode(sample_event(("/sensor",), "/at", Measured, "s"))
    assert event["at"] * 1_000 == TIME_MS


@pytest.mark.parametrize("value_type", [Strict, Zoned])
def test_a_sample_of_a_constrained_type_has_only_key_and_time(value_type: Any) -> None:
    """A sample for a type with constraints has only the fields that the ingest needs. The type may raise any error."""
    assert msgspec.json.decode(sample_event(("/user",), None, value_type)) == {"user": KEY}


def test_the_type_is_that_of_the_source() -> None:
    """The type of a topic's values comes from the topology, and is `dict` for a topic that it does not read."""
    builder = StreamsBuilder()
    orders = builder.stream("orders", value=Order).group_by_key().session_window(1_000)
    orders.aggregate("s", n=Count()).on_close().to("sums")
    topology = builder.build()
    assert sample_event_type(topology, "orders") is Order
    assert sample_event_type(topology, "others") is dict


def test_an_untyped_source_has_the_fields_of_its_aggregations() -> None:
    """Without a type, the first aggregations determine the fields; those of later ones are results."""
    builder = StreamsBuilder()
    clicks = builder.stream("clicks").filter(lambda value: True).group_by_key().session_window(1_000)
    visits = clicks.aggregate("visits", n=Count(), ms=Mean("ms"), pages=CountDistinct("page")).on_close()
    users = visits.key_by(lambda record: record.key.key, name="users")
    users.group_by_key().session_window(9_000).aggregate("days", ms=Mean("start")).on_close().to("days")
    fields = sample_event_fields(builder.build(), "clicks")
    assert fields == {"ms": 1, "page": "text"}
    event = msgspec.json.decode(sample_event(("/user",), "/at", fields=fields))
    assert event == {"ms": 1, "page": "text", "user": KEY, "at": TIME}
    assert sample_event_fields(builder.build(), "others") == {}
