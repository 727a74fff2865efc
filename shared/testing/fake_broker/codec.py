"""Kafka's wire format: a message's fields as a table of text, turned into a reader and a writer for each version.

A table has one field a line: a name, a type, and optional properties. Fields of an array's element or a struct are
indented. The tables repeat Kafka's message definitions, but are written independently of the client's. So tests can
detect an error in the client's definitions.

    topics []                        an array of structs; `[]int32` is an array of numbers
      name ?string                   `?` can be null
      leader_epoch int32 7+ = -1     from version 7 on, default -1
      retention_ms int64 2-4         in versions 2 to 4
      current_leader {} 10+ tag 0    a struct in the tagged fields

From its flexible version on, a message writes lengths as varints and ends every struct with tagged fields. Tags that a
table does not name are skipped.

>>> schema = MessageSchema("id int32\\nname ?string 1+", flexible=2)
>>> [schema.encode(Message(id=7, name="a"), version).hex(" ") for version in (0, 1, 2)]
['00 00 00 07', '00 00 00 07 00 01 61', '00 00 00 07 02 61 00']
>>> schema.decode(bytes.fromhex("00 00 00 07 02 61 00"), 2)
(Message(id=7, name='a'), 7)
"""

from __future__ import annotations

import re
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

Read = Callable[[bytes, int], tuple[Any, int]]
Write = Callable[[Any], bytes]

NO_UUID = uuid.UUID(int=0)
FLEXIBLE_NEVER = 1 << 15

NUMBERS = {"int8": ">b", "int16": ">h", "uint16": ">H", "int32": ">i", "int64": ">q", "float64": ">d", "bool": ">?"}
ZEROS: dict[str, Any] = {**dict.fromkeys(NUMBERS, 0), "bool": False, "string": "", "bytes": b"", "uuid": NO_UUID}

_LINE = re.compile(
    r"(?P<name>\w+) (?P<null>\??)(?P<array>\[\])?(?P<type>\{\}|\w*)"
    r"(?: (?P<since>\d+)(?:(?P<on>\+)|-(?P<until>\d+)))?(?: tag (?P<tag>\d+))?(?: = (?P<default>\S+))?"
)


class Message(SimpleNamespace):
    """A request, response or struct. Its attributes are fields of its `MessageSchema`."""


class MalformedMessage(ValueError):
    """Bytes that do not match the table of their version."""


@dataclass
class FieldSchema:
    """One line of a table."""

    name: str
    type: str
    nullable: bool
    array: bool
    since: int
    until: int
    tag: int | None
    default: Any
    children: list[FieldSchema] = field(default_factory=list)


def parse_fields(text: str) -> list[FieldSchema]:
    """The fields that a codec's table of text names, with children in their parents."""
    root: list[FieldSchema] = []
    open_at: list[tuple[int, list[FieldSchema]]] = [(0, root)]
    for line in text.strip("\n").splitlines():
        indent = len(line) - len(line.lstrip())
        while indent < open_at[-1][0]:
            open_at.pop()
        if indent > open_at[-1][0]:
            open_at.append((indent, open_at[-1][1][-1].children))
        found = _LINE.fullmatch(line.strip())
        assert found is not None, f"not a field: {line!r}"
        kind = found["type"] or "{}"
        array = bool(found["array"])
        nullable = bool(found["null"])
        since = int(found["since"] or 0)
        until = FLEXIBLE_NEVER if found["on"] or found["since"] is None else int(found["until"])
        tag = int(found["tag"]) if found["tag"] is not None else None
        default = _default_of_field(kind, array, nullable, found["default"])
        open_at[-1][1].append(
            FieldSchema(
                name=found["name"],
                type=kind,
                nullable=nullable,
                array=array,
                since=since,
                until=until,
                tag=tag,
                default=default,
            )
        )
    return root


def _default_of_field(kind: str, array: bool, nullable: bool, given: str | None) -> Any:
    if given is not None:
        return int(given)
    if nullable:
        return None
    return [] if array else ZEROS.get(kind)


class MessageSchema:
    """The fields of one message. The reader and writer of a version are made when that version is first used."""

    def __init__(self, text: str, flexible: int = FLEXIBLE_NEVER) -> None:
        self.fields = parse_fields(text)
        self._flexible = flexible
        self._made: dict[int, tuple[Read, Write]] = {}

    def decode(self, data: bytes, version: int, start: int = 0) -> tuple[Message, int]:
        """The message at `start` and the position after it. Raises MalformedMessage if it cannot be decoded."""
        try:
            return self._codec_of_version(version)[0](data, start)
        except (struct.error, IndexError, UnicodeDecodeError) as e:
            raise MalformedMessage(str(e)) from e

    def encode(self, message: Message, version: int) -> bytes:
        """The message's bytes. A missing field gets its default."""
        write = self._codec_of_version(version)[1]
        return write(message)

    def _codec_of_version(self, version: int) -> tuple[Read, Write]:
        if version not in self._made:
            self._made[version] = _struct_codec(self.fields, version, version >= self._flexible)
        return self._made[version]


def _number_codec(kind: str) -> tuple[Read, Write]:
    packer = struct.Struct(NUMBERS[kind])
    size = packer.size

    def read_number(data: bytes, at: int) -> tuple[Any, int]:
        return packer.unpack_from(data, at)[0], at + size

    return read_number, packer.pack


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned varint and the position after it."""
    value = 0
    shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def write_varint(value: int) -> bytes:
    """Encode an unsigned varint of a message of the fake broker.

    >>> write_varint(300).hex()
    'ac02'
    """
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _length_codec(kind: str, flexible: bool) -> tuple[Read, Write]:
    """Codec of a length: -1 is null. In a flexible version it is a varint of the length plus one."""
    if not flexible:
        return _number_codec("int16" if kind == "string" else "int32")

    def read_length(data: bytes, at: int) -> tuple[int, int]:
        value, at = read_varint(data, at)
        return value - 1, at

    return read_length, lambda length: write_varint(length + 1)


def _bytes_codec(kind: str, flexible: bool) -> tuple[Read, Write]:
    read_length, write_length = _length_codec(kind, flexible)
    text = kind == "string"

    def read_bytes(data: bytes, at: int) -> tuple[Any, int]:
        length, at = read_length(data, at)
        if length < 0:
            return None, at
        end = at + length
        if end > len(data):
            raise MalformedMessage(f"{length} bytes of {kind} at {at}, but the message has {len(data)}")
        return (data[at:end].decode() if text else data[at:end]), end

    def write_bytes(value: Any) -> bytes:
        if value is None:
            return write_length(-1)
        raw: bytes = value.encode() if text else value
        return write_length(len(raw)) + raw

    return read_bytes, write_bytes


def _uuid_codec() -> tuple[Read, Write]:
    def read_uuid(data: bytes, at: int) -> tuple[uuid.UUID, int]:
        if at + 16 > len(data):
            raise MalformedMessage("a uuid is cut off")
        return uuid.UUID(bytes=data[at : at + 16]), at + 16

    return read_uuid, lambda value: value.bytes


def _array_codec(item: tuple[Read, Write], flexible: bool) -> tuple[Read, Write]:
    read_length, write_length = _length_codec("array", flexible)
    read_item, write_item = item

    def read_array(data: bytes, at: int) -> tuple[list[Any] | None, int]:
        length, at = read_length(data, at)
        if length < 0:
            return None, at
        if length > len(data) - at:
            raise MalformedMessage(f"{length} items at {at}, but the message has {len(data)} bytes")
        items = []
        for _ in range(length):
            value, at = read_item(data, at)
            items.append(value)
        return items, at

    def write_array(values: list[Any] | None) -> bytes:
        if values is None:
            return write_length(-1)
        return write_length(len(values)) + b"".join(map(write_item, values))

    return read_array, write_array


def _field_codec(one: FieldSchema, version: int, flexible: bool) -> tuple[Read, Write]:
    if one.type == "{}":
        codec = _struct_codec(one.children, version, flexible)
    elif one.type == "uuid":
        codec = _uuid_codec()
    elif one.type in NUMBERS:
        codec = _number_codec(one.type)
    else:
        codec = _bytes_codec(one.type, flexible)
    return _array_codec(codec, flexible) if one.array else codec


def _struct_codec(fields: list[FieldSchema], version: int, flexible: bool) -> tuple[Read, Write]:
    known = [one for one in fields if one.since <= version <= one.until]
    made = {one.name: _field_codec(one, version, flexible) for one in known}
    plain = [(one.name, *made[one.name], one.default) for one in known if one.tag is None]
    tagged = {one.tag: (one.name, *made[one.name], one.default) for one in known if one.tag is not None}
    absent = {one.name: one.default for one in fields if one not in known or one.tag is not None}

    def read_struct(data: bytes, at: int) -> tuple[Message, int]:
        values = absent.copy()
        for name, read_one, _, _ in plain:
            values[name], at = read_one(data, at)
        if flexible:
            count, at = read_varint(data, at)
            for _ in range(count):
                tag, at = read_varint(data, at)
                size, at = read_varint(data, at)
                if tag in tagged:
                    values[tagged[tag][0]], _ = tagged[tag][1](data, at)
                at += size
        return Message(**values), at

    def write_struct(message: Message) -> bytes:
        values = message.__dict__
        parts = [write_one(values.get(name, default)) for name, _, write_one, default in plain]
        if flexible:
            given = [
                (tag, write_one(values[name]))
                for tag, (name, _, write_one, default) in sorted(tagged.items())
                if values.get(name, default) not in (default, None)
            ]
            parts.append(write_varint(len(given)))
            parts += [write_varint(tag) + write_varint(len(raw)) + raw for tag, raw in given]
        return b"".join(parts)

    return read_struct, write_struct
