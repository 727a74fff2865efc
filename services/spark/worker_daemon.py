"""What Spark forks its Python workers from: what the jobs need is imported already, which would take two seconds."""

from __future__ import annotations

from pyspark.daemon import manager

import penstock.services.spark.batch_task
import penstock.services.spark.fold
import penstock.services.spark.rewrite  # noqa: F401  (so that the forked workers have them)
from penstock.shared.streams.changelog.reader import compile_kernels

if __name__ == "__main__":
    compile_kernels()
    manager()
