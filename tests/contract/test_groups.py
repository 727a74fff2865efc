"""Groups of the classic protocol: generations, members, and committed offsets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from penstock.shared.testing.fake_broker import Api, ErrorCode, Message
from tests.contract.conftest import Broker, Log, Wire, connected, until

SESSION_MS = 10_000


def named(code: int) -> str:
    return ErrorCode(code).name


@dataclass
class Member:
    """One member, made of bare requests."""

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
        answer = await self.wire.ask(Api.JOIN_GROUP, **body)
        if named(answer.error_code) == "MEMBER_ID_REQUIRED":
            self.member_id = answer.member_id
            return await self.join(**more)
        if not answer.error_code:
            self.member_id, self.generation = answer.member_id, answer.generation_id
        return answer

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "group_id": self.group_id,
            "generation_id": self.generation,
            "member_id": self.member_id,
            "group_instance_id": self.instance_id,
        }

    async def sync(self, assignments: dict[str, bytes] | None = None, **more: Any) -> Message:
        rows = [Message(member_id=who, assignment=what) for who, what in (assignments or {}).items()]
        protocol = {"protocol_type": "consumer", "protocol_name": "range"}
        return await self.wire.ask(Api.SYNC_GROUP, **{"assignments": rows, **protocol, **self.identity, **more})

    async def heartbeat(self) -> str:
        return named((await self.wire.ask(Api.HEARTBEAT, **self.identity)).error_code)

    async def leave(self) -> str:
        rows = [Message(member_id=self.member_id, group_instance_id=self.instance_id)]
        answer = await self.wire.ask(Api.LEAVE_GROUP, group_id=self.group_id, members=rows)
        return named(answer.error_code or answer.members[0].error_code)

    async def commit(self, log: Log, offset: int, metadata: str = "") -> str:
        topics = log.topics(offset=offset, metadata=metadata)
        answer = await self.wire.ask(Api.OFFSET_COMMIT, topics=topics, **self.identity)
        return named(answer.topics[0].partitions[0].error_code)

    async def committed(self, log: Log) -> tuple[int, str]:
        topics = [Message(name=log.topic, partitions=[0])]
        answer = await self.wire.ask(Api.OFFSET_FETCH, group_id=self.group_id, topics=topics)
        row = answer.topics[0].partitions[0]
        return row.offset, row.metadata


async def alone(wire: Wire, name: str, **more: Any) -> Member:
    """A member that is the whole group, in a stable generation."""
    await wire.ask(Api.FIND_COORDINATOR, key=name)
    member = Member(wire, name, **more)
    await member.join()
    assert (await member.sync({member.member_id: b"all"})).assignment == b"all"
    return member


async def state_of(wire: Wire, group_id: str) -> str:
    return str((await wire.ask(Api.DESCRIBE_GROUPS, groups=[group_id])).groups[0].group_state)


async def test_a_member_joins_with_the_id_it_was_given(wire: Wire, name: str) -> None:
    """The first try gives an id, the second joins, leads, and lists itself."""
    await wire.ask(Api.FIND_COORDINATOR, key=name)
    member = Member(wire, name)
    answer = await member.join()
    assert (answer.error_code, answer.generation_id, answer.protocol_name) == (0, 1, "range")
    assert answer.leader == answer.member_id == member.member_id
    assert [(one.member_id, one.metadata) for one in answer.members] == [(member.member_id, b"m")]
    assert member.member_id.startswith("contract-")


async def test_the_leader_assigns(broker: Broker, wire: Wire, other_wire: Wire, name: str) -> None:
    """A second member has the group join anew; the leader's sync gives each its assignment."""
    first, second = await alone(wire, name), Member(other_wire, name)
    joining = asyncio.create_task(second.join())

    async def is_asked_to_join() -> bool:
        return await first.heartbeat() == "REBALANCE_IN_PROGRESS"

    await until(is_asked_to_join)
    assert named((await first.sync()).error_code) == "REBALANCE_IN_PROGRESS"
    answer, others = await first.join(), await joining
    assert (answer.generation_id, others.generation_id) == (2, 2)
    assert (answer.leader, others.leader, others.members) == (first.member_id, first.member_id, [])
    assert sorted(one.member_id for one in answer.members) == sorted((first.member_id, second.member_id))
    waiting = asyncio.create_task(second.sync())
    own = await first.sync({first.member_id: b"1", second.member_id: b"2"})
    assert (own.assignment, (await waiting).assignment) == (b"1", b"2")
    assert await state_of(wire, name) == "Stable"
    described = (await wire.ask(Api.DESCRIBE_GROUPS, groups=[name])).groups[0]
    assert sorted((one.member_id, one.member_assignment, one.client_id) for one in described.members) == sorted(
        [(first.member_id, b"1", "contract"), (second.member_id, b"2", "contract")]
    )


async def test_a_sync_names_the_protocol(wire: Wire, name: str) -> None:
    """A sync without the group's protocol, or with another, is refused."""
    member = await alone(wire, name)
    for wrong in ({"protocol_name": None}, {"protocol_type": None}, {"protocol_name": "x"}, {"protocol_type": "x"}):
        assert named((await member.sync(**wrong)).error_code) == "INCONSISTENT_GROUP_PROTOCOL"
    assert named((await member.sync()).error_code) == "NONE"


async def test_strangers_are_refused(wire: Wire, name: str) -> None:
    """A member the group does not know, or of another generation, is told so by every request."""
    member = await alone(wire, name)
    stranger = Member(wire, name, member_id="stranger", generation=member.generation)
    assert await stranger.heartbeat() == "UNKNOWN_MEMBER_ID"
    assert named((await stranger.join()).error_code) == "UNKNOWN_MEMBER_ID"
    assert named((await stranger.sync()).error_code) == "UNKNOWN_MEMBER_ID"
    assert await stranger.leave() == "UNKNOWN_MEMBER_ID"
    member.generation += 1
    assert await member.heartbeat() == "ILLEGAL_GENERATION"
    assert named((await member.sync()).error_code) == "ILLEGAL_GENERATION"


async def test_a_group_that_is_not_there(wire: Wire, name: str) -> None:
    """Nothing is known of a group that nobody joined: it is Dead."""
    await wire.ask(Api.FIND_COORDINATOR, key=name)
    nobody = Member(wire, name, member_id="m", generation=1)
    assert await nobody.heartbeat() == "UNKNOWN_MEMBER_ID"
    assert await nobody.leave() == "UNKNOWN_MEMBER_ID"
    assert await state_of(wire, name) == "Dead"
    answer = await wire.ask(Api.DELETE_GROUPS, groups=[name])
    assert named(answer.groups[0].error_code) == "GROUP_ID_NOT_FOUND"


async def test_who_rejoins_with_nothing_new_changes_nothing(broker: Broker, wire: Wire, name: str) -> None:
    """A follower that joins again with the same protocols stays in the generation; the leader starts the next one."""
    member = await alone(wire, name)
    answer = await member.join()
    assert (answer.error_code, answer.generation_id) == (0, 2)


async def test_a_group_agrees_on_a_protocol(wire: Wire, name: str) -> None:
    """Members without a common protocol cannot be in one group."""
    await alone(wire, name)
    async with asyncio.timeout(SESSION_MS / 1000):
        other = Member(wire, name, protocols=[("sticky", b"m")])
        assert named((await other.join()).error_code) == "INCONSISTENT_GROUP_PROTOCOL"
        assert (
            named((await Member(wire, name).join(protocol_type="connect")).error_code) == "INCONSISTENT_GROUP_PROTOCOL"
        )


async def test_session_timeouts_have_limits(wire: Wire, name: str) -> None:
    """A session timeout lies between the broker's limits, and a group has a name."""
    await wire.ask(Api.FIND_COORDINATOR, key=name)
    assert named((await Member(wire, name, session_ms=99).join()).error_code) == "INVALID_SESSION_TIMEOUT"
    assert named((await Member(wire, name, session_ms=1_800_001).join()).error_code) == "INVALID_SESSION_TIMEOUT"
    assert named((await Member(wire, "").join()).error_code) == "INVALID_GROUP_ID"


async def test_silence_ends_a_membership(wire: Wire, name: str) -> None:
    """A member that says nothing for its session timeout is out, and the group is empty."""
    member = await alone(wire, name, session_ms=150)

    async def is_empty() -> bool:
        return await state_of(wire, name) == "Empty"

    await until(is_empty)
    assert await member.heartbeat() == "UNKNOWN_MEMBER_ID"


async def test_leaving_empties_the_group(wire: Wire, name: str) -> None:
    """The last member's leave empties the group, and an empty group can be deleted."""
    member = await alone(wire, name)
    assert named((await wire.ask(Api.DELETE_GROUPS, groups=[name])).groups[0].error_code) == "NON_EMPTY_GROUP"
    assert await member.leave() == "NONE"
    assert await state_of(wire, name) == "Empty"
    listed = await wire.ask(Api.LIST_GROUPS, states_filter=["Empty"])
    assert (name, "consumer", "Empty") in [(g.group_id, g.protocol_type, g.group_state) for g in listed.groups]
    assert named((await wire.ask(Api.DELETE_GROUPS, groups=[name])).groups[0].error_code) == "NONE"
    assert await state_of(wire, name) == "Dead"


async def test_members_commit(log: Log, name: str) -> None:
    """A member of the present generation commits, one of another does not, and outsiders do not while there are any."""
    member = await alone(log.wire, f"{name}-group")
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


async def test_who_has_no_group_can_keep_offsets(log: Log, name: str) -> None:
    """Without members anyone may commit, with a generation nobody; such a group is Empty, without a protocol type."""
    group_id = f"{name}-group"
    await log.wire.ask(Api.FIND_COORDINATOR, key=group_id)
    assert await Member(log.wire, group_id, member_id="m", generation=1).commit(log, 1) == "ILLEGAL_GENERATION"
    outsider = Member(log.wire, group_id)
    assert await outsider.commit(log, 4) == "NONE"
    assert await outsider.committed(log) == (4, "")
    assert await state_of(log.wire, group_id) == "Empty"
    every = await log.wire.ask(Api.OFFSET_FETCH, group_id=group_id, topics=None)
    assert [(t.name, [(p.partition, p.offset) for p in t.partitions]) for t in every.topics] == [(log.topic, [(0, 4)])]


async def test_what_cannot_be_committed(log: Log, name: str) -> None:
    """Offsets of unknown topics and metadata without end are refused."""
    group_id = f"{name}-group"
    await log.wire.ask(Api.FIND_COORDINATOR, key=group_id)
    outsider = Member(log.wire, group_id)
    assert await outsider.commit(Log(log.wire, f"{name}-none"), 1) == "UNKNOWN_TOPIC_OR_PARTITION"
    answer = await log.wire.ask(
        Api.OFFSET_COMMIT, topics=log.topics(offset=1, metadata="m" * 5_000), **outsider.identity
    )
    assert answer.topics[0].partitions[0].error_code == 12


async def test_commits_wait_for_the_assignment(log: Log, name: str) -> None:
    """Between join and sync a member cannot commit, and its heartbeat is fine."""
    group_id = f"{name}-group"
    await log.wire.ask(Api.FIND_COORDINATOR, key=group_id)
    member = Member(log.wire, group_id)
    await member.join()
    assert await member.heartbeat() == "NONE"
    assert await member.commit(log, 1) == "REBALANCE_IN_PROGRESS"
    await member.sync()
    assert await member.commit(log, 1) == "NONE"


async def test_static_members_keep_their_place(broker: Broker, wire: Wire, name: str) -> None:
    """A static member that starts anew gets a new id, its old assignment, and no rebalance; the old id is fenced."""
    first = await alone(wire, name, instance_id="one")
    second = Member(wire, name, instance_id="one")
    answer = await second.join()
    assert (answer.error_code, answer.generation_id, answer.skip_assignment) == (0, first.generation, True)
    assert second.member_id != first.member_id
    assert answer.leader == second.member_id
    assert await state_of(wire, name) == "Stable"
    assert (await second.sync()).assignment == b"all"
    assert await first.heartbeat() == "FENCED_INSTANCE_ID"
    assert named((await first.join()).error_code) == "FENCED_INSTANCE_ID"
    assert await first.leave() == "FENCED_INSTANCE_ID"
    async with connected(broker) as third:
        assert await Member(third, name, "one", first.member_id, first.generation).heartbeat() == "FENCED_INSTANCE_ID"


async def test_older_clients_do_not_skip_the_assignment(wire: Wire, name: str) -> None:
    """Before an answer could say so, a leader that started anew was told that its old self leads."""
    first = await alone(wire, name, instance_id="one")
    answer = await wire.ask(
        Api.JOIN_GROUP,
        5,
        group_id=name,
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=SESSION_MS,
        group_instance_id="one",
        protocol_type="consumer",
        protocols=[Message(name="range", metadata=b"m")],
    )
    assert (answer.error_code, answer.generation_id) == (0, first.generation)
    assert (answer.leader, answer.members) == (first.member_id, [])


async def test_another_protocol_is_a_rebalance(wire: Wire, name: str) -> None:
    """A static member that starts anew has the group rebalance where its protocol is another, and only there."""
    first = await alone(wire, name, instance_id="one")
    second = Member(wire, name, instance_id="one", protocols=[("range", b"other")])
    assert ((await second.join()).error_code, second.generation) == (0, first.generation)
    third = Member(wire, name, instance_id="one", protocols=[("sticky", b"m"), ("range", b"m")])
    assert ((await third.join()).error_code, third.generation) == (0, first.generation + 1)


async def test_static_members_leave_by_name(wire: Wire, name: str) -> None:
    """An administrator removes a static member without knowing its id."""
    await alone(wire, name, instance_id="one")
    rows = [Message(member_id="", group_instance_id=instance) for instance in ("one", "two")]
    answer = await wire.ask(Api.LEAVE_GROUP, group_id=name, members=rows)
    assert [named(row.error_code) for row in answer.members] == ["NONE", "UNKNOWN_MEMBER_ID"]
    assert await state_of(wire, name) == "Empty"
