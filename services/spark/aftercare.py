"""The steps after a run: the rewrite, deletion from the changelog, the tables' upkeep and the user's own step.

A failed step does not undo the run and does not stop the other steps. Its error is logged, listed in the summary, and
raised at the end. If another job commits first, OPTIMIZE, VACUUM or the rewrite is left to the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from deltalake import DeltaTable
from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException

from penstock.services.spark import delta, upkeep
from penstock.services.spark.arrow_columns import DAY_MS
from penstock.services.spark.delta import CompactionConflict
from penstock.services.spark.failures import translated
from penstock.services.spark.settings import UpkeepSettings
from penstock.shared.common import lake
from penstock.shared.common.errors import PenstockError

T = TypeVar("T")
VERSIONS_MORE = 50  # of a table's log that are looked at beyond those of the runs that a policy counts


class Aftercare:
    """The steps after one run; `failed` are those of them that were not done, with why."""

    def __init__(self, settings: UpkeepSettings, say: Callable[[str], object]) -> None:
        self.settings, self.say = settings, say
        self.failed: list[tuple[str, PenstockError]] = []

    def __repr__(self) -> str:
        return f"Aftercare({self.failures()})"

    def failures(self) -> tuple[str, ...]:
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

    def run_upkeep(self, state: str, others: Mapping[str, str]) -> dict[str, Any]:
        """OPTIMIZE and VACUUM, each where its policy says so; `others` are the paths of `closed` and `late` tables.

        What was done, as a summary has it.
        """
        settings = self.settings
        hours, appends_max = settings.retention_hours, settings.optimize_files_max
        self._try("the deletion of old closed windows", lambda: self._expire(state, others), None)
        optimized, vacuumed = 0, False
        if appends_max:
            optimized = sum(
                self._try(f"OPTIMIZE of {name}", partial(self._optimize, path, appends_max), False)
                for name, path in others.items()
            )
        if hours is not None and self._try("VACUUM", lambda: self._is_vacuum_due(state), False):
            # The history of `state` says when a VACUUM was the last time: it comes last, when all others are done.
            vacuumed = True
            for path in (*others.values(), state):
                vacuumed &= self._try(f"VACUUM of {path}", partial(self._vacuum, path, hours), False)
        return {"optimized_tables": optimized, "vacuumed": vacuumed}

    def _try(self, what: str, step: Callable[[], T], otherwise: T) -> T:
        return self.attempt(what, step, otherwise, is_upkeep=True)

    def _open(self, path: str) -> DeltaTable | None:
        return lake.open_table(path, self.settings.storage_options)

    def _is_vacuum_due(self, state: str) -> bool:
        table, every = self._open(state), self.settings.vacuum_every
        return table is not None and upkeep.is_vacuum_due(delta.history(table, 2 * every + VERSIONS_MORE), every)

    def _optimize(self, path: str, appends_max: int) -> bool:
        table = self._open(path)
        if table is None or not upkeep.is_optimize_due(delta.history(table, appends_max + VERSIONS_MORE), appends_max):
            return False
        upkeep.optimize(table)
        self.say(f"optimized {path}")
        return True

    def _vacuum(self, path: str, hours: int) -> bool:
        if (table := self._open(path)) is not None:
            upkeep.vacuum(table, hours)
        return True

    def _expire(self, state: str, others: Mapping[str, str]) -> None:
        """Delete closed windows that end before what `state` says, and late records that are as much older again."""
        days, table = self.settings.closed_retention_days, self._open(state)
        if days is None or table is None:
            return
        limit_ms = max((of[0]["expired_ms"] for of in delta.progress_rows(table).values()), default=-1)
        limits = {"closed": ("window_end", limit_ms), "late": ("event_time", limit_ms - days * DAY_MS)}
        for name, path in others.items():
            column, before_ms = limits[name.partition("/")[0]]
            own = self._open(path) if before_ms > 0 else None
            if own is not None and (expired := upkeep.expire(own, column, before_ms)):
                self.say(f"{name}: {expired} rows deleted: retention is {days} days")
