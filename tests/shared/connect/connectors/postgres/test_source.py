"""What the Postgres source may be set, and how its work is divided."""

from __future__ import annotations

import pytest

from penstock.shared.connect.connectors.postgres.source import PostgresSourceConnector
from penstock.shared.connect.errors import ConfigError, ConnectError

LOGICAL = {"connection.url": "postgresql://x/y", "mode": "logical", "topic.prefix": "", "slot.name": "s_1"}


def errors(**more: str) -> dict[str, list[str]]:
    """What is wrong, by setting."""
    props = {**LOGICAL, **{name.replace("_", "."): value for name, value in more.items()}}
    return {value.name: value.errors for value in PostgresSourceConnector().validate(props) if value.errors}


def test_logical_decoding_needs_a_slot_and_no_tables() -> None:
    """Its name is one that Postgres takes; a query has no log of changes."""
    assert errors() == {}
    assert errors(table_whitelist="a,b") == {}
    for name in ("", "Slot", "a-b", "x" * 64):
        assert list(errors(slot_name=name)) == ["slot.name"]
    assert list(errors(query="SELECT 1")) == ["query"]


async def test_a_slot_has_one_reader() -> None:
    """Whatever `tasks.max` says; without a slot's name there is none."""
    connector = PostgresSourceConnector()
    await connector.start({**LOGICAL, "table.whitelist": "a,b"})
    assert await connector.task_configs(5) == [{**LOGICAL, "table.whitelist": "a,b"}]
    with pytest.raises(ConfigError, match=r"slot\.name"):
        await connector.start({**LOGICAL, "slot.name": ""})


async def test_a_place_in_the_log_may_be_set_by_hand() -> None:
    """For a slot; what is none is refused."""
    connector, slot = PostgresSourceConnector(), {"protocol": "1", "slot": "s_1"}
    assert await connector.alter_offsets(LOGICAL, [(slot, {"lsn": "0/16B3748"}), (slot, None)])
    with pytest.raises(ConnectError, match="is no offset"):
        await connector.alter_offsets(LOGICAL, [(slot, {"lsn": "here"})])
    with pytest.raises(ConnectError, match="a partition is"):
        await connector.alter_offsets(LOGICAL, [({"slots": "s_1"}, None)])
