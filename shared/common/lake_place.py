"""Where a lake is, in the one form that everything that reads or writes it goes by (an edge).

Spark takes a URI's escapes (`with%20space`) for the folder's own name, deltalake takes them for what they stand for. So
a `file:` URI becomes the path that it means, and a `%` that is left, in a path or another URI, is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from penstock.shared.common.errors import ConfigError

_LOCAL = re.compile(r"file:(//(localhost)?(?=/))?", re.IGNORECASE)


def lake_root(lake: str) -> str:
    """A folder as an absolute path, another URI as it is, both without a slash at the end. ConfigError for no place.

    >>> lake_root("file:///srv/my%20lake/"), lake_root("s3://bucket/lake/")
    ('/srv/my lake', 's3://bucket/lake')
    """
    local = _LOCAL.match(lake)
    try:
        path = unquote(lake[local.end() :]) if local is not None else lake
        root = path if "://" in path and local is None else str(Path(path).expanduser().resolve())
    except (ValueError, RuntimeError) as e:  # a null byte; a home folder that is nobody's
        raise ConfigError(f"lake {lake!r}: {e}") from None
    if local is not None and (not path.startswith("/") or path.startswith("//")):
        raise ConfigError(f"lake {lake!r}: a file: URI names an absolute path of this machine, file:///folder")
    if "%" in root:
        raise ConfigError(f"lake {lake!r}: not every reader takes a % in its place for the same: choose one without it")
    return root.rstrip("/")


def require_place(lake: str | None) -> str | None:
    """The same text, for a setting; ValueError where it is no place."""
    try:
        if lake is not None:
            lake_root(lake)
    except ConfigError as e:
        raise ValueError(str(e).removeprefix(f"lake {lake!r}: ")) from None
    return lake
