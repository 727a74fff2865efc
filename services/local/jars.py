"""Kafka's jars, resolved once per user.

Ivy, which ships inside pyspark, resolves the broker's artifacts and what they depend on from a Maven repository. The
jars land in one folder per Kafka version, `~/.cache/penstock/kafka-4.1.1` (`XDG_CACHE_HOME` is honoured). The folder
appears by a rename of a complete one: it is either whole or not there. Of two processes that want it at once the second
waits for the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from xml.sax.saxutils import quoteattr

from services.local.child import ChildProcess
from services.local.java import Java, find_java
from shared.common.errors import ConfigError
from shared.common.log import configure, get_logger
from shared.common.settings import LogSettings

log = get_logger(__name__)

KAFKA_VERSION = "4.1.1"
# The binding must be the one for slf4j 1.7, which is what Kafka's jars ask for.
ARTIFACTS = (
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.24.3"),
)
MAVEN_CENTRAL = "https://repo1.maven.org/maven2/"
REPOSITORY_VARIABLE = "PENSTOCK_MAVEN_REPOSITORY"
RESOLVE_TIMEOUT_MS = 900_000  # 43 MB: a slow line needs minutes, a dead one must end
NEEDED_BYTES = 150 * 1024 * 1024  # jars twice (Ivy's own cache and ours) and room to work
_KEPT_TYPES = ("jar", "bundle")
_IVY_MESSAGES = 12
IVY_LOG_LINES = 2_000
LOCK_FILE = "download.lock"
LOCK_POLL_MS = 100


class JarsUnavailable(ConfigError):
    """Kafka's jars are not in the cache and could not be put there; the message says why and what to do."""


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's downloads are kept: `$XDG_CACHE_HOME/penstock`, or `~/.cache/penstock`."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and is ignored.
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".cache"
    return root / "penstock"


async def kafka_jars(java: Java, environ: Mapping[str, str] | None = None) -> Path:
    """The folder that holds Kafka's jars; downloads them when it is not there yet.

    Takes about a minute the first time. Raises JarsUnavailable.
    """
    environ = os.environ if environ is None else environ
    root = cache_root(environ)
    folder = root / f"kafka-{KAFKA_VERSION}"
    if folder.is_dir():
        return folder
    repository = environ.get(REPOSITORY_VARIABLE) or MAVEN_CENTRAL
    log.info("downloading Kafka", version=KAFKA_VERSION, repository=repository, folder=str(folder))
    try:
        _check_space(root)
        async with _only_downloader(root):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(
                    dir=root, prefix="kafka-download-", ignore_cleanup_errors=True
                ) as work:
                    jars = await _resolve(java, Path(work), root / "ivy", repository)
                    jars.rename(folder)
    except OSError as e:
        raise JarsUnavailable(_explain_os_error(e, root)) from None
    return folder


def ivy_jar() -> Path:
    """Ivy, found in pyspark's folder without importing pyspark."""
    spec = importlib.util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for jar in sorted(Path(place, "jars").glob("ivy-*.jar")):
            return jar
    raise JarsUnavailable("pyspark, whose jars folder holds Ivy, is not installed: pip install pyspark")


def _check_space(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, {NEEDED_BYTES >> 20} MiB needed", str(root))


async def _resolve(java: Java, work: Path, ivy_cache: Path, repository: str) -> Path:
    """Run Ivy; the folder with the jars. Raises JarsUnavailable with what could not be had."""
    jars = work / "jars"
    (work / "ivy.xml").write_text(ivy_module(), encoding="utf-8")
    (work / "ivysettings.xml").write_text(ivy_settings(repository, ivy_cache), encoding="utf-8")
    pattern = f"{jars}/[artifact]-[revision](-[classifier]).[ext]"
    command: list[str | Path] = [
        java.executable,
        "-Xmx256m",
        f"-Divy.default.ivy.user.dir={ivy_cache}",
        "-jar",
        ivy_jar(),
    ]
    command += ["-settings", work / "ivysettings.xml", "-ivy", work / "ivy.xml"]
    command += ["-types", *_KEPT_TYPES, "-retrieve", pattern]
    # A child of ours, so that a download ends with the process that wanted it.
    child = await ChildProcess.start(command, name="Ivy", log_file=work / "ivy.log", cwd=work)
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_MS / 1000):
            status = await child.wait()
    except TimeoutError:
        raise JarsUnavailable(
            f"Kafka {KAFKA_VERSION} could not be downloaded from {repository} within {RESOLVE_TIMEOUT_MS // 1000} s"
        ) from None
    finally:
        await child.terminate(0)
    said = child.log_tail(IVY_LOG_LINES)
    why = explain_ivy("\n".join(said), repository, str(ivy_cache))
    if status != 0 or why or not any(jars.glob("kafka_2.13-*.jar")):
        raise JarsUnavailable(why or _ivy_failed(said))
    return jars


@contextlib.asynccontextmanager
async def _only_downloader(root: Path) -> AsyncIterator[None]:
    """Wait for another process's download, since two Ivys overwrite each other's reports in one cache."""
    deadline = time.monotonic() + RESOLVE_TIMEOUT_MS / 1000
    fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                raise JarsUnavailable(
                    f"another process has been downloading Kafka into {root} for {RESOLVE_TIMEOUT_MS // 1000} s"
                )
            await asyncio.sleep(LOCK_POLL_MS / 1000)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def ivy_module() -> str:
    """The Ivy file that asks for the artifacts, with what they depend on at run time."""
    wanted = "".join(
        f"<dependency org={quoteattr(org)} name={quoteattr(name)} rev={quoteattr(rev)} conf='default->default'/>"
        for org, name, rev in ARTIFACTS
    )
    return (
        "<ivy-module version='2.0'><info organisation='penstock' module='kafka'/>"
        f"<configurations><conf name='default'/></configurations><dependencies>{wanted}</dependencies></ivy-module>"
    )


def ivy_settings(repository: str, ivy_cache: Path) -> str:
    """Ivy's settings: one Maven repository, and Ivy's own cache inside ours."""
    root = repository if repository.endswith("/") else f"{repository}/"
    return (
        "<ivysettings><settings defaultResolver='maven'/>"
        f"<caches defaultCacheDir={quoteattr(str(ivy_cache))}/>"
        f"<resolvers><ibiblio name='maven' m2compatible='true' root={quoteattr(root)}/></resolvers></ivysettings>"
    )


def explain_ivy(output: str, repository: str, ivy_cache: str) -> str | None:
    """What Ivy's output says went wrong, in words; None when it names nothing that could not be had."""
    if "No space left on device" in output:
        return f"no space left on the disk of {ivy_cache}; Kafka's jars need {NEEDED_BYTES >> 20} MiB"
    if "Permission denied" in output or "Read-only file system" in output:
        return f"{ivy_cache} cannot be written; set XDG_CACHE_HOME to a folder that can"
    lacking = re.findall(r":: (\S+?)#(\S+?);(\S+?): not found", output)
    lacking += re.findall(r"\[FAILED\s*\]\s+(\S+?)#(\S+?);(\S+?)!", output)
    if not lacking:
        return None
    names = list(dict.fromkeys(f"{org}:{name}:{rev}" for org, name, rev in lacking))
    named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    causes = re.findall(r"(UnknownHostException|ConnectException|SocketTimeoutException|SSL\w*Exception)[^\n]*", output)
    why = "the repository cannot be reached" if causes else "the repository does not have it, or cannot be reached"
    return (
        f"Kafka {KAFKA_VERSION} must be downloaded once, and {named} could not be had from {repository}: {why}. "
        f"Connect this machine to the network, or name a mirror by {REPOSITORY_VARIABLE}"
    )


def _ivy_failed(lines: list[str]) -> str:
    said = [line.strip() for line in lines if line.strip()][-_IVY_MESSAGES:]
    return f"Kafka {KAFKA_VERSION} could not be downloaded; Ivy said\n  " + "\n  ".join(said)


def _explain_os_error(e: OSError, root: Path) -> str:
    place = e.filename or root
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space for Kafka's jars: {place}: {e.strerror}"
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        return f"the cache folder {root} cannot be written ({place}: {e.strerror}); set XDG_CACHE_HOME to one that can"
    return f"Kafka's jars: {place}: {e.strerror}"


def main() -> int:
    """Put Kafka's jars into the cache and print their folder; a failure is one message on standard error."""
    configure(LogSettings(), "kafka")
    try:
        print(asyncio.run(kafka_jars(find_java())))
    except ConfigError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
