"""A compaction in a process of its own that is killed (SIGKILL, with its JVM) at one of five points, or waits until it
is overtaken; run by a test."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.services.spark import compact, fold, upkeep
from penstock.services.spark.compact import Compaction
from penstock.services.spark.fold import Merged, Plan
from penstock.services.spark.kafka import delete_records
from penstock.services.spark.main import DONE, compact_main
from penstock.services.spark.session import spark_session
from penstock.services.spark.settings import CompactSettings

POLL_SECONDS = 0.001


def die() -> None:
    """Kill this process and all that it started."""
    os.killpg(0, signal.SIGKILL)


def die_when(seen: Callable[[], bool]) -> None:
    """Kill it as soon as something is to be seen."""

    def watch() -> None:
        while not seen():
            time.sleep(POLL_SECONDS)
        die()

    threading.Thread(target=watch, daemon=True).start()


def files(table: str, pattern: str) -> set[Path]:
    """What a table's folder holds."""
    return set(Path(table).rglob(pattern))


class BeforeRead(Compaction):
    """Killed with the plan made and nothing read."""

    def records(self, plan: Plan) -> DataFrame:
        die()
        return super().records(plan)


class DuringMerge(Compaction):
    """Killed once the MERGE has begun to write files, before it is committed."""

    def _merge(self, *arguments: Any) -> Merged:
        before = files(self.state, "part-*.parquet")
        die_when(lambda: bool(files(self.state, "part-*.parquet") - before))
        return super()._merge(*arguments)


class BeforeDelete(Compaction):
    """Killed with the run committed and no changelog record deleted."""

    def _delete_covered(self, plan: Plan) -> None:
        die()


class DuringDelete(Compaction):
    """Killed with one partition's records deleted and the other's not."""

    def _delete_covered(self, plan: Plan) -> None:
        partition = min(plan.covered)
        before = {partition: plan.covered[partition].changelog_offset}
        delete_records(self.spark, self.settings.kafka, plan.offsets.topic, before, self.settings.kafka_timeout_ms)
        die()


class DuringOptimize(Compaction):
    """Killed once OPTIMIZE has begun to write files."""

    def _look_after(self, summary: fold.Summary) -> fold.Summary:
        before = files(self.settings.tables, "part-*.parquet")
        die_when(lambda: bool(files(self.settings.tables, "part-*.parquet") - before))
        for path in (self.state, *(self.closed(store) for store in self._known_stores({}))):
            upkeep.optimize(self.spark, path, 0)  # which rewrites nothing where one file is left of a partition
        return super()._look_after(summary)


def wait() -> None:
    """Say by a file that the job is there, and wait until another file is."""
    Path(os.environ["THERE"]).touch()
    while not Path(os.environ["OVERTAKEN"]).exists():
        time.sleep(POLL_SECONDS)


class WithPlan(Compaction):
    """Waits with its plan made and nothing read."""

    def plan(self) -> Plan:
        plan = super().plan()
        wait()
        return plan


class WithAppend(Compaction):
    """Waits with its closed windows appended and nothing merged: the other job finds what looks like a crash."""

    def _merge(self, *arguments: Any) -> Merged:
        wait()
        return super()._merge(*arguments)


OVERTAKEN = {kind.__name__: kind for kind in (WithPlan, WithAppend)}
POINTS = {kind.__name__: kind for kind in (BeforeRead, DuringMerge, BeforeDelete, DuringDelete, DuringOptimize)}


def main(arguments: list[str]) -> int:
    """The point, then the flags of `penstock compact`; the exit status of one that lives to its end."""
    if arguments[0] in OVERTAKEN:
        compact.Compaction = OVERTAKEN[arguments[0]]  # type: ignore[misc]
        return compact_main(arguments[1:])
    settings = CompactSettings.load(arguments[1:])
    with spark_session(settings.spark, "crashing", settings.tables) as spark:
        assert isinstance(spark, SparkSession)
        POINTS[arguments[0]](spark, settings, print).run()
    return DONE


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
