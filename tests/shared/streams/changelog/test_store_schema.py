"""The stored definition of a store is compared with the present one, field by field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, ConfirmedChanges
from penstock.shared.streams.changelog.format import Progress, Takeover
from penstock.shared.streams.changelog.store_schema import (
    AggregationSchema,
    StoreSchema,
    check_restorable,
    check_schema,
    incompatible_aggregations,
)

STORES = {
    "session": StoreSchema(
        name="s",
        kind="session",
        key="bytes",
        gap_ms=10,
        grace_ms=5,
        emit="on_close",
        source="in",
        results="out",
        late="in-late",
        dead_letters="in-dlq",
        aggregations=(AggregationSchema.of("n", Count()),),
    )
}
STORES["tumbling"] = msgspec.structs.replace(STORES["session"], kind="tumbling", gap_ms=0, size_ms=20, advance_ms=20)
STORES["hopping"] = msgspec.structs.replace(STORES["tumbling"], kind="hopping", advance_ms=4)
STORES["sliding"] = msgspec.structs.replace(STORES["tumbling"], kind="sliding", advance_ms=0)

STAYS = [
    ("session", "gap_ms", 11),
    ("session", "gap_ms", 9),
    ("tumbling", "size_ms", 21),
    ("hopping", "size_ms", 16),
    ("hopping", "advance_ms", 5),
    ("sliding", "size_ms", 19),
    ("session", "source", "other"),
    ("session", "kind", "sliding"),
    ("tumbling", "kind", "hopping"),
    ("sliding", "key", "string"),
]
MAY_CHANGE = {
    "grace_ms": 6,
    "emit": "on_update",
    "results": None,
    "late": "elsewhere",
    "dead_letters": None,
    "upstream": ("filter",),
}


@pytest.mark.parametrize(("kind", "what", "now"), STAYS)
def test_definitions_of_windows_may_not_change(kind: str, what: str, now: Any) -> None:
    """The message has the store's name, the field, its old and new value, and both ways out."""
    was = STORES[kind]
    other = msgspec.structs.replace(was, name="beside")
    with pytest.raises(SchemaMismatch) as raised:
        check_schema((other, was), (other, msgspec.structs.replace(was, **{what: now})))
    message = str(raised.value)
    assert message.startswith(f"store {was.name!r}: {what} was {getattr(was, what)!r}, is now {now!r}. ")
    for way_out in ("Run the topology as it was", "an application_id of its own", "`penstock streams reset`"):
        assert way_out in message


@pytest.mark.parametrize(
    ("now", "message"), [(["t", "s"], "their order changed"), (["s", "u"], "'u' is new, 't' is gone")]
)
def test_names_and_order_of_stores_may_not_change(now: list[str], message: str) -> None:
    """The message names the stores that are new or gone, and does not blame the windows."""
    was, is_now = (
        tuple(msgspec.structs.replace(STORES["session"], name=name) for name in names) for names in (["s", "t"], now)
    )
    with pytest.raises(SchemaMismatch, match=f"{message}.*stores cannot change"):
        check_schema(was, is_now)


def test_every_field_of_a_store_is_listed_here() -> None:
    """A field that is added to stores is either compared or may change, and is put into one of the lists."""
    fields = {what for _, what, _ in STAYS} | MAY_CHANGE.keys() | {"name", "aggregations"}
    assert fields == set(StoreSchema.__struct_fields__)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("what", MAY_CHANGE)
def test_grace_emission_and_output_topics_may_change(kind: str, what: str) -> None:
    """They determine what happens from now on, not how existing windows were made.

    So do the functions before a window.
    """
    changed = msgspec.structs.replace(STORES[kind], **{what: MAY_CHANGE[what]})
    check_schema((STORES[kind],), (changed,))
    check_schema((changed,), (STORES[kind],))


@pytest.mark.parametrize("kind", STORES)
def test_windows_on_close_are_not_continued_on_update(kind: str) -> None:
    """A live window without a later record would never be forwarded. The other change forwards each at its close."""
    on_close = (STORES[kind],)
    on_update = (msgspec.structs.replace(STORES[kind], emit="on_update"),)
    check_restorable(on_update, on_close)
    with pytest.raises(SchemaMismatch, match="emit was 'on_close', is now 'on_update'"):
        check_restorable(on_close, on_update)


@pytest.mark.parametrize(("kind", "what", "now"), STAYS)
def test_a_commit_with_another_window_definition_is_rejected(kind: str, what: str, now: Any) -> None:
    """A commit that was written with another definition of a window is rejected as a whole."""
    was, changes = STORES[kind], list[ConfirmedChanges]()
    reader = ChangelogReader(changes.append, stores=(msgspec.structs.replace(was, **{what: now}),))
    reader.feed_record(0, None, fmt.encode_takeover(1, Takeover("app", "host", 0)))
    reader.feed_record(1, b"a", fmt.encode_live(0, 1, 1, 0, 0, b"state"))
    progress = Progress("app", "exactly_once", {"in": 7}, {"s": 0}, {}, {}, (was,), 0)
    with pytest.raises(SchemaMismatch, match=what):
        reader.feed_record(2, None, fmt.encode_progress(1, 1, progress))
    assert (changes, reader.progress) == ([], None)


def test_only_the_aggregations_that_changed_are_named() -> None:
    """A further aggregation is allowed, so it is not named beside one that changed or is gone."""
    was = msgspec.structs.replace(
        STORES["session"],
        aggregations=(AggregationSchema.of("gone", Count()), AggregationSchema.of("n", Count())),
    )
    now = msgspec.structs.replace(
        was, aggregations=(AggregationSchema.of("n", Sum("x")), AggregationSchema.of("m", Count()))
    )
    assert incompatible_aggregations(was, now) == ["gone", "n"]
    added = msgspec.structs.replace(was, aggregations=(*was.aggregations, AggregationSchema.of("m", Count())))
    assert incompatible_aggregations(was, added) == []
    table = msgspec.structs.replace(was, kind="table")
    assert incompatible_aggregations(table, msgspec.structs.replace(added, kind="table")) == ["m"]
    assert incompatible_aggregations(table, msgspec.structs.replace(now, kind="table")) == ["gone", "m", "n"]
    swapped = msgspec.structs.replace(was, aggregations=was.aggregations[::-1])
    assert incompatible_aggregations(was, swapped) == incompatible_aggregations(swapped, was) == ["their order"]
