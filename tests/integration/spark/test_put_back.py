"""Tables that an operator puts back or changes: copies, RESTORE, DELETE and OPTIMIZE by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.services.spark.compaction import table_maintenance
from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.delta_reader import table_positions
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.common.errors import ChangelogHole
from penstock.shared.common.lake import delta_tables
from penstock.shared.common.settings import KafkaSettings
from tests.integration.spark.test_compact import closed_in_lake, is_right
from tests.shared_broker import Broker

CLOSED = "closed/banks"


class Lake:
    """A simulation's tables, and the actions of an operator on them."""

    def __init__(self, spark: Any, simulation: Any, topics: Any, settings: CompactSettings) -> None:
        self.spark, self.simulation, self.topics, self.settings = spark, simulation, topics, settings
        self.root, self.seed = Path(settings.lake), 0
        self.folder = self.root / simulation.name
        self.messages: list[str] = []

    def compact(self, records: int = 60, **more: Any) -> Any:
        """Processes more records, then compacts."""
        self.seed += 1
        self.simulation.feed(records, self.seed)
        self.topics.write(self.simulation)
        self.messages = []
        job = CompactionJob(self.spark, self.settings.model_copy(update=more), self.messages.append)
        summary = job.run()
        job.maintenance.failed.raise_first()
        return summary

    def copy(self, table: str, to: str) -> None:
        shutil.copytree(self.folder / table, self.root / to)

    def put_back(self, copy: str, table: str) -> None:
        shutil.rmtree(self.folder / table, ignore_errors=True)
        shutil.copytree(self.root / copy, self.folder / table)

    def table(self, name: str) -> DeltaTable:
        return DeltaTable(str(self.folder / name))

    def append_nothing(self, table: str) -> None:
        """Write to a table by hand, so that its commits no longer tell its positions."""
        rows = self.table(table).to_pyarrow_table()
        write_deltalake(str(self.folder / table), rows.slice(0, 0), mode="append")

    @property
    def reads_positions(self) -> bool:
        """Return True if the last compaction read the position of `closed` from its rows, and not from its commits."""
        return f"{CLOSED}: its positions are read from its rows" in self.messages

    def is_right(self) -> bool:
        return is_right(self.root, self.simulation)


@pytest.fixture
def tables_of(
    spark: Any, kafka: Broker, topics: Any, simulate: Callable[..., Any], tmp_path: Path
) -> Callable[[], Lake]:
    """Makes a simulation with its lake, compacted once."""

    def make() -> Lake:
        simulation = simulate()
        broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        settings = CompactSettings(application=simulation.name, lake=str(tmp_path), kafka=broker)
        made = Lake(spark, simulation, topics, settings)
        made.compact()
        return made

    return make


@pytest.mark.parametrize("tables", [("state",), (CLOSED,), ("state", CLOSED)], ids=["state", "closed", "both"])
def test_an_earlier_copy_catches_up(tables_of: Callable[[], Lake], tables: tuple[str, ...]) -> None:
    """One compaction brings each table forward from its own position. The next one uses the recorded positions
    again."""
    of = tables_of()
    of.compact()
    for n, table in enumerate(tables):
        of.copy(table, f"backup-{n}")
    of.compact()
    of.compact()
    for n, table in enumerate(tables):
        of.put_back(f"backup-{n}", table)
    of.compact()
    assert of.is_right()
    of.compact()
    assert not of.reads_positions
    assert of.is_right()


@pytest.mark.parametrize("table", ["state", CLOSED])
def test_a_table_that_was_restored_goes_on(tables_of: Callable[[], Lake], table: str) -> None:
    """Delta's RESTORE, by deltalake and by Spark, and twice in a row."""
    of = tables_of()
    version = of.table(table).version()
    of.compact()
    of.table(table).restore(version)
    of.compact()
    assert not of.reads_positions
    assert of.is_right()
    of.spark.sql(f"RESTORE TABLE delta.`{of.folder / table}` TO VERSION AS OF {version}")
    of.table(table).restore(version)
    of.compact()
    assert of.is_right()
    assert of.compact().closed_rows > 0
    assert of.is_right()


def test_without_state_the_whole_changelog_is_read(tables_of: Callable[[], Lake]) -> None:
    """`closed` keeps its rows. If the changelog's beginning was deleted, the compaction fails and names the offsets."""
    of = tables_of()
    shutil.rmtree(of.folder / "state")
    of.compact()
    assert of.is_right()
    of.compact(delete_covered=True)
    shutil.rmtree(of.folder / "state")
    with pytest.raises(ChangelogHole, match=r"offsets 0 to \d+.*offset 0"):
        of.compact()


def test_a_closed_that_the_changelog_has_left_behind_is_rejected(tables_of: Callable[[], Lake]) -> None:
    """A restored `closed` table whose missing rows were deleted from the changelog is rejected. The error names the
    table and the offsets, and no table changes."""
    of = tables_of()
    of.copy(CLOSED, "backup")
    for _ in range(3):
        of.compact(delete_covered=True)
    before = of.table("state").version()
    of.put_back("backup", CLOSED)
    with pytest.raises(ChangelogHole, match=rf"{CLOSED}.*offset \d+"):
        of.compact()
    assert of.table("state").version() == before


def test_the_last_closed_but_one_catches_up_after_a_deletion(tables_of: Callable[[], Lake]) -> None:
    """The changelog has the records that it lacks, also if its positions are read from its rows."""
    of = tables_of()
    of.compact(delete_covered=True)
    version = of.table(CLOSED).version()
    of.compact(delete_covered=True)
    of.table(CLOSED).restore(version)
    of.append_nothing(CLOSED)
    of.compact(delete_covered=True)
    assert of.reads_positions
    assert of.is_right()
    of.compact(delete_covered=True)
    assert not of.reads_positions
    assert of.is_right()


def test_rows_that_their_owner_deletes_stay_deleted(tables_of: Callable[[], Lake]) -> None:
    """Rows deleted by hand are not appended again, even those with the highest offsets, with or without an OPTIMIZE."""
    of = tables_of()
    of.compact()
    deleted = of.table(CLOSED).delete("key = 'a'")["num_deleted_rows"]
    assert deleted > 0
    of.table(CLOSED).optimize.compact()
    of.table("state").optimize.compact()
    kept = closed_in_lake(of.root, of.simulation)
    of.compact()
    assert not of.reads_positions
    now = closed_in_lake(of.root, of.simulation)
    assert all(row in now for row in kept)
    assert len(now) == sum(len(task.closed) for task in of.simulation.tasks) - deleted


def test_rows_that_somebody_else_added_are_compared(tables_of: Callable[[], Lake]) -> None:
    """After a write by hand, a compaction reads the position from the rows."""
    of = tables_of()
    of.append_nothing(CLOSED)
    of.compact()
    assert of.reads_positions
    assert of.is_right()


def test_a_table_catches_up_in_several_compactions(tables_of: Callable[[], Lake]) -> None:
    """Each compaction continues where the previous one ended. Nothing that a table lacks is deleted from the
    changelog."""
    of = tables_of()
    of.copy(CLOSED, "backup")
    for _ in range(3):
        of.compact()
    of.put_back("backup", CLOSED)
    compactions = 0
    while of.compact(records=0, changelog_records_max=60, delete_covered=True).remaining_records:
        compactions += 1
        assert compactions < 50, "it does not come to an end"
    assert compactions > 2
    assert of.is_right()
    of.compact(delete_covered=True)
    assert not of.reads_positions
    assert of.is_right()


def test_a_table_that_is_older_than_a_rewrite_catches_up(tables_of: Callable[[], Lake]) -> None:
    """The rewrite keeps the progress rows from which the changelog can be read."""
    of = tables_of()
    of.compact(delete_covered=True)
    of.copy(CLOSED, "backup")
    assert of.compact(optimize_files_max=1).rewritten_partitions > 0
    of.put_back("backup", CLOSED)
    of.compact(delete_covered=True)
    assert of.is_right()


def test_windows_that_retention_deleted_are_not_missing(tables_of: Callable[[], Lake]) -> None:
    """Deletions, OPTIMIZE and VACUUM each repeat the positions in their commit."""
    of = tables_of()
    of.compact(delete_covered=True)
    for before_ms in (1, 2_000_000_000_000):
        table_maintenance.delete_expired_rows(of.table(CLOSED), "window_end", before_ms)
        table_maintenance.optimize(of.table(CLOSED), "closed", {})
        table_maintenance.vacuum(of.table(CLOSED), 24)
    assert delta_tables.rows(of.table(CLOSED), "SELECT * FROM t") == []
    before = table_positions(of.table(CLOSED))
    assert before is not None
    of.compact(delete_covered=True)
    assert not of.reads_positions
    after = table_positions(of.table(CLOSED))
    assert after is not None
    assert all(after["positions"][p] >= at for p, at in before["positions"].items())


def test_a_changelog_that_was_made_again_is_rejected(tables_of: Callable[[], Lake], topics: Any) -> None:
    """A recreated changelog topic is rejected, also without a `state` table, because the rows of both topics would
    count twice."""
    of = tables_of()
    topic = f"{of.simulation.name}-changelog"
    topics.delete(topic)
    topics.make(of.simulation.name)
    for without in ((), ("state",)):
        for table in without:
            shutil.rmtree(of.folder / table)
        job = CompactionJob(of.spark, of.settings, of.messages.append)
        with pytest.raises(ChangelogHole, match="created again"):
            job.run()
