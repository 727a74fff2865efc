"""The statements of the Postgres sink."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import DataError
from penstock.shared.connect.connectors.postgres.sql import SqlTable, update_from

TABLE = SqlTable("t", {"id": "bigint", "n": "integer"}, ("id",))


def test_an_update_needs_a_column_to_change() -> None:
    """Rows that have only columns of the key are an error, since they change nothing."""
    assert update_from(TABLE, "s", ("id", "n")) == 'UPDATE "t" t SET "n"=s."n" FROM "s" s WHERE t."id"=s."id"'
    with pytest.raises(DataError, match=r"update.*id"):
        update_from(TABLE, "s", ("id",))
