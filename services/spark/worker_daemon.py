"""Spark forks its Python workers from this process, which has imported all that the jobs need (two seconds)."""

# ruff: noqa: E402, F401 - the import path is set before the imports; forked workers inherit the imported modules
from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path


def without_archives(path: Sequence[str]) -> list[str]:
    """An import path without the archives of a pyspark that is on it as a folder as well, as pip installs it.

    Spark puts its zip files and a jar first. Before every task a worker reads the tables of contents of all archives
    that it has looked into, which took a tenth of a second.
    """
    folders = [Path(one) for one in path if (Path(one) / "pyspark" / "__init__.py").is_file() and Path(one).is_dir()]
    return [one for one in path if not any(folder / "pyspark" in Path(one).parents for folder in folders)]


for archive in set(sys.path).difference(without_archives(sys.path)):
    sys.path.remove(archive)
    sys.path_importer_cache.pop(archive, None)

import pyspark.worker
from pyspark.daemon import manager

import penstock.services.spark.batch.task
import penstock.services.spark.compaction.fold
import penstock.services.spark.compaction.rewrite
from penstock.shared.streams.changelog.reader import compile_kernels

if __name__ == "__main__":
    compile_kernels()
    # Spark's worker collects garbage after every task. What was imported is none: to look at it took a quarter second.
    gc.collect()
    gc.freeze()
    manager()
