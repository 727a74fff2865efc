"""The I/O of every `Member`: JoinGroup, SyncGroup, LeaveGroup, and the heartbeats sent in parallel.

The response to JoinGroup may wait until all members have joined, and that to SyncGroup until the leader has sent the
assignments. These requests have a connection of their own, so that heartbeats, commits and fetches do not wait behind
them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.group.member import COORDINATOR_MOVED, Join, JoinResponse, Member, Sync, SyncResponse
from penstock.shared.clients.group.member_identity import log_fields
from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.errors import NO_ERROR, name_of
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import PenstockError, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.repeated_failure import RepeatedFailure

log = get_logger(__name__)

RESPONSE_GRACE_MS = 5_000
"""The extra time beyond the rebalance timeout to answer JoinGroup (as in the Java consumer) or SyncGroup."""
FIRST_RESPONSE_MS = 2_000
"""How long a leave waits for the response to a first join, which has the member id. Brokers send it at once
(KIP-394)."""
LEAVE_TRIES = 3
"""How often LeaveGroup is sent if the coordinator has moved."""


class GroupRequests:
    """Sends one member's requests to its group's coordinator, over an open connection."""

    def __init__(
        self,
        connection: Connection,
        member: Member,
        clock: Clock,
        *,
        protocol_type: str,
        rebalance_timeout_ms: int,
        on_heartbeat: Callable[[bool], None],
    ) -> None:
        """`on_heartbeat` is called after each heartbeat, with True if it was answered without an error."""
        self._connection = connection
        self._member = member
        self._clock = clock
        self._protocol_type = protocol_type
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self._on_heartbeat = on_heartbeat
        self._group_id = member.config.group_id
        self._beats = asyncio.Event()
        self._first_join: asyncio.Future[JoinResponse] | None = None
        self._unanswered = RepeatedFailure()
        self._failing = RepeatedFailure()

    def __repr__(self) -> str:
        return f"<GroupRequests of {self._member.where()}>"

    async def join(self, join: Join) -> JoinResponse:
        """Send JoinGroup."""
        if join.member_id or self._member.config.instance_id is not None:
            return await self._send_join_group(join)
        # On a join without a member id the coordinator reserves a membership for the id that it answers with (KIP-394).
        # Such a join continues if its caller is cancelled, so that `leave` can release the membership.
        self._first_join = asyncio.ensure_future(self._send_join_group(join))
        response = await asyncio.shield(self._first_join)
        self._first_join = None
        return response

    async def _send_join_group(self, join: Join) -> JoinResponse:
        config = self._member.config
        # While joins fail, `_log_failure` logs now and then.
        if not self._failing.is_failing:
            log.info("joining the group", **self.fields(), reason=join.reason)
        response = await self._request_group_coordinator(
            requests.JOIN_GROUP(
                config.group_id,
                config.session_timeout_ms,
                self._rebalance_timeout_ms,
                join.member_id,
                config.instance_id,
                self._protocol_type,
                list(join.protocols),
            ),
            "JoinGroup",
            waits_ms=self._rebalance_timeout_ms + RESPONSE_GRACE_MS,
        )
        return JoinResponse(
            response.error_code,
            response.generation_id,
            response.protocol_name or "",
            response.leader or "",
            response.member_id or "",
            tuple((name, instance, bytes(data)) for name, instance, data in response.members),
        )

    async def sync(self, sync: Sync) -> SyncResponse:
        """Send SyncGroup."""
        response = await self._request_group_coordinator(
            requests.SYNC_GROUP(
                self._group_id,
                sync.generation,
                sync.member_id,
                self._member.config.instance_id,
                list(sync.assignments.items()),
            ),
            "SyncGroup",
            waits_ms=self._rebalance_timeout_ms + RESPONSE_GRACE_MS,
        )
        return SyncResponse(response.error_code, bytes(response.assignment or b""))

    async def leave(self, member_id: str) -> None:
        """Send LeaveGroup. Errors are only logged: without the request the group removes the member after its session
        timeout.

        Without a member id the call waits for the response to the first JoinGroup, and uses the id in it. Nothing is
        sent if no first JoinGroup is in flight, or if no id arrives within FIRST_RESPONSE_MS.
        """
        if not (member_id := member_id or await self._first_member_id()):
            return
        request = requests.LEAVE_GROUP(self._group_id, [(member_id, None)])
        codes: list[int] = []
        try:
            # Only a moved coordinator is worth a retry: after any other error the session timeout removes the member.
            for _ in range(LEAVE_TRIES):
                response = await self._request_group_coordinator(request, "LeaveGroup")
                codes = [response.error_code, *(code for *_, code in response.members)]
                if not COORDINATOR_MOVED.intersection(codes):
                    break
                self._connection.forget_coordinator("group", self._group_id)
                await asyncio.sleep(self._member.config.retry_backoff_ms / 1000)
        except PenstockError as e:
            log.info("LeaveGroup failed", **self.fields(), left_as=member_id, reason=str(e))
            return
        for code in (code for code in codes if code != NO_ERROR):
            log.info("LeaveGroup failed", **self.fields(), left_as=member_id, reason=name_of(code))

    async def _first_member_id(self) -> str:
        # Take it, so that a second `leave` does not wait again.
        joining = self._first_join
        self._first_join = None
        if joining is None:
            return ""
        try:
            async with asyncio.timeout(FIRST_RESPONSE_MS / 1000):
                return (await joining).member_id
        except (TimeoutError, PenstockError) as e:
            log.info("LeaveGroup was not sent", **self.fields(), reason=str(e) or "no response to the join")
            return ""

    async def heartbeats(self) -> None:
        """Send each heartbeat when it is due, until cancelled."""
        while True:
            wait_ms = self._member.heartbeat_wait_ms(self._clock.monotonic_ms())
            if wait_ms == 0:
                await self._send_heartbeat()
                continue
            self._beats.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._beats.wait()

    async def _send_heartbeat(self) -> None:
        config = self._member.config
        sent_as = self._member.on_heartbeat_sent(self._clock.monotonic_ms())
        code: int | None = None
        request = requests.HEARTBEAT(config.group_id, *sent_as, config.instance_id)
        try:
            # The request timeout may be longer. After the session timeout the response does not help any more.
            async with asyncio.timeout(config.session_timeout_ms / 1000):
                code = (await self._request_group_coordinator(request, "Heartbeat")).error_code
        except (TimeoutError, RetriableError) as e:
            # As Java's `markCoordinatorUnknown`: no later request may use the silent connection.
            if isinstance(e, TimeoutError):
                self._connection.disconnect_coordinator("group", config.group_id)
            now_ms = self._clock.monotonic_ms()
            if (times := self._unanswered.failed(now_ms)) is not None:
                log.warning("heartbeat without response", **self.fields(), **times, reason=str(e) or "session timeout")
            self._member.on_heartbeat_lost(now_ms)
        except PenstockError as e:
            self._member.on_heartbeat_failed(sent_as, e)
        else:
            if (times := self._unanswered.succeeded(self._clock.monotonic_ms())) is not None:
                log.info("heartbeats are answered again", **self.fields(), **times)
            if code != NO_ERROR:
                log.info("heartbeat", **self.fields(), response=name_of(code))
            self._member.on_heartbeat(sent_as, code, self._clock.monotonic_ms())
        self.follow_up()
        self._on_heartbeat(code == NO_ERROR)

    async def execute(self, step: object, execution: Awaitable[None]) -> None:
        """Await the execution of a step. A PenstockError is logged and reported to the member."""
        try:
            await execution
        except PenstockError as e:
            self._log_failure(step, e)
            self._member.on_failure(e, self._clock.monotonic_ms())
        else:
            self._log_success(step)
        self.follow_up()

    def _log_failure(self, step: object, error: PenstockError) -> None:
        """Log a step's failed request; repeated failures are logged only now and then."""
        if (times := self._failing.failed(self._clock.monotonic_ms())) is not None:
            name = type(step).__name__
            log.warning("group request failed", **self.fields(), **times, step=name, reason=str(error))

    def _log_success(self, step: object) -> None:
        """Log that JoinGroup or SyncGroup is answered again, if the last ones failed."""
        if isinstance(step, Join | Sync) and (times := self._failing.succeeded(self._clock.monotonic_ms())) is not None:
            log.info("group requests are answered again", **self.fields(), **times)

    def follow_up(self) -> None:
        """Called after steps, heartbeats and adopted assignments: wake `heartbeats`, and forget a moved coordinator."""
        self._beats.set()
        if self._member.forget_coordinator:
            self._member.forget_coordinator = False
            self._connection.forget_coordinator("group", self._group_id)

    def fields(self) -> dict[str, object]:
        """Return the member's identity as fields for the log."""
        return log_fields(self._member.config.client_id, self._member.group_metadata)

    async def _request_group_coordinator(self, request: Any, api: str, waits_ms: float | None = None) -> Any:
        where = f"{api} of {self._member.where()}"
        return await self._connection.request_coordinator("group", self._group_id, request, where, waits_ms=waits_ms)
