"""Splits the NDJSON body of a request into lines as it arrives.

Sans-IO. The lines do not depend on how the body is divided into chunks. At most one unfinished line is buffered, until
it ends or is found to be too long.

>>> lines = LineSplitter(max_line_bytes=8)
>>> lines.feed(b'{"a":1}\\r\\n{"a"')
[b'{"a":1}']
>>> lines.feed(b':2}\\n{"a":"too long"}\\n')
[b'{"a":2}', None]
>>> lines.close()
[]
"""

from __future__ import annotations


class LineSplitter:
    """Splits chunks into lines without their line ends (LF or CR LF); None stands for a line over `max_line_bytes`."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = bytearray()
        self._skipping = False

    def __repr__(self) -> str:
        return f"LineSplitter(rest={len(self._rest)} bytes, skipping={self._skipping})"

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun and is incomplete."""
        return bool(self._rest) or self._skipping

    def feed(self, chunk: bytes) -> list[bytes | None]:
        """Return the lines that this chunk completes."""
        head, newline, tail = chunk.partition(b"\n")
        if not newline:
            self._append_to_line(chunk)
            return []
        self._append_to_line(head)
        lines: list[bytes | None] = [self._end_line()]
        *complete, last = tail.split(b"\n")
        lines += [self._line_within_limit(line) for line in complete]
        self._append_to_line(last)
        return lines

    def close(self) -> list[bytes | None]:
        """Return the last line if the body does not end with a line end."""
        return [self._end_line()] if self._rest or self._skipping else []

    def _append_to_line(self, part: bytes) -> None:
        """Add bytes to the unfinished line, or skip them if it is too long."""
        if self._skipping:
            return
        self._rest += part
        # The last byte may be a CR, which does not count.
        if len(self._rest) > self._max_line_bytes + 1:
            self._skipping = True
            self._rest.clear()

    def _end_line(self) -> bytes | None:
        """Return the unfinished line, which has ended; None if it is too long."""
        if self._skipping:
            self._skipping = False
            return None
        line = bytes(self._rest)
        self._rest.clear()
        return self._line_within_limit(line)

    def _line_within_limit(self, line: bytes) -> bytes | None:
        if line.endswith(b"\r"):
            line = line[:-1]
        return line if len(line) <= self._max_line_bytes else None
