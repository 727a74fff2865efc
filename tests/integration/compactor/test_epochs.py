"""Commits that lack their takeover record."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.services.compactor.changelog import Newest, Window, read_window
from penstock.services.compactor.kafka import READ_SCHEMA
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.streams import changelog_format as log
from penstock.shared.streams.changelog_reader import Change, ChangelogReader, CorruptEntry

Case = tuple[tuple[bytes, ...], tuple[int, ...]]
Record = tuple[bytes | None, bytes | None]
LOGS, RECORDS_MAX, EPOCH_MAX, COMMIT_MAX, REFUSALS = 100, 40, 3, 2, 5
WRONG = [(b'"wall_ms":0', b'"wall_ms":"a"'), (b'"version":1', b'"version":null'), (b"}", b"")]


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


class Read:
    """A log of one partition as the Python reader takes it: what it applied, and up to which offset it counts."""

    def __init__(self, records: list[Record], begins: int, skip: frozenset[int]) -> None:
        self.applied: list[int] = []
        self.covers = 0
        self.refused: int | None = None
        reader = ChangelogReader(self._apply, epoch=begins, skip=skip)
        for offset, (key, value) in enumerate(records):
            before = reader.progress
            try:
                reader.feed(offset, key, value)
            except CorruptEntry as e:
                self.refused = e.offset
                return
            self.covers = offset + 1 if reader.progress is not before else self.covers

    def _apply(self, change: Change) -> None:
        self.applied.append(int(change.key))


def drawn(draw: random.Random, offset: int, done: log.Progress) -> Record:
    """A record of any owner, or one that nobody can read; epoch 0 is nobody's."""
    epoch, commit, kind = draw.randint(0, EPOCH_MAX), draw.randint(1, COMMIT_MAX), draw.choice("TTTGGGGGLLLLLLLLLLWXF")
    if kind == "T":
        return None, log.encode_takeover(epoch, log.Takeover("log", "test", 0))
    if kind == "G":
        return None, log.encode_progress(epoch, commit, done)
    if kind == "W":
        return None, log.encode_progress(epoch, commit, done).replace(*draw.choice(WRONG))
    if kind == "X":
        return None, OF_NO_OPERATION
    if kind == "F":
        return None, b"\x00" + TAKEOVER[1:]
    return b"%d" % offset, log.encode_deleted(0, epoch, commit, 0)


def test_spark_and_the_reader_agree_on_what_counts(spark: Any, new_simulation: Callable[[str, int], Any]) -> None:
    """Whatever takeovers were named or came twice, whatever commits began again, and whoever wrote what among them.

    What the reader refuses is named, and then the next, until there is no more; Spark refuses the same.
    """
    (task,) = new_simulation("log", 1).tasks
    task.commit()
    done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
    rows, covered, skip, expected = [], {}, set(), {}
    refusals: list[tuple[list[Record], int, frozenset[int], int]] = []
    for partition in range(LOGS):
        draw = random.Random(partition)
        begins = draw.randrange(2) * draw.randrange(EPOCH_MAX)
        records = [drawn(draw, offset, done) for offset in range(RECORDS_MAX)]
        named = frozenset(draw.sample(range(RECORDS_MAX), draw.randrange(4)))
        while (refused := (read := Read(records, begins, named)).refused) is not None:
            refusals.append((records[: refused + 1], begins, named, refused))
            named |= {refused}
        rows += [(partition, offset, 0, *record) for offset, record in enumerate(records)]
        if begins:
            covered[partition] = Newest(0, begins, 0, b"", done)
        skip |= {(partition, offset) for offset in named}
        expected[partition] = read
    window = read_window(spark, "log", spark.createDataFrame(rows, READ_SCHEMA), covered, frozenset(skip))
    found: dict[int, list[int]] = {p: [] for p in expected}
    for row in window.entries.select("partition", "offset").orderBy("partition", "offset").collect():
        found[row.partition].append(row.offset)
    assert found == {p: sorted(read.applied) for p, read in expected.items()}
    newest = {p: one.covered_offset for p, one in window.newest.items()}
    assert newest == {p: read.covers for p, read in expected.items() if read.covers}
    assert sum(map(len, found.values())) > LOGS / 2
    for records, begins, named, refused in random.Random(0).sample(refusals, REFUSALS):
        frame = spark.createDataFrame([(0, at, 0, *record) for at, record in enumerate(records)], READ_SCHEMA)
        known = {0: Newest(0, begins, 0, b"", done)} if begins else {}
        with pytest.raises(CorruptRecord, match=rf"^log-0 at offset {refused}: "):
            read_window(spark, "log", frame, known, frozenset((0, at) for at in named))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (TAKEOVER, None),
        (OF_NO_OPERATION, None),
        (LATER, r"at offset 2: .* epoch 2 follow \(offset 3 is the first\)"),
    ],
    ids=["takeover", "unreadable", "of-another-epoch"],
)
def test_a_named_takeover_counts_as_named_with_other_corrupt_records(
    spark: Any, read: Callable[..., Window], named: bytes, said: str | None
) -> None:
    """One between it and its owner's commits is left out as any other, and nobody is asked to name it too."""
    case: Case = ((named, OF_NO_OPERATION), (2,))
    if said is not None:
        with pytest.raises(CorruptRecord, match=said):
            read(case, named=1)
        return
    window = read(case, named=1)
    assert [(c.partition, c.offset) for c in window.corrupt] == [(0, 2)]
    assert {p: newest.covered_offset for p, newest in window.newest.items()} == {0: 1}


def test_commits_without_a_takeover_are_refused_by_their_own_place(read: Callable[..., Window]) -> None:
    """Where its mark is damaged nobody can tell it from a foreign record: what it leaves behind tells."""
    damaged = b"\x00" + TAKEOVER[1:]
    with pytest.raises(CorruptRecord, match=r"^log-0 at offset 2: a commit of epoch 2, and no takeover .*\"0:2\""):
        read(((damaged,), (2, 2)))
    for named in (1, 2):
        window = read(((damaged,), (2, 2, 1)), named=named)
        assert {p: newest.covered_offset for p, newest in window.newest.items()} == {0: 5}
