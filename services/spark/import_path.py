"""Where Spark's Python workers import from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def without_archives(path: Sequence[str]) -> list[str]:
    """`path` without the archives of a pyspark that is on it as a folder as well, as pip installs it.

    Spark puts its zip files and a jar first. Before every task a worker reads the tables of contents of all archives
    that it has looked into, which took a tenth of a second.
    """
    folders = [Path(one) for one in path if (Path(one) / "pyspark" / "__init__.py").is_file() and Path(one).is_dir()]
    return [one for one in path if not any(folder / "pyspark" in Path(one).parents for folder in folders)]
