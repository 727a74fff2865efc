"""Converts the NDJSON body of a request to records, line by line as it arrives.

Sans-IO. Records and errors do not depend on how the body is divided into chunks. At most one unfinished line is
buffered, until it ends or is found to be too long.

>>> lines = LineSplitter(max_line_bytes=8)
>>> lines.feed(b'{"a":1}\\r\\n{"a"')
[b'{"a":1}']
>>> lines.feed(b':2}\\n{"a":"too long"}\\n')
[b'{"a":2}', None]
>>> lines.close()
[]
"""

from __future__ import annotations

from penstock.api.ingest.event import EventParser, Parsed

LINES_MAX = 4_000
"""The most lines that are parsed at once. Between such batches other requests proceed, and errors are counted."""


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


class NdjsonReader:
    """Parses the body of one NDJSON request: chunks in, records and errors out, LINES_MAX lines at a time."""

    def __init__(self, parser: EventParser, max_line_bytes: int) -> None:
        self._parser = parser
        self._lines = LineSplitter(max_line_bytes)
        self._pending: list[bytes | None] = []
        self.ended = 0
        """Lines that the last chunk completed."""
        self.next_line = 1
        """The number of the next line."""

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun and is incomplete."""
        return self._lines.unfinished

    @property
    def has_pending_lines(self) -> bool:
        """Whether lines of the last chunk are not parsed yet. If so, call `parse_pending` before the next `feed`."""
        return bool(self._pending)

    def feed(self, chunk: bytes, now_ms: int) -> Parsed:
        """Parse the lines that the chunk completes, LINES_MAX of them at most; `parse_pending` parses the rest.

        Positions are line numbers from 1.
        """
        assert not self._pending, "parse_pending() comes first"
        lines = self._lines.feed(chunk)
        self.ended = len(lines)
        return self._parse_lines(self._take_first_lines(lines), now_ms)

    def parse_pending(self, now_ms: int) -> Parsed:
        """Parse the next lines of the last chunk."""
        return self._parse_lines(self._take_first_lines(self._pending), now_ms)

    def close(self, now_ms: int) -> Parsed:
        """Parse the last line if it has no line end."""
        assert not self._pending, "parse_pending() comes first"
        return self._parse_lines(self._lines.close(), now_ms)

    def _take_first_lines(self, lines: list[bytes | None]) -> list[bytes | None]:
        """Return the first LINES_MAX lines. The others are pending."""
        self._pending = lines[LINES_MAX:]
        return lines[:LINES_MAX] if self._pending else lines

    def _parse_lines(self, lines: list[bytes | None], now_ms: int) -> Parsed:
        parsed = self._parser.parse(lines, self.next_line, now_ms)
        self.next_line += len(lines)
        return parsed
