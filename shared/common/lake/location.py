"""The location of a lake, in the one form that all readers and writers use.

Spark treats percent-encoding in a URI (`with%20space`) as part of the folder's name, deltalake decodes it. So a `file:`
URI is converted to its path, and a `%` in a path or in another URI is rejected.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from penstock.shared.common.errors import ConfigError

_LOCAL = re.compile(r"file:(//(localhost)?(?=/))?", re.IGNORECASE)


def lake_root(lake: str) -> str:
    """The location of a lake in its one form, without a trailing slash. Raises ConfigError if it is invalid.

    A path or a `file:` URI becomes an absolute path. Any other URI is unchanged.

    >>> lake_root("file:///srv/my%20lake/"), lake_root("s3://bucket/lake/")
    ('/srv/my lake', 's3://bucket/lake')
    """
    local = _LOCAL.match(lake)
    try:
        path = unquote(lake[local.end() :]) if local is not None else lake
        root = path if "://" in path and local is None else str(Path(path).expanduser().resolve())
    except (ValueError, RuntimeError) as e:
        # The location has a null byte, or names the home folder of an unknown user.
        raise ConfigError(f"lake {lake!r}: {e}") from None
    if local is not None and (not path.startswith("/") or path.startswith("//")):
        raise ConfigError(f"lake {lake!r}: a file: URI names an absolute path of this machine, file:///folder")
    if "%" in root:
        raise ConfigError(f"lake {lake!r}: Spark and deltalake interpret % differently: choose a location without it")
    return root.rstrip("/")


def table_uri(lake: str, application: str, *table: str) -> str:
    """The location of an application's table in a lake, or of the application's folder without `table`.

    It is an absolute path or a URI. Raises ConfigError if `lake` is invalid.
    """
    return "/".join((lake_root(lake), application, *table))


def local_folder(root: str) -> Path | None:
    """The local folder of a location that `table_uri` returned; None if the location is a URI.

    >>> str(local_folder("/lake/my app")), local_folder("s3://lake/app")
    ('/lake/my app', None)
    """
    return None if "://" in root else Path(root)


def require_location(lake: str | None) -> str | None:
    """Return the text unchanged: a validator of settings. Raises ValueError if the text is not a location of a lake."""
    try:
        if lake is not None:
            lake_root(lake)
    except ConfigError as e:
        raise ValueError(str(e).removeprefix(f"lake {lake!r}: ")) from None
    return lake


def hadoop_uri(uri: str) -> str:
    """Return the URI of a folder, file or pattern for Hadoop, whose S3 client uses the scheme `s3a` instead of `s3`.

    >>> hadoop_uri("S3://bucket/x"), hadoop_uri("gs://bucket/x"), hadoop_uri("x")
    ('s3a://bucket/x', 'gs://bucket/x', 'x')
    """
    scheme, separator, rest = uri.partition("://")
    return f"s3a://{rest}" if separator and scheme.lower() in ("s3", "s3a") else uri
