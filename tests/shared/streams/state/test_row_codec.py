"""Rows of stores are decoded unchanged, and their keys have the store's type."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import StateStoreFailed
from penstock.shared.common.key_range import raw_key
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.aggregations.collect import CollectSet
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.state.row_codec import RowCodec, row_layout


def codec(key: str = "string") -> RowCodec:
    builder = StreamsBuilder()
    windows = builder.stream("in", key=key).group_by_key().session_window(10)  # type: ignore[arg-type]
    windows.aggregate("s", n=Count(), ids=CollectSet("id", limit=9), sum=Sum("id")).on_close().to("out")
    (store,) = builder.build().stores.values()
    return RowCodec(store.schema, store.aggregations)


def test_states_come_back_as_they_were() -> None:
    """Numbers and bytes are decoded unchanged, as new objects."""
    own = codec()
    states = [a.initial() for a in own._aggregations]
    states = [a.add_at(s, {"id": 7}, 1) for a, s in zip(own._aggregations, states, strict=True)]
    again = own.unpack(own.pack(states))
    assert [a.result(s) for a, s in zip(own._aggregations, again, strict=True)] == [1, [7], 7.0]
    assert again[1] is not states[1]


def test_bytes_that_are_no_states_end_the_task() -> None:
    """A row that cannot be read is an error of the store's, never a record's."""
    with pytest.raises(StateStoreFailed, match=r"store 's'.*row"):
        codec().unpack(b"short")
    own = codec()
    columns = [value for a in own._aggregations for value in a.to_columns(a.initial())]
    columns[columns.index(b"[]")] = b"[" * 100_000
    with pytest.raises(StateStoreFailed, match=r"store 's'.*row"):
        own.unpack(own._codec.pack(columns))


def test_keys_by_the_stores_type() -> None:
    """Text keys are stored in UTF-8. A key of the other type is converted to the store's type."""
    text, raw = codec(), codec("bytes")
    assert (raw_key("é"), text.key_of(b"\xc3\xa9"), raw.key_of(b"\xff")) == (b"\xc3\xa9", "é", b"\xff")
    assert (text.own_key(b"a"), raw.own_key("a"), text.own_key("a"), text.own_key(None)) == ("a", b"a", "a", None)
    assert text.own_key(b"\xff") == b"\xff"  # there is no such key


def schemas(gap: int = 10, name: str = "s", **more: Sum) -> tuple[StoreSchema, ...]:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(gap).aggregate(name, n=Count(), **more).on_close().to("out")
    return builder.build().schemas()


def test_the_layout_is_what_the_bytes_depend_on() -> None:
    """The layout changes with a store's name or aggregations, but not with its gap."""
    assert row_layout(schemas()) == row_layout(schemas(gap=99))
    assert len({row_layout(schemas()), row_layout(schemas(name="t")), row_layout(schemas(sum=Sum("id")))}) == 3
