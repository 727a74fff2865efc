"""Groups of the classic protocol on both brokers: generations, members, and committed offsets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from penstock.shared.clients.protocol.errors import CODE_OF
from penstock.shared.testing.fake_broker import Api, Message
from tests.contract.conftest import Broker, Log, Wire, code_name, connected, until

SESSION_MS = 10_000


@dataclass
class Member:
    """A group member made of bare requests."""

    wire: Wire
    group_id: str
    instance_id: str | None = None
    member_id: str = ""
    generation: int = -1
    session_ms: int = SESSION_MS
    protocols: list[tuple[str, bytes]] = field(default_factory=lambda: [("range", b"m")])

    async def join(self, **more: Any) -> Message:
        body = {
            "group_id": self.group_id,
            "session_timeout_ms": self.session_ms,
            "rebalance_timeout_ms": SESSION_MS,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
            "protocol_type": "consumer",
            "protocols": [Message(name=name, metadata=metadata) for name, metadata in self.protocols],
            **more,
        }
        response = await self.wire.request(Api.JOIN_GROUP, **body)
        if code_name(response.error_code) == "MEMBER_ID_REQUIRED":
            self.member_id = response.member_id
            return await self.join(**more)
        if not response.error_code:
            self.member_id, self.generation = response.member_id, response.generation_id
        return response

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "group_id": self.group_id,
            "generation_id": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
        }

    async def sync(self, assignments: dict[str, bytes] | None = None, **more: Any) -> Message:
        rows = [
            Message(member_id=member_id, assignment=assignment) for member_id, assignment in (assignments or {}).items()
        ]
        protocol = {"protocol_type": "consumer", "protocol_name": "range"}
        return await self.wire.request(Api.SYNC_GROUP, **{"assignments": rows, **protocol, **self.identity, **more})

    async def heartbeat(self) -> str:
        return code_name((await self.wire.request(Api.HEARTBEAT, **self.identity)).error_code)

    async def leave(self) -> str:
        rows = [Message(member_id=self.member_id, group_instance_id=self.instance_id)]
        response = await self.wire.request(Api.LEAVE_GROUP, group_id=self.group_id, members=rows)
        return code_name(response.error_code or response.members[0].error_code)

    async def commit(self, log: Log, offset: int, metadata: str = "") -> str:
        topics = log.topics(offset=offset, metadata=metadata)
        response = await self.wire.request(Api.OFFSET_COMMIT, topics=topics, **self.identity)
        return code_name(response.topics[0].partitions[0].error_code)

    async def committed(self, log: Log) -> tuple[int, str]:
        topics = [Message(name=log.topic, partitions=[0])]
        response = await self.wire.request(Api.OFFSET_FETCH, group_id=self.group_id, topics=topics)
        row = response.topics[0].partitions[0]
        return row.offset, row.metadata


async def single_member(wire: Wire, name: str, **more: Any) -> Member:
    """Join as the group's only member, in a stable generation."""
    await wire.request(Api.FIND_COORDINATOR, key=name)
    member = Member(wire, name, **more)
    await member.join()
    assert (await member.sync({member.member_id: b"all"})).assignment == b"all"
    return member


async def state_of(wire: Wire, group_id: str) -> str:
    return str((await wire.request(Api.DESCRIBE_GROUPS, groups=[group_id])).groups[0].group_state)


async def test_a_member_joins_with_the_id_it_was_given(wire: Wire, name: str) -> None:
    """The first join returns an id, and the second makes the member the leader of the group."""
    await wire.request(Api.FIND_COORDINATOR, key=name)
    member = Member(wire, name)
    response = await member.join()
    assert (response.error_code, response.generation_id, response.protocol_name) == (0, 1, "range")
    assert response.leader == response.member_id == member.member_id
    assert [(one.member_id, one.metadata) for one in response.members] == [(member.member_id, b"m")]
    assert member.member_id.startswith("contract-")


async def test_the_leader_assigns(broker: Broker, wire: Wire, other_wire: Wire, name: str) -> None:
    """A second member makes the group rebalance, and the leader's sync gives each its assignment."""
    first, second = await single_member(wire, name), Member(other_wire, name)
    joining = asyncio.create_task(second.join())

    async def must_rejoin() -> bool:
        return await first.heartbeat() == "REBALANCE_IN_PROGRESS"

    await until(must_rejoin)
    assert code_name((await first.sync()).error_code) == "REBALANCE_IN_PROGRESS"
    response, others = await first.join(), await joining
    assert (response.generation_id, others.generation_id) == (2, 2)
    assert (response.leader, others.leader, others.members) == (first.member_id, first.member_id, [])
    assert sorted(one.member_id for one in response.members) == sorted((first.member_id, second.member_id))
    waiting = asyncio.create_task(second.sync())
    own = await first.sync({first.member_id: b"1", second.member_id: b"2"})
    assert (own.assignment, (await waiting).assignment) == (b"1", b"2")
    assert await state_of(wire, name) == "Stable"
    described = (await wire.request(Api.DESCRIBE_GROUPS, groups=[name])).groups[0]
    assert sorted((one.member_id, one.member_assignment, one.client_id) for one in described.members) == sorted(
        [(first.member_id, b"1", "contract"), (second.member_id, b"2", "contract")]
    )


async def test_a_sync_names_the_protocol(wire: Wire, name: str) -> None:
    """A sync without the group's protocol, or with another one, is an error."""
    member = await single_member(wire, name)
    for wrong in ({"protocol_name": None}, {"protocol_type": None}, {"protocol_name": "x"}, {"protocol_type": "x"}):
        assert code_name((await member.sync(**wrong)).error_code) == "INCONSISTENT_GROUP_PROTOCOL"
    assert code_name((await member.sync()).error_code) == "NONE"


async def test_unknown_members_and_generations_are_errors(wire: Wire, name: str) -> None:
    """Every request of an unknown member or of another generation is an error."""
    member = await single_member(wire, name)
    stranger = Member(wire, name, member_id="stranger", generation=member.generation)
    assert await stranger.heartbeat() == "UNKNOWN_MEMBER_ID"
    assert code_name((await stranger.join()).error_code) == "UNKNOWN_MEMBER_ID"
    assert code_name((await stranger.sync()).error_code) == "UNKNOWN_MEMBER_ID"
    assert await stranger.leave() == "UNKNOWN_MEMBER_ID"
    member.generation += 1
    assert await member.heartbeat() == "ILLEGAL_GENERATION"
    assert code_name((await member.sync()).error_code) == "ILLEGAL_GENERATION"


async def test_a_missing_group_is_dead(wire: Wire, name: str) -> None:
    """A group that no member joined is Dead."""
    await wire.request(Api.FIND_COORDINATOR, key=name)
    unknown = Member(wire, name, member_id="m", generation=1)
    assert await unknown.heartbeat() == "UNKNOWN_MEMBER_ID"
    assert await unknown.leave() == "UNKNOWN_MEMBER_ID"
    assert await state_of(wire, name) == "Dead"
    response = await wire.request(Api.DELETE_GROUPS, groups=[name])
    assert code_name(response.groups[0].error_code) == "GROUP_ID_NOT_FOUND"


async def test_a_leader_that_rejoins_starts_a_generation(broker: Broker, wire: Wire, name: str) -> None:
    """A leader that joins again with the same protocols starts the next generation."""
    member = await single_member(wire, name)
    response = await member.join()
    assert (response.error_code, response.generation_id) == (0, 2)


async def test_a_group_agrees_on_a_protocol(wire: Wire, name: str) -> None:
    """A member without a common protocol cannot join the group."""
    await single_member(wire, name)
    async with asyncio.timeout(SESSION_MS / 1000):
        other = Member(wire, name, protocols=[("sticky", b"m")])
        assert code_name((await other.join()).error_code) == "INCONSISTENT_GROUP_PROTOCOL"
        assert (
            code_name((await Member(wire, name).join(protocol_type="connect")).error_code)
            == "INCONSISTENT_GROUP_PROTOCOL"
        )


async def test_session_timeouts_have_limits(wire: Wire, name: str) -> None:
    """A session timeout outside of the broker's limits is an error, as is an empty group id."""
    await wire.request(Api.FIND_COORDINATOR, key=name)
    assert code_name((await Member(wire, name, session_ms=99).join()).error_code) == "INVALID_SESSION_TIMEOUT"
    assert code_name((await Member(wire, name, session_ms=1_800_001).join()).error_code) == "INVALID_SESSION_TIMEOUT"
    assert code_name((await Member(wire, "").join()).error_code) == "INVALID_GROUP_ID"


async def test_silence_ends_a_membership(wire: Wire, name: str) -> None:
    """A member that sends nothing for its session timeout is removed, and the group is empty."""
    member = await single_member(wire, name, session_ms=150)

    async def is_empty() -> bool:
        return await state_of(wire, name) == "Empty"

    await until(is_empty)
    assert await member.heartbeat() == "UNKNOWN_MEMBER_ID"


async def test_leaving_empties_the_group(wire: Wire, name: str) -> None:
    """The group is empty after its last member left, and only an empty group can be deleted."""
    member = await single_member(wire, name)
    assert code_name((await wire.request(Api.DELETE_GROUPS, groups=[name])).groups[0].error_code) == "NON_EMPTY_GROUP"
    assert await member.leave() == "NONE"
    assert await state_of(wire, name) == "Empty"
    listed = await wire.request(Api.LIST_GROUPS, states_filter=["Empty"])
    assert (name, "consumer", "Empty") in [(g.group_id, g.protocol_type, g.group_state) for g in listed.groups]
    assert code_name((await wire.request(Api.DELETE_GROUPS, groups=[name])).groups[0].error_code) == "NONE"
    assert await state_of(wire, name) == "Dead"


async def test_members_commit(log: Log, name: str) -> None:
    """Only a member of the current generation can commit, and others can once the group has no members."""
    member = await single_member(log.wire, f"{name}-group")
    assert await member.committed(log) == (-1, "")
    assert await member.commit(log, 5, "here") == "NONE"
    assert await member.committed(log) == (5, "here")
    old = Member(log.wire, member.group_id, member_id=member.member_id, generation=member.generation - 1)
    assert await old.commit(log, 6) == "ILLEGAL_GENERATION"
    assert await Member(log.wire, member.group_id).commit(log, 6) == "UNKNOWN_MEMBER_ID"
    assert await Member(log.wire, member.group_id, member_id="x", generation=1).commit(log, 6) == "UNKNOWN_MEMBER_ID"
    assert await member.committed(log) == (5, "here")
    assert await member.leave() == "NONE"
    assert await Member(log.wire, member.group_id).commit(log, 3) == "NONE"
    assert await member.committed(log) == (3, "")


async def test_clients_without_a_group_can_commit(log: Log, name: str) -> None:
    """Without members a client can commit without a generation; such a group is Empty, without a protocol type."""
    group_id = f"{name}-group"
    await log.wire.request(Api.FIND_COORDINATOR, key=group_id)
    assert await Member(log.wire, group_id, member_id="m", generation=1).commit(log, 1) == "ILLEGAL_GENERATION"
    outsider = Member(log.wire, group_id)
    assert await outsider.commit(log, 4) == "NONE"
    assert await outsider.committed(log) == (4, "")
    assert await state_of(log.wire, group_id) == "Empty"
    every = await log.wire.request(Api.OFFSET_FETCH, group_id=group_id, topics=None)
    assert [(t.name, [(p.partition, p.offset) for p in t.partitions]) for t in every.topics] == [(log.topic, [(0, 4)])]


async def test_invalid_commits(log: Log, name: str) -> None:
    """Offsets of unknown topics and metadata that is too long are errors."""
    group_id = f"{name}-group"
    await log.wire.request(Api.FIND_COORDINATOR, key=group_id)
    outsider = Member(log.wire, group_id)
    assert await outsider.commit(Log(log.wire, f"{name}-none"), 1) == "UNKNOWN_TOPIC_OR_PARTITION"
    response = await log.wire.request(
        Api.OFFSET_COMMIT, topics=log.topics(offset=1, metadata="m" * 5_000), **outsider.identity
    )
    assert response.topics[0].partitions[0].error_code == CODE_OF["OFFSET_METADATA_TOO_LARGE"]


async def test_a_member_commits_only_after_its_sync(log: Log, name: str) -> None:
    """Between join and sync a member cannot commit, but its heartbeat is accepted."""
    group_id = f"{name}-group"
    await log.wire.request(Api.FIND_COORDINATOR, key=group_id)
    member = Member(log.wire, group_id)
    await member.join()
    assert await member.heartbeat() == "NONE"
    assert await member.commit(log, 1) == "REBALANCE_IN_PROGRESS"
    await member.sync()
    assert await member.commit(log, 1) == "NONE"


async def test_static_members_keep_their_assignment(broker: Broker, wire: Wire, name: str) -> None:
    """A restarted static member has a new id and its old assignment without a rebalance, and the old id is fenced."""
    first = await single_member(wire, name, instance_id="one")
    second = Member(wire, name, instance_id="one")
    response = await second.join()
    assert (response.error_code, response.generation_id, response.skip_assignment) == (0, first.generation, True)
    assert second.member_id != first.member_id
    assert response.leader == second.member_id
    assert await state_of(wire, name) == "Stable"
    assert (await second.sync()).assignment == b"all"
    assert await first.heartbeat() == "FENCED_INSTANCE_ID"
    assert code_name((await first.join()).error_code) == "FENCED_INSTANCE_ID"
    assert await first.leave() == "FENCED_INSTANCE_ID"
    async with connected(broker) as third:
        assert await Member(third, name, "one", first.member_id, first.generation).heartbeat() == "FENCED_INSTANCE_ID"


async def test_older_clients_do_not_skip_the_assignment(wire: Wire, name: str) -> None:
    """In versions without `skip_assignment` a restarted leader gets its old member id as the leader."""
    first = await single_member(wire, name, instance_id="one")
    response = await wire.request(
        Api.JOIN_GROUP,
        5,
        group_id=name,
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=SESSION_MS,
        group_instance_id="one",
        protocol_type="consumer",
        protocols=[Message(name="range", metadata=b"m")],
    )
    assert (response.error_code, response.generation_id) == (0, first.generation)
    assert (response.leader, response.members) == (first.member_id, [])


async def test_another_protocol_is_a_rebalance(wire: Wire, name: str) -> None:
    """A restarted static member causes a rebalance only if the group's protocol changes."""
    first = await single_member(wire, name, instance_id="one")
    second = Member(wire, name, instance_id="one", protocols=[("range", b"other")])
    assert ((await second.join()).error_code, second.generation) == (0, first.generation)
    third = Member(wire, name, instance_id="one", protocols=[("sticky", b"m"), ("range", b"m")])
    assert ((await third.join()).error_code, third.generation) == (0, first.generation + 1)


async def test_a_restart_before_the_sync_is_a_rebalance(wire: Wire, other_wire: Wire, name: str) -> None:
    """If a static member restarts before the leader's sync, the group rebalances: the leader knows only the old id."""
    leader, second = await single_member(wire, name, instance_id="one"), Member(other_wire, name, "two")

    async def must_rejoin() -> bool:
        return await leader.heartbeat() == "REBALANCE_IN_PROGRESS"

    for _ in range(2):
        second.member_id = ""
        joining = asyncio.create_task(second.join())
        await until(must_rejoin)
        response, others = await leader.join(), await joining
    assert sorted(one.member_id for one in response.members) == sorted((leader.member_id, second.member_id))
    assert (response.generation_id, others.generation_id) == (3, 3)
    waiting = asyncio.create_task(second.sync())
    await leader.sync({leader.member_id: b"1", second.member_id: b"2"})
    assert (await waiting).assignment == b"2"


async def test_a_static_member_outlasts_one_rebalance(wire: Wire, other_wire: Wire, name: str) -> None:
    """A static member that does not join again keeps its assignment, but is removed if it does not sync either."""
    await wire.request(Api.FIND_COORDINATOR, key=name)
    first, second = Member(wire, name, "one"), Member(other_wire, name, "two")
    await first.join(rebalance_timeout_ms=500)
    await first.sync({first.member_id: b"1"})
    response = await second.join(rebalance_timeout_ms=500)
    assert (response.generation_id, response.leader) == (2, second.member_id)
    assert sorted(one.member_id for one in response.members) == sorted((first.member_id, second.member_id))
    assert (await second.sync({first.member_id: b"1", second.member_id: b"2"})).assignment == b"2"
    described = (await wire.request(Api.DESCRIBE_GROUPS, groups=[name])).groups[0]
    assert sorted(one.member_assignment for one in described.members) == [b"1", b"2"]

    async def must_rejoin() -> bool:
        return await second.heartbeat() == "REBALANCE_IN_PROGRESS"

    await until(must_rejoin)
    assert await first.heartbeat() == "UNKNOWN_MEMBER_ID"


async def test_static_members_leave_by_name(wire: Wire, name: str) -> None:
    """A static member can be removed by its instance id alone."""
    await single_member(wire, name, instance_id="one")
    rows = [Message(member_id="", group_instance_id=instance) for instance in ("one", "two")]
    response = await wire.request(Api.LEAVE_GROUP, group_id=name, members=rows)
    assert [code_name(row.error_code) for row in response.members] == ["NONE", "UNKNOWN_MEMBER_ID"]
    assert await state_of(wire, name) == "Empty"
