"""Tables that an operator puts back: copies, RESTORE, and what docs/lake.md says of backups."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark import delta_log, tables
from penstock.services.spark.compact import Compaction
from penstock.services.spark.runs import TablesDisagree
from penstock.services.spark.settings import CompactSettings
from penstock.shared.common import lake
from penstock.shared.common.errors import ChangelogHole
from penstock.shared.common.settings import KafkaSettings
from tests.integration.spark.test_compact import (
    Crashing,
    closed_in_lake,
    closed_in_tasks,
    live_in_lake,
    live_in_tasks,
)


class Lake:
    """A simulation's tables, and what an operator does with them."""

    def __init__(self, spark: Any, simulation: Any, topics: Any, settings: CompactSettings) -> None:
        self.spark, self.simulation, self.topics, self.settings = spark, simulation, topics, settings
        self.root, self.seed = Path(settings.lake), 0
        self.folder = self.root / simulation.name
        self.said: list[str] = []

    def compact(self, records: int = 60, kind: type[Compaction] = Compaction, **more: Any) -> Any:
        """Take more records, then compact."""
        self.seed += 1
        self.simulation.feed(records, self.seed)
        self.topics.write(self.simulation)
        self.said = []
        return kind(self.spark, self.settings.model_copy(update=more), self.said.append).run()

    def copy(self, table: str, to: str) -> None:
        shutil.copytree(self.folder / table, self.root / to)

    def put_back(self, copy: str, table: str) -> None:
        shutil.rmtree(self.folder / table, ignore_errors=True)
        shutil.copytree(self.root / copy, self.folder / table)

    def restore(self, table: str, version: int) -> None:
        """Delta's own way back."""
        self.spark.sql(f"RESTORE TABLE {tables.delta(str(self.folder / table))} TO VERSION AS OF {version}")

    def version(self, table: str) -> int:
        return int(tables.history(self.spark, str(self.folder / table))[0].version)

    def require_whole(self) -> None:
        """The tables hold what the tasks left, each window once."""
        assert live_in_lake(self.root, self.simulation) == live_in_tasks(self.simulation)
        assert closed_in_lake(self.root, self.simulation) == closed_in_tasks(self.simulation)


@pytest.fixture
def tables_of(
    spark: Any, kafka: EmbeddedKafka, topics: Any, simulate: Callable[..., Any], tmp_path: Path
) -> Callable[[], Lake]:
    """Makes a simulation with its lake, compacted once."""

    def make() -> Lake:
        simulation = simulate()
        broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        made = Lake(
            spark, simulation, topics, CompactSettings(application=simulation.name, lake=str(tmp_path), kafka=broker)
        )
        made.compact()
        return made

    return make


def test_an_earlier_copy_of_state_catches_up(tables_of: Callable[[], Lake]) -> None:
    """What `closed` has already is not appended again, and all that the changelog has since then is folded in."""
    of = tables_of()
    of.copy("state", "backup")
    of.compact()
    of.compact()
    of.put_back("backup", "state")
    done = of.compact()
    assert of.said[0].startswith("`state` is of run 1, and closed/banks is of run 3: an earlier `state` was put back; ")
    assert (done.run, done.adopted, done.finals) == (3, True, 0)
    compared = "closed/banks: its rows are compared: its log does not say that `state` covers them"
    assert compared in of.said
    assert of.compact().run == 4
    assert compared not in of.said
    of.require_whole()


def test_folders_without_a_log_are_no_tables(
    spark: Any, kafka: EmbeddedKafka, topics: Any, simulate: Callable[..., Any], tmp_path: Path
) -> None:
    """What a crash between folder and first commit leaves, or an object store's marker for a folder, stops no run."""
    simulation = simulate()
    broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    settings = CompactSettings(application=simulation.name, lake=str(tmp_path), kafka=broker)
    of = Lake(spark, simulation, topics, settings)
    for table in ("state", "closed/banks", "late_states", "advances"):
        (of.folder / table / "_delta_log").mkdir(parents=True)
    of.compact()
    of.require_whole()
    tables.create(spark, str(of.folder / "late_states"), "topic STRING")
    shown = spark.sql(f"SHOW TBLPROPERTIES {tables.delta(str(of.folder / 'state'))}").collect()
    assert ("delta.enableDeletionVectors", "true") in [(row.key, row.value) for row in shown]
    assert tables.exists(spark, str(of.folder / "late_states"))
    assert not tables.exists(spark, str(of.folder / "advances"))


@pytest.mark.soak
def test_appends_that_lie_far_back_in_the_log(tables_of: Callable[[], Lake], spark: Any) -> None:
    """An earlier `state` catches up however much upkeep of `closed` came since; Delta itself knows the last number.
    What others say of their commits is nobody's business."""
    of = tables_of()
    of.copy("state", "backup")
    of.compact()
    first = of.version("closed/banks") + 1
    for version in range(first, first + tables.HISTORY_VERSIONS_MAX):
        upkeep = {"timestamp": 0, "operation": "VACUUM END", "operationParameters": {}, "userMetadata": "by alice"}
        (of.folder / "closed/banks/_delta_log" / f"{version:020}.json").write_text(json.dumps({"commitInfo": upkeep}))
    of.put_back("backup", "state")
    done = of.compact()
    assert (done.run, done.adopted) == (2, True)
    closed = str(of.folder / "closed/banks")
    assert delta_log.transaction(spark, closed, f"penstock-compact-{of.simulation.name}-banks") == 2
    assert delta_log.transaction(spark, closed, "another's") == -1
    spark.conf.set("spark.databricks.delta.commitInfo.userMetadata", "rolled back by bob")
    spark.sql(f"ALTER TABLE {tables.delta(str(of.folder / 'state'))} SET TBLPROPERTIES ('team' = 'visits')")
    spark.conf.unset("spark.databricks.delta.commitInfo.userMetadata")
    of.compact(retention_hours=168, vacuum_every=20)
    of.require_whole()


def test_a_closed_that_deltalake_took_back_by_time_is_refused(tables_of: Callable[[], Lake]) -> None:
    """It says the time in words of its own; what is missing since then is known by the files that are left."""
    of = tables_of()
    at = datetime.now(UTC)
    of.compact()
    DeltaTable(str(of.folder / "closed/banks")).restore(at)
    with pytest.raises(TablesDisagree, match="`state` is of run 2, but closed/banks is of run 1, and run 2 appended"):
        of.compact()


def test_closed_windows_of_another_changelog_are_refused(
    tables_of: Callable[[], Lake], new_simulation: Callable[[str, int], Any], topics: Any
) -> None:
    """Kept beside a changelog that was made again, they would hide windows of it; moved away, all of it is folded."""
    of = tables_of()
    again = new_simulation(f"{of.simulation.name}-again", 1)
    again.feed(60, 9)
    topics.write(again)
    shutil.rmtree(of.folder / "state")
    of.settings = of.settings.model_copy(update={"changelog": f"{again.name}-changelog"})
    with pytest.raises(TablesDisagree, match=r"closed/banks is of another changelog .*: move .*/closed to"):
        of.compact()
    shutil.move(of.folder / "closed", of.root / "kept")
    assert of.compact().finals == len(closed_in_tasks(again))


@pytest.mark.soak
def test_a_state_that_the_changelog_has_left_behind_is_refused(tables_of: Callable[[], Lake]) -> None:
    """By its run and that of `closed`, and with the way out, which holds: RESTORE of the version before the newest."""
    of = tables_of()
    of.copy("state", "backup")
    of.compact(delete_covered=True)
    before = of.version("state")
    of.compact(delete_covered=True)
    of.put_back("backup", "state")
    said = (
        r"are gone and were not compacted\. `state` is of run 1, and closed/banks is of run 3: an earlier `state` was"
    )
    with pytest.raises(ChangelogHole, match=said):
        of.compact()
    shutil.rmtree(of.folder / "state")
    with pytest.raises(ChangelogHole, match=r"compacted\. `state` is gone, and closed/banks is of run 3: put back one"):
        of.compact()
    assert before > 0


@pytest.mark.soak
def test_restored_versions_go_on(tables_of: Callable[[], Lake]) -> None:
    """RESTORE of `state` to the snapshot before, of both tables, and again: under numbers that no log knows."""
    of = tables_of()
    at = {table: of.version(table) for table in ("state", "closed/banks")}
    of.compact(delete_covered=True)
    of.restore("state", at["state"])
    assert of.compact(delete_covered=True).run == 3
    of.require_whole()
    at = {table: of.version(table) for table in ("state", "closed/banks")}
    of.compact()
    for table, version in at.items():
        of.restore(table, version)
    assert of.compact().run == 5
    of.require_whole()
    of.restore("state", at["state"])
    with pytest.raises(KeyboardInterrupt):
        of.compact(kind=Crashing)
    assert of.compact().adopted
    of.compact()
    of.require_whole()


@pytest.mark.soak
def test_without_state_the_whole_changelog_makes_it_again(tables_of: Callable[[], Lake]) -> None:
    """Where the changelog has all that it ever had, in runs of bounded size too."""
    of = tables_of()
    of.compact()
    shutil.rmtree(of.folder / "state")
    read = sum(len(task.changelog) for task in of.simulation.tasks) // 2
    done = of.compact(run_records_max=read)
    assert done.adopted
    assert done.remaining_records > 0
    while done.remaining_records:
        done = of.compact(0, run_records_max=read)
    of.require_whole()
    assert lake.describe(str(of.root), of.simulation.name)["live_rows"] == done.live_rows


@pytest.mark.soak
def test_an_earlier_closed_is_refused(tables_of: Callable[[], Lake]) -> None:
    """Windows that `state` covers would be missing for ever; with as old a `state` beside it they come again."""
    of = tables_of()
    of.copy("state", "state-backup")
    of.copy("closed", "closed-backup")
    of.compact()
    of.put_back("closed-backup", "closed")
    with pytest.raises(TablesDisagree, match="`state` is of run 2, but closed/banks is of run 1, and run 2 appended"):
        of.compact()
    of.put_back("state-backup", "state")
    of.compact()
    of.require_whole()
    of.compact(0, accept_lost_windows=True)
    assert of.said[0].startswith("--accept-lost-windows accepts nothing: no windows are missing")
    of.put_back("closed-backup", "closed")
    done = of.compact(0, accept_lost_windows=True)
    assert of.said[0].startswith(f"accepted: `state` is of run {done.run - 1}, but closed/banks is of run 1")
    assert of.compact(0).run == done.run
    assert closed_in_lake(of.root, of.simulation) != closed_in_tasks(of.simulation)
    assert of.compact().run == done.run + 1


@pytest.mark.soak
def test_a_backup_made_while_compactions_go_on(tables_of: Callable[[], Lake]) -> None:
    """As docs/lake.md says: `state` before `closed`, of each its log before its files, with runs between all steps."""
    of = tables_of()
    backup = of.root / "backup"
    for table in ("state", "closed/banks"):
        hint = shutil.ignore_patterns("_last_checkpoint")
        shutil.copytree(of.folder / table / "_delta_log", backup / table / "_delta_log", ignore=hint)
        of.compact(optimize_files_max=1)
        no_log = shutil.ignore_patterns("_delta_log")
        shutil.copytree(of.folder / table, backup / table, ignore=no_log, dirs_exist_ok=True)
        of.compact(optimize_files_max=1)
    shutil.rmtree(of.folder)
    shutil.copytree(backup, of.folder)
    of.compact()
    of.compact()
    of.require_whole()


@pytest.mark.soak
def test_copies_of_rows(tables_of: Callable[[], Lake], spark: Any) -> None:
    """Tables that Spark wrote anew at one version, without the log of how they came: their contents are compared."""
    of = tables_of()
    for table, column in (("state", "partition"), ("closed/banks", "day")):
        rows = spark.read.format("delta").load(str(of.folder / table))
        rows.write.format("delta").partitionBy(column).save(str(of.root / "backup" / table))
        of.compact()
    for table in ("state", "closed/banks"):
        of.put_back(f"backup/{table}", table)
    of.compact()
    of.require_whole()
    of.compact()
    of.require_whole()
