"""Updates the lock files of jars: the jars that Kafka, Spark's connectors, … need, each with its size and SHA-256.

    .venv/bin/python scripts/lock_jars.py [--check] [FILE ...]

A lock file is `*_jars.json`. Without FILE all lock files of the checkout are updated. To change a version, edit the
file's `roots` (`group:artifact:version`), and `title` and `folder` with them, then run this. The Ivy that comes with
pyspark resolves the runtime dependencies of the roots; it needs Java. The repository is the one that Penstock downloads
jars from, without the credentials of a settings.xml. All jars are downloaded into a folder that is removed at the end.
`--check` writes nothing, and returns status 1 if a file would change.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import quoteattr

import msgspec
import pyspark

from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import Jar, JarSet
from penstock.shared.common.java.maven import Repository, find_repository

ROOT = Path(__file__).resolve().parent.parent
KEPT_TYPES = ("jar", "bundle")
PATTERN = "[orgPath]/[module]/[revision]/[artifact]-[revision](-[classifier]).[ext]"  # a Maven repository's


class Wanted(msgspec.Struct):
    """The fields of a lock file that are edited by hand."""

    title: str
    folder: str
    roots: tuple[str, ...]
    excluded: tuple[str, ...] = ()


def ivy_module(wanted: Wanted) -> str:
    """The Ivy file that requests the roots with their runtime dependencies."""
    dependencies = "".join(
        f"<dependency org={quoteattr(org)} name={quoteattr(name)} rev={quoteattr(rev)} conf='default->default'/>"
        for org, name, rev in (root.split(":") for root in wanted.roots)
    )
    excluded = "".join(
        f"<exclude org={quoteattr(org)} module={quoteattr(name)}/>"
        for org, name in (pattern.split(":") for pattern in wanted.excluded)
    )
    return (
        f"<ivy-module version='2.0'><info organisation='penstock' module={quoteattr(wanted.folder)}/>"
        "<configurations><conf name='default'/></configurations>"
        f"<dependencies>{dependencies}{excluded}</dependencies></ivy-module>"
    )


def ivy_settings(repository: Repository, cache: Path) -> str:
    """Ivy's settings: one repository, and a cache of its own."""
    return (
        "<ivysettings><settings defaultResolver='maven'/>"
        f"<caches defaultCacheDir={quoteattr(str(cache))}/>"
        f"<resolvers><ibiblio name='maven' m2compatible='true' root={quoteattr(repository.url)}/></resolvers>"
        "</ivysettings>"
    )


def resolve(wanted: Wanted, work: Path) -> JarSet:
    """The lock of the wanted jars."""
    (ivy,) = Path(pyspark.__file__).parent.glob("jars/ivy-*.jar")
    (work / "ivy.xml").write_text(ivy_module(wanted), encoding="utf-8")
    (work / "ivysettings.xml").write_text(ivy_settings(find_repository(os.environ), work / "cache"), encoding="utf-8")
    command = [str(find_java().executable), f"-Divy.default.ivy.user.dir={work / 'cache'}", "-jar", str(ivy)]
    command += ["-settings", str(work / "ivysettings.xml"), "-ivy", str(work / "ivy.xml")]
    command += ["-types", *KEPT_TYPES, "-retrieve", f"{work}/jars/{PATTERN}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or "[FAILED" in done.stdout or ": not found" in done.stdout:
        raise SystemExit(f"{wanted.title}: Ivy failed\n{done.stdout[-4_000:]}{done.stderr[-2_000:]}")
    jars = []
    for path in sorted((work / "jars").rglob("*.jar")):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        jars.append(Jar(path.relative_to(work / "jars").as_posix(), path.stat().st_size, digest))
    return JarSet(wanted.title, wanted.folder, wanted.roots, tuple(jars), wanted.excluded)


def written(locked: JarSet) -> bytes:
    """The text of a lock file: a jar a line, so that a change shows as one."""
    fields: dict[str, str | tuple[str, ...]] = {
        "title": locked.title,
        "folder": locked.folder,
        "roots": locked.roots,
        "excluded": locked.excluded,
    }
    head = [f"  {msgspec.json.encode(k).decode()}: {_lines(v)}" for k, v in fields.items()]
    jars = ",\n".join(f"    {msgspec.json.encode(jar).decode()}" for jar in locked.jars)
    return ("{\n" + ",\n".join(head) + ',\n  "jars": [\n' + jars + "\n  ]\n}\n").encode()


def _lines(value: str | tuple[str, ...]) -> str:
    if isinstance(value, str) or not value:
        return msgspec.json.encode(value).decode()
    return "[\n" + ",\n".join(f"    {msgspec.json.encode(item).decode()}" for item in value) + "\n  ]"


def main(arguments: list[str]) -> int:
    """Update the named locks, or all."""
    if unknown := [argument for argument in arguments if argument.startswith("-") and argument != "--check"]:
        print(f"{unknown[0]}: no such option\n\n{__doc__}", file=sys.stderr)
        return 2
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*_jars.json"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [Path(argument) for argument in arguments if argument != "--check"]
    changed = 0
    for file in files or [ROOT / name for name in sorted(set(listed) - {""})]:
        wanted = msgspec.json.decode(file.read_bytes(), type=Wanted)
        with tempfile.TemporaryDirectory(prefix="penstock-lock-") as work:
            locked = resolve(wanted, Path(work))
        text = written(locked)
        is_same = text == file.read_bytes()
        changed += not is_same
        if not is_same and "--check" not in arguments:
            file.write_bytes(text)
        total = sum(jar.size for jar in locked.jars)
        print(f"{file}: {len(locked.jars)} jars, {total >> 20} MiB, {'as before' if is_same else 'changed'}")
    return 1 if changed and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
