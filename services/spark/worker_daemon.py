"""What Spark forks its Python workers from: what the jobs need is imported already, which would take two seconds."""

# ruff: noqa: E402, F401 - the path comes before what is imported by it, and imported is what forked workers are to have
from __future__ import annotations

import gc
import sys

from penstock.services.spark.import_path import without_archives

for archive in set(sys.path).difference(without_archives(sys.path)):
    sys.path.remove(archive)
    sys.path_importer_cache.pop(archive, None)

import pyspark.worker
from pyspark.daemon import manager

import penstock.services.spark.batch_task
import penstock.services.spark.fold
import penstock.services.spark.rewrite
from penstock.shared.streams.changelog.reader import compile_kernels

if __name__ == "__main__":
    compile_kernels()
    # Spark's worker collects garbage after every task. What was imported is none: to look at it took a quarter second.
    gc.collect()
    gc.freeze()
    manager()
