"""Reads, alters and resets a connector's offsets. Those of a source are in the offset store, those of a sink in its
group.

Offsets are changed only while the connector is STOPPED, which the herder checks. Under exactly-once, a source's tasks
that may still write are fenced first. Then the connector itself checks the offsets, and after that they are stored. If
a sink's group still has members, an error is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import GroupNotEmpty, GroupNotFound, UnknownMember
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.errors import BadRequest, ConnectError
from penstock.shared.connect.properties import reject_unknown_fields, with_prefix
from penstock.shared.connect.runtime.client_settings import kafka_settings, sink_group_id
from penstock.shared.connect.runtime.offset_backing_store import (
    OffsetBackingStore,
    offset_key,
    offset_value,
    parse_offset_key,
    parse_offset_value,
)
from penstock.shared.connect.runtime.worker_config import WorkerConfig
from penstock.shared.connect.storage.config_records import Config

Json = dict[str, Any]
Row = tuple[Json, Json | None]
"""A partition and its offset, in REST's form."""
Wanted = dict[TopicPartition, int | None] | list[Row]
"""The offsets to store: a sink's, or a source's."""

TOPIC = "kafka_topic"
PARTITION = "kafka_partition"
OFFSET = "kafka_offset"
PARTITION_MAX = 2**31 - 1
OFFSET_MAX = 2**63 - 1
"""The largest partition and the largest offset in Kafka's protocol: signed integers of 32 and 64 bits."""
SETTLE_TRIES = 25
"""How often a change is retried while the broker does not count a group without members as empty."""
SETTLE_WAIT_MS = 200
"""The interval of these retries. Together they take longer than the default of the brokers' setting
`group.initial.rebalance.delay.ms` (3 s)."""
ALTERED = "The offsets for this connector have been altered successfully"
RESET = "The offsets for this connector have been reset successfully"
MAYBE_ALTERED = (
    "The Connect framework-managed offsets for this connector have been altered successfully. "
    "However, if this connector manages offsets externally, they will need to be manually altered in the system "
    "that the connector uses."
)
MAYBE_RESET = MAYBE_ALTERED.replace("altered", "reset")


def rows_of(body: object) -> list[Row]:
    """Return the rows of a request to alter offsets.

    Raises BadRequest if there are none or they are malformed. An unknown field is an error: a misspelt `offset` would
    delete the partition's offset.
    """
    reject_unknown_fields(body, ("offsets",))
    rows = body.get("offsets") if isinstance(body, dict) else None
    if not rows:
        raise BadRequest("Partitions / offsets need to be provided for an alter offsets request")
    if not isinstance(rows, list):
        raise BadRequest("'offsets' must be a list of partitions with their offsets")
    found: list[Row] = []
    for row in rows:
        reject_unknown_fields(row, ("partition", "offset"))
        partition, offset = (row.get("partition"), row.get("offset")) if isinstance(row, dict) else (None, None)
        if not isinstance(partition, dict) or not (offset is None or isinstance(offset, dict)):
            raise BadRequest("Each of 'offsets' needs an object 'partition' and an object or null as 'offset'")
        found.append((partition, offset))
    return found


def sink_offsets(rows: Sequence[Row]) -> dict[TopicPartition, int | None]:
    """Return a sink's offsets by partition. Raises BadRequest, in Kafka Connect's words, if a row is invalid."""
    found: dict[TopicPartition, int | None] = {}
    for partition, offset in rows:
        if partition.get(TOPIC) is None or partition.get(PARTITION) is None:
            raise BadRequest(
                f"The partition for a sink connector offset must contain the keys '{TOPIC}' and '{PARTITION}'"
            )
        number = _parse_offset_number(partition[PARTITION], PARTITION_MAX)
        if number is None:
            raise BadRequest(
                f"Failed to parse the following Kafka partition value in the provided offsets: "
                f"'{partition[PARTITION]}'. Partition values for sink connectors need to be integers from 0 to "
                f"{PARTITION_MAX}."
            )
        tp = TopicPartition(str(partition[TOPIC]), number)
        if offset is None:
            found[tp] = None
            continue
        if OFFSET not in offset:
            raise BadRequest(f"The offset for a sink connector should either be null or contain the key '{OFFSET}'")
        at = _parse_offset_number(offset[OFFSET], OFFSET_MAX)
        if at is None:
            raise BadRequest(
                f"Failed to parse the following Kafka offset value in the provided offsets: '{offset[OFFSET]}'. "
                f"Offset values for sink connectors need to be integers from 0 to {OFFSET_MAX}."
            )
        found[tp] = at
    return found


class ConnectorOffsets:
    """Reads, alters and resets the offsets of the cluster's connectors."""

    def __init__(self, admin: Admin, offsets: OffsetBackingStore, worker: WorkerConfig) -> None:
        """`admin` is for the groups of sinks, except of those for which `connected` opens a client."""
        self._admin = admin
        self._offsets = offsets
        self._worker = worker

    @asynccontextmanager
    async def connected(self, name: str, config: Config, *, is_sink: bool) -> AsyncIterator[ConnectorOffsets]:
        """Yield what reads and changes the connector's offsets.

        For a sink, this opens a client with the settings `admin.*` and `admin.override.*` if there are any: the sink's
        group may be in another cluster, or the worker may not have the permissions for it. If no broker answers, that
        takes as long as the client's `request.timeout.ms`.
        """
        if not (is_sink and (with_prefix(self._worker.props, "admin.") or with_prefix(config, "admin.override."))):
            yield self
            return
        props = self._worker.connector_client_props("admin", f"connector-worker-adminclient-{name}", config)
        async with Admin(kafka_settings(props)) as admin:
            yield ConnectorOffsets(admin, self._offsets, self._worker)

    async def read(self, name: str, config: Config, *, is_sink: bool) -> Json:
        """Return a connector's offsets as REST shows them."""
        if is_sink:
            committed = await self._admin.group_offsets(sink_group_id(name, config), require_stable=True)
            return {
                "offsets": [
                    {"partition": {TOPIC: tp.topic, PARTITION: tp.partition}, "offset": {OFFSET: at.offset}}
                    for tp, at in sorted(committed.items())
                ]
            }
        rows = []
        for key, value in (await self._offsets.connector_offsets(name)).items():
            if (parsed := parse_offset_key(key)) is not None:
                rows.append({"partition": dict(parsed[1]), "offset": parse_offset_value(value)})
        return {"offsets": rows}

    async def wanted(self, name: str, config: Config, rows: Sequence[Row] | None, *, is_sink: bool) -> Wanted:
        """Return the offsets that the connector is to check. If `rows` is None, each stored offset is to be removed
        (None)."""
        if is_sink:
            if rows is not None:
                return sink_offsets(rows)
            # A reset: the connector sees every committed partition with None, as in KIP-875.
            return dict.fromkeys(await self._admin.group_offsets(sink_group_id(name, config)))
        if rows is not None:
            return list(rows)
        known = await self._offsets.connector_offsets(name)
        parsed = [found for key in known if (found := parse_offset_key(key)) is not None]
        return [(cast(Json, dict(partition)), None) for _, partition in parsed]

    async def keep(
        self, name: str, config: Config, rows: Sequence[Row] | None, wanted: Wanted, *, altered: bool
    ) -> str:
        """Store or remove the offsets. Returns the message for REST. `altered` is the result of the connector's
        `alter_offsets`."""
        if isinstance(wanted, dict):
            await self._alter_or_delete_sink_group_offsets(name, config, rows, wanted)
        else:
            await self._offsets.set({offset_key(name, part): offset_value(offset) for part, offset in wanted})
        return _result_message(rows, altered)

    async def _alter_or_delete_sink_group_offsets(
        self, name: str, config: Config, rows: Sequence[Row] | None, wanted: Mapping[TopicPartition, int | None]
    ) -> None:
        group = sink_group_id(name, config)
        try:
            if rows is None:
                await self._change_empty_group(group, lambda: self._admin.delete_group(group))
            else:
                await self._alter_group(group, wanted)
        except GroupNotFound:
            # The group has no offsets to remove.
            pass
        except (GroupNotEmpty, UnknownMember) as e:
            raise ConnectError(
                f"Failed to {'reset' if rows is None else 'alter'} the offsets of sink connector {name}: its consumer "
                f"group still has members, since tasks may not have stopped yet: {e}"
            ) from None

    async def _alter_group(self, group: str, wanted: Mapping[TopicPartition, int | None]) -> None:
        moved = {tp: at for tp, at in wanted.items() if at is not None}
        if moved:
            await self._change_empty_group(group, lambda: self._admin.alter_group_offsets(group, moved))
        forgotten = [tp for tp, at in wanted.items() if at is None]
        if forgotten and (known := [tp for tp in await self._admin.group_offsets(group) if tp in forgotten]):
            await self._change_empty_group(group, lambda: self._admin.delete_group_offsets(group, known))

    async def _change_empty_group(self, group: str, change: Callable[[], Awaitable[object]]) -> None:
        """Call `change` for a group whose members have left.

        Raises GroupNotEmpty or UnknownMember if the group has members. If it has none, but the broker does not count
        it as empty, `change` is tried again for about five seconds before the error is raised.
        """
        # If the last member leaves during the delay before a group's first rebalance
        # (`group.initial.rebalance.delay.ms`), the broker counts the group as empty only at the end of the delay.
        for _ in range(SETTLE_TRIES):
            try:
                await change()
                return
            except (GroupNotEmpty, UnknownMember):
                if (await self._admin.describe_group(group)).members:
                    raise
            await asyncio.sleep(SETTLE_WAIT_MS / 1000)
        await change()


def _result_message(rows: Sequence[Row] | None, altered: bool) -> str:
    if altered:
        return RESET if rows is None else ALTERED
    return MAYBE_RESET if rows is None else MAYBE_ALTERED


def _parse_offset_number(value: object, largest: int) -> int | None:
    try:
        number = int(str(value))
    except ValueError:
        return None
    return number if 0 <= number <= largest else None
