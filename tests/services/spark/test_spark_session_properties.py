"""The properties with which Spark starts, hidden from the command line."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from penstock.services.spark.spark_session import SUBMIT_ARGS, properties_file


def test_only_the_owner_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher receives the file's path, before its existing arguments."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for before, after in ((None, "pyspark-shell"), ("--verbose pyspark-shell", "--verbose pyspark-shell")):
        monkeypatch.delenv(SUBMIT_ARGS, raising=False) if before is None else monkeypatch.setenv(SUBMIT_ARGS, before)
        with properties_file({"spark.hadoop.fs.s3a.secret.key": "hunter=2"}, str(folder)):
            arguments = shlex.split(os.environ[SUBMIT_ARGS])
            file = Path(arguments[arguments.index("--properties-file") + 1])
            assert " ".join(arguments).endswith(after)
            assert (file.stat().st_mode & 0o777, file.read_text()) == (
                0o600,
                "spark.hadoop.fs.s3a.secret.key=hunter\\=2\n",
            )
        assert os.environ.get(SUBMIT_ARGS) == before
