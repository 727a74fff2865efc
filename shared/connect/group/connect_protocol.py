"""The messages between the workers of a Connect group: their states to the leader, and its assignments to them.

These are the bytes of Kafka Connect's protocols `eager` (version 0), `compatible` (1) and `sessioned` (2). Kafka's
tools can therefore read our groups, and workers of both kinds understand each other. All three have the protocol type
`connect`. A member offers the versions that it knows, newest first. The coordinator picks one that all members offer.

    State      => version url config_offset allocation(1+)      allocation: an Assignment, or nothing
    Assignment => version error leader leader_url config_offset assignment revoked(1+) delay(1+)
    assignment, revoked => [connector [task]]                   task -1: the connector itself

An assignment of version 0 contains all work of the worker. From version 1 on, it contains the additional work and the
revoked work. In the state's allocation, the field `assignment` contains all work that the worker runs.

>>> held = Work({"orders"}, {ConnectorTaskId("orders", 0)})
>>> state = decode_state(encode_state(WorkerState("http://a:8083/", 7, held), SESSIONED))
>>> state.url, state.config_offset, state.held == held
('http://a:8083/', 7, True)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.shared.common.errors import SerializationError
from penstock.shared.connect.runtime.states import ConnectorTaskId

PROTOCOL_TYPE = "connect"
EAGER, COMPATIBLE, SESSIONED = 0, 1, 2
PROTOCOL_NAMES = {EAGER: "default", COMPATIBLE: "compatible", SESSIONED: "sessioned"}
"""The names that members offer to the coordinator. Only settings call the first one `eager`."""
SETTINGS_NAMES = {"eager": EAGER, "compatible": COMPATIBLE, "sessioned": SESSIONED}

NO_ERROR, CONFIG_MISMATCH = 0, 1
CONNECTOR_ITSELF = -1


@dataclass(frozen=True, slots=True)
class Work:
    """A set of connectors and tasks."""

    connectors: frozenset[str] = frozenset()
    tasks: frozenset[ConnectorTaskId] = frozenset()

    def __init__(self, connectors: Iterable[str] = (), tasks: Iterable[ConnectorTaskId] = ()) -> None:
        object.__setattr__(self, "connectors", frozenset(connectors))
        object.__setattr__(self, "tasks", frozenset(tasks))

    def __bool__(self) -> bool:
        return bool(self.connectors or self.tasks)

    def __len__(self) -> int:
        return len(self.connectors) + len(self.tasks)

    def __repr__(self) -> str:
        return f"Work({', '.join([*sorted(self.connectors), *map(str, sorted(self.tasks))])})"

    def __or__(self, other: Work) -> Work:
        return Work(self.connectors | other.connectors, self.tasks | other.tasks)

    def __sub__(self, other: Work) -> Work:
        return Work(self.connectors - other.connectors, self.tasks - other.tasks)

    def __and__(self, other: Work) -> Work:
        return Work(self.connectors & other.connectors, self.tasks & other.tasks)


NOTHING = Work()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's message to the leader: its REST URL, the offset up to which it has read the configs, and its work."""

    url: str
    config_offset: int
    held: Work = NOTHING
    version: int = SESSIONED


@dataclass(frozen=True, slots=True)
class Assignment:
    """The leader's message to a worker. The module explains `work`. The worker joins again after `delay_ms`."""

    leader: str
    leader_url: str
    config_offset: int
    work: Work = NOTHING
    revoked: Work = NOTHING
    delay_ms: int = 0
    error: int = NO_ERROR
    version: int = field(default=SESSIONED, compare=False)

    @property
    def failed(self) -> bool:
        """Returns whether the leader could not assign, because another member has read the configs further."""
        return self.error != NO_ERROR


def encode_state(state: WorkerState, version: int, last: Assignment | None = None) -> bytes:
    """Returns the bytes of a worker's state. `last` is the assignment from which its work came."""
    data = struct.pack(">h", version) + _encode_string(state.url) + struct.pack(">q", state.config_offset)
    # An eager worker has stopped all its work before it joins, so version 0 has no allocation.
    if version == EAGER:
        return data
    if last is None:
        last = Assignment("", "", state.config_offset)
    allocation = Assignment(last.leader, last.leader_url, last.config_offset, state.held)
    return data + _encode_bytes(encode_assignment(allocation, version))


def decode_state(data: bytes) -> WorkerState:
    """Returns the state in these bytes. Raises SerializationError if they are invalid."""
    read = _Reader(data, "worker state")
    version = read.version()
    url = read.text()
    offset = read.int64()
    if version == EAGER:
        return WorkerState(url, offset, NOTHING, EAGER)
    allocation = None if read.at_end else read.blob()
    if allocation is None:
        return WorkerState(url, offset, NOTHING, version)
    held = decode_assignment(allocation)
    return WorkerState(url, offset, held.work, held.version)


def encode_assignment(assignment: Assignment, version: int) -> bytes:
    """Returns the bytes of an assignment."""
    data = struct.pack(">hh", version, assignment.error)
    data += (
        _encode_string(assignment.leader)
        + _encode_string(assignment.leader_url)
        + struct.pack(">q", assignment.config_offset)
    )
    data += _encode_work(assignment.work)
    return (
        data if version == EAGER else data + _encode_work(assignment.revoked) + struct.pack(">i", assignment.delay_ms)
    )


def decode_assignment(data: bytes) -> Assignment:
    """Returns the assignment in these bytes. Raises SerializationError if they are invalid."""
    read = _Reader(data, "assignment")
    version = read.version()
    error = read.int16()
    leader = read.text()
    leader_url = read.text()
    offset = read.int64()
    work = read.work()
    if version == EAGER or read.at_end:
        return Assignment(leader, leader_url, offset, work, error=error, version=version)
    revoked = read.work()
    delay_ms = 0 if read.at_end else read.int32()
    return Assignment(leader, leader_url, offset, work, revoked, delay_ms, error, version)


def _encode_string(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">h", len(data)) + data


def _encode_bytes(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


def _encode_work(work: Work) -> bytes:
    numbers: dict[str, list[int]] = {connector: [CONNECTOR_ITSELF] for connector in sorted(work.connectors)}
    for task in sorted(work.tasks):
        numbers.setdefault(task.connector, []).append(task.task)
    rows = [
        _encode_string(name) + struct.pack(f">i{len(found)}i", len(found), *found)
        for name, found in sorted(numbers.items())
    ]
    return struct.pack(">i", len(rows)) + b"".join(rows)


class _Reader:
    """Reads fields from the front. Raises SerializationError with the position of an invalid field."""

    def __init__(self, data: bytes, description: str) -> None:
        self._data = data
        self._at = 0
        self._description = description

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._data)

    def version(self) -> int:
        version = self.int16()
        if version < 0:
            raise SerializationError(f"{self._description}: version {version}")
        return version

    def int16(self) -> int:
        return self._read_number(">h", 2)

    def int32(self) -> int:
        return self._read_number(">i", 4)

    def int64(self) -> int:
        return self._read_number(">q", 8)

    def text(self) -> str:
        length = self.int16()
        try:
            return self._take_bytes(max(0, length)).decode()
        except UnicodeDecodeError as e:
            raise SerializationError(f"{self._description}: invalid UTF-8 before byte {self._at}") from e

    def blob(self) -> bytes | None:
        length = self.int32()
        return None if length < 0 else self._take_bytes(length)

    def work(self) -> Work:
        connectors: set[str] = set()
        tasks: set[ConnectorTaskId] = set()
        for _ in range(self._read_array_count()):
            name = self.text()
            for _ in range(self._read_array_count()):
                number = self.int32()
                if number == CONNECTOR_ITSELF:
                    connectors.add(name)
                else:
                    tasks.add(ConnectorTaskId(name, number))
        return Work(connectors, tasks)

    def _read_array_count(self) -> int:
        count = self.int32()
        # Each element has at least one byte. A larger count is damaged, and must not run a long loop.
        if count > len(self._data):
            raise SerializationError(f"{self._description}: an array of {count} at byte {self._at - 4}")
        return max(0, count)

    def _read_number(self, form: str, size: int) -> int:
        return int(struct.unpack(form, self._take_bytes(size))[0])

    def _take_bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise SerializationError(f"{self._description}: ends at byte {len(self._data)}, within a field")
        read = self._data[self._at : end]
        self._at = end
        return read
