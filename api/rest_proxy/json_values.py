"""Splits a stream of JSON objects, as in REST Proxy v3: chunks in, the bytes of complete objects out.

Sans-IO. Only braces and strings are examined; the consumer of an object validates it. Between objects there may be
whitespace and commas.

>>> values = ObjectSplitter(max_bytes=20)
>>> values.feed(b'{"a":"}"}{"b"'), values.feed(b':{}} \\n {"c":1}'), values.close()
([b'{"a":"}"}'], [b'{"b":{}}', b'{"c":1}'], None)
"""

from __future__ import annotations

import re

_MARK = re.compile(rb'["{}\\]')
_BETWEEN = re.compile(rb"[\s,]*")


class NotAnObject(ValueError):
    """The data is not an object, or an object has no end or is too long. Nothing after it can be read."""


class ObjectSplitter:
    """Splits the chunks of one stream. An object may have `max_bytes` at most."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._scanned = 0
        self._depth = 0
        self._in_string = False

    def __repr__(self) -> str:
        return f"ObjectSplitter({len(self._rest)} bytes, depth={self._depth})"

    @property
    def unfinished(self) -> bool:
        """Whether an object has begun and is incomplete."""
        return self._depth > 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the objects that this chunk completes. Raises NotAnObject."""
        self._rest += chunk
        objects: list[bytes] = []
        start = 0
        while True:
            if not self._depth:
                between = _BETWEEN.match(self._rest, start)
                assert between is not None
                start = self._scanned = between.end()
                if start == len(self._rest):
                    break
                if self._rest[start] != ord("{"):
                    raise NotAnObject(f"expected an object, got {bytes(self._rest[start : start + 20])!r}")
            end = self._scan_object()
            if end is None:
                break
            self._check_size(end - start)
            objects.append(bytes(self._rest[start:end]))
            start = end
        del self._rest[:start]
        self._scanned -= start
        self._check_size(len(self._rest))
        return objects

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise NotAnObject(f"an object longer than {self._max_bytes} bytes")

    def close(self) -> None:
        """End the input. Raises NotAnObject if it ends within an object."""
        if self._depth:
            raise NotAnObject("the body ends within an object")

    def _scan_object(self) -> int | None:
        """Return the end of the current object; None if it is incomplete."""
        rest = self._rest
        at = self._scanned
        while (mark := _MARK.search(rest, at)) is not None:
            at = mark.end()
            character = rest[mark.start()]
            if character == ord("\\"):
                if at == len(rest):  # the escaped character has not arrived yet
                    self._scanned = mark.start()
                    return None
                at += 1
            elif character == ord('"'):
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if character == ord("{") else -1
                if not self._depth:
                    self._scanned = at
                    return at
        self._scanned = len(rest)
        return None
