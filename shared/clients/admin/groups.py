"""Groups and their committed offsets.

Offsets of a group can be changed only while it has no members: a member would commit over the change, or hold a
position that ignores it. So every change first describes the group and refuses with GroupNotEmpty and the members.
(The broker refuses the same for the member that joins in between.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.shared.clients.admin.topics import IsolationLevel, TopicsAdmin, one_deadline
from penstock.shared.clients.admin.types import (
    GroupDescription,
    GroupListing,
    MemberDescription,
    OffsetChange,
    PartitionLag,
)
from penstock.shared.clients.connection import CONSUMER_GROUP_DESCRIBE, decode_assignment, error_for_code, wire
from penstock.shared.common.errors import (
    CoordinatorNotAvailable,
    GroupNotEmpty,
    GroupNotFound,
    UnknownMember,
)
from penstock.shared.common.offset_checks import checked_offsets, checked_spec
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

NO_GENERATION = -1
DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """A reset that moves the committed offset by so many records, kept within what the partition holds."""

    records: int


Reset = Literal["earliest", "latest"] | int | ShiftBy | Mapping[TopicPartition, int]
"""Where to: the earliest or latest offset, a time in ms since the epoch, a shift, or an offset for each partition."""


class GroupsAdmin(TopicsAdmin):
    """The part of `Admin` that deals with groups."""

    async def _ask(self, group_id: str, request: Any, where: str) -> Any:
        return await self._connection.ask_coordinator("group", group_id, request, where)

    def _raise(self, code: int, group_id: str, where: str) -> None:
        error = error_for_code(code, where)
        if isinstance(error, CoordinatorNotAvailable):
            self._connection.forget_coordinator("group", group_id)
        raise error

    async def list_groups(self, *, timeout_ms: int | None = None) -> list[GroupListing]:
        """Every group of the cluster, sorted by id."""

        async def ask() -> list[GroupListing]:
            found: dict[str, GroupListing] = {}
            for node in self._connection.nodes():
                response = await self._connection.send(node, wire.LIST_GROUPS([]), f"groups of node {node}")
                if response.error_code:
                    raise error_for_code(response.error_code, f"groups of node {node}")
                for group_id, protocol_type, state, _ in response.groups:
                    found[group_id] = GroupListing(group_id, state, protocol_type)
            return [found[group_id] for group_id in sorted(found)]

        return await self._run(ask, "list groups", timeout_ms)

    async def describe_group(self, group_id: str, *, timeout_ms: int | None = None) -> GroupDescription:
        """A group's state and members with their assignments, under either of Kafka's group protocols; a group that
        does not exist has the state Dead."""
        where = f"group {group_id}"

        async def ask() -> GroupDescription:
            response = await self._ask(group_id, wire.DESCRIBE_GROUPS([group_id], False), where)
            code, _, state, protocol_type, protocol, rows, _ = response.groups[0]
            if code:
                self._raise(code, group_id, where)
            members = tuple(
                MemberDescription(member_id, client_id, host, instance_id, decode_assignment(assignment))
                for member_id, instance_id, client_id, host, _, assignment in rows
            )
            node = await self._connection.coordinator("group", group_id)
            if state == DEAD and (found := await self._describe_consumer_group(group_id, node)) is not None:
                return found
            return GroupDescription(group_id, state, protocol_type, protocol, node, members)

        return await self._run(ask, where, timeout_ms)

    async def _describe_consumer_group(self, group_id: str, node: int) -> GroupDescription | None:
        """A group whose members' assignments the coordinator makes; None where there is none, or the broker is older
        than such groups."""
        api, where = CONSUMER_GROUP_DESCRIBE, f"group {group_id}"
        low, high = (await self._connection.api_versions(node)).get(api.key, (0, -1))
        if not low <= api.version <= high:
            return None
        response = await self._ask(group_id, api([group_id], False), where)
        code, _, _, state, _, _, assignor, rows, *_ = response.groups[0]
        if code:
            error = error_for_code(code, where)
            if isinstance(error, GroupNotFound):
                return None
            self._raise(code, group_id, where)
        members = tuple(
            MemberDescription(
                member_id,
                client_id,
                host,
                instance_id,
                frozenset(TopicPartition(topic, p) for _, topic, partitions, _ in topics for p in partitions),
            )
            for member_id, instance_id, _, _, client_id, host, _, _, topics, *_ in rows
        )
        return GroupDescription(group_id, state, "consumer", assignor, node, members)

    async def group_offsets(
        self, group_id: str, *, require_stable: bool = False, timeout_ms: int | None = None
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """What a group has committed.

        With `require_stable` offsets that a transaction is just committing are waited for, within the deadline.
        """
        where = f"offsets of group {group_id}"

        async def ask() -> dict[TopicPartition, OffsetAndMetadata]:
            response = await self._ask(group_id, wire.OFFSET_FETCH(group_id, None, require_stable), where)
            if response.error_code:
                self._raise(response.error_code, group_id, where)
            found = {}
            for topic, partitions, _ in response.topics:
                for partition, offset, epoch, metadata, code, _ in partitions:
                    tp = TopicPartition(topic, partition)
                    if code:
                        self._raise(code, group_id, f"{where}, {tp}")
                    if offset >= 0:
                        found[tp] = OffsetAndMetadata(offset, metadata or "", epoch)
            return found

        return await self._run(ask, where, timeout_ms)

    @one_deadline
    async def group_lag(
        self, group_id: str, isolation_level: IsolationLevel = "read_uncommitted", *, timeout_ms: int | None = None
    ) -> list[PartitionLag]:
        """Committed offset, end and lag of every partition that the group has committed or is assigned, in order."""
        committed = await self.group_offsets(group_id, timeout_ms=timeout_ms)
        members = (await self.describe_group(group_id, timeout_ms=timeout_ms)).members
        partitions = sorted(set(committed).union(*(m.assignment for m in members)))
        if not partitions:
            return []
        ends = await self.list_offsets(dict.fromkeys(partitions, "latest"), isolation_level, timeout_ms=timeout_ms)
        starts = await self.list_offsets(dict.fromkeys(partitions, "earliest"), timeout_ms=timeout_ms)
        rows = []
        for tp in partitions:
            own = committed[tp].offset if tp in committed else None
            rows.append(PartitionLag(tp, own, ends[tp], max(0, ends[tp] - (starts[tp] if own is None else own))))
        return rows

    @one_deadline
    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], *, timeout_ms: int | None = None
    ) -> None:
        """Commit offsets for a group that has no members; GroupNotEmpty names the members of one that has, ValueError
        and TypeError what is no offset."""
        checked = checked_offsets(offsets)
        await self._refuse_while_active(group_id, timeout_ms)
        topics: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        for tp, at in checked.items():
            topics[tp.topic].append((tp.partition, at.offset, at.leader_epoch, at.metadata))
        where = f"offsets of group {group_id}"
        request = wire.OFFSET_COMMIT(group_id, NO_GENERATION, "", None, list(topics.items()))

        async def commit() -> None:
            response = await self._ask(group_id, request, where)
            for topic, partitions in response.topics:
                for partition, code in partitions:
                    if code:
                        self._raise(code, group_id, f"{where}, {TopicPartition(topic, partition)}")

        try:
            await self._run(commit, where, timeout_ms)
        except UnknownMember:  # the coordinator's word for "the group has members, and you are none of them"
            await self._refuse_while_active(group_id, timeout_ms)
            raise

    @one_deadline
    async def reset_group_offsets(
        self,
        group_id: str,
        to: Reset,
        partitions: Iterable[TopicPartition] | None = None,
        dry_run: bool = False,
        *,
        timeout_ms: int | None = None,
    ) -> dict[TopicPartition, OffsetChange]:
        """Move a group's committed offsets; gives each partition's offset before and after.

        `partitions` are by default those with a commit (or the keys of `to`). Offsets are kept within what a partition
        holds. With `dry_run` nothing is changed, and an active group is not refused. Raises GroupNotEmpty naming the
        members, GroupNotFound where there is nothing to reset, ValueError and TypeError for any other `to`.
        """
        _check_reset(to)
        if not dry_run:
            await self._refuse_while_active(group_id, timeout_ms)
        committed = await self.group_offsets(group_id, timeout_ms=timeout_ms)
        wanted = sorted(partitions if partitions is not None else to if isinstance(to, Mapping) else committed)
        if not wanted:
            raise GroupNotFound(f"group {group_id}: nothing committed, and no partitions given")
        first = await self.list_offsets(dict.fromkeys(wanted, "earliest"), timeout_ms=timeout_ms)
        end = await self.list_offsets(dict.fromkeys(wanted, "latest"), timeout_ms=timeout_ms)
        if isinstance(to, ShiftBy):
            target = {tp: (committed[tp].offset if tp in committed else first[tp]) + to.records for tp in wanted}
        elif isinstance(to, Mapping):
            target = {tp: to[tp] for tp in wanted}
        else:
            target = await self.list_offsets(dict.fromkeys(wanted, to), timeout_ms=timeout_ms)
        changes = {
            tp: OffsetChange(
                committed[tp].offset if tp in committed else None, min(max(target[tp], first[tp]), end[tp])
            )
            for tp in wanted
        }
        if not dry_run:
            await self.alter_group_offsets(group_id, {tp: c.after for tp, c in changes.items()}, timeout_ms=timeout_ms)
        return changes

    @one_deadline
    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> None:
        """Forget what a group has committed for partitions; GroupNotEmpty names the members of one that has any,
        GroupNotFound where there is no such group."""
        await self._refuse_while_active(group_id, timeout_ms)
        topics: dict[str, list[int]] = defaultdict(list)
        for tp in partitions:
            topics[tp.topic].append(tp.partition)
        where = f"offsets of group {group_id}"
        request = wire.OFFSET_DELETE(group_id, list(topics.items()))

        async def delete() -> None:
            response = await self._ask(group_id, request, where)
            if response.error_code:
                self._raise(response.error_code, group_id, where)
            for topic, rows in response.topics:
                for partition, code in rows:
                    if code:
                        self._raise(code, group_id, f"{where}, {TopicPartition(topic, partition)}")

        try:
            await self._run(delete, where, timeout_ms)
        except GroupNotEmpty:
            await self._refuse_while_active(group_id, timeout_ms)
            raise

    @one_deadline
    async def delete_group(self, group_id: str, *, timeout_ms: int | None = None) -> None:
        """Delete a group and its offsets; GroupNotEmpty names the members, GroupNotFound where there is none."""
        where = f"group {group_id}"

        async def delete() -> None:
            response = await self._ask(group_id, wire.DELETE_GROUPS([group_id]), where)
            for _, code in response.results:
                if code:
                    self._raise(code, group_id, where)

        try:
            await self._run(delete, where, timeout_ms)
        except GroupNotEmpty:
            await self._refuse_while_active(group_id, timeout_ms)
            raise

    async def _refuse_while_active(self, group_id: str, timeout_ms: int | None) -> None:
        members = (await self.describe_group(group_id, timeout_ms=timeout_ms)).members
        if members:
            raise GroupNotEmpty(f"group {group_id} has {len(members)} members: {'; '.join(map(str, members))}")


def _check_reset(to: object) -> None:
    if isinstance(to, Mapping):
        checked_offsets(to)
    elif isinstance(to, ShiftBy):
        if not isinstance(to.records, int) or isinstance(to.records, bool):
            raise TypeError(f"shift by {to.records!r}: not a number of records")
    else:
        checked_spec("reset", to)


__all__ = ["GroupsAdmin", "Reset", "ShiftBy"]
