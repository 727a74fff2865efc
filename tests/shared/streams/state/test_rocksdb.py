"""One task's rows in RocksDB: found by key and by end, written all or nothing, and thrown away when unreadable."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import StateStoreFailed
from penstock.shared.streams.state.checkpoint import Checkpoint
from penstock.shared.streams.state.rocksdb import META, Meta, RocksDb, RocksMemory, RowId, StoredRow
from tests.property_tests import examples

MEMORY = RocksMemory(8 * 1024 * 1024)
AT = Checkpoint("id", 3, 17, 15, None)


def test_rows_are_found_by_key_in_order_of_start(tmp_path: Path) -> None:
    """The rows of a key are sorted by start. Rows of other stores, and of keys with the same prefix, are left out."""
    db = RocksDb(tmp_path / "0", MEMORY)
    rows = {(0, b"a", 9): 10, (0, b"a", -1): 2, (0, b"ab", 1): 2, (1, b"a", 5): 6, (0, b"", 0): 1}
    assert db.write({id_: StoredRow(end, b"%d" % end) for id_, end in rows.items()}, AT, indexed={0}) == {0: 4, 1: 1}
    assert db.rows_of(0, b"a") == [(-1, StoredRow(2, b"2")), (9, StoredRow(10, b"10"))]
    assert (db.rows_of(0, b"b"), db.rows_of(0, b"")) == ([], [(0, StoredRow(1, b"1"))])
    many = dict(db.rows_of_many(0, [b"", b"b", b"a", b"ab"]))
    assert many == {key: db.rows_of(0, key) for key in (b"", b"a", b"ab", b"b")}
    assert (len(many[b"ab"]), len(many[b"a"])) == (1, 2)
    assert (db.row(1, b"a", 5), db.row(1, b"a", 6)) == (StoredRow(6, b"6"), None)
    assert sorted(db.rows(0)) == sorted((key, start, StoredRow(end, b"%d" % end))
        for (store, key, start), end in rows.items() if store == 0)  # fmt: skip
    assert (db.count(0), db.count(1)) == (4, 1)
    db.close()


def test_rows_and_checkpoint_outlive_the_process(tmp_path: Path) -> None:
    """Rows, counts and the checkpoint are there when the folder is opened again."""
    db = RocksDb(tmp_path / "0", MEMORY)
    assert (db.is_new, db.checkpoint) == (True, None)
    db.write({(0, b"a", 1): StoredRow(2, b"x"), (0, b"b", 1): StoredRow(2, b"y")}, AT)
    db.write({(0, b"b", 1): None, (0, b"c", 1): None}, AT)
    db.close()
    again = RocksDb(tmp_path / "0", MEMORY)
    assert (again.is_new, again.checkpoint, again.count(0)) == (False, AT, 1)
    assert list(again.rows(0)) == [(b"a", 1, StoredRow(2, b"x"))]
    again.clear()
    assert (again.is_new, again.checkpoint, again.count(0), list(again.rows(0))) == (True, None, 0, [])
    again.close()


def test_rows_of_an_unknown_format_are_not_used(tmp_path: Path) -> None:
    """Rows in an unknown format have no valid checkpoint, so they are not used."""
    db = RocksDb(tmp_path / "0", MEMORY)
    db.write({}, AT)
    db._db[META] = msgspec.msgpack.encode(Meta(format=99, checkpoint=AT))
    db.close()
    again = RocksDb(tmp_path / "0", MEMORY)
    assert (again.checkpoint, again.is_new) == (None, False)
    again._db[META] = b"\xc1"
    again.close()
    assert RocksDb(tmp_path / "0", MEMORY).checkpoint is None


def test_damaged_files_are_thrown_away(tmp_path: Path) -> None:
    """If RocksDB reports corrupt files, the state is deleted and restored."""
    db = RocksDb(tmp_path / "0", MEMORY)
    db.write({(0, b"a", 1): StoredRow(2, b"x")}, AT)
    db.close()
    (tmp_path / "0" / "CURRENT").write_text("nothing of this kind\n")
    again = RocksDb(tmp_path / "0", MEMORY)
    assert (again.is_new, again.checkpoint, list(again.rows(0))) == (True, None, [])
    again.close()


def test_errors_of_the_disk_name_the_folder(tmp_path: Path) -> None:
    """A folder that is already open and one that is closed raise errors that name it."""
    db = RocksDb(tmp_path / "0", MEMORY)
    with pytest.raises(StateStoreFailed, match=rf"{tmp_path}/0.*lock"):
        RocksDb(tmp_path / "0", MEMORY)
    db.close()
    db.close()
    with pytest.raises(StateStoreFailed, match="closed"):
        db.row(0, b"a", 0)


def test_the_index_moves_on_what_has_grown(tmp_path: Path) -> None:
    """If a row's end grows, its index entry is moved when it is due, and the row is due at its new end."""
    db = RocksDb(tmp_path / "0", MEMORY)
    for end in (10, 20, 30):
        db.write({(0, b"a", 5): StoredRow(end, b"")}, AT, indexed={0})
    db.write({(0, b"b", 5): StoredRow(12, b"")}, AT, indexed={0})
    assert db.take_due(0, -100, 11) == (set(), 12)
    assert db.take_due(0, 11, 30) == ({b"b"}, 30)
    assert db.take_due(0, 30, 31)[0] == {b"a"}
    db.write({(0, b"a", 5): None, (0, b"b", 5): None}, AT, indexed={0})
    assert db.take_due(0, -100, 1_000) == (set(), 1 << 63)
    db.close()


ids = st.tuples(st.just(0), st.sampled_from([b"a", b"b"]), st.integers(0, 4))
writes = st.lists(st.dictionaries(ids, st.one_of(st.none(), st.integers(0, 30)), max_size=4), max_size=8)


@settings(max_examples=examples(20), deadline=None)
@given(plan=st.lists(st.tuples(writes, st.integers(0, 35)), max_size=4))
def test_due_is_what_ends_before_the_limit(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[list[dict[RowId, int | None]], int]]
) -> None:
    """`take_due` finds exactly the rows that end between two limits, after any writes and earlier calls."""
    db = RocksDb(tmp_path_factory.mktemp("db"), MEMORY)
    rows: dict[RowId, int] = {}
    since = -1
    for changes, limit in plan:
        for change in changes:
            # Ends do not shrink, and nothing comes that ends before what was looked through.
            change = {id_: end if end is None else max(end, since, rows.get(id_, 0)) for id_, end in change.items()}
            written = {id_: None if end is None else StoredRow(end, b"") for id_, end in change.items()}
            db.write(written, AT, indexed={0}, due={0: since})
            for id_, end in change.items():
                if end is None:
                    rows.pop(id_, None)
                else:
                    rows[id_] = end
        assert db.count(0) == len(rows)
        if limit > since:
            keys, upcoming = db.take_due(0, since, limit)
            assert keys == {key for (_, key, _), end in rows.items() if since <= end < limit}
            assert all(end >= upcoming for end in rows.values() if end >= limit)
            rows = {id_: end for id_, end in rows.items() if end >= limit}
            db.write({(0, key, s): None for key, s, row in db.rows(0) if row.end < limit}, AT, indexed={0})
            since = limit
    db.close()
