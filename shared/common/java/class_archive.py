"""Class archives: files that let a JVM start with its classes already loaded and checked.

A JVM spends most of its start on loading and checking classes. With Java's application class-data sharing (AppCDS), a
JVM writes its loaded classes to an archive file, which later JVMs map into memory. With an archive the embedded Kafka
starts with two thirds of the CPU time, and a job that writes and reads one small Delta table took 13 s of CPU time
instead of 20.

`penstock jars kafka spark --class-archive` makes one archive for each user, Java and set of jars. A JVM silently
ignores the archive if its Java, its class path or the jars' modification times differ from the archive's.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.shared.common.java.installed_java import Java
from penstock.shared.common.log import get_logger

DUMP_TIMEOUT_MS = 120_000
"""How long a JVM may take to write its archive, 50 to 180 MB, when it ends."""
# Suppresses the warnings about an archive that does not fit and about classes that cannot be archived.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")

log = get_logger(__name__)


def archive_path(folder: Path, name: str, java: Java, jars: Sequence[Path]) -> Path:
    """Return the path in `folder` of the archive for this Java and these jars, whether or not it exists.

    The file name has two digests: of the paths of Java and the jars, and of the Java release and the jars' modification
    times and sizes.
    """
    release = java.home / "release"
    release_id = release.read_bytes() if release.is_file() else str(java.version).encode()
    # Java compares times and sizes too, so reinstalled jars need a new archive.
    stats = [jar.stat() for jar in jars]
    paths_digest = _digest_of(os.fsencode(java.home), *map(os.fsencode, jars))
    contents_digest = _digest_of(release_id, *(f"{int(stat.st_mtime)} {stat.st_size}".encode() for stat in stats))
    return folder / f"{name}-{paths_digest}-{contents_digest}.jsa"


def _digest_of(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def archive_options(archive: Path) -> tuple[str, ...]:
    """Return the Java options that use an archive; none if the file does not exist."""
    return (f"-XX:SharedArchiveFile={archive}", *_QUIET) if archive.is_file() else ()


@contextmanager
def recording(archive: Path) -> Iterator[tuple[str, ...]]:
    """Yield the Java options that make a JVM write its archive when it ends.

    When the context ends, the written file is removed, unless `keep_archive` has moved it to the archive's path.
    """
    file = recorded_file(archive)
    try:
        yield f"-XX:ArchiveClassesAtExit={file}", "-Xlog:disable"
    finally:
        file.unlink(missing_ok=True)


def recorded_file(archive: Path) -> Path:
    """Return the path to which a JVM that this process starts writes its archive.

    `keep_archive` moves the complete file to the archive's path: a JVM must not map half an archive.
    """
    return archive.with_name(f"{archive.name}.{os.getpid()}")


def keep_archive(archive: Path, *, complete: bool) -> bool:
    """Move the file at `recorded_file` to the archive's path. Then remove older archives of the same paths.

    Only logs a warning and returns False if there is no file, or if `complete` is false: the JVM was killed or has not
    ended in time, so the file may be incomplete.
    """
    file = recorded_file(archive)
    if not complete or not file.is_file():
        log.warning("no class archive was made; Java starts without one", archive=str(archive))
        return False
    file.replace(archive)
    # Older archives are large and no longer used.
    for former in archive.parent.glob(f"{archive.name.rpartition('-')[0]}-*.jsa"):
        if former != archive:
            former.unlink(missing_ok=True)
    return True
