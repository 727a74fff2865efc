"""Spark's configuration as a file of properties: a command line is read by every user of a machine, and a storage's
keys are among what Spark is given.

>>> properties({"spark.hadoop.fs.s3a.secret.key": "a=b\\\\c", "x y": " ü"})
'spark.hadoop.fs.s3a.secret.key=a=b\\\\\\\\c\\nx\\\\ y=\\\\ \\\\u00fc\\n'
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SUBMIT = "PYSPARK_SUBMIT_ARGS"  # which pyspark hands to Spark's launcher
_ALONE = "pyspark-shell"
_ESCAPED = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f"}


def properties(conf: Mapping[str, str]) -> str:
    """The text of a file that Java reads as these."""
    return "".join(f"{_key(name)}={_value(text)}\n" for name, text in conf.items())


@contextmanager
def properties_file(conf: Mapping[str, str], folder: str) -> Iterator[None]:
    """Have a JVM of Spark's that is started meanwhile take this from a file in `folder` that only its owner reads."""
    before = os.environ.get(SUBMIT)
    file = Path(folder) / "spark.properties"
    file.touch(0o600)
    file.write_text(properties(conf), encoding="ascii")
    os.environ[SUBMIT] = f"--load-spark-defaults --properties-file {shlex.quote(str(file))} {before or _ALONE}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SUBMIT]
        else:
            os.environ[SUBMIT] = before


def _key(name: str) -> str:
    return re.sub(r"([ :=#!])", r"\\\1", _text(name))


def _value(text: str) -> str:
    return re.sub(r"^ ", r"\\ ", _text(text))


def _text(text: str) -> str:
    """Escapes for what Java takes for something else; UTF-16 for what is not ASCII."""
    return "".join(_ESCAPED.get(c, c) if c.isascii() else _units(c) for c in text)


def _units(character: str) -> str:
    raw = character.encode("utf-16-be")
    return "".join(f"\\u{raw[i]:02x}{raw[i + 1]:02x}" for i in range(0, len(raw), 2))
