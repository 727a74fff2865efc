"""The process from which Spark forks its Python workers.

It imports the modules of batch and compaction tasks before it forks, so a worker does not spend two seconds on that.
"""

# ruff: noqa: E402, F401 - the import path is set before the imports; forked workers inherit the imported modules
from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path


def without_archives(path: Sequence[str]) -> list[str]:
    """Return the import path without pyspark's archives, if the path also has pyspark as a folder, as pip installs it.

    Before every task, a worker reads the tables of contents of all archives that it has opened, which took a tenth of a
    second.
    """
    folders = [Path(one) for one in path if (Path(one) / "pyspark" / "__init__.py").is_file() and Path(one).is_dir()]
    return [one for one in path if not any(folder / "pyspark" in Path(one).parents for folder in folders)]


if __name__ == "__main__":
    # Garbage collection would take a tenth of the imports' time.
    gc.disable()

for archive in set(sys.path).difference(without_archives(sys.path)):
    sys.path.remove(archive)
    sys.path_importer_cache.pop(archive, None)

import pyspark.worker
from pyspark.daemon import manager

import penstock.services.spark.batch.batch_task
import penstock.services.spark.compaction.compaction_task
import penstock.services.spark.compaction.rewrite
from penstock.shared.streams.changelog.changelog_reader import compile_changelog_reader

if __name__ == "__main__":
    compile_changelog_reader()
    # Spark's worker collects garbage after every task. Imported modules are no garbage: scanning them took 0.25 s.
    gc.freeze()
    gc.enable()
    manager()
