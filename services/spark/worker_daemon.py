"""What Spark forks its Python workers from: what the jobs need is imported already, which would take two seconds."""

from __future__ import annotations

from pyspark.daemon import manager

import penstock.services.spark.fold
import penstock.services.spark.rewrite  # noqa: F401  (so that the forked workers have them)

if __name__ == "__main__":
    manager()
