"""The compiled rules of windows: Kafka Streams' rule for each kind, record by record in order of arrival.

A window is a row of arrays. `cells` has its links, its bounds and the numbers of its aggregations; `flags` has one byte
for it. `floats` and `links` are the same memory as `cells`, as float64 and int32. The links are the key's number, the
next and the previous row of the key, and the next row of the bucket. The rows of a key are a linked list in descending
order of start; `heads` has its first row.

A kernel takes the records from `first` to `count` (exclusive) of a batch: times, key numbers, and a row of values for
each aggregation that reads values. It applies the whole rule to a record, including the closing of windows, before it
takes the next one. It returns DONE, or stops early: with ROWS if free rows run out, with FULL if an output has no room,
with REJECTED if a sum would not fit into 64 bits. Then the record at `meta[PROCESSED]` is the next one, and nothing of
it was applied. The caller makes room or leaves that record out, and calls the kernel again. If `meta[CLOSING]` is not
NOTHING, closing was interrupted, and the caller first calls `close_due`.

Windows whose END, the last moment in the window, is below the close time are closed. The close time never goes back,
even if the grace changes. A timer wheel finds the windows that are due. Its buckets hold rows by the time at which they
are due; a heap holds the rows of buckets that have been visited. A row is filed by the end that it has then. If it has
grown when its time comes, it is filed again.

Shapes, where n is the room of the array itself: `times`, `codes` (records); `values`, `float_values`, `has`
(numbers, records); `program` (aggregations, 3); `cells`, `floats` (rows, `base` + state cells), `links` the same memory
with twice the columns; `flags`, `free`, `changed` (rows); `heads` (keys); `ring` (buckets); `heap`, `dues` (n);
`pending` (n, 4); `spare` (n + DIGIT_ROWS, 4); `late`, `deleted` (n, 4); `closed` (n, 6 + state cells); `updates`
(n, 5 + state cells); `steps` (n, 3).

All kernels are in one file, since numba identifies a cached function by its file.
"""

# ruff: noqa: SIM110
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import numpy as np

from penstock.shared.common.compiled import compiled

# --- meta ---
STREAM_TIME, CLOSE_TIME, PROCESSED, LATE, MISSED, CLOSED, DELETED, CHANGED, UPDATES, STEPS = range(10)
FREE, LIVE, FRONT, HEAP, CLOSING, PENDING, PENDING_AT, REJECTED_BY = range(10, 18)
META = 18

NOTHING, COLLECTING, ORDERED = range(3)
"""How far closing was when it stopped for room: it is done; it collects due rows; it closes them in order."""

# --- links ---
KEY, NEXT, PREVIOUS, BUCKET = range(4)

# --- flags ---
# The row has changed since the last commit.
DIRTY = 1
# The window existed at the last commit.
PERSISTED = 2
# The window is closed and retained.
RETAINED = 4
# The list of changed rows contains the row, even after its window was removed.
LISTED = 8
DIRTY_AND_LISTED = DIRTY | LISTED

# --- changes of a window of the last commit ---
# The key has no window with this start any more.
REMOVED = 1
# The result with the window's old bounds is retracted.
RETRACTED = 2
REMOVED_AND_RETRACTED = REMOVED | RETRACTED

# --- cells ---
LINK_CELLS = 2
"""The first cells are the four links, so that what is read together is adjacent in memory."""
START, END, SHOWN_START, SHOWN_END = range(LINK_CELLS, LINK_CELLS + 4)
"""The bounds, and for a session those in the last commit."""

# --- due rows, and their sort keys ---
ROW, BY_END, BY_START, BY_KEY = range(4)
PENDING_COLUMNS = 4
WORD_BYTES = 7
"""The bytes of a key that fit, with three bits more, into a non-negative int64."""
RUN = 8
"""Up to this number rows are sorted by insertion, which is faster than by merging."""
DIGITS = 256
"""The values of a byte. More rows than this are sorted byte by byte, which is faster than by merging."""
DIGIT_ROWS = DIGITS // PENDING_COLUMNS
"""`spare` has this many rows more than `pending`, because it counts digits in their four columns."""

# --- operations of aggregations ---
COUNT, LATEST, SUM_INT, SUM_FLOAT, MIN_INT, MIN_FLOAT, MAX_INT, MAX_FLOAT, FIRST, LAST, OBJECT = range(11)
"""FIRST and LAST have a time and a value, whose bits they copy; the time is -1 without a value. All other operations of
two cells have a number and the count of its values."""

# --- steps: operations that Python executes for aggregations whose states are objects ---
NEW, ADD, MERGE, COPY, CLOSE, RETAIN, DROP, UPDATE = range(8)

# --- results of a call ---
DONE, ROWS, FULL, REJECTED = range(4)

NONE = -1

# --- columns of outputs; cells come after them ---
INDEX, CODE, FROM, TO, CLOSED_AT, WAS_DIRTY = range(6)
CLOSED_COLUMNS = 6
LATE_ACCEPTED = 3
LATE_COLUMNS = 4
"""For late records: index, close time, stream time, and 1 if other windows accepted the record."""
UPDATE_COLUMNS = 5
"""Index, code, start, end, and 1 for a result or 0 for a retraction."""


# --- aggregations ---


@compiled
def _init_aggregation_cells(program, cells, row, base):
    for a in range(len(program)):
        op = program[a, 0]
        cell = base + program[a, 1]
        # Python has the state (`object_states`).
        if op == OBJECT:
            continue
        cells[row, cell] = -1 if op in (LATEST, FIRST, LAST) else 0
        if op not in (COUNT, LATEST):
            cells[row, cell + 1] = 0


@compiled
def _sum_overflows(a, b):
    total = a + b
    return ((a ^ total) & (b ^ total)) < 0


@compiled
def _program_can_reject(program):
    """Return whether an operation of a kernel's program may reject a record."""
    for a in range(len(program)):
        if program[a, 0] == SUM_INT:
            return True
    return False


@compiled
def _rejected_by(program, cells, row, other, base, values, has, i):
    """Return the aggregation whose sum would not fit into 64 bits if record i was added, or NONE.

    The record would be added to `row`, merged with `other`. Each of the two may be NONE: a new row, or no merge.
    """
    for a in range(len(program)):
        if program[a, 0] != SUM_INT:
            continue
        cell = base + program[a, 1]
        # The sum of no numbers is 0 in the cells, too.
        total = 0
        if row != NONE:
            total = cells[row, cell]
        # A merge adds the two sums first, so their sum must fit as well.
        if other != NONE:
            if _sum_overflows(total, cells[other, cell]):
                return a
            total += cells[other, cell]
        if has[program[a, 2], i] and _sum_overflows(total, values[program[a, 2], i]):
            return a
    return NONE


@compiled
def _op_replaces_value(op, new, old):
    """Return whether an operation of a kernel replaces a value of the time `old` (-1: none) by one of `new`."""
    # Of equal times, the first to arrive is FIRST, and the last to arrive is LAST.
    return old < 0 or (new < old if op == FIRST else new >= old)


@compiled
def _add_number_to_cells(op, cells, floats, row, cell, n_more, number, float_number):
    """Add a number, or the result of `n_more` numbers, to an aggregation's cells; `float_number` has the same bits."""
    n = cells[row, cell + 1]
    cells[row, cell + 1] = n + n_more
    if n == 0:
        cells[row, cell] = number
    elif op == SUM_INT:
        cells[row, cell] += number
    elif op == SUM_FLOAT:
        floats[row, cell] += float_number
    elif op == MIN_INT:
        cells[row, cell] = min(cells[row, cell], number)
    elif op == MAX_INT:
        cells[row, cell] = max(cells[row, cell], number)
    elif op == MIN_FLOAT:
        old = floats[row, cell]
        # NaN counts as the highest number, as in Spark.
        if float_number < old or old != old:
            floats[row, cell] = float_number
    else:
        old = floats[row, cell]
        if float_number > old or float_number != float_number:
            floats[row, cell] = float_number


@compiled
def _add_record_to_row(program, cells, floats, row, base, values, float_values, has, i, timestamp):
    """Add record i to a row. Rare operations are functions of their own, so that callers can inline this function."""
    for a in range(len(program)):
        op = program[a, 0]
        cell = base + program[a, 1]
        v = program[a, 2]
        if op == COUNT:
            cells[row, cell] += 1
        elif op == LATEST:
            cells[row, cell] = max(cells[row, cell], timestamp)
        elif op == OBJECT or not has[v, i]:
            continue
        elif op in (FIRST, LAST):
            if _op_replaces_value(op, timestamp, cells[row, cell]):
                cells[row, cell] = timestamp
                cells[row, cell + 1] = values[v, i]
        else:
            _add_number_to_cells(op, cells, floats, row, cell, 1, values[v, i], float_values[v, i])


@compiled
def _merge_row_cells(program, cells, floats, row, other, base):
    """Merge the numbers of a later window into an earlier one's row."""
    for a in range(len(program)):
        op = program[a, 0]
        cell = base + program[a, 1]
        if op == COUNT:
            cells[row, cell] += cells[other, cell]
        elif op == LATEST:
            cells[row, cell] = max(cells[row, cell], cells[other, cell])
        elif op in (FIRST, LAST):
            if cells[other, cell] >= 0 and _op_replaces_value(op, cells[other, cell], cells[row, cell]):
                cells[row, cell] = cells[other, cell]
                cells[row, cell + 1] = cells[other, cell + 1]
        elif op != OBJECT and cells[other, cell + 1] > 0:
            _add_number_to_cells(
                op, cells, floats, row, cell, cells[other, cell + 1], cells[other, cell], floats[other, cell]
            )


# --- rows and lists ---


@compiled
def _new_row(code, start, end, links, flags, cells, free, meta):
    meta[FREE] -= 1
    row = free[meta[FREE]]
    links[row, KEY] = code
    cells[row, START] = start
    cells[row, END] = end
    meta[LIVE] += 1
    return row


@compiled
def _mark_row_changed(row, flags, changed, meta):
    """Mark a row as changed since the last commit."""
    if not flags[row] & LISTED:
        changed[meta[CHANGED]] = row
        meta[CHANGED] += 1
    flags[row] |= DIRTY_AND_LISTED


@compiled
def _link_row_between(row, previous, next_, links, heads):
    """Insert a row into its key's list between two others, either of which may be NONE."""
    links[row, PREVIOUS] = previous
    links[row, NEXT] = next_
    _link_next_row(links[row, KEY], previous, row, links, heads)
    if next_ != NONE:
        links[next_, PREVIOUS] = row


@compiled
def _link_next_row(code, previous, next_, links, heads):
    """Link a row, or with NONE the head of the key's list, to its next row."""
    if previous == NONE:
        heads[code] = next_
    else:
        links[previous, NEXT] = next_


@compiled
def _unlink_row(row, links, flags, heads, meta):
    """Remove a row from its key's list.

    A row in a bucket or in the heap becomes free when the wheel visits the bucket or takes it from the heap. The caller
    must free a row that is in neither.
    """
    previous = links[row, PREVIOUS]
    next_ = links[row, NEXT]
    _link_next_row(links[row, KEY], previous, next_, links, heads)
    if next_ != NONE:
        links[next_, PREVIOUS] = previous
    links[row, KEY] = NONE
    # The list of changed rows may still have the row when another window uses it.
    flags[row] &= LISTED
    meta[LIVE] -= 1


@compiled
def _write_deleted_window(code, start, end, kind, deleted, meta):
    n = meta[DELETED]
    deleted[n, 0] = code
    deleted[n, 1] = start
    deleted[n, 2] = end
    deleted[n, 3] = kind
    meta[DELETED] = n + 1


@compiled
def _write_object_step(op, a, b, steps, meta):
    n = meta[STEPS]
    steps[n, 0] = op
    steps[n, 1] = a
    steps[n, 2] = b
    meta[STEPS] = n + 1


@compiled
def _write_late_record(index, close_time, stream_time, is_accepted, late, meta):
    n = meta[LATE]
    late[n, 0] = index
    late[n, 1] = close_time
    late[n, 2] = stream_time
    late[n, LATE_ACCEPTED] = is_accepted
    meta[LATE] = n + 1


@compiled
def _write_window_update(index, code, start, end, row, cells, base, updates, meta):
    """Write a result on update, or with row NONE a retraction."""
    n = meta[UPDATES]
    updates[n, 0] = index
    updates[n, 1] = code
    updates[n, 2] = start
    updates[n, 3] = end
    updates[n, 4] = row != NONE
    if row != NONE:
        for c in range(cells.shape[1] - base):
            updates[n, UPDATE_COLUMNS + c] = cells[row, base + c]
    meta[UPDATES] = n + 1


# --- the wheel ---


@compiled
def _row_due_time(row, flags, cells, retained_ms):
    """Return when a row is closed, or removed if it is closed already."""
    return cells[row, END] + retained_ms if flags[row] & RETAINED else cells[row, END]


@compiled
def _push_due_row(row, due, heap, dues, meta):
    """Add a row to the binary heap of due times."""
    at = meta[HEAP]
    meta[HEAP] = at + 1
    while at > 0:
        parent = (at - 1) >> 1
        if dues[parent] <= due:
            break
        dues[at] = dues[parent]
        heap[at] = heap[parent]
        at = parent
    dues[at] = due
    heap[at] = row


@compiled
def _pop_due_row(heap, dues, meta):
    """Remove and return the row that is due first."""
    top = heap[0]
    n = meta[HEAP] - 1
    meta[HEAP] = n
    due = dues[n]
    row = heap[n]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        # Behind the heap, `dues[n]` is still `due`.
        if dues[child + 1] < dues[child]:
            child += 1
        if dues[child] >= due:
            break
        dues[at] = dues[child]
        heap[at] = heap[child]
        at = child
    dues[at] = due
    heap[at] = row
    return top


@compiled
def _is_heap_due(close_time, dues, meta):
    return meta[HEAP] and dues[0] < close_time


@compiled
def _is_any_row_due(close_time, bucket_ms, dues, meta):
    """Return whether a row may be due: on the heap, or in a bucket that was not visited."""
    return close_time // bucket_ms > meta[FRONT] or _is_heap_due(close_time, dues, meta)


@compiled
def _file_row_in_wheel(row, due, bucket_ms, links, ring, heap, dues, meta):
    """Add a row to the bucket of its due time, or to the heap if that bucket has been visited already.

    The buckets of several rounds share a slot of the ring. `_turn_wheel` files the rows of later rounds again.
    """
    bucket = due // bucket_ms
    if bucket <= meta[FRONT]:
        _push_due_row(row, due, heap, dues, meta)
    else:
        slot = bucket % len(ring)
        links[row, BUCKET] = ring[slot]
        ring[slot] = row


@compiled
def _write_pending_row(row, cells, pending, meta):
    n = meta[PENDING]
    pending[n, ROW] = row
    pending[n, BY_END] = cells[row, END]
    pending[n, BY_START] = cells[row, START]
    pending[n, BY_KEY] = 0
    meta[PENDING] = n + 1


@compiled
def _turn_wheel(close_time, bucket_ms, retained_ms, links, flags, cells, ring, heap, dues, pending, free, meta):
    """Visit all buckets up to that of the close time. Their rows become pending if they are due, or are filed again.

    Removed rows become free. Return False if `pending` or the heap is full; rows that were not visited are still in
    their buckets.
    """
    target = close_time // bucket_ms
    # The front is the last visited bucket. Time may jump by more than a round. One round visits every slot.
    first = max(meta[FRONT] + 1, target - len(ring) + 1)
    meta[FRONT] = target
    for bucket in range(first, target + 1):
        # 1. Detach the list, so that rows can be filed in the same slot for a later round.
        slot = bucket % len(ring)
        row = ring[slot]
        ring[slot] = NONE
        while row != NONE:
            # 2. Without room, attach the rest of the list before the rows that were filed meanwhile, set the front
            # before this bucket, and stop. The row goes to `pending` or to the heap; which one is not known yet.
            if meta[PENDING] == len(pending) or meta[HEAP] == len(heap):
                last = row
                while links[last, BUCKET] != NONE:
                    last = links[last, BUCKET]
                links[last, BUCKET] = ring[slot]
                ring[slot] = row
                meta[FRONT] = bucket - 1
                return False
            next_ = links[row, BUCKET]
            # 3. Free, collect or file the row. Removed rows stay in their bucket until it is visited: a list that is
            # linked one way cannot lose a row in its middle.
            if links[row, KEY] == NONE:
                free[meta[FREE]] = row
                meta[FREE] += 1
            else:
                due = _row_due_time(row, flags, cells, retained_ms)
                # A session that has grown since was filed by an earlier end, and is filed again.
                if due < close_time:
                    _write_pending_row(row, cells, pending, meta)
                else:
                    _file_row_in_wheel(row, due, bucket_ms, links, ring, heap, dues, meta)
            row = next_
    return True


@compiled
def _collect_due_rows(close_time, bucket_ms, retained_ms, links, flags, cells, ring, heap, dues, pending, free, meta):
    """Make all due rows pending. Return False if `pending` or the heap is full: make room there and call again."""
    if not _turn_wheel(
        close_time, bucket_ms, retained_ms, links, flags, cells, ring, heap, dues, pending, free, meta
    ):  # fmt: skip
        return False
    while _is_heap_due(close_time, dues, meta):
        if meta[PENDING] == len(pending):
            return False
        row = _pop_due_row(heap, dues, meta)
        if links[row, KEY] == NONE:
            free[meta[FREE]] = row
            meta[FREE] += 1
            continue
        due = _row_due_time(row, flags, cells, retained_ms)
        if due < close_time:
            _write_pending_row(row, cells, pending, meta)
        else:
            _file_row_in_wheel(row, due, bucket_ms, links, ring, heap, dues, meta)
    return True


@compiled
def _set_words(pending, n, links, arena, key_offsets, sizes):
    """Set BY_KEY of each pending row: a number in the order of the keys, as far as seven bytes distinguish them.

    The seven bytes are those after the common prefix of the pending rows' keys.
    """
    first = links[pending[0, ROW], KEY]
    # Keys often begin alike, so the bytes after the common prefix distinguish more of them.
    prefix = sizes[first]
    for i in range(1, n):
        code = links[pending[i, ROW], KEY]
        prefix = min(prefix, sizes[code])
        for j in range(prefix):
            if arena[key_offsets[code] + j] != arena[key_offsets[first] + j]:
                prefix = j
                break
    for i in range(n):
        code = links[pending[i, ROW], KEY]
        count = min(sizes[code] - prefix, WORD_BYTES)
        # The number consists of the seven bytes (zeros for missing bytes), and then of the number of bytes that are not
        # missing.
        word = np.int64(0)
        for j in range(count):
            word = word << 8 | arena[key_offsets[code] + prefix + j]
        pending[i, BY_KEY] = word << 8 * (WORD_BYTES - count) + 3 | count


@compiled
def _is_key_before(a, b, links, arena, key_offsets, sizes):
    x = links[a, KEY]
    y = links[b, KEY]
    for at in range(min(sizes[x], sizes[y])):
        p = arena[key_offsets[x] + at]
        q = arena[key_offsets[y] + at]
        if p != q:
            return p < q
    return sizes[x] < sizes[y]


@compiled
def _is_pending_row_before(a, i, b, j, links, arena, key_offsets, sizes):
    """Return whether row i of a is closed before row j of b: by end, start, and key as bytes."""
    for c in range(BY_END, PENDING_COLUMNS):
        if a[i, c] != b[j, c]:
            return a[i, c] < b[j, c]
    return _is_key_before(a[i, ROW], b[j, ROW], links, arena, key_offsets, sizes)


@compiled
def _have_pending_rows_equal_columns(pending, i, j):
    """Return whether two rows have equal bounds and words."""
    for c in range(BY_END, PENDING_COLUMNS):
        if pending[i, c] != pending[j, c]:
            return False
    return True


@compiled
def _move_pending_row(a, i, b, j):
    for c in range(PENDING_COLUMNS):
        a[i, c] = b[j, c]


@compiled
def _merge_sort_pending_rows(pending, spare, first, n, links, arena, key_offsets, sizes):
    """Sort the pending rows from `first` to n in closing order."""
    # Runs are sorted by insertion, then merged in pairs. Only the left one of a pair is copied to `spare`.
    for low in range(first, n, RUN):
        for i in range(low + 1, min(low + RUN, n)):
            if not _is_pending_row_before(pending, i, pending, i - 1, links, arena, key_offsets, sizes):
                continue
            _move_pending_row(spare, 0, pending, i)
            at = i
            while at > low and _is_pending_row_before(spare, 0, pending, at - 1, links, arena, key_offsets, sizes):
                _move_pending_row(pending, at, pending, at - 1)
                at -= 1
            _move_pending_row(pending, at, spare, 0)
    width = RUN
    while width < n - first:
        for low in range(first, n, 2 * width):
            middle = min(low + width, n)
            high = min(low + 2 * width, n)
            if middle == high or not _is_pending_row_before(
                pending, middle, pending, middle - 1, links, arena, key_offsets, sizes
            ):
                continue
            for i in range(low, middle):
                _move_pending_row(spare, i, pending, i)
            a = low
            b = middle
            at = low
            while a < middle and b < high:
                if _is_pending_row_before(pending, b, spare, a, links, arena, key_offsets, sizes):
                    _move_pending_row(pending, at, pending, b)
                    b += 1
                else:
                    _move_pending_row(pending, at, spare, a)
                    a += 1
                at += 1
            while a < middle:
                _move_pending_row(pending, at, spare, a)
                a += 1
                at += 1
        width *= 2


@compiled
def _radix_sort_pending_rows(pending, spare, n):
    """Sort the first n pending rows by end, start and BY_KEY: a radix sort, from the lowest byte to the highest.

    None of these numbers is negative.
    """
    for column in range(BY_KEY, BY_END - 1, -1):
        differing = 0
        for i in range(1, n):
            differing |= pending[i, column] ^ pending[0, column]
        for shift in range(0, 64, 8):
            # Rows that are due together differ in few bytes.
            if not differing >> shift & (DIGITS - 1):
                continue
            # A counting sort, which keeps the order of equal bytes. The counts of the digits are behind the rows, four
            # in each row of `spare`.
            for digit in range(DIGITS):
                spare[n + (digit >> 2), digit & 3] = 0
            for i in range(n):
                digit = pending[i, column] >> shift & (DIGITS - 1)
                spare[n + (digit >> 2), digit & 3] += 1
            at = 0
            for digit in range(DIGITS):
                count = spare[n + (digit >> 2), digit & 3]
                spare[n + (digit >> 2), digit & 3] = at
                at += count
            for i in range(n):
                digit = pending[i, column] >> shift & (DIGITS - 1)
                at = spare[n + (digit >> 2), digit & 3]
                spare[n + (digit >> 2), digit & 3] = at + 1
                _move_pending_row(spare, at, pending, i)
            for i in range(n):
                _move_pending_row(pending, i, spare, i)


@compiled
def _sort_pending_rows(pending, spare, n, links, arena, key_offsets, sizes):
    """Sort the first n pending rows in closing order; `spare` has room for as many, and for the digits."""
    # Fewer rows rarely have equal bounds, and then whole keys are compared.
    if n > RUN:
        _set_words(pending, n, links, arena, key_offsets, sizes)
    if n <= DIGITS:
        _merge_sort_pending_rows(pending, spare, 0, n, links, arena, key_offsets, sizes)
        return
    _radix_sort_pending_rows(pending, spare, n)
    first = 0
    # Rows with equal bounds and words are sorted by whole keys.
    for i in range(1, n + 1):
        if i == n or not _have_pending_rows_equal_columns(pending, i, first):
            if i - first > 1:
                _merge_sort_pending_rows(pending, spare, first, i, links, arena, key_offsets, sizes)
            first = i


@compiled
def close_due(
    index, retains, moves, base, bucket_ms, retained_ms, links, flags, cells, heads, free, ring, heap, dues, pending,
    spare, arena, key_offsets, sizes, closed, deleted, changed, steps, has_objects, meta,
):  # fmt: skip
    """Close the windows whose last moment is below the close time, in order of end, start and key.

    With `retains` a closed window stays for another `retained_ms`, and is removed then. `moves` is True for sessions,
    whose bounds may have changed since the last commit. Return False if an output, `pending` or the heap is full. Then
    the caller makes room and calls again, and the kernel continues where it stopped.
    """
    close_time = meta[CLOSE_TIME]
    while True:
        # 1. Collect the due rows from the timer wheel and the heap.
        # 2. Sort them by end, start and key, so that the order does not depend on how records were batched.
        # Steps 1 and 2 are skipped if an earlier call has done them and then stopped in step 3.
        if meta[CLOSING] != ORDERED:
            meta[CLOSING] = COLLECTING
            if not _collect_due_rows(
                close_time, bucket_ms, retained_ms, links, flags, cells, ring, heap, dues, pending, free, meta
            ):  # fmt: skip
                return False
            _sort_pending_rows(pending, spare, meta[PENDING], links, arena, key_offsets, sizes)
            meta[CLOSING] = ORDERED
            meta[PENDING_AT] = 0
        # 3. Close the rows in order, or remove those that were retained long enough. `meta[PENDING_AT]` is the next
        # row, so that another call continues there. Room is checked for a whole row, so that no row is closed by half.
        while meta[PENDING_AT] < meta[PENDING]:
            if (
                meta[CLOSED] == len(closed)
                or meta[DELETED] == len(deleted)
                or meta[HEAP] == len(heap)
                or (has_objects and meta[STEPS] == len(steps))
            ):
                return False
            row = pending[meta[PENDING_AT], ROW]
            meta[PENDING_AT] += 1
            was_flags = flags[row]
            code = links[row, KEY]
            # A retained window was closed and forwarded before. Only the changelog must learn that it is gone.
            if was_flags & RETAINED:
                if was_flags & PERSISTED:
                    _write_deleted_window(code, cells[row, START], cells[row, END], REMOVED, deleted, meta)
                if has_objects:
                    _write_object_step(DROP, row, NONE, steps, meta)
                _unlink_row(row, links, flags, heads, meta)
                free[meta[FREE]] = row
                meta[FREE] += 1
                continue
            n = meta[CLOSED]
            meta[CLOSED] = n + 1
            closed[n, INDEX] = index
            closed[n, CODE] = code
            closed[n, FROM] = cells[row, START]
            closed[n, TO] = cells[row, END]
            closed[n, CLOSED_AT] = meta[STREAM_TIME]
            closed[n, WAS_DIRTY] = was_flags & DIRTY
            if was_flags & PERSISTED and moves:
                # The changelog has the session under its start as of the last commit, and results on update have both
                # of its bounds of then. If a bound has changed, that result is retracted. If it is the start, that
                # entry is deleted too.
                was = cells[row, SHOWN_START]
                if was != cells[row, START] or cells[row, SHOWN_END] != cells[row, END]:
                    kind = RETRACTED if was == cells[row, START] else REMOVED_AND_RETRACTED
                    _write_deleted_window(code, was, cells[row, SHOWN_END], kind, deleted, meta)
            for c in range(cells.shape[1] - base):
                closed[n, CLOSED_COLUMNS + c] = cells[row, base + c]
            if has_objects:
                _write_object_step(RETAIN if retains else CLOSE, row, n, steps, meta)
            if retains:
                flags[row] |= RETAINED
                _mark_row_changed(row, flags, changed, meta)
                _file_row_in_wheel(row, cells[row, END] + retained_ms, bucket_ms, links, ring, heap, dues, meta)
            else:
                _unlink_row(row, links, flags, heads, meta)
                free[meta[FREE]] = row
                meta[FREE] += 1
        meta[CLOSING] = NOTHING
        meta[PENDING] = 0
        # 4. Begin again. Time may have jumped so far that a window is closed and removed at once.
        if not _is_heap_due(close_time, dues, meta):
            return True


# --- sessions ---


@compiled
def take_sessions(
    times, codes, first, count, values, float_values, has, gap_ms, grace_ms, closes, program, base, bucket_ms, links,
    flags, cells, floats, heads, free, ring, heap, dues, pending, spare, arena, key_offsets, sizes, late, closed,
    deleted, changed, updates, logs_updates, steps, has_objects, meta,
):  # fmt: skip
    """Apply Kafka Streams' session rule (KStreamSessionWindowAggregate) to the records from `first` to before `count`.

    A record joins the open sessions of its key that are at most `gap_ms` away. It is late if the resulting session ends
    below the close time. Open sessions of a key are more than the gap apart, so a record joins two at most.
    """
    can_reject = _program_can_reject(program)
    for i in range(first, count):
        meta[PROCESSED] = i
        t = times[i]
        code = codes[i]
        stream_time = max(t, meta[STREAM_TIME])
        close_time = max(stream_time - grace_ms - gap_ms, meta[CLOSE_TIME])
        # 1. Find the open sessions that the record joins: `later`, then `earlier`, because the list is in descending
        # order of start. If it joins only one, that is `earlier`. As `findSessions(key, t - gap, t + gap)`, but open
        # sessions only: a closed one is never joined.
        later = NONE
        earlier = NONE
        before = NONE
        at = heads[code]
        while at != NONE and cells[at, START] > t + gap_ms:
            before = at
            at = links[at, NEXT]
        reach = max(t - gap_ms, close_time)
        end = t
        if at != NONE and cells[at, END] >= reach:
            end = max(t, cells[at, END])
            earlier = at
            at = links[at, NEXT]
            if at != NONE and cells[at, END] >= reach:
                later = earlier
                earlier = at
        # 2. If the resulting session is closed, note the record as late and go to 5. As `mergedWindow.end() <
        # windowCloseTime`: a record that would be late alone counts if it joins an open session. Otherwise stop if
        # there is no room or if the record would overflow a sum. Nothing has changed up to here.
        if end < close_time:
            if meta[LATE] == len(late):
                return FULL
            _write_late_record(i, close_time, stream_time, False, late, meta)
        else:
            if not meta[FREE]:
                return ROWS
            if meta[HEAP] == len(heap) or meta[DELETED] == len(deleted):
                return FULL
            if has_objects and meta[STEPS] + 3 > len(steps):
                return FULL
            if logs_updates and meta[UPDATES] + 3 > len(updates):
                return FULL
            rejected_by = _rejected_by(program, cells, earlier, later, base, values, has, i) if can_reject else NONE
            if rejected_by != NONE:
                meta[REJECTED_BY] = rejected_by
                return REJECTED
            # 3. Create a session, or extend `earlier`. If there is `later`, merge it into `earlier` and remove its row.
            if earlier == NONE:
                row = _new_row(code, t, t, links, flags, cells, free, meta)
                _init_aggregation_cells(program, cells, row, base)
                _link_row_between(row, before, at, links, heads)
                _file_row_in_wheel(row, t, bucket_ms, links, ring, heap, dues, meta)
                if has_objects:
                    _write_object_step(NEW, row, NONE, steps, meta)
            else:
                row = earlier
                start = min(t, cells[row, START])
                # KStreamSessionWindowAggregate removes the merged sessions first, and forwards a null for each, unless
                # the merged session equals the one that the record would be alone.
                if logs_updates and start != end:
                    _write_window_update(i, code, cells[row, START], cells[row, END], NONE, cells, base, updates, meta)
                if later != NONE:
                    if logs_updates:
                        _write_window_update(
                            i, code, cells[later, START], cells[later, END], NONE, cells, base, updates, meta
                        )
                    _merge_row_cells(program, cells, floats, row, later, base)
                    if has_objects:
                        _write_object_step(MERGE, row, later, steps, meta)
                    # The changelog and the results have `later` with its bounds of the last commit. The commit removes
                    # it there.
                    if flags[later] & PERSISTED:
                        was = cells[later, SHOWN_START]
                        was_end = cells[later, SHOWN_END]
                        _write_deleted_window(code, was, was_end, REMOVED_AND_RETRACTED, deleted, meta)
                    _unlink_row(later, links, flags, heads, meta)
                cells[row, START] = start
                cells[row, END] = end
            # 4. Add the record after the merge, as the aggregator is applied to the merged aggregate.
            _add_record_to_row(program, cells, floats, row, base, values, float_values, has, i, t)
            if has_objects:
                _write_object_step(ADD, row, i, steps, meta)
            _mark_row_changed(row, flags, changed, meta)
            if logs_updates:
                _write_window_update(i, code, cells[row, START], cells[row, END], row, cells, base, updates, meta)
                if has_objects:
                    _write_object_step(UPDATE, row, meta[UPDATES] - 1, steps, meta)
        # 5. Advance the time, and close the due sessions. The time advances only here: a record that is rejected above
        # advances no time.
        meta[STREAM_TIME] = stream_time
        meta[PROCESSED] = i + 1
        if closes:
            meta[CLOSE_TIME] = close_time
            if _is_any_row_due(close_time, bucket_ms, dues, meta) and not close_due(
                i, False, True, base, bucket_ms, 0, links, flags, cells, heads, free, ring, heap, dues, pending, spare,
                arena, key_offsets, sizes, closed, deleted, changed, steps, has_objects, meta,
            ):  # fmt: skip
                return FULL
    return DONE


# --- tumbling and hopping windows ---


@compiled
def take_time_windows(
    times, codes, first, count, values, float_values, has, size_ms, advance_ms, grace_ms, closes, program, base,
    bucket_ms, links, flags, cells, floats, heads, free, ring, heap, dues, pending, spare, arena, key_offsets, sizes,
    late, closed, deleted, changed, updates, logs_updates, steps, has_objects, meta,
):  # fmt: skip
    """Apply Kafka Streams' rule for windows of one size, at multiples of the advance (KStreamWindowAggregate).

    A record is added to those of its windows that are not closed. It is late if all of them are closed. A row's END is
    the last moment in its window, one less than the window's end.
    """
    can_reject = _program_can_reject(program)
    for i in range(first, count):
        meta[PROCESSED] = i
        t = times[i]
        code = codes[i]
        stream_time = max(t, meta[STREAM_TIME])
        close_time = max(stream_time - grace_ms, meta[CLOSE_TIME])
        # 1. Window n starts at n times the advance. Compute the numbers of the record's windows, from `earliest` to
        # `latest`, and the number of the first window that is not closed, `accepted_from`. As TimeWindows.windowsFor:
        # the first window begins at 0. Window n is open as long as its end is above the close time.
        earliest = max(t - size_ms + advance_ms, 0) // advance_ms
        latest = t // advance_ms
        accepted_from = max(earliest, (close_time - size_ms) // advance_ms + 1)
        windows = latest - accepted_from + 1
        # 2. If all windows are closed, note the record as late and go to 5. Otherwise stop if there is no room or if
        # the record would overflow a sum of any window. Nothing has changed up to here.
        if windows <= 0:
            if meta[LATE] == len(late):
                return FULL
            _write_late_record(i, close_time, stream_time, False, late, meta)
            meta[MISSED] += latest - earliest + 1
        else:
            if meta[FREE] < windows:
                return ROWS
            if meta[HEAP] + windows > len(heap) or meta[LATE] == len(late):
                return FULL
            if has_objects and meta[STEPS] + 3 * windows > len(steps):
                return FULL
            if logs_updates and meta[UPDATES] + windows > len(updates):
                return FULL
            # The list descends by start: find the position of the latest of these windows.
            before = NONE
            at = heads[code]
            while at != NONE and cells[at, START] > latest * advance_ms:
                before = at
                at = links[at, NEXT]
            probe = at
            if can_reject:
                for number in range(latest, accepted_from - 1, -1):
                    found = NONE
                    if probe != NONE and cells[probe, START] == number * advance_ms:
                        found = probe
                        probe = links[probe, NEXT]
                    rejected_by = _rejected_by(program, cells, found, NONE, base, values, has, i)
                    if rejected_by != NONE:
                        meta[REJECTED_BY] = rejected_by
                        return REJECTED
            # 3. For each of its windows that is not closed, from the latest to the earliest: create the window if it is
            # missing, and add the record to it. This is the order of the key's list, so that the list is walked once.
            for number in range(latest, accepted_from - 1, -1):
                start = number * advance_ms
                if at != NONE and cells[at, START] == start:
                    row = at
                else:
                    row = _new_row(code, start, start + size_ms - 1, links, flags, cells, free, meta)
                    _init_aggregation_cells(program, cells, row, base)
                    _link_row_between(row, before, at, links, heads)
                    _file_row_in_wheel(row, start + size_ms - 1, bucket_ms, links, ring, heap, dues, meta)
                    if has_objects:
                        _write_object_step(NEW, row, NONE, steps, meta)
                before = row
                at = links[row, NEXT]
                _add_record_to_row(program, cells, floats, row, base, values, float_values, has, i, t)
                if has_objects:
                    _write_object_step(ADD, row, i, steps, meta)
                _mark_row_changed(row, flags, changed, meta)
            # 4. Log the updates in Kafka Streams' order: the earliest window first. So they are written backwards. If
            # some of the record's windows are closed, note it as late too.
            if logs_updates:
                meta[UPDATES] += windows
                row = heads[code]
                while cells[row, START] > latest * advance_ms:
                    row = links[row, NEXT]
                total = meta[UPDATES]
                for back in range(windows):
                    meta[UPDATES] = total - 1 - back
                    _write_window_update(i, code, cells[row, START], cells[row, END], row, cells, base, updates, meta)
                    if has_objects:
                        _write_object_step(UPDATE, row, total - 1 - back, steps, meta)
                    row = links[row, NEXT]
                meta[UPDATES] = total
            if accepted_from > earliest:
                _write_late_record(i, close_time, stream_time, True, late, meta)
            meta[MISSED] += accepted_from - earliest
        # 5. Advance the time, and close the due windows.
        meta[STREAM_TIME] = stream_time
        meta[PROCESSED] = i + 1
        if closes:
            meta[CLOSE_TIME] = close_time
            if _is_any_row_due(close_time, bucket_ms, dues, meta) and not close_due(
                i, False, False, base, bucket_ms, 0, links, flags, cells, heads, free, ring, heap, dues, pending, spare,
                arena, key_offsets, sizes, closed, deleted, changed, steps, has_objects, meta,
            ):  # fmt: skip
                return FULL
    return DONE


# --- sliding windows ---


@compiled
def _link_sliding_window_row(row, links, cells, heads):
    """Insert a row into its key's list, which descends by start."""
    code = links[row, KEY]
    start = cells[row, START]
    before = NONE
    at = heads[code]
    while at != NONE and cells[at, START] > start:
        before = at
        at = links[at, NEXT]
    _link_row_between(row, before, at, links, heads)


@compiled
def _new_sliding_window_row(
    code, start, end, model, program, base, links, flags, cells, heads, free, ring, heap, dues, bucket_ms, changed,
    steps, has_objects, meta,
):  # fmt: skip
    """Create a row for a new window with the numbers of another one, or with none."""
    row = _new_row(code, start, end, links, flags, cells, free, meta)
    if model == NONE:
        _init_aggregation_cells(program, cells, row, base)
    else:
        for c in range(base, cells.shape[1]):
            cells[row, c] = cells[model, c]
    if has_objects:
        _write_object_step(NEW if model == NONE else COPY, row, model, steps, meta)
    _link_sliding_window_row(row, links, cells, heads)
    _file_row_in_wheel(row, end, bucket_ms, links, ring, heap, dues, meta)
    _mark_row_changed(row, flags, changed, meta)
    return row


@compiled
def take_sliding_windows(
    times, codes, first, count, values, float_values, has, difference_ms, grace_ms, closes, program, base, bucket_ms,
    links, flags, cells, floats, heads, free, ring, heap, dues, pending, spare, arena, key_offsets, sizes, late, closed,
    deleted, changed, updates, logs_updates, steps, has_objects, meta,
):  # fmt: skip
    """Apply Kafka Streams' rule of sliding windows (KStreamSlidingWindowAggregate).

    For each record, one window ends at its timestamp. Another window starts 1 ms later, if it contains a record. Both
    bounds are in the window. A closed window is retained for a time, because a new window may have to begin with a copy
    of its aggregations. The first aggregation is the kernel's own: the timestamp of the window's latest record. A
    record is late if no window accepts it.

    For a timestamp below `difference_ms` the window that ends there would begin below 0. Kafka Streams makes one window
    for all such early records, which begins at 0.
    """
    retained_ms = 2 * difference_ms
    can_reject = _program_can_reject(program)
    for i in range(first, count):
        meta[PROCESSED] = i
        t = times[i]
        code = codes[i]
        stream_time = max(t, meta[STREAM_TIME])
        close_time = max(stream_time - grace_ms, meta[CLOSE_TIME])
        is_early = t < difference_ms
        missed = 0
        n_found = 0
        is_accepted = False
        left = NONE
        right = NONE
        combined = NONE
        previous = -1
        right_latest = -1
        has_left = False
        has_right = False
        is_whole = False
        has_next = False
        is_both = False
        # Stop if a late record has no room. Whether this one is late is known only in step 5.
        if meta[LATE] == len(late):
            return FULL
        # If the record is older than the rule accepts, only step 5 is left. As `timestamp + 1 + timeDifferenceMs <=
        # closeTime`: even the window just after the record is closed.
        if t + difference_ms < close_time:
            missed = 1
        else:
            # 1. Find the windows of the key around t. The row numbers of those that contain t are written to `spare`,
            # which is scratch memory. `right` is the latest window that contains t and ends after it: `made_right` will
            # begin with a copy of its numbers. `left` is the latest window that ends before t: `made_left` will begin
            # with a copy of its numbers if `made_left` contains the key's latest record before t. The window of early
            # records, `combined`, is not in `spare`. An early record has no `left`.
            # As `processReverse` and `processEarly`: visit the windows of the key that can contain the record, and the
            # one that ends before it.
            at = heads[code]
            while at != NONE and cells[at, START] > t + 1:
                at = links[at, NEXT]
            earliest = max(0, t - 2 * difference_ms)
            while at != NONE and cells[at, START] >= earliest:
                if n_found == len(spare):
                    return FULL
                start = cells[at, START]
                end = cells[at, END]
                latest = cells[at, base]
                if start == t + 1:
                    has_right = True
                elif is_early:
                    if start == 0:
                        combined = at
                        if latest < t:
                            previous = latest
                    else:
                        if right == NONE:
                            right = at
                        spare[n_found, ROW] = at
                        n_found += 1
                elif end > t:
                    if right == NONE:
                        right = at
                    spare[n_found, ROW] = at
                    n_found += 1
                elif end == t:
                    has_left = True
                    spare[n_found, ROW] = at
                    n_found += 1
                    # Another record of this time has made all windows already.
                    if latest == t:
                        is_whole = True
                        break
                    previous = latest
                else:
                    left = at
                    previous = latest
                    break
                at = links[at, NEXT]
            if is_early and right == NONE:
                right = combined
            if right != NONE:
                right_latest = cells[right, base]
            # 2. Stop if there is no room for the three windows that a record can make, their steps and their updates,
            # or if the record would overflow a sum of a window that is not closed. Nothing has changed up to here.
            if meta[FREE] < 3:
                return ROWS
            if meta[HEAP] + 3 > len(heap):
                return FULL
            # `made_right` has two steps, and the other two windows have three each.
            if has_objects and meta[STEPS] + 2 * n_found + 8 > len(steps):
                return FULL
            if logs_updates and meta[UPDATES] + n_found + 3 > len(updates):
                return FULL
            # Still 2: stop if the record would overflow a sum. Without such an aggregation the range is empty.
            for f in range(n_found + 1 if can_reject else 0):
                row = combined if f == n_found else spare[f, ROW]
                if row == NONE or cells[row, END] < close_time:
                    continue
                rejected_by = _rejected_by(program, cells, row, NONE, base, values, has, i)
                if rejected_by != NONE:
                    meta[REJECTED_BY] = rejected_by
                    return REJECTED
            # As `leftWindowNotEmpty`: the previous record is in the window that ends at t.
            lends = left != NONE and t - difference_ms <= previous
            # The window that ends at t will begin with the numbers of `left`, so the sum with those must fit.
            if can_reject and lends and not has_left and t >= close_time:
                rejected_by = _rejected_by(program, cells, left, NONE, base, values, has, i)
                if rejected_by != NONE:
                    meta[REJECTED_BY] = rejected_by
                    return REJECTED
            # 3. Create the missing windows that would contain a record and are not closed. `made_right` begins 1 ms
            # after t. `made_next` begins 1 ms after the key's latest record before t: it was empty until now.
            # `made_left` ends at t. An early record has `made_combined`, which begins at 0, instead of `made_left`. A
            # window that begins with another one's numbers is created before that one takes the record.
            made_right = NONE
            # As `rightWindowIsNotEmpty`: a window that would contain no record is not created.
            if not is_whole and not has_right and right_latest > t:
                made_right = _new_sliding_window_row(
                    code, t + 1, t + 1 + difference_ms, right, program, base, links, flags, cells, heads, free, ring,
                    heap, dues, bucket_ms, changed, steps, has_objects, meta,
                )  # fmt: skip
            # For an early record, Kafka Streams forwards the update of `made_right` first.
            if is_early and made_right != NONE and logs_updates:
                _write_window_update(
                    i, code, cells[made_right, START], cells[made_right, END], made_right, cells, base, updates, meta
                )
                if has_objects:
                    _write_object_step(UPDATE, made_right, meta[UPDATES] - 1, steps, meta)
            made_left = NONE
            made_next = NONE
            made_combined = NONE
            # As `previousRecordRightWindowDoesNotExistAndIsNotEmpty`: the previous record's window may have been empty
            # until now.
            if previous >= 0 and previous + 1 + difference_ms >= t:
                at = heads[code]
                while at != NONE and cells[at, START] > previous + 1:
                    at = links[at, NEXT]
                has_next = at != NONE and cells[at, START] == previous + 1
                if not has_next and previous + 1 + difference_ms < close_time:
                    missed += 1
                elif not has_next:
                    made_next = _new_sliding_window_row(
                        code, previous + 1, previous + 1 + difference_ms, NONE, program, base, links, flags, cells,
                        heads, free, ring, heap, dues, bucket_ms, changed, steps, has_objects, meta,
                    )  # fmt: skip
            if is_early:
                if combined == NONE and difference_ms < close_time:
                    missed += 1
                elif combined == NONE:
                    made_combined = _new_sliding_window_row(
                        code, 0, difference_ms, NONE, program, base, links, flags, cells, heads, free, ring, heap, dues,
                        bucket_ms, changed, steps, has_objects, meta,
                    )  # fmt: skip
            elif not has_left and not is_whole:
                if t < close_time:
                    missed += 1
                elif made_next != NONE and previous + 1 == t - difference_ms:
                    # The window after the previous record also ends here. Kafka Streams creates and forwards it twice.
                    is_both = True
                else:
                    made_left = _new_sliding_window_row(
                        code, t - difference_ms, t, left if lends else NONE, program, base, links, flags, cells, heads,
                        free, ring, heap, dues, bucket_ms, changed, steps, has_objects, meta,
                    )  # fmt: skip
            # 4. Add the record to the windows that contain it and are not closed. Log the updates in the order of Kafka
            # Streams, which visits the latest window first, but the earliest first for early records. It forwards
            # `made_right` last unless the record is early.
            for f in range(n_found + 4):
                if f < n_found:
                    row = spare[n_found - 1 - f, ROW] if is_early else spare[f, ROW]
                elif f == n_found:
                    row = made_next
                elif f == n_found + 1:
                    row = made_left
                elif f == n_found + 2:
                    row = made_combined
                else:
                    row = combined
                if row == NONE:
                    continue
                if cells[row, END] < close_time:
                    missed += 1
                    continue
                is_accepted = True
                _add_record_to_row(program, cells, floats, row, base, values, float_values, has, i, t)
                _mark_row_changed(row, flags, changed, meta)
                if has_objects:
                    _write_object_step(ADD, row, i, steps, meta)
                if logs_updates:
                    _write_window_update(i, code, cells[row, START], cells[row, END], row, cells, base, updates, meta)
                    if has_objects:
                        _write_object_step(UPDATE, row, meta[UPDATES] - 1, steps, meta)
            if is_both and logs_updates:
                _write_window_update(
                    i, code, cells[made_next, START], cells[made_next, END], made_next, cells, base, updates, meta
                )
                if has_objects:
                    _write_object_step(UPDATE, made_next, meta[UPDATES] - 1, steps, meta)
            if not is_early and made_right != NONE and logs_updates:
                _write_window_update(
                    i, code, cells[made_right, START], cells[made_right, END], made_right, cells, base, updates, meta
                )
                if has_objects:
                    _write_object_step(UPDATE, made_right, meta[UPDATES] - 1, steps, meta)
        # 5. Note the record as late if no window accepted it. Then advance the time.
        if not is_accepted:
            _write_late_record(i, close_time, stream_time, False, late, meta)
        meta[MISSED] += missed
        meta[STREAM_TIME] = stream_time
        meta[PROCESSED] = i + 1
        if closes:
            meta[CLOSE_TIME] = close_time
            if _is_any_row_due(close_time, bucket_ms, dues, meta) and not close_due(
                i, True, False, base, bucket_ms, retained_ms, links, flags, cells, heads, free, ring, heap, dues,
                pending, spare, arena, key_offsets, sizes, closed, deleted, changed, steps, has_objects, meta,
            ):  # fmt: skip
                return FULL
    return DONE


# --- restoring ---


@compiled
def load_rows(
    codes, starts, ends, states, retains, retained_ms, is_table, base, bucket_ms, rows, links, flags, cells, heads,
    free, ring, heap, dues, meta,
):  # fmt: skip
    """Restore windows as of the last commit. The table must not contain them yet, and enough rows must be free.

    With `retains`, windows that end below the close time are restored as closed and retained.
    """
    for i in range(len(codes)):
        row = _new_row(codes[i], starts[i], ends[i], links, flags, cells, free, meta)
        rows[i] = row
        if base > SHOWN_START:
            cells[row, SHOWN_START] = starts[i]
            cells[row, SHOWN_END] = ends[i]
        for c in range(states.shape[1]):
            cells[row, base + c] = states[i, c]
        flags[row] |= PERSISTED
        if retains and ends[i] < meta[CLOSE_TIME]:
            # Closed before the restart: its result was forwarded, and only its numbers are needed.
            flags[row] |= RETAINED
        _link_sliding_window_row(row, links, cells, heads)
        if not is_table:
            _file_row_in_wheel(
                row, _row_due_time(row, flags, cells, retained_ms), bucket_ms, links, ring, heap, dues, meta
            )


@compiled
def rows_of(row, links, rows):
    """Write a key's rows to the end of `rows` in order of start, as many as fit; return how many the key has.

    `row` is the key's row with the latest start, or NONE.
    """
    count = 0
    while row != NONE:
        count += 1
        if count <= len(rows):
            rows[len(rows) - count] = row
        row = links[row, NEXT]
    return count


@compiled
def rows_at(codes, starts, links, cells, heads, rows):
    """Find the rows of the windows of these keys and starts; NONE for a missing one."""
    for i in range(len(codes)):
        row = heads[codes[i]]
        while row != NONE and cells[row, START] > starts[i]:
            row = links[row, NEXT]
        rows[i] = row if row != NONE and cells[row, START] == starts[i] else NONE


@compiled
def drop_rows(rows, is_table, links, flags, heads, free, meta):
    """Remove rows as if they had never existed."""
    for row in rows:
        _unlink_row(row, links, flags, heads, meta)
        if is_table:
            free[meta[FREE]] = row
            meta[FREE] += 1


@compiled
def sweep(ring, heap, dues, links, free, meta):
    """Free the removed rows that are still in the wheel."""
    for slot in range(len(ring)):
        row = ring[slot]
        remaining = NONE
        while row != NONE:
            next_ = links[row, BUCKET]
            if links[row, KEY] == NONE:
                free[meta[FREE]] = row
                meta[FREE] += 1
            else:
                links[row, BUCKET] = remaining
                remaining = row
            row = next_
        ring[slot] = remaining
    filed = meta[HEAP]
    meta[HEAP] = 0
    for at in range(filed):
        row = heap[at]
        due = dues[at]
        if links[row, KEY] == NONE:
            free[meta[FREE]] = row
            meta[FREE] += 1
        else:
            _push_due_row(row, due, heap, dues, meta)


# --- tables ---


@compiled
def take_rows(
    times, codes, first, count, values, float_values, has, program, base, links, flags, cells, floats, heads, free,
    changed, updates, logs_updates, steps, has_objects, meta,
):  # fmt: skip
    """Aggregate without windows: one row a key, which never closes."""
    can_reject = _program_can_reject(program)
    for i in range(first, count):
        meta[PROCESSED] = i
        t = times[i]
        code = codes[i]
        row = heads[code]
        if (has_objects and meta[STEPS] + 3 > len(steps)) or (logs_updates and meta[UPDATES] == len(updates)):
            return FULL
        if row == NONE and not meta[FREE]:
            return ROWS
        rejected_by = _rejected_by(program, cells, row, NONE, base, values, has, i) if can_reject else NONE
        if rejected_by != NONE:
            meta[REJECTED_BY] = rejected_by
            return REJECTED
        if row == NONE:
            row = _new_row(code, 0, 0, links, flags, cells, free, meta)
            _init_aggregation_cells(program, cells, row, base)
            _link_row_between(row, NONE, NONE, links, heads)
            if has_objects:
                _write_object_step(NEW, row, NONE, steps, meta)
        _add_record_to_row(program, cells, floats, row, base, values, float_values, has, i, t)
        _mark_row_changed(row, flags, changed, meta)
        if has_objects:
            _write_object_step(ADD, row, i, steps, meta)
        if logs_updates:
            _write_window_update(i, code, 0, 0, row, cells, base, updates, meta)
            if has_objects:
                _write_object_step(UPDATE, row, meta[UPDATES] - 1, steps, meta)
        meta[STREAM_TIME] = max(t, meta[STREAM_TIME])
        meta[PROCESSED] = i + 1
    return DONE
