"""Settings of the Postgres source for logical decoding, and its task configs."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.connectors.postgres.source import PostgresSourceConnector
from penstock.shared.connect.errors import ConnectError

LOGICAL = {"connection.url": "postgresql://x/y", "mode": "logical", "topic.prefix": "", "slot.name": "s_1"}


def errors(**more: str) -> dict[str, list[str]]:
    """The errors of each invalid setting."""
    props = {**LOGICAL, **{name.replace("_", "."): value for name, value in more.items()}}
    return {value.name: value.errors for value in PostgresSourceConnector().validate(props) if value.errors}


def test_logical_decoding_needs_a_slot_and_no_tables() -> None:
    """Logical decoding requires a valid slot name, needs no tables and does not accept a query."""
    assert errors() == {}
    assert errors(table_whitelist="a,b") == {}
    for name in ("", "Slot", "a-b", "x" * 64):
        assert list(errors(slot_name=name)) == ["slot.name"]
    assert list(errors(query="SELECT 1")) == ["query"]


async def test_a_slot_has_one_reader() -> None:
    """Logical decoding has one task with any `tasks.max`, and does not start without a slot name."""
    connector = PostgresSourceConnector()
    await connector.start({**LOGICAL, "table.whitelist": "a,b"})
    assert await connector.task_configs(5) == [{**LOGICAL, "table.whitelist": "a,b"}]
    with pytest.raises(ConfigError, match=r"slot\.name"):
        await connector.start({**LOGICAL, "slot.name": ""})


async def test_a_slots_offset_can_be_altered() -> None:
    """A slot's offset can be altered or deleted; an invalid offset or partition is an error."""
    connector, slot = PostgresSourceConnector(), {"protocol": "1", "slot": "s_1"}
    assert await connector.alter_offsets(LOGICAL, [(slot, {"lsn": "0/16B3748"}), (slot, None)])
    with pytest.raises(ConnectError, match="is not an offset"):
        await connector.alter_offsets(LOGICAL, [(slot, {"lsn": "here"})])
    with pytest.raises(ConnectError, match="a partition is"):
        await connector.alter_offsets(LOGICAL, [({"slots": "s_1"}, None)])
