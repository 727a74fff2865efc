"""The user's hook after a compaction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.services.spark.compaction.compact import AfterHookFailed, call_after_hook
from penstock.shared.common.errors import ConfigError
from tests.lake_tables import small_lake

HOOKS = """
def count(spark, tables):
    counts = {name: frame.count() for name, frame in sorted(tables.items())}
    open("counts", "w").write(repr(counts))


def fail(spark, tables):
    raise KeyError("visits")
"""


def test_the_hook_gets_the_tables(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook gets each table by name, with live windows as of their newest rows. Its error is reported by name, and
    so is a missing hook."""
    monkeypatch.chdir(tmp_path)
    Path("hooks_of_test_after_hook.py").write_text(HOOKS)
    folder = small_lake(tmp_path)
    call_after_hook(spark, "hooks_of_test_after_hook:count", folder)
    assert Path("counts").read_text() == "{'closed/s': 3, 'late/s': 0, 'live/s': 2}"
    with pytest.raises(AfterHookFailed, match=r"hooks_of_test_after_hook:fail: KeyError: 'visits'"):
        call_after_hook(spark, "hooks_of_test_after_hook:fail", folder)
    with pytest.raises(ConfigError, match="after: hooks_of_test_after_hook:nothing"):
        call_after_hook(spark, "hooks_of_test_after_hook:nothing", folder)
