"""Commits that lack their takeover record."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.compactor.changelog import Newest, Window, read_window
from services.compactor.kafka import READ_SCHEMA
from shared.common.errors import CorruptRecord
from shared.streams import changelog_format as log
from shared.streams.changelog_reader import Change, ChangelogReader, CorruptEntry

Case = tuple[tuple[bytes, ...], tuple[int, ...]]
LOGS, RECORDS_MAX, EPOCH_MAX, COMMIT_MAX = 100, 40, 3, 2


@pytest.fixture
def read(spark: Any, new_simulation: Callable[[str, int], Any]) -> Callable[..., Window]:
    """Reads a partition for each case, where epoch 1 is known: a commit of it, values, and commits of other epochs."""

    def read(*cases: Case, named: int | None = None) -> Window:
        (task,) = new_simulation("log", 1).tasks
        task.commit()
        done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
        rows = []
        for partition, (values, epochs) in enumerate(cases):
            everything = [log.encode_progress(1, 1, done), *values, *(log.encode_progress(e, 1, done) for e in epochs)]
            rows += [(partition, offset, 0, None, value) for offset, value in enumerate(everything)]
        covered = {p: Newest(0, 1, 0, b"", done) for p in range(len(cases))}
        skip = frozenset((p, named) for p in covered if named is not None)
        return read_window(spark, "log", spark.createDataFrame(rows, READ_SCHEMA), covered, skip, skip_corrupt=True)

    return read


TAKEOVER = log.encode_takeover(2, log.Takeover("log", "test", 0))
LATER = log.encode_takeover(3, log.Takeover("log", "test", 0))
OF_ANOTHER_VERSION, OF_NO_OPERATION = b"\x03" + TAKEOVER[1:], TAKEOVER[:1] + b"X" + TAKEOVER[2:]


@pytest.mark.parametrize(
    ("value", "epochs", "why"),
    [
        (OF_ANOTHER_VERSION, (1,), "it is a takeover record"),
        (OF_NO_OPERATION, (2, 2), "commits of epoch 2 follow (offset 2 is the first), and no takeover record of it"),
    ],
)
def test_a_damaged_takeover_is_not_left_out(
    read: Callable[..., Window], value: bytes, epochs: tuple[int, ...], why: str
) -> None:
    """Whether it still says that it is one, before any commit hangs on it, or commits that follow say so."""
    with pytest.raises(CorruptRecord, match=rf"^log-0 at offset 1: .*{re.escape(why)}"):
        read(((value,), epochs))


def test_corrupt_records_on_which_no_epoch_hangs_are_left_out(read: Callable[..., Window]) -> None:
    """Behind a sound takeover, in an epoch that goes on, and past the newest commit."""
    window = read(((TAKEOVER, OF_NO_OPERATION), (2,)), ((OF_NO_OPERATION,), (1,)), ((OF_NO_OPERATION,), ()))
    assert {p: newest.covered_offset for p, newest in window.newest.items()} == {0: 4, 1: 3, 2: 1}
    assert [(c.partition, c.offset) for c in window.corrupt] == [(0, 2), (1, 1), (2, 1)]


def test_a_takeover_that_is_named_takes_its_epoch_with_it(read: Callable[..., Window]) -> None:
    """Nothing of it counts, up to the next takeover."""
    window = read(((OF_ANOTHER_VERSION,), (2,)), ((OF_ANOTHER_VERSION, LATER), (2, 3)), named=1)
    assert {p: (newest.epoch, newest.covered_offset) for p, newest in window.newest.items()} == {0: (1, 1), 1: (3, 5)}
    assert window.corrupt == ()


NOT_INTS = (b"1.5", b"01", b"-", b'"1"')


def test_a_progress_record_is_what_every_reader_takes_for_one(
    spark: Any, new_simulation: Callable[[str, int], Any]
) -> None:
    """A field of another type, one that is missing, a body that is cut off: refused everywhere, whoever wrote it."""
    (task,) = new_simulation("log", 1).tasks
    task.commit()
    done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
    body = msgspec.json.decode(msgspec.json.encode(done))
    wrong = {"sources": "x", "grids_ms": 1, "wall_ms": "a", "version": None, "source_ids": 3, "guarantee": "once"}
    bodies = [msgspec.json.encode({**body, name: value}) for name, value in wrong.items()]
    bodies += [msgspec.json.encode({k: v for k, v in body.items() if k != "wall_ms"}), msgspec.json.encode(done)[:-1]]
    bodies += [msgspec.json.encode(done).replace(b'"version":1', b'"version":%b' % more) for more in NOT_INTS]
    bodies += [msgspec.json.encode(done).replace(b'"application":"', b'"application":"\xff')]
    rows, refused = [], {}
    cases = [(body, epoch, at) for body in bodies for epoch in (1, 2, 3) for at in (1, 2, 4)]
    for partition, (damaged, epoch, at) in enumerate(cases):
        values = [log.encode_takeover(2, log.Takeover("log", "test", 0)), *[log.encode_progress(2, 1, done)] * 3]
        values.insert(at, log.encode_progress(epoch, 1, done)[: log.ENVELOPE.size] + damaged)
        reader = ChangelogReader(lambda change: None)
        for offset, value in enumerate(values):
            try:
                reader.feed(offset, None, value)
            except CorruptEntry as e:
                refused[partition] = e.offset
        rows += [(partition, offset, 0, None, value) for offset, value in enumerate(values)]
    records = spark.createDataFrame(rows, READ_SCHEMA)
    with pytest.raises(CorruptRecord, match=r"^log-0 at offset 1: a progress record cannot be read"):
        read_window(spark, "log", records, {})
    window = read_window(spark, "log", records, {}, skip_corrupt=True)
    assert {c.partition: c.offset for c in window.corrupt} == refused == {p: at for p, (_, _, at) in enumerate(cases)}
    assert {newest.covered_offset for newest in window.newest.values()} == {4, 5}


def test_spark_and_the_reader_agree_on_what_counts(spark: Any, new_simulation: Callable[[str, int], Any]) -> None:
    """Whatever takeovers were named or came twice, whatever commits began again, and whoever wrote what among them."""
    (task,) = new_simulation("log", 1).tasks
    task.commit()
    done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
    store = 0
    rows, covered, skip, expected = [], {}, set(), {}
    for partition in range(LOGS):
        draw = random.Random(partition)
        begins = draw.randrange(2) * draw.randrange(EPOCH_MAX)
        named = frozenset(draw.sample(range(RECORDS_MAX), draw.randrange(4)))
        applied: list[int] = []

        def apply(change: Change, applied: list[int] = applied) -> None:
            applied.append(int(change.key))

        reader = ChangelogReader(apply, epoch=begins, skip=named)
        counts = 0
        for offset in range(RECORDS_MAX):
            epoch, commit = draw.randint(1, EPOCH_MAX), draw.randint(1, COMMIT_MAX)
            kind = draw.choice("TGGLLLLL")
            if kind == "T":
                key, value = None, log.encode_takeover(epoch, log.Takeover("log", "test", 0))
            elif kind == "G":
                key, value = None, log.encode_progress(epoch, commit, done)
            else:
                key, value = b"%d" % offset, log.encode_deleted(store, epoch, commit, 0)
            rows.append((partition, offset, 0, key, value))
            before = reader.progress
            reader.feed(offset, key, value)
            counts = offset + 1 if reader.progress is not before else counts
        if begins:
            covered[partition] = Newest(0, begins, 0, b"", done)
        skip |= {(partition, offset) for offset in named}
        expected[partition] = (applied, counts)
    window = read_window(spark, "log", spark.createDataFrame(rows, READ_SCHEMA), covered, frozenset(skip))
    found: dict[int, list[int]] = {p: [] for p in expected}
    for row in window.entries.select("partition", "offset").orderBy("partition", "offset").collect():
        found[row.partition].append(row.offset)
    assert found == {p: sorted(applied) for p, (applied, _) in expected.items()}
    newest = {p: one.covered_offset for p, one in window.newest.items()}
    assert newest == {p: counts for p, (_, counts) in expected.items() if counts}
    assert sum(map(len, found.values())) > LOGS
