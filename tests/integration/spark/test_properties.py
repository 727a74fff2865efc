"""The properties of Spark's JVM that every user of a machine can see."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext

from tests.integration.spark.conftest import SECRET, SECRET_NAME


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_setting_of_sparks_is_on_its_command_line(spark: Any) -> None:
    """Spark gets the settings of the jobs (for instance the keys of a storage), but not on the command line."""
    assert spark._jsc.hadoopConfiguration().get(SECRET_NAME) == SECRET
    line = Path(f"/proc/{SparkContext._gateway.proc.pid}/cmdline").read_bytes().decode()
    assert "org.apache.spark.deploy.SparkSubmit" in line
    assert "penstock.test" not in line
