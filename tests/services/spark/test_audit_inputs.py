"""What the audit takes on."""

from __future__ import annotations

import msgspec
import pytest

from penstock.services.spark.audit_inputs import NotAuditable, require_auditable
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.dsl import StreamsBuilder


def test_windows_of_all_kinds_are_audited_and_nothing_else() -> None:
    """Sessions and windows of fixed size are taken; a table's rows are refused by the store's name."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    for name, windows in (
        ("s", grouped.session_window(10)),
        ("t", grouped.tumbling_window(10)),
        ("h", grouped.hopping_window(10, 5)),
        ("d", grouped.sliding_window(10)),
    ):
        windows.aggregate(name, n=Count()).on_close().to(f"out-{name}")
    schemas = builder.build().schemas()
    for store in schemas:
        require_auditable(store)
    with pytest.raises(NotAuditable, match=r"store 's' cannot be audited: it holds no windows \(table\)"):
        require_auditable(msgspec.structs.replace(schemas[0], kind="table"))
    with pytest.raises(NotAuditable, match="filter-2 stands before its window"):
        require_auditable(msgspec.structs.replace(schemas[0], upstream=("filter-2",)))
