"""How the tests are divided among several processes."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

SPARK_TESTS = "tests/integration/spark/"


class ByFile(LoadScopeScheduling):
    """Keeps the tests of a file in one process, and all tests that share a Spark session.

    A test that hangs ends its process (pyproject.toml). It is reported as failed, and another process runs the tests
    after it. LoadScopeScheduling would run it again in each new process.
    """

    def _split_scope(self, nodeid: str) -> str:
        return SPARK_TESTS if nodeid.startswith(SPARK_TESTS) else nodeid.partition("::")[0]

    def remove_node(self, node: Any) -> str | None:
        left = [test for unit in self.assigned_work[node].values() for test, done in unit.items() if not done]
        units: dict[str, dict[str, bool]] = {}
        for test in left[1:]:
            units.setdefault(self._split_scope(test), {})[test] = False
        self.assigned_work[node] = units
        super().remove_node(node)
        return left[0] if left else None
