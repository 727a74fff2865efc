"""What every user of a machine can see of Spark's JVM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext

from tests.integration.spark.conftest import SECRET, SECRET_NAME


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_setting_of_sparks_is_on_its_command_line(spark: Any) -> None:
    """What the jobs are given for Spark (a storage's keys, for instance) is there, and not on the command line."""
    assert spark._jsc.hadoopConfiguration().get(SECRET_NAME) == SECRET
    line = Path(f"/proc/{SparkContext._gateway.proc.pid}/cmdline").read_bytes().decode()
    assert "org.apache.spark.deploy.SparkSubmit" in line
    assert "penstock.test" not in line
