"""Commits that lack their takeover record."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.services.spark.changelog import Newest, Window, read_window, split
from penstock.services.spark.kafka import READ_SCHEMA
from penstock.services.spark.unread_progress import unread_progress
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.changelog.reader import Change, ChangelogReader, CorruptEntry, ignore, one_by_one

Case = tuple[tuple[bytes, ...], tuple[int, ...]]
Record = tuple[bytes | None, bytes | None]
LOGS, RECORDS_MAX, EPOCH_MAX, COMMIT_MAX, REFUSALS = 100, 40, 3, 2, 5
WRONG = [(b'"wall_ms":0', b'"wall_ms":"a"'), (b'"version":1', b'"version":null'), (b"}", b"")]


@pytest.fixture
def read(spark: Any, new_simulation: Callable[[str, int], Any]) -> Callable[..., Window]:
    """Reads a partition for each case, where epoch 1 is known: a commit of it, values, and commits of other epochs."""

    def read(*cases: Case) -> Window:
        (task,) = new_simulation("log", 1).tasks
        task.commit()
        done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
        rows = []
        for partition, (values, epochs) in enumerate(cases):
            everything = [log.encode_progress(1, 1, done), *values, *(log.encode_progress(e, 1, done) for e in epochs)]
            rows += [(partition, offset, 0, None, value) for offset, value in enumerate(everything)]
        covered = {p: Newest(0, 1, 0, b"", done) for p in range(len(cases))}
        return read_window(spark, "log", spark.createDataFrame(rows, READ_SCHEMA), covered)

    return read


TAKEOVER = log.encode_takeover(2, log.Takeover("log", "test", 0))
OF_NO_OPERATION = TAKEOVER[:1] + b"X" + TAKEOVER[2:]

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
        reader = ChangelogReader(ignore)
        for offset, value in enumerate(values):
            try:
                reader.feed_record(offset, None, value)
            except CorruptEntry as e:
                refused[partition] = e.offset
        rows += [(partition, offset, 0, None, value) for offset, value in enumerate(values)]
    records = spark.createDataFrame(rows, READ_SCHEMA)
    with pytest.raises(CorruptRecord, match=r"^log-0 at offset 1: a progress record cannot be read"):
        read_window(spark, "log", records, {})
    unread = unread_progress(spark, split(records))
    assert unread is not None
    assert {row.partition: row.offset for row in unread.collect()} == refused
    assert refused == {p: at for p, (_, _, at) in enumerate(cases)}


class Read:
    """A log of one partition as the Python reader takes it: what it applied, and up to which offset it counts."""

    def __init__(self, records: list[Record], begins: int) -> None:
        self.applied: list[int] = []
        self.covers = 0
        self.refused: int | None = None
        reader = ChangelogReader(one_by_one(self._apply), epoch=begins)
        for offset, (key, value) in enumerate(records):
            before = reader.progress
            try:
                reader.feed_record(offset, key, value)
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
    """Whatever takeovers came twice, whatever commits began again, and whoever wrote what among them.

    What the reader refuses becomes a foreign record, and then the next, until there is no more; Spark refuses the same.
    """
    (task,) = new_simulation("log", 1).tasks
    task.commit()
    done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
    rows, covered, expected = [], {}, {}
    refusals: list[tuple[list[Record], int, int]] = []
    for partition in range(LOGS):
        draw = random.Random(partition)
        begins = draw.randrange(2) * draw.randrange(EPOCH_MAX)
        records = [drawn(draw, offset, done) for offset in range(RECORDS_MAX)]
        while (refused := (read := Read(records, begins)).refused) is not None:
            refusals.append((records[: refused + 1], begins, refused))
            records[refused] = None, b"foreign"
        rows += [(partition, offset, 0, *record) for offset, record in enumerate(records)]
        if begins:
            covered[partition] = Newest(0, begins, 0, b"", done)
        expected[partition] = read
    window = read_window(spark, "log", spark.createDataFrame(rows, READ_SCHEMA), covered)
    found: dict[int, list[int]] = {p: [] for p in expected}
    for row in window.entries.select("partition", "offset").orderBy("partition", "offset").collect():
        found[row.partition].append(row.offset)
    assert found == {p: sorted(read.applied) for p, read in expected.items()}
    newest = {p: one.covered_offset for p, one in window.newest.items()}
    assert newest == {p: read.covers for p, read in expected.items() if read.covers}
    assert sum(map(len, found.values())) > LOGS / 2
    for records, begins, refused in random.Random(0).sample(refusals, REFUSALS):
        frame = spark.createDataFrame([(0, at, 0, *record) for at, record in enumerate(records)], READ_SCHEMA)
        known = {0: Newest(0, begins, 0, b"", done)} if begins else {}
        with pytest.raises(CorruptRecord, match=rf"^log-0 at offset {refused}: "):
            read_window(spark, "log", frame, known)


def test_commits_without_a_takeover_are_refused_by_their_own_place(read: Callable[..., Window]) -> None:
    """Where its mark is damaged nobody can tell it from a foreign record: what it leaves behind tells."""
    damaged = b"\x00" + TAKEOVER[1:]
    with pytest.raises(CorruptRecord, match=r"^log-0 at offset 2: a commit of epoch 2, and no takeover "):
        read(((damaged,), (2, 2)))
