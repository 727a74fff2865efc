"""Whether a broker answers, and why one did not start.

The lines of logs are those of a real Kafka 4.1.1 and a real JVM.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.services.local.broker_failure import Cause, explain, find_cause, meaningful
from penstock.services.local.embedded_kafka import PROBE_RESPONSE_BYTES_MAX, broker_answers, probe_request

AT = "2025-06-01 09:26:22,693"
PLENTY = 1 << 30
PORT = [
    f"{AT} ERROR [KafkaRaftServer nodeId=1] Fatal error during startup. (kafka.server.KafkaRaftServer)",
    "org.apache.kafka.common.KafkaException: Socket server failed to bind to 127.0.0.1:29574: Address already in use.",
    "\tat kafka.network.Acceptor.openServerSocket(SocketServer.scala:732)",
    "Caused by: java.net.BindException: Address already in use",
    "\t... 12 more",
]
LOCKED = [
    f"{AT} ERROR [SharedServer id=1] Got exception while starting SharedServer (kafka.server.SharedServer)",
    "org.apache.kafka.common.KafkaException: Failed to acquire lock on file .lock in /data/log/__cluster_metadata-0. "
    "A Kafka instance in another process or thread is using this directory.",
]
DISK = [
    f"{AT} ERROR Error while writing to checkpoint file (org.apache.kafka.storage.internals.log.LogDirFailureChannel)",
    "java.io.IOException: No space left on device",
    f"{AT} ERROR Shutdown broker because all log dirs in /data/log have failed (kafka.log.LogManager)",
]
CHECKPOINT = [
    "java.io.IOException: Malformed line in checkpoint file [/data/log/recovery-point-offset-checkpoint]: garbage",
    f"{AT} ERROR Shutdown broker because all log dirs in /data/log have failed (kafka.log.LogManager)",
]
META = ["java.lang.RuntimeException: Error: node ID not found in log"]
NODE = ["java.lang.RuntimeException: Stored node id 7 doesn't match previous node id 1 in log/meta.properties."]
MEMORY = ["# There is insufficient memory for the Java Runtime Environment to continue."]
HEAP = [
    "Error occurred during initialization of VM",
    "Could not reserve enough space for 104857600KB object heap",
]
PROPERTY = [
    "org.apache.kafka.common.config.ConfigException: Invalid value many for configuration num.io.threads: Not a number"
]
OPTION = ["Unrecognized VM option 'Nonsense'", "Error: Could not create the Java Virtual Machine."]
DENIED = ["java.nio.file.AccessDeniedException: /data/log/meta.properties"]
QUIET = [
    f"{AT} INFO [QuorumController id=1] writeNoOpRecord: unable to start because of RejectedExecutionException (k.Q)",
    f"{AT} INFO [BrokerServer id=1] Address already in use is only mentioned here (kafka.server.BrokerServer)",
]


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (PORT, Cause.PORT_TAKEN),
        (LOCKED, Cause.LOCKED),
        (DISK, Cause.NO_SPACE),
        (CHECKPOINT, Cause.CORRUPT),
        (META, Cause.CORRUPT),
        (NODE, Cause.CORRUPT),
        (MEMORY, Cause.NO_MEMORY),
        (HEAP, Cause.NO_MEMORY),
        (PROPERTY, Cause.WRONG_PROPERTY),
        (OPTION, Cause.WRONG_PROPERTY),
        (DENIED, Cause.NOT_WRITABLE),
        (QUIET, None),
        ([], None),
    ],
)
def test_cause_is_read_from_the_log(lines: list[str], cause: Cause | None) -> None:
    """Each known failure has its cause, the specific one before the general, and INFO lines have none."""
    assert find_cause([*QUIET, *lines]) is cause


def test_only_meaningful_lines_are_shown() -> None:
    """Stack frames and INFO lines are left out if there are others."""
    assert meaningful([*QUIET, *PORT]) == [PORT[0], PORT[1], PORT[3]]
    assert meaningful([*QUIET, *HEAP]) == HEAP


def test_without_errors_the_last_lines_are_shown() -> None:
    """The end of a log without errors is shown."""
    assert meaningful(QUIET, 1) == [QUIET[1]]


def test_an_explanation_has_cause_and_lines() -> None:
    """An explanation has the cause and then the broker's lines."""
    message = explain(LOCKED, "/data", PLENTY)
    assert message.startswith("the data folder /data is in use by another running broker. Its output:\n  ")
    assert LOCKED[1] in message


def test_full_disk_needs_no_line() -> None:
    """A full disk is detected without a line in the log."""
    assert explain([], "/data", 0).startswith("no space left on the disk of /data")


def test_an_unknown_cause_is_reported_as_unknown() -> None:
    """An unknown cause is reported as unknown."""
    assert explain(QUIET, "/data", PLENTY).startswith("the reason is unknown. Its output:")
    assert explain([], "/data", PLENTY) == "the reason is unknown; it had no output"


GOOD = struct.pack(">ihi", 1, 0, 0)
LIMIT_MS = 10_000


@asynccontextmanager
async def server(reply: bytes | None, received: list[bytes]) -> AsyncIterator[int]:
    """A server that accepts one request, sends `reply` and closes, or never answers if it is None."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readexactly(len(probe_request())))
        if reply is None:
            await reader.read()
        else:
            writer.write(reply)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (struct.pack(">i", len(GOOD)) + GOOD, True),
        (struct.pack(">i", len(GOOD)) + struct.pack(">ihi", 1, 35, 0), False),
        (struct.pack(">i", len(GOOD)) + struct.pack(">ihi", 2, 0, 0), False),
        (struct.pack(">i", PROBE_RESPONSE_BYTES_MAX + 1) + GOOD, False),
        (struct.pack(">i", -1), False),
        (struct.pack(">i", 2) + b"ab", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"", False),
    ],
)
async def test_only_a_response_without_error_counts(reply: bytes, expected: bool) -> None:
    """Another correlation id, an error code, another protocol, and an incomplete response are no valid response."""
    received: list[bytes] = []
    async with server(reply, received) as port:
        assert await broker_answers("127.0.0.1", port, LIMIT_MS) is expected
    assert received == [bytes.fromhex("0000000a 0012 0000 00000001 ffff")]


async def test_a_silent_server_is_a_timeout() -> None:
    """A server without a response is no broker after the timeout."""
    async with server(None, []) as port:
        assert not await broker_answers("127.0.0.1", port, 20)


async def test_closed_port_does_not_answer() -> None:
    """A refused connection is no broker."""
    async with server(b"", []) as port:
        pass
    assert not await broker_answers("127.0.0.1", port, LIMIT_MS)
