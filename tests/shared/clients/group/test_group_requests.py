"""A member's requests against a fake broker whose coordinator moves."""

from __future__ import annotations

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.consumer.assignors import ASSIGNORS
from penstock.shared.clients.consumer.membership_manager import ConsumerMembershipManager
from penstock.shared.clients.group.group_requests import GroupRequests
from penstock.shared.clients.group.member import GroupConfig, Join
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster


async def test_a_leave_finds_a_coordinator_that_has_moved() -> None:
    """If the coordinator has moved, it is looked up again, so that the other members need not wait for the session
    timeout."""
    async with FakeCluster() as cluster:
        config = GroupConfig("g", "c", retry_backoff_ms=1)
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, client_id="c"))
        await connection.open()
        member = ConsumerMembershipManager(config, ASSIGNORS["range"])
        requests = GroupRequests(
            connection, member, SYSTEM_CLOCK,
            protocol_type="any", rebalance_timeout_ms=1_000, on_heartbeat=lambda _ok: None,
        )  # fmt: skip
        try:
            named = await requests.join(Join("", (("p", b""),), "new"))
            joined = await requests.join(Join(named.member_id, (("p", b""),), "new"))
            assert (joined.code, joined.protocol, joined.leader) == (ErrorCode.NONE, "p", joined.member_id)
            with cluster.control(Api.LEAVE_GROUP, Fail(ErrorCode.NOT_COORDINATOR), times=1):
                await requests.leave(joined.member_id)
            back = await requests.join(Join(joined.member_id, (("p", b""),), "back"))
            assert back.code == ErrorCode.UNKNOWN_MEMBER_ID
        finally:
            await connection.close()
