"""The messages between the workers of a Connect group: workers send their states to the leader, which sends
assignments.

These are the bytes of Kafka Connect's protocols `eager` (version 0), `compatible` (1) and `sessioned` (2). Kafka's
tools can therefore read Penstock's groups, and Java and Penstock workers can share a group. All three have the protocol
type `connect`. A member offers the versions that it supports, newest first. The coordinator picks one that all members
offer.

    State      => version url config_offset allocation(1+)      allocation: an Assignment, or nothing
    Assignment => version error leader leader_url config_offset assignment revoked(1+) delay(1+)
    assignment, revoked => [connector [task]]                   task -1: the connector itself

`config_offset` is the offset of the next record of the config topic: the sender knows the configs before it. It is -1
if the topic has no record.

An assignment of version 0 contains all work of the worker. From version 1 on, it contains the additional work and the
revoked work. The allocation in a worker's state has the same format. There the field `assignment` contains all work
that the worker runs.

>>> held = ConnectorsAndTasks({"orders"}, {ConnectorTaskId("orders", 0)})
>>> state = decode_state(encode_state(WorkerState("http://a:8083/", 7, held), SESSIONED))
>>> state.url, state.config_offset, state.held == held
('http://a:8083/', 7, True)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.shared.clients.protocol.primitive_types import PrimitiveReader, encode_bytes, encode_string
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.status_listener import Id

PROTOCOL_TYPE = "connect"
EAGER = 0
COMPATIBLE = 1
SESSIONED = 2
PROTOCOL_NAMES = {EAGER: "default", COMPATIBLE: "compatible", SESSIONED: "sessioned"}
"""The protocols' names in JoinGroup. The protocol `eager` is called `default` there."""
SETTINGS_NAMES = {"eager": EAGER, "compatible": COMPATIBLE, "sessioned": SESSIONED}

NO_ERROR = 0
CONFIG_MISMATCH = 1
CONNECTOR_ITSELF = -1


@dataclass(frozen=True, slots=True)
class ConnectorsAndTasks:
    """A set of connectors and tasks."""

    connectors: frozenset[str] = frozenset()
    tasks: frozenset[ConnectorTaskId] = frozenset()

    def __init__(self, connectors: Iterable[str] = (), tasks: Iterable[ConnectorTaskId] = ()) -> None:
        object.__setattr__(self, "connectors", frozenset(connectors))
        object.__setattr__(self, "tasks", frozenset(tasks))

    def __bool__(self) -> bool:
        return bool(self.connectors or self.tasks)

    def __repr__(self) -> str:
        return f"ConnectorsAndTasks({', '.join([*sorted(self.connectors), *map(str, sorted(self.tasks))])})"

    def __contains__(self, id: Id) -> bool:
        return id in self.connectors or id in self.tasks

    def __or__(self, other: ConnectorsAndTasks) -> ConnectorsAndTasks:
        return ConnectorsAndTasks(self.connectors | other.connectors, self.tasks | other.tasks)

    def __sub__(self, other: ConnectorsAndTasks) -> ConnectorsAndTasks:
        return ConnectorsAndTasks(self.connectors - other.connectors, self.tasks - other.tasks)

    def __and__(self, other: ConnectorsAndTasks) -> ConnectorsAndTasks:
        return ConnectorsAndTasks(self.connectors & other.connectors, self.tasks & other.tasks)


NOTHING = ConnectorsAndTasks()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's message to the leader: its REST URL, the offset up to which it has read the configs, and its work."""

    url: str
    config_offset: int
    held: ConnectorsAndTasks = NOTHING


@dataclass(frozen=True, slots=True)
class ExtendedAssignment:
    """The leader's message to a worker. In version 0, `work` is all work of the worker; from version 1 on, it is the
    additional work. When the worker applies the message, it replaces `work` by all of its work.

    If `delay_ms` is not 0, the worker joins again after that time.
    """

    leader: str
    leader_url: str
    config_offset: int
    work: ConnectorsAndTasks = NOTHING
    revoked: ConnectorsAndTasks = NOTHING
    delay_ms: int = 0
    error: int = NO_ERROR

    @property
    def failed(self) -> bool:
        """Return whether the leader could not assign, because another member has read the configs further."""
        return self.error != NO_ERROR


def encode_state(state: WorkerState, version: int, last: ExtendedAssignment | None = None) -> bytes:
    """Return the bytes of a worker's state for the leader. `last` is the last assignment that the worker applied."""
    data = struct.pack(">h", version) + encode_string(state.url) + struct.pack(">q", state.config_offset)
    # An eager worker has stopped all its work before it joins, so version 0 has no allocation.
    if version == EAGER:
        return data
    if last is None:
        last = ExtendedAssignment("", "", state.config_offset)
    allocation = ExtendedAssignment(last.leader, last.leader_url, last.config_offset, state.held)
    return data + encode_bytes(encode_assignment(allocation, version))


def decode_state(data: bytes) -> WorkerState:
    """Return the worker's state in these bytes. Raises SerializationError if they are invalid."""
    read = PrimitiveReader(data, "worker state")
    version = read.version()
    url = read.string() or ""
    offset = read.int64()
    if version == EAGER:
        return WorkerState(url, offset)
    allocation = None if read.at_end else read.blob()
    if allocation is None:
        return WorkerState(url, offset)
    held = decode_assignment(allocation)
    return WorkerState(url, offset, held.work)


def encode_assignment(assignment: ExtendedAssignment, version: int) -> bytes:
    """Return the bytes of the leader's assignment to a Connect worker, in this version of Connect's protocol."""
    data = struct.pack(">hh", version, assignment.error)
    data += (
        encode_string(assignment.leader)
        + encode_string(assignment.leader_url)
        + struct.pack(">q", assignment.config_offset)
    )
    data += _encode_work(assignment.work)
    return (
        data if version == EAGER else data + _encode_work(assignment.revoked) + struct.pack(">i", assignment.delay_ms)
    )


def decode_assignment(data: bytes) -> ExtendedAssignment:
    """Return a Connect worker's assignment from its bytes. Raises SerializationError if they are invalid."""
    read = PrimitiveReader(data, "assignment")
    version = read.version()
    error = read.int16()
    leader = read.string() or ""
    leader_url = read.string() or ""
    offset = read.int64()
    work = _read_work(read)
    if version == EAGER or read.at_end:
        return ExtendedAssignment(leader, leader_url, offset, work, error=error)
    revoked = _read_work(read)
    delay_ms = 0 if read.at_end else read.int32()
    return ExtendedAssignment(
        leader=leader,
        leader_url=leader_url,
        config_offset=offset,
        work=work,
        revoked=revoked,
        delay_ms=delay_ms,
        error=error,
    )


def _encode_work(work: ConnectorsAndTasks) -> bytes:
    numbers: dict[str, list[int]] = {connector: [CONNECTOR_ITSELF] for connector in sorted(work.connectors)}
    for task in sorted(work.tasks):
        numbers.setdefault(task.connector, []).append(task.task)
    rows = [
        encode_string(name) + struct.pack(f">i{len(found)}i", len(found), *found)
        for name, found in sorted(numbers.items())
    ]
    return struct.pack(">i", len(rows)) + b"".join(rows)


def _read_work(read: PrimitiveReader) -> ConnectorsAndTasks:
    connectors: set[str] = set()
    tasks: set[ConnectorTaskId] = set()
    for _ in range(read.array_length()):
        name = read.string() or ""
        for _ in range(read.array_length()):
            number = read.int32()
            if number == CONNECTOR_ITSELF:
                connectors.add(name)
            else:
                tasks.add(ConnectorTaskId(name, number))
    return ConnectorsAndTasks(connectors, tasks)
