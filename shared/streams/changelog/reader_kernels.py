"""Kernels that parse changelog records and apply the reader's rule: functions over arrays, compiled with numba.

`numbers` has the shape (records, NUMBERS), `confirmed` (records), `commits` (progress records, 2), `counters`
(COUNTERS), `cells` (fixed columns, states), `begins` and `sizes` (binary columns, states).

`parse_envelopes` reads the envelope of each record of a batch. `apply_reader_rule` decides which of the records count.
`read_state_columns` reads the columns of states. None of these kernels allocates an array.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import numpy as np

from penstock.shared.common.compiled import compiled
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.format import EPOCH_MAX, FORMAT_VERSION, VERSIONS_MAX

ENVELOPE_BYTES = fmt.ENVELOPE.size
START_BYTES = fmt.START.size
LIVE_BYTES = fmt.START_END.size
FINAL_BYTES = fmt.START_END_CLOSED.size
LATE_BYTES = fmt.TIME_OFFSET_COUNT.size + 1
"""The bytes of a body before the state. For a late record they include the flag of the state, but not the starts of the
missed windows."""
LIVE, DELETED, FINAL, LATE, PROGRESS, TAKEOVER = (
    operation[0] for operation in (fmt.LIVE, fmt.DELETED, fmt.FINAL, fmt.LATE, fmt.PROGRESS, fmt.TAKEOVER)
)
FOREIGN = 0
"""The operation of a foreign record."""

# --- numbers of a record ---
OPERATION, STORE, EPOCH, COMMIT, START, END, CLOSED_AT, STATE, STATE_BYTES = range(9)
NUMBERS = 9
"""`STATE` is the offset of a state in the buffer. For a late record, `START` is its timestamp, `END` its source offset,
`CLOSED_AT` the number of windows it missed, and `STATE_BYTES` is NO_STATE if it has no state."""
NO_STATE = -1

# --- the counters of a reader in a batch ---
AT, FORCE, PENDING, FIRST_PENDING, COMMITS, CONFIRMED, IGNORED, FOREIGN_RECORDS = range(8)
COUNTERS = 8
"""In order: the index of the next record; the epoch in force; the number of this batch's entries that wait for a
commit, and the index of the first; the numbers of confirmed commits, confirmed changes, ignored records and foreign
records."""

DONE, BEGINS, LOST = range(3)
"""Why `apply_reader_rule` stopped: it has reached the end; the record is a takeover that begins an epoch; the record is
a progress record of an epoch above the one in force."""


@compiled
def _big_endian_number(data, at, size):
    """Return a number of a changelog entry, for the reader's kernels; one of 8 bytes is signed."""
    number = np.int64(0)
    for i in range(at, at + size):
        number = (number << 8) | np.int64(data[i])
    return number


@compiled
def parse_envelopes(data, offsets, lengths, key_lengths, numbers):
    """Read the numeric fields of each record into `numbers`, up to the first invalid record.

    Return the index of the invalid record, or the number of records. A foreign record (`is_foreign_record`) gets the
    operation FOREIGN. Of progress and takeover records only the envelope is read.
    """
    for i in range(len(offsets)):
        at = offsets[i]
        length = lengths[i]
        # 1. Foreign: the record does not begin with the mark of an entry, a version from 1 to 7 and a capital letter.
        if length < 2 or data[at] < 1 or data[at] > VERSIONS_MAX or data[at + 1] < 65 or data[at + 1] > 90:
            numbers[i, OPERATION] = FOREIGN
            continue
        # 2. The envelope. The record is invalid if it is too short or has another version, a negative commit number or
        # an epoch that is too high. A record with the mark must not be skipped: that could lose state silently.
        if length < ENVELOPE_BYTES or data[at] != FORMAT_VERSION:
            return i
        operation = np.int64(data[at + 1])
        epoch = _big_endian_number(data, at + 3, 4)
        commit = _big_endian_number(data, at + 7, 8)
        if epoch > EPOCH_MAX or commit < 0:
            return i
        numbers[i, OPERATION] = operation
        numbers[i, STORE] = data[at + 2]
        numbers[i, EPOCH] = epoch
        numbers[i, COMMIT] = commit
        # 3. JSON follows, which Python decodes.
        if operation in (PROGRESS, TAKEOVER):
            continue
        # 4. The fields of the body. The record is invalid if its operation is unknown, its key is missing or its body
        # has the wrong size.
        body = at + ENVELOPE_BYTES
        size = length - ENVELOPE_BYTES
        if operation == LATE:
            if size < LATE_BYTES or key_lengths[i] < 0:
                return i
            missed = _big_endian_number(data, body + 16, 4)
            head = LATE_BYTES + START_BYTES * missed
            if size < head or data[body + head - 1] > 1 or (data[body + head - 1] == 0 and size > head):
                return i
            numbers[i, START] = _big_endian_number(data, body, 8)
            numbers[i, END] = _big_endian_number(data, body + 8, 8)
            numbers[i, CLOSED_AT] = missed
            numbers[i, STATE] = body + head
            numbers[i, STATE_BYTES] = size - head if data[body + head - 1] == 1 else NO_STATE
            continue
        if operation == LIVE:
            head = LIVE_BYTES
        elif operation == FINAL:
            head = FINAL_BYTES
        elif operation == DELETED:
            head = START_BYTES
        else:
            return i
        if size < head or (operation == DELETED and size != head) or key_lengths[i] < 0:
            return i
        numbers[i, START] = _big_endian_number(data, body, 8)
        numbers[i, END] = _big_endian_number(data, body + 8, 8) if head >= LIVE_BYTES else 0
        numbers[i, CLOSED_AT] = _big_endian_number(data, body + 16, 8) if head >= FINAL_BYTES else 0
        numbers[i, STATE] = body + head
        numbers[i, STATE_BYTES] = size - head
    return len(offsets)


@compiled
def apply_reader_rule(numbers, count, confirmed, commits, counters):
    """Apply the reader's rule (see `format`) to the records from `counters[AT]` up to `count`; return why it stops.

    The indexes of confirmed changes go to `confirmed`. For each confirmed commit, `commits` gets two numbers: the index
    of its progress record, and the number of all changes confirmed so far. It stops with BEGINS at a takeover record of
    a higher epoch, so that the caller sets the epoch in force.
    """
    for i in range(counters[AT], count):
        counters[AT] = i
        operation = numbers[i, OPERATION]
        epoch = numbers[i, EPOCH]
        # There are five cases:
        # 1. A foreign record is counted and skipped.
        if operation == FOREIGN:
            counters[FOREIGN_RECORDS] += 1
            continue
        force = counters[FORCE]
        # 2. A takeover with a higher epoch stops the loop. Any other takeover has no effect.
        if operation == TAKEOVER:
            if epoch > force:
                return BEGINS
            continue
        # 3. A change of the epoch in force waits for its commit. Any other change is ignored.
        if operation != PROGRESS:
            # 0: no takeover record yet, so nothing counts.
            if epoch != force or force == 0:
                counters[IGNORED] += 1
            else:
                if counters[PENDING] == 0:
                    counters[FIRST_PENDING] = i
                counters[PENDING] += 1
            continue
        # 4. The takeover record of a higher epoch is missing: the log has lost records.
        if epoch > force:
            return LOST
        # 5. A progress record of the epoch in force confirms the waiting changes with its commit number. Other waiting
        # changes belong to commits that failed, and are ignored. A progress record of a lower epoch is ignored.
        if epoch < force or force == 0:
            counters[IGNORED] += 1
            continue
        if counters[PENDING] > 0:
            found = counters[CONFIRMED]
            # The log may hold entries of a failed commit of the same epoch, and of zombies, between the first that
            # waits and this record.
            for j in range(counters[FIRST_PENDING], i):
                other = numbers[j, OPERATION]
                if other in (FOREIGN, TAKEOVER, PROGRESS) or numbers[j, EPOCH] != force:
                    continue
                if numbers[j, COMMIT] == numbers[i, COMMIT]:
                    confirmed[found] = j
                    found += 1
            counters[IGNORED] += counters[PENDING] - (found - counters[CONFIRMED])
            counters[CONFIRMED] = found
            counters[PENDING] = 0
        commits[counters[COMMITS], 0] = i
        commits[counters[COMMITS], 1] = counters[CONFIRMED]
        counters[COMMITS] += 1
    counters[AT] = count
    return DONE


@compiled
def read_state_columns(data, offsets, lengths, fixed, binary, cells, begins, sizes):
    """Read the columns of states; return the index of the first invalid state, or the number of states.

    A state begins with `fixed` columns of 8 bytes, which go to `cells`. The offsets and sizes of the `binary` columns
    that follow go to `begins` and `sizes`.
    """
    for i in range(len(offsets)):
        at = offsets[i]
        end = offsets[i] + lengths[i]
        if at + 8 * fixed > end:
            return i
        for c in range(fixed):
            cells[c, i] = _big_endian_number(data, at, 8)
            at += 8
        for b in range(binary):
            if at + 4 > end:
                return i
            size = _big_endian_number(data, at, 4)
            begins[b, i] = at + 4
            sizes[b, i] = size
            at += 4 + size
        if at != end:
            return i
    return len(offsets)
