"""The kernels of the changelog reader, each beside the plain functions or rule that it must agree with."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.streams.aggregations.aggregation import Column
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog import reader_kernels as k
from penstock.shared.streams.changelog.state_codec import StateCodec

UNSET = -77
"""Stands in every output before a kernel runs, so that a test sees what the kernel left alone."""
AROUND = [b"\1L" * 15, b"L" * 30]
"""Bytes of other records before and after the record that is read: it would be another with some of them."""
BEGIN = 30

# --- parse_envelopes ---

ENTRIES = {
    "live": fmt.encode_live(3, 5, 7, -2, 258, b"st"),
    "live without a state": fmt.encode_live(3, 5, 7, 1, 2, b""),
    "deleted": fmt.encode_deleted(3, 5, 7, -2),
    "final": fmt.encode_final(3, 5, 7, -2, 258, 300, b"st"),
    "late": fmt.encode_late(3, 5, 7, -2, -1, [4, 5], b"st"),
    "late without a state": fmt.encode_late(3, 5, 7, -2, 258, [4, 5], None),
    "late in no window": fmt.encode_late(3, 5, 7, -2, 258, [], b""),
    "progress": fmt.ENVELOPE.pack(1, fmt.PROGRESS, 0, 5, 7) + b"{}",
    "takeover": fmt.ENVELOPE.pack(1, fmt.TAKEOVER, 0, 5, 0) + b"{}",
}


def parsed(value: bytes, has_key: bool, around: bytes = AROUND[0]) -> list[int] | None:
    """The numbers of a record as the kernel reads them; None if it finds the record invalid."""
    data = np.frombuffer(around + value + around, np.uint8)
    numbers = np.full((1, k.NUMBERS), UNSET, np.int64)
    at, size, key_size = (np.array([number]) for number in (BEGIN, len(value), 0 if has_key else -1))
    count = k.parse_envelopes(data, at, size, key_size, numbers)
    return numbers[0].tolist() if count else None


def expected(value: bytes, has_key: bool) -> list[int] | None:
    """The numbers of a record as the functions of the format read it."""
    if fmt.is_foreign_record(value):
        return [k.FOREIGN, *[UNSET] * (k.NUMBERS - 1)]
    try:
        operation, store, epoch, commit, body = fmt.decode_entry(value)
    except CorruptRecord:
        return None
    envelope = [operation[0], store, epoch, commit]
    if operation in (fmt.PROGRESS, fmt.TAKEOVER):
        return [*envelope, *[UNSET] * (k.NUMBERS - 4)]
    if not has_key:
        return None
    begin = BEGIN + fmt.ENVELOPE.size
    if operation == fmt.LATE:
        time, offset, missed = fmt.TIME_OFFSET_COUNT.unpack_from(body)
        head = fmt.TIME_OFFSET_COUNT.size + 8 * missed + 1
        return [*envelope, time, offset, missed, begin + head, len(body) - head if body[head - 1] else k.NO_STATE]
    layout = {fmt.LIVE: fmt.START_END, fmt.DELETED: fmt.START, fmt.FINAL: fmt.START_END_CLOSED}[operation]
    times = [*layout.unpack_from(body), 0, 0][:3]
    return [*envelope, *times, begin + layout.size, len(body) - layout.size]


def variants(value: bytes) -> list[bytes]:
    """The record itself, cut off anywhere, longer by a byte, and with each of its bytes replaced by others."""
    found = [value[:size] for size in range(len(value) + 1)] + [value + b"\0"]
    for at in range(len(value)):
        others = b"\0\1\2\7\x08@AZ[\x7f\x80\xff" if at < fmt.ENVELOPE.size else b"\0\1\2\xff"
        found += [value[:at] + bytes([other]) + value[at + 1 :] for other in others]
    return found


@pytest.mark.parametrize("kind", ENTRIES)
def test_records_are_read_as_the_format_defines_them(kind: str) -> None:
    """An entry, and each record that differs from it in one byte or in length, has the numbers of the format's own
    functions, or is invalid where these reject it."""
    for value, has_key, around in product(variants(ENTRIES[kind]), (True, False), AROUND):
        assert parsed(value, has_key, around) == expected(value, has_key), value
    assert expected(ENTRIES[kind], has_key=True) is not None


@pytest.mark.parametrize(("epoch", "is_valid"), [(fmt.EPOCH_MAX, True), (fmt.EPOCH_MAX + 1, False)])
def test_the_highest_epoch_is_valid(epoch: int, is_valid: bool) -> None:
    """No owner takes an epoch above the highest."""
    assert (parsed(fmt.encode_deleted(3, epoch, 7, 1), has_key=True) is not None) == is_valid


def test_parsing_stops_at_the_first_invalid_record() -> None:
    """The records before an invalid one are read, the records after it are not."""
    good = fmt.encode_deleted(3, 5, 7, 1)
    for values, count in (([b"", good, b"\1Y", good], 2), ([good, good], 2), ([b"\2L", good], 0), ([], 0)):
        sizes = np.array([len(value) for value in values], np.int64)
        numbers = np.full((len(values), k.NUMBERS), UNSET, np.int64)
        data = np.frombuffer(b"".join(values) + AROUND[0], np.uint8)
        assert k.parse_envelopes(data, np.cumsum(sizes) - sizes, sizes, np.zeros_like(sizes), numbers) == count
        assert [operation != UNSET for operation in numbers[:, k.OPERATION].tolist()] == [
            index < count for index in range(len(values))
        ]


# --- apply_reader_rule ---

Row = tuple[int, int, int]
"""A record's operation, epoch and commit number."""

ROWS: list[Row] = [
    (k.FOREIGN, 0, 0),
    *((k.TAKEOVER, epoch, 0) for epoch in (0, 1, 2)),
    *((k.LIVE, epoch, commit) for epoch, commit in ((0, 1), (1, 1), (1, 2), (2, 1))),
    *((k.PROGRESS, epoch, 1) for epoch in (0, 1, 2)),
]


def table_of(rows: tuple[Row, ...]) -> NDArray[np.int64]:
    numbers = np.full((len(rows), k.NUMBERS), UNSET, np.int64)
    for i, (operation, epoch, commit) in enumerate(rows):
        numbers[i, [k.OPERATION, k.EPOCH, k.COMMIT]] = operation, epoch, commit
    return numbers


def applied(rows: tuple[Row, ...], force: int, at: int = 0) -> tuple[object, ...]:
    """What the kernel returns and leaves: confirmed changes, commits with their ends, and counters."""
    counters = np.zeros(k.COUNTERS, np.int64)
    counters[k.FORCE], counters[k.AT] = force, at
    confirmed = np.full(len(rows), UNSET, np.int64)
    commits = np.full((len(rows), 2), UNSET, np.int64)
    why = k.apply_reader_rule(table_of(rows), len(rows), confirmed, commits, counters)
    pending = counters[k.PENDING]
    return (
        int(why),
        int(counters[k.AT]),
        confirmed[: counters[k.CONFIRMED]].tolist(),
        commits[: counters[k.COMMITS]].tolist(),
        (int(pending), int(counters[k.FIRST_PENDING]) if pending else None),
        (int(counters[k.IGNORED]), int(counters[k.FOREIGN_RECORDS])),
    )


def by_the_rule(rows: tuple[Row, ...], force: int, at: int = 0) -> tuple[object, ...]:
    """The same by the rule of `format`, record by record."""
    confirmed: list[int] = []
    commits: list[list[int]] = []
    pending: list[int] = []
    ignored = foreign = 0
    why = k.DONE
    for i in range(at, len(rows)):
        operation, epoch, commit = rows[i]
        if operation == k.TAKEOVER and epoch > force:
            why = k.BEGINS
            break
        if operation == k.PROGRESS and epoch > force:
            why = k.LOST
            break
        if operation == k.FOREIGN:
            foreign += 1
        elif operation == k.TAKEOVER:
            pass
        elif epoch != force or not force:
            ignored += 1
        elif operation == k.PROGRESS:
            own = [j for j in pending if rows[j][2] == commit]
            confirmed += own
            ignored += len(pending) - len(own)
            pending = []
            commits.append([i, len(confirmed)])
        else:
            pending.append(i)
    else:
        i = len(rows)
    return why, i, confirmed, commits, (len(pending), pending[0] if pending else None), (ignored, foreign)


@pytest.mark.parametrize("first", ROWS)
def test_every_short_log_is_settled_by_the_rule(first: Row) -> None:
    """The kernel and the rule agree about all logs of up to four records, with and without an epoch in force."""
    for rest in product(ROWS, repeat=3):
        assert applied((first, *rest), 1) == by_the_rule((first, *rest), 1), (first, *rest)
    for size, force in product((0, 1, 2), (0, 2)):
        for rest in product(ROWS, repeat=size):
            assert applied((first, *rest), force) == by_the_rule((first, *rest), force), (first, *rest)
    assert applied((), 1) == by_the_rule((), 1)


def test_commits_with_records_of_others_between() -> None:
    """A commit has its own changes alone, and the next one begins after it; the kernel goes on where it is told."""
    rows: tuple[Row, ...] = (
        (k.PROGRESS, 1, 1),
        *((k.LIVE, 2, 1), (k.FINAL, 2, 2), (k.LIVE, 1, 2), (k.PROGRESS, 1, 2), (k.TAKEOVER, 2, 2)),
        *((k.FOREIGN, 2, 2), (k.LATE, 2, 2), (k.DELETED, 2, 2), (k.PROGRESS, 2, 2)),
        *((k.LIVE, 2, 2), (k.LIVE, 2, 3), (k.PROGRESS, 2, 3), (k.PROGRESS, 2, 4)),
        *((k.LIVE, 1, 5), (k.LIVE, 2, 5), (k.LIVE, 2, 5)),
    )
    for at in range(len(rows)):
        assert applied(rows, 2, at) == by_the_rule(rows, 2, at)
    assert applied(rows, 2) == (
        *(k.DONE, len(rows), [2, 7, 8, 11], [[9, 3], [12, 4], [13, 4]]),
        *((2, 15), (6, 1)),
    )


# --- read_state_columns ---


def test_states_are_read_as_the_codec_unpacks_them() -> None:
    """Each state has the codec's values. The first one that is cut off or too long is reported by its index."""
    codec = StateCodec([Column("a", "binary"), Column("b", "int64"), Column("c", "int64"), Column("d", "binary")])
    rows = [[b"abc", -2, 258, b"defg"], [b"", 1, 2, b""], [b"x" * 300, 2**62, -1, b"y"]]
    packed = [codec.pack(row) for row in rows]
    damaged = [state[:size] for state in packed for size in range(len(state))] + [state + b"\0" for state in packed]
    for states in ([*packed], *([*packed, one, *after] for one in damaged for after in ([], [packed[0]]))):
        # Nothing follows the last state, so that a read beyond it would fail.
        data = np.frombuffer(AROUND[0] + b"".join(states), np.uint8)
        sizes = np.array([len(state) for state in states])
        offsets = BEGIN + np.cumsum(sizes) - sizes
        cells, begins, lengths = np.full((3, 2, len(states)), UNSET, np.int64)
        assert k.read_state_columns(data, offsets, sizes, 2, 2, cells, begins, lengths) == len(packed)
        for i, (a, b, c, d) in enumerate(rows):
            found = [data[at : at + size].tobytes() for at, size in zip(begins[:, i], lengths[:, i], strict=True)]
            assert (cells[:, i].tolist(), found) == ([b, c], [a, d])
