"""A task's state on disk: it is never ahead of its confirmed commits, it is used only if it is valid, and its folder
has one owner."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.shared.common.errors import ConfigError, SchemaMismatch
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, ignore_changes
from penstock.shared.streams.changelog.format import EPOCH_MAX
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.state.checkpoint import Checkpoint, CommitPosition
from penstock.shared.streams.state.local_restore import (
    continue_from_local_state,
)
from penstock.shared.streams.state.local_state import RESTORE_BYTES_MAX, CommitOffsetUnknown, LocalState
from penstock.shared.streams.state.persistent_stores import PersistentWindowStore
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


@pytest.fixture
def state(tmp_path: Path) -> Iterator[LocalState]:
    """One partition's state."""
    own = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0).state_of(0)
    yield own
    own.close()


def task_on(state: LocalState) -> StreamTask:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    task = StreamTask(builder.build(), 0, application="app", local=state)
    task.initialize(0)
    return task


def take(task: StreamTask, key: bytes, at: int) -> None:
    offset = task.sources.get("in", 0)
    task.process(Columns.of([ConsumerRecord("in", 0, offset, at, key, b"{}")]), 0)


def test_only_confirmed_commits_are_on_disk(state: LocalState) -> None:
    """Changes and prepared commits are written to disk only when the commit is confirmed."""
    task = task_on(state)
    take(task, b"a", 5)
    task.prepare_commit(0)
    take(task, b"b", 6)
    assert (state.db.count(0), state.checkpoint, len(task.stores["s"])) == (0, None, 2)
    task.commit_succeeded(CommitPosition("id", 7))
    assert [(key, start) for key, start, _ in state.db.rows(0)] == [(b"a", 5)]
    assert state.checkpoint is not None
    assert (state.checkpoint.covered_offset, state.checkpoint.epoch, state.checkpoint.topic_id) == (7, 1, "id")
    assert state.checkpoint.progress is not None
    assert state.checkpoint.progress.sources == {"in": 1}
    assert [s.key for s in task.stores["s"].rows()] == ["b", "a"]  # what is not committed yet stays in memory


def test_a_commit_without_an_offset_is_restored_from_the_log(state: LocalState) -> None:
    """If the broker has not returned a commit's offset, nothing is written, and the state is restored from the log."""
    task = task_on(state)
    take(task, b"a", 5)
    task.prepare_commit(0)
    with pytest.raises(CommitOffsetUnknown):
        task.commit_succeeded(CommitPosition("id", 0))
    assert state.checkpoint is None


def test_a_response_after_the_end_changes_nothing(state: LocalState) -> None:
    """A commit that succeeds after the local state is closed leaves no checkpoint."""
    task = task_on(state)
    take(task, b"a", 5)
    task.prepare_commit(0)
    state.close()
    task.commit_succeeded(CommitPosition("id", 7))
    assert state.checkpoint is None


def test_a_restore_is_written_in_parts(state: LocalState) -> None:
    """A restore is buffered up to a limit of bytes, and has no checkpoint until it is complete."""
    state.begin(task_on(state).topology.schemas())
    while not state.is_full:
        state.restore_raw("s", b"k%d" % len(state._buffered), 1, 2, bytes(50_000))
    assert len(state._buffered) <= RESTORE_BYTES_MAX / 50_000 + 1
    state.write(None)
    assert (state.is_full, state.checkpoint, state.db.count(0) > 10) == (False, None, True)


def test_memory_is_released_row_by_row(state: LocalState) -> None:
    """With a memory limit of zero a row leaves memory once its commit is confirmed, and is read from disk again."""
    task = task_on(state)
    for i in range(50):
        take(task, b"%d" % i, 5)
        task.prepare_commit(0)
        task.commit_succeeded(CommitPosition("id", i + 1))
    store = task.stores["s"]
    assert (len(store), state._budget.bytes_used) == (50, 0)
    take(task, b"3", 7)
    assert [(s.start, s.end, s.states) for s in store.rows_of("3")] == [(5, 7, [2])]
    assert 0 < state._budget.bytes_used < 2_000
    state.close()
    assert state._budget.bytes_used == 0


def test_rows_in_memory_stay_within_their_limit(tmp_path: Path) -> None:
    """After each commit the rows in memory are within the limit, and the others are on disk, for any number of keys."""
    limit = 20_000
    own = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=limit)
    state = own.state_of(0)
    task = task_on(state)
    for i in range(300):
        take(task, b"%d" % i, 5)
        if i % 10 == 9:
            task.prepare_commit(0)
            task.commit_succeeded(CommitPosition("id", i + 1))
            assert own.budget.bytes_used <= limit
    store = task.stores["s"]
    assert isinstance(store, PersistentWindowStore)
    assert (len(store), len(list(store.rows()))) == (300, 300)
    assert 0 < len(store._cache) < 50
    state.close()


FOUND = Checkpoint("id", epoch=3, covered_offset=50, progress=None)


def topology(gap_ms: int = 10, name: str = "s", **more: Sum) -> Topology:
    builder = StreamsBuilder()
    sessions = builder.stream("in").group_by_key().session_window(gap_ms)
    sessions.aggregate(name, **{"n": Count(), **more}).on_close().to("out")
    return builder.build()


def test_state_that_has_met_the_highest_epoch_is_not_gone_on_from(tmp_path: Path) -> None:
    """A local state with the highest epoch is not used."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    local, schemas = state.state_of(0), topology().schemas()
    local.begin(schemas)
    for epoch, is_used in ((EPOCH_MAX - 1, True), (EPOCH_MAX, False)):
        checkpoint = msgspec.structs.replace(FOUND, epoch=epoch)
        local.write(checkpoint)
        found = continue_from_local_state(ChangelogReader(ignore_changes), local, schemas, "id", 0, 50)
        assert found == (checkpoint if is_used else None)
    local.close()


def test_a_restart_reads_the_tail_alone(tmp_path: Path) -> None:
    """Records that the state on disk covers are not read again. Incomplete state is not used."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(topology(), commit_each=False, state=state)
    for i in range(20):
        driver.pipe("in", key=b"%d" % i, value=b"{}", timestamp=i % 3)
        driver.commit()
    driver.crash()
    driver.restore()
    assert (driver.restored_entries, len(driver.task.stores["s"]), driver.task.epoch) == (0, 20, 2)
    assert driver.task.local is not None
    driver.task.local.write(None)
    driver.crash()
    driver.restore()
    assert (driver.restored_entries, len(driver.task.stores["s"]), driver.task.epoch) == (
        len(driver.changelog) - 1,
        20,
        3,
    )
    driver.close()


def test_rows_of_other_aggregations_come_from_the_changelog(tmp_path: Path) -> None:
    """A store whose aggregations have changed is restored from the changelog and not from disk."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(topology(), state=state)
    driver.pipe("in", key=b"a", value=b'{"id":1}', timestamp=5)
    driver.crash()
    driver.topology = topology(sum=Sum("id")).of_application("test-driver")
    driver.restore()
    assert driver.restored_entries > 0
    assert [(s.key, s.states[0]) for s in driver.task.stores["s"].rows()] == [("a", 1)]
    driver.pipe("in", key=b"a", value=b'{"id":4}', timestamp=6)
    driver.pipe("in", key=b"b", value=b'{"id":9}', timestamp=60)
    assert [record.value for record in driver.read("out")] == [b'{"key":"a","start":5,"end":6,"n":2,"sum":4.0}']
    driver.close()


def test_restored_rows_of_an_added_aggregation_are_read_only_with_it(tmp_path: Path) -> None:
    """A restore under a topology with an added aggregation writes rows that have it, even before the first commit.

    They are used under this topology. Under the topology before, the store is restored from the changelog.
    """
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(topology(), state=state)
    driver.pipe("in", key=b"a", value=b'{"id":1}', timestamp=5)
    from_disk = list[bool]()
    for more in ({"sum": Sum("id")}, {"sum": Sum("id")}, {}):
        driver.crash()
        driver.topology = topology(**more).of_application("test-driver")
        driver.restore()
        from_disk.append(driver.restored_entries == 0)
        assert [(s.key, s.states[0]) for s in driver.task.stores["s"].rows()] == [("a", 1)]
    assert from_disk == [False, True, False]
    driver.pipe("in", key=b"a", value=b'{"id":4}', timestamp=6)
    driver.pipe("in", key=b"b", value=b'{"id":9}', timestamp=60)
    assert [record.value for record in driver.read("out")] == [b'{"key":"a","start":5,"end":6,"n":2}']
    driver.close()


def updating() -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_update().to("out")
    return builder.build()


@pytest.mark.parametrize(
    "topologies",
    [
        (topology(), topology(sum=Sum("other")), topology(sum=Sum("id"))),
        (updating(), topology(), updating()),
    ],
    ids=["another aggregation", "another emission"],
)
def test_a_topology_that_has_committed_nothing_rejects_no_other(tmp_path: Path, topologies: list[Topology]) -> None:
    """A restore, or a standby, writes rows to disk. The changelog alone decides which topology may follow."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(topologies[0], state=state)
    driver.pipe("in", key=b"a", value=b'{"id":1}', timestamp=5)
    for later in topologies[1:]:
        driver.crash()
        driver.topology = later.of_application("test-driver")
        driver.restore()
        assert [(row.key, row.states[0]) for row in driver.task.stores["s"].rows()] == [("a", 1)]
    driver.close()


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (topology(gap_ms=20), "gap_ms was 10, is now 20"),
        (topology(name="t"), "'t' is new, 's' is gone"),
        (topology(n=Sum("id")), "aggregations changed: n"),
        (topology(), "aggregations changed: sum"),
    ],
)
def test_state_on_disk_that_the_topology_cannot_read_stays(tmp_path: Path, now: Topology, message: str) -> None:
    """A topology that is rejected does not cost the rows on disk: the next start with the old one uses them."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(topology(sum=Sum("id")), state=state)
    driver.pipe("in", key=b"a", value=b'{"id":1}', timestamp=5)
    driver.crash()
    local, changed = state.state_of(0), now.of_application("test-driver").schemas()
    before = local.checkpoint
    assert before is not None
    reader = ChangelogReader(ignore_changes, stores=changed)
    with pytest.raises(SchemaMismatch, match=message):
        continue_from_local_state(reader, local, changed, None, 0, len(driver.changelog))
    assert (local.checkpoint, reader.progress) == (before, None)
    local.close()


def test_a_changelog_that_does_not_go_on_from_there() -> None:
    """Another topic, a log that begins too late and a log that lost its end are each reported with their numbers."""
    assert FOUND.mismatch("id", 50, 50) is None
    assert "now has id other" in (FOUND.mismatch("other", 0, 90) or "")
    assert FOUND.mismatch("id", 51, 90) == "the changelog begins at 51, the state is of offset 50"
    assert FOUND.mismatch("id", 0, 49) == "the changelog ends at 49, the state is of offset 50"


def directory(folder: Path) -> StateDirectory:
    return StateDirectory(str(folder), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    """A second instance is rejected with the setting's name, and can use the folder after the first has closed it."""
    first, second = directory(tmp_path), directory(tmp_path)
    first.acquire()
    with pytest.raises(ConfigError, match=rf"streams.state_dir.*{tmp_path}/app.*locked"):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    assert repr(second) == f"<StateDirectory {tmp_path}/app locked>"
    second.release()


def test_a_folder_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    """A path that is no folder, or cannot be created, is rejected with the path and the system's reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"streams.state_dir.*file/app.*Not a directory"):
        directory(tmp_path / "file").acquire()


def test_a_missing_extra_is_named_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rocksdict is not installed, the error names the setting and the extra."""
    for module in ("local_state", "rocksdb"):
        monkeypatch.delitem(sys.modules, f"penstock.shared.streams.state.{module}", raising=False)
        package = sys.modules["penstock.shared.streams.state"]
        monkeypatch.delattr(package, module, raising=False)
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(ConfigError, match=r"default_dsl_store: .*rocksdict: .*penstock\[rocksdb\]"):
        directory(tmp_path)


def test_each_partition_has_a_database_of_its_own(tmp_path: Path) -> None:
    """Partitions are folders below the application's folder. Other entries there are ignored."""
    own = directory(tmp_path)
    own.acquire()
    states = [own.state_of(partition) for partition in (3, 11)]
    assert own.partitions() == [3, 11]
    for state in states:
        state.close()
    own.release()


def test_unused_partition_folders_are_deleted(tmp_path: Path) -> None:
    """A partition's folder is deleted if it was not open for the delay. An open or recently used one stays."""
    own = directory(tmp_path)
    own.acquire()
    states = {partition: own.state_of(partition) for partition in (1, 2, 3)}
    states[1].close()
    states[2].close()
    closed_ms = (tmp_path / "app" / "2").stat().st_mtime * 1000
    os.utime(tmp_path / "app" / "1", (closed_ms / 1000 - 60, closed_ms / 1000 - 60))
    assert own.clean(30_000, int(closed_ms) + 1_000) == [1]
    assert own.partitions() == [2, 3]
    assert own.clean(30_000, int(closed_ms) + 60_000) == [2]
    assert (own.clean(30_000, int(closed_ms) + 60_000), own.partitions()) == ([], [3])
    states[3].close()
    own.release()


def test_folders_are_kept_for_the_delay_after_a_start(tmp_path: Path) -> None:
    """However long the instance was down, the group first gets the time to assign the partitions to it again."""
    before = directory(tmp_path)
    before.acquire()
    before.state_of(1).close()
    before.release()
    os.utime(tmp_path / "app" / "1", (0, 0))
    own = directory(tmp_path)
    own.acquire()
    started_ms = int(time.time() * 1000)
    assert (own.clean(30_000, started_ms + 29_000), own.partitions()) == ([], [1])
    assert own.clean(30_000, started_ms + 31_000) == [1]
    own.release()
