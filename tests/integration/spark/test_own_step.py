"""The user's own step after a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.services.spark.own_step import AfterHookFailed, call_hook
from penstock.shared.common.errors import ConfigError
from tests.lake_tables import small_lake

STEPS = """
def count(spark, tables):
    counts = {name: frame.count() for name, frame in sorted(tables.items())}
    open("counts", "w").write(repr(counts))


def fail(spark, tables):
    raise KeyError("visits")
"""


def test_the_step_gets_the_tables(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, with live windows as their newest rows say; what it raises is named, and a missing one too."""
    monkeypatch.chdir(tmp_path)
    Path("steps_of_test_own_step.py").write_text(STEPS)
    folder = small_lake(tmp_path)
    call_hook(spark, "steps_of_test_own_step:count", folder)
    assert Path("counts").read_text() == "{'closed/s': 3, 'late/s': 0, 'live/s': 2}"
    with pytest.raises(AfterHookFailed, match=r"steps_of_test_own_step:fail: KeyError: 'visits'"):
        call_hook(spark, "steps_of_test_own_step:fail", folder)
    with pytest.raises(ConfigError, match="after: steps_of_test_own_step:nothing"):
        call_hook(spark, "steps_of_test_own_step:nothing", folder)
