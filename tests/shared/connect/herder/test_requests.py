"""Requests to the herder: they run in its loop in order, and requests between workers are signed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable

import pytest

from penstock.shared.common.errors import IllegalState
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.herder.command_queue import CommandQueue
from penstock.shared.connect.herder.errors import RequestTimedOut
from penstock.shared.connect.herder.leader_client import LeaderClient, LeaderRequestFailed
from penstock.shared.connect.herder.session_keys import (
    ALGORITHM_HEADER,
    HASHES,
    SIGNATURE_HEADER,
    expires_in_ms,
    new_key,
    sign,
    verify,
)
from penstock.shared.connect.storage.config_records import SessionKey
from penstock.shared.testing.manual_clock import ManualClock
from tests.shared.connect.connectors.http_server import serving


def recording(ran: list[int], number: int) -> Callable[[], Awaitable[int]]:
    async def run() -> int:
        ran.append(number)
        return number

    return run


async def test_commands_run_in_the_order_they_are_due() -> None:
    """Commands run in the order they came, and a delayed command when it is due."""
    clock, ran, woken = ManualClock(), list[int](), list[int]()
    queue = CommandQueue(clock, lambda: woken.append(1))
    later = queue.put(recording(ran, 3), delay_ms=100)
    futures = [queue.put(recording(ran, n)) for n in (1, 2)]
    assert (len(woken), queue.wait_ms()) == (3, 0)
    await queue.run_due()
    assert ran == [1, 2]
    assert [await done for done in futures] == [1, 2]
    assert queue.wait_ms() == 100
    clock.advance(100)
    await queue.run_due()
    assert await later == 3
    assert queue.wait_ms() is None


async def test_errors_reach_the_caller() -> None:
    """A command's error is raised in its caller, and the next command runs."""
    ran: list[int] = []
    queue = CommandQueue(ManualClock(), lambda: None)

    async def fail() -> None:
        raise BadRequest("no")

    response = asyncio.ensure_future(queue.execute(fail))
    await asyncio.sleep(0)
    queue.put(recording(ran, 1))
    await queue.run_due()
    with pytest.raises(BadRequest):
        await response
    assert ran == [1]


async def test_run_due_stops_on_a_condition() -> None:
    """`run_due` stops after a command if its condition is true, and the rest waits."""
    ran: list[int] = []
    queue = CommandQueue(ManualClock(), lambda: None)
    for n in (1, 2):
        queue.put(recording(ran, n))
    await queue.run_due(until=lambda: bool(ran))
    assert ran == [1]
    assert len(queue) == 1


async def test_a_command_that_times_out_does_not_run() -> None:
    """A command whose caller timed out is not run."""
    ran: list[int] = []
    queue = CommandQueue(ManualClock(), lambda: None)
    with pytest.raises(RequestTimedOut):
        await queue.execute(recording(ran, 1), timeout_ms=1)
    await queue.run_due()
    assert ran == []


async def test_a_timeout_error_of_a_command_reaches_the_caller() -> None:
    """A TimeoutError that a command raises is not a timeout of the request."""
    queue = CommandQueue(ManualClock(), lambda: None)

    async def fail() -> None:
        raise TimeoutError("db")

    response = asyncio.ensure_future(queue.execute(fail))
    await asyncio.sleep(0)
    await queue.run_due()
    with pytest.raises(TimeoutError, match="db"):
        await response


async def test_a_closed_queue_rejects_commands() -> None:
    """Waiting and new commands of a closed queue raise IllegalState."""
    queue = CommandQueue(ManualClock(), lambda: None)
    waiting = queue.put(recording([], 1))
    queue.close()
    for done in (waiting, queue.put(recording([], 2))):
        with pytest.raises(IllegalState):
            await done


async def test_a_queue_is_attended_while_its_loop_runs() -> None:
    """`is_attended` is true while the loop runs commands, and false once the queue is closed."""
    queue = CommandQueue(ManualClock(), lambda: None)
    response = asyncio.ensure_future(queue.is_attended())
    await asyncio.sleep(0)
    await queue.run_due()
    assert await response
    queue.close()
    assert not await queue.is_attended()


@pytest.mark.parametrize("status", [308, 409])
async def test_a_response_without_success_fails_a_request_to_the_leader(status: int) -> None:
    """An error or a redirect, as of a proxy that requires https, fails a request to the leader: it had no effect."""
    client = LeaderClient()
    async with serving(lambda _: (status, {"Location": "https://leader.example/"}, b"")) as server:
        with pytest.raises(LeaderRequestFailed, match=str(status)):
            await client.put_tasks(server.url, "c", [], SessionKey(b"k", "HmacSHA256", 0))
    await client.close()


@pytest.mark.parametrize("algorithm", HASHES)
def test_a_signature_holds_for_its_body_and_key_alone(algorithm: str) -> None:
    """A signature is valid only for its body and key, with header names in any case. Its algorithm need not be that of
    the key.
    """
    key = new_key("HmacSHA1", 0)
    headers = {name.lower(): value for name, value in sign(key, b"body", algorithm).items()}
    assert verify(key, b"body", headers, (algorithm,))
    assert not verify(key, b"other", headers, (algorithm,))
    assert not verify(new_key("HmacSHA1", 0), b"body", headers, (algorithm,))


def test_malformed_signatures_are_errors() -> None:
    """A missing signature, an unaccepted algorithm and invalid base64 are errors with the reason."""
    key = SessionKey(b"k", "HmacSHA256", 0)
    signed = sign(key, b"", key.algorithm)
    for headers in (
        {},
        {ALGORITHM_HEADER: "HmacSHA256"},
        {**signed, ALGORITHM_HEADER: "HmacMD5"},
        {**signed, SIGNATURE_HEADER: "*"},
    ):
        with pytest.raises(ValueError, match=r"signed|algorithm|base64"):
            verify(key, b"", headers, ("HmacSHA256",))


def test_signatures_equal_javas() -> None:
    """A signature equals HMAC-SHA256 of RFC 4231's second test case."""
    key = SessionKey(b"Jefe", "HmacSHA256", 0)
    signature = sign(key, b"what do ya want for nothing?", key.algorithm)[SIGNATURE_HEADER]
    known = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert base64.b64decode(signature).hex() == known


def test_keys_expire() -> None:
    """A key expires after its time to live; a missing key is expired."""
    key = SessionKey(b"k", "HmacSHA256", 1_000)
    assert [expires_in_ms(key, 500, now) for now in (1_000, 1_400, 1_500, 9_000)] == [500, 100, 0, 0]
    assert expires_in_ms(None, 500, 0) == 0
    assert len(new_key("HmacSHA256", 0).key) == 32
