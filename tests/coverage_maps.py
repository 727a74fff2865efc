"""Reads COVERAGE.md files: tables that name, for each test of the reference, one of ours or a reason for none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class CoverageMap(NamedTuple):
    """The table of one folder; `rows` are pairs of the reference's test and ours."""

    folder: Path
    rows: list[tuple[str, str]]

    @classmethod
    def of(cls, folder: Path, *first_words: str) -> CoverageMap:
        """The rows that begin with one of these words."""
        begins = re.compile(rf"\| (?:{'|'.join(first_words)})")
        lines = [line for line in (folder / "COVERAGE.md").read_text().splitlines() if begins.match(line)]
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
        return cls(folder, [(theirs, ours) for theirs, ours in cells])

    def theirs(self) -> list[str]:
        return [theirs for theirs, _ in self.rows]

    def named(self) -> list[str]:
        """Our tests, as `file::function`."""
        return [name for _, ours in self.rows for name in re.findall(r"`([^`]+\.py::\w+)`", ours)]

    def missing(self) -> list[str]:
        """Named tests that do not exist."""
        return [name for name in self.named() if not self._exists(*name.split("::"))]

    def without_test_or_reason(self) -> list[str]:
        return [theirs for theirs, ours in self.rows if "::test_" not in ours and not ours.startswith("none: ")]

    def duplicates(self) -> list[str]:
        """The reference's tests that are listed more than once."""
        theirs = self.theirs()
        return sorted({name for name in theirs if theirs.count(name) > 1})

    def _exists(self, file: str, function: str) -> bool:
        return f"def {function}(" in (self.folder / file).read_text()
