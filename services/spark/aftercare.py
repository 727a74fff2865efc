"""What is done once a run counts: corrections, deletion from the changelog, and the tables' upkeep.

None of it may hide the run, nor keep the rest from being done: a step that fails is said and kept, and raised when all
others are done and the run was told. An OPTIMIZE or VACUUM that another job got ahead of is no failure: it rewrites
nothing that is missing, and the next run does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession

from penstock.services.spark import tables, upkeep
from penstock.services.spark.bodies import TIME_MS_MAX
from penstock.services.spark.failures import CompactionConflict, translated
from penstock.services.spark.runs import RUN, note_of
from penstock.services.spark.settings import UpkeepSettings
from penstock.shared.common.errors import PenstockError
from penstock.shared.streams.changelog.format import decode_progress

T = TypeVar("T")


class Aftercare:
    """The steps after one run; `failed` are those of them that did not come about, with why."""

    def __init__(self, spark: SparkSession, settings: UpkeepSettings, say: Callable[[str], object]) -> None:
        self.spark, self.settings, self.say = spark, settings, say
        self.failed: list[tuple[str, PenstockError]] = []

    def __repr__(self) -> str:
        return f"Aftercare({self.told()})"

    def told(self) -> tuple[str, ...]:
        """What failed, a line each."""
        return tuple(f"{what}: {type(error).__name__}: {error}" for what, error in self.failed)

    def require_done(self) -> None:
        """Raise what a step failed with; that another job was first only where nothing else was wrong."""
        errors = [error for _, error in self.failed]
        if errors:
            raise next((error for error in errors if not isinstance(error, CompactionConflict)), errors[0])

    def attempt(self, what: str, step: Callable[[], T], otherwise: T, *, is_upkeep: bool = False) -> T:
        """What a step gives, `otherwise` where it fails; one that `is_upkeep` may be lost to another job."""
        try:
            return step()
        except (PenstockError, Py4JError, PySparkException, ConnectionError) as e:
            error = e if isinstance(e, PenstockError) else translated(e)
        if is_upkeep and isinstance(error, CompactionConflict):
            self.say(f"{what}: another job was first; it is left to the next run")
        else:
            self.say(f"{what} failed: {error}")
            self.failed.append((what, error))
        return otherwise

    def look_after(self, state: str, closed: Mapping[str, str], others: tuple[str, ...]) -> dict[str, Any]:
        """OPTIMIZE and VACUUM, each where its policy says so; `closed` are paths by store, `state` and `others` paths.

        What was done, as a summary has it.
        """
        settings, spark = self.settings, self.spark
        hours, files_max = settings.retention_hours, settings.optimize_files_max
        is_due = hours is not None and self._try("VACUUM", lambda: self._is_vacuum_due(state), False)
        expired = self._try("the deletion of old closed windows", lambda: self._expire(state, closed), 0)
        optimized, vacuumed = 0, is_due
        # The state's history says when a VACUUM was the last time: it comes last, when all others are done.
        for path in (*closed.values(), *others, state):
            if not self._try(f"upkeep of {path}", partial(tables.exists, spark, path), False):
                continue
            if files_max:
                optimized += self._try(f"OPTIMIZE of {path}", partial(upkeep.optimize, spark, path, files_max), 0)
            if hours is not None and is_due:
                vacuumed &= self._try(f"VACUUM of {path}", partial(_vacuumed, spark, path, hours), False)
        if optimized:
            self.say(f"optimized {optimized} partitions")
        return {"optimized_partitions": optimized, "vacuumed": vacuumed, "expired_days": expired}

    def _try(self, what: str, step: Callable[[], T], otherwise: T) -> T:
        return self.attempt(what, step, otherwise, is_upkeep=True)

    def _is_vacuum_due(self, state: str) -> bool:
        every = self.settings.vacuum_every
        if every == 1 or not tables.exists(self.spark, state):
            return every == 1
        done = tables.history(self.spark, state)
        return upkeep.is_vacuum_due(((v.operation, note_of(v.userMetadata).get(RUN)) for v in done), every)

    def _expire(self, state: str, closed: Mapping[str, str]) -> int:
        """Delete closed windows by the retention; how many days of how many stores those were."""
        days = self.settings.closed_retention_days
        if days is None:
            return 0
        rows = tables.progress_rows(self.spark, state).values()
        times = (decode_progress(row.progress.encode()).stream_time_ms for row in rows)
        newest_ms = max((time_ms for time_ms in times if time_ms <= TIME_MS_MAX), default=-1)
        there = [path for path in closed.values() if newest_ms >= 0 and tables.exists(self.spark, path)]
        expired = sum(len(upkeep.expire(self.spark, path, newest_ms, days)) for path in there)
        if expired:
            self.say(f"closed windows of {expired} days deleted: retention is {days} days")
        return expired


def _vacuumed(spark: SparkSession, path: str, retention_hours: int) -> bool:
    upkeep.vacuum(spark, path, retention_hours)
    return True
