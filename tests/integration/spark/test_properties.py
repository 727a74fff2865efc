"""The properties of Spark's JVM and session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkContext
from pyspark.errors import ArithmeticException
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from tests.integration.spark.conftest import SECRET, SECRET_NAME


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_no_setting_of_sparks_is_on_its_command_line(spark: Any) -> None:
    """Spark gets the settings of the jobs (for instance the keys of a storage), but not on the command line."""
    assert spark._jsc.hadoopConfiguration().get(SECRET_NAME) == SECRET
    line = Path(f"/proc/{SparkContext._gateway.proc.pid}/cmdline").read_bytes().decode()
    assert "org.apache.spark.deploy.SparkSubmit" in line
    assert "penstock.test" not in line


def test_columns_do_not_record_their_callers(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a row does not name the line of Python. A session that recorded it would call Java ten more times for
    each method of a column."""
    # PySpark reads the setting once a process, and takes it as off if that happens in a thread without a session.
    monkeypatch.setattr("pyspark.errors.utils._enable_debugging_cache", None)
    with pytest.raises(ArithmeticException) as caught:
        spark.range(1).select(F.col("id") / F.lit(0)).collect()
    assert "DIVIDE_BY_ZERO" in str(caught.value)
    assert Path(__file__).name not in str(caught.value)
