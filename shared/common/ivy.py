"""Java libraries, fetched once per user by Ivy, which ships inside pyspark.

A set of jars lands in one folder, named after what it is for and its version, in `~/.cache/penstock` (`XDG_CACHE_HOME`
is honoured). The folder appears by a rename of a complete one: it is either whole or not there. One process downloads
at a time, since two Ivys overwrite each other's reports in one cache; the others wait for it. Ivy runs under a keeper,
so a download ends with the process that wanted it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from penstock.shared.common import keeper
from penstock.shared.common.errors import JarsUnavailable
from penstock.shared.common.extras import missing
from penstock.shared.common.file_lock import FileLock
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

REPOSITORY_VARIABLE = "PENSTOCK_MAVEN_REPOSITORY"
RESOLVE_TIMEOUT_MS = 900_000  # tens of megabytes: a slow line needs minutes, a dead one must end
LOCK_FILE = "download.lock"
POLL_MS = 50  # how soon an end of Ivy, a free lock or a call to stop is seen
STOP_LIMIT_MS = 1_000  # what Ivy gets to end by itself; it has nothing to save
OUTPUT_BYTES_MAX = 1 << 20  # of Ivy's report, the end: its summary comes last
_KEPT_TYPES = ("jar", "bundle")
_IVY_MESSAGES = 12


@dataclass(frozen=True, slots=True)
class JarSet:
    """What to fetch: `artifacts` are (organisation, name, revision), with what they depend on at run time.

    `excluded` are (organisation, name) pairs that are not followed since they are there already; the name `*` is all
    of an organisation's. `needed_bytes` is for the jars twice (Ivy's cache and ours) and room to work.
    """

    title: str
    folder: str
    artifacts: tuple[tuple[str, str, str], ...]
    needed_bytes: int
    excluded: tuple[tuple[str, str], ...] = ()


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's downloads are kept: `$XDG_CACHE_HOME/penstock`, or `~/.cache/penstock`."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and is ignored.
    root = Path(base) if base.startswith("/") else _home(environ) / ".cache"
    return root / "penstock"


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    if not home:  # which Path.home() takes for the root folder
        with contextlib.suppress(KeyError):
            home = pwd.getpwuid(os.getuid()).pw_dir
    return Path(home or "/")


def fetch_jars(
    java: Path | str,
    wanted: JarSet,
    environ: Mapping[str, str] | None = None,
    *,
    stop: threading.Event | None = None,
) -> Path:
    """The folder that holds the jars; downloads them with the Java launcher `java` when it is not there yet.

    Blocks for about a minute the first time. Setting `stop`, from another thread, ends a download within moments.
    Raises JarsUnavailable.
    """
    environ = os.environ if environ is None else environ
    root = cache_root(environ)
    folder = root / wanted.folder
    if folder.is_dir():
        return folder
    mirror = environ.get(REPOSITORY_VARIABLE) or None
    log.info("downloading", what=wanted.title, repository=repository_name(mirror), folder=str(folder))
    try:
        _check_space(root, wanted)
        with _only_downloader(root, wanted, stop):
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(
                    dir=root, prefix=f"{wanted.folder}-", ignore_cleanup_errors=True
                ) as work:
                    _resolve(java, wanted, Path(work), root / "ivy", mirror, stop).rename(folder)
    except OSError as e:
        raise JarsUnavailable(_explain_os_error(e, root, wanted)) from None
    return folder


def announcement(wanted: JarSet, environ: Mapping[str, str] | None = None) -> str | None:
    """What `fetch_jars` will download, from where and to where; None where the jars are there."""
    environ = os.environ if environ is None else environ
    folder = cache_root(environ) / wanted.folder
    if folder.is_dir():
        return None
    return f"downloading {wanted.title} from {repository_name(environ.get(REPOSITORY_VARIABLE) or None)} into {folder}"


def repository_name(mirror: str | None) -> str:
    """How messages name the repository."""
    return mirror or "Maven Central"


def ivy_jar() -> Path:
    """Ivy, found in pyspark's folder without importing pyspark."""
    spec = importlib.util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for jar in sorted(Path(place, "jars").glob("ivy-*.jar")):
            return jar
    raise JarsUnavailable(missing("the download of Kafka's and Spark's jars, by Ivy,", "pyspark"))


def ivy_module(wanted: JarSet) -> str:
    """The Ivy file that asks for the artifacts, with what they depend on at run time."""
    asked = "".join(
        f"<dependency org={quoteattr(org)} name={quoteattr(name)} rev={quoteattr(rev)} conf='default->default'/>"
        for org, name, rev in wanted.artifacts
    )
    excluded = "".join(f"<exclude org={quoteattr(org)} module={quoteattr(name)}/>" for org, name in wanted.excluded)
    return (
        f"<ivy-module version='2.0'><info organisation='penstock' module={quoteattr(wanted.folder)}/>"
        "<configurations><conf name='default'/></configurations>"
        f"<dependencies>{asked}{excluded}</dependencies></ivy-module>"
    )


def ivy_settings(mirror: str | None, ivy_cache: Path) -> str:
    """Ivy's settings: one Maven repository, and Ivy's own cache inside ours.

    Without a mirror Ivy takes the repository that it knows by itself, which is Maven Central.
    """
    root = "" if mirror is None else f" root={quoteattr(mirror if mirror.endswith('/') else f'{mirror}/')}"
    return (
        "<ivysettings><settings defaultResolver='maven'/>"
        f"<caches defaultCacheDir={quoteattr(str(ivy_cache))}/>"
        f"<resolvers><ibiblio name='maven' m2compatible='true'{root}/></resolvers></ivysettings>"
    )


def explain_ivy(output: str, wanted: JarSet, mirror: str | None, ivy_cache: str) -> str | None:
    """What Ivy's output says went wrong, in words; None when it names nothing that could not be had."""
    if "No space left on device" in output:
        return f"no space left on the disk of {ivy_cache}; {wanted.title} needs {wanted.needed_bytes >> 20} MiB"
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
        f"{wanted.title} must be downloaded once, and {named} could not be had from {repository_name(mirror)}: {why}. "
        f"Connect this machine to the network, or name a mirror by {REPOSITORY_VARIABLE}"
    )


def _check_space(root: Path, wanted: JarSet) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < wanted.needed_bytes:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, {wanted.needed_bytes >> 20} MiB needed", str(root))


@contextlib.contextmanager
def _only_downloader(root: Path, wanted: JarSet, stop: threading.Event | None) -> Iterator[None]:
    deadline = time.monotonic() + RESOLVE_TIMEOUT_MS / 1000
    lock = FileLock(root / LOCK_FILE)
    try:
        while not lock.try_acquire():
            _check_stop(wanted, stop)
            if time.monotonic() >= deadline:
                raise JarsUnavailable(
                    f"another process has been downloading jars into {root} for {RESOLVE_TIMEOUT_MS // 1000} s"
                )
            time.sleep(POLL_MS / 1000)
        yield
    finally:
        lock.release()


def _check_stop(wanted: JarSet, stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise JarsUnavailable(f"the download of {wanted.title} was given up")


def _resolve(
    java: Path | str, wanted: JarSet, work: Path, ivy_cache: Path, mirror: str | None, stop: threading.Event | None
) -> Path:
    """Run Ivy; the folder with the jars. Raises JarsUnavailable with what could not be had."""
    jars = work / "jars"
    (work / "ivy.xml").write_text(ivy_module(wanted), encoding="utf-8")
    (work / "ivysettings.xml").write_text(ivy_settings(mirror, ivy_cache), encoding="utf-8")
    pattern = f"{jars}/[artifact]-[revision](-[classifier]).[ext]"
    command = [java, "-Xmx256m", f"-Divy.default.ivy.user.dir={ivy_cache}", "-jar", ivy_jar()]
    command += ["-settings", work / "ivysettings.xml", "-ivy", work / "ivy.xml"]
    command += ["-types", *_KEPT_TYPES, "-retrieve", pattern]
    try:
        status, output = _run([os.fspath(word) for word in command], work / "ivy.log", wanted, stop)
    except TimeoutError:
        raise JarsUnavailable(
            f"{wanted.title} could not be downloaded from {repository_name(mirror)} within "
            f"{RESOLVE_TIMEOUT_MS // 1000} s"
        ) from None
    if status == keeper.NOT_STARTED:
        raise JarsUnavailable(f"{wanted.title} could not be downloaded: the Java launcher {java} cannot be started")
    why = explain_ivy(output, wanted, mirror, str(ivy_cache))
    lacking = [name for _, name, _ in wanted.artifacts if not any(jars.glob(f"{name}-*.jar"))]
    if status != 0 or why or lacking:
        raise JarsUnavailable(why or _ivy_failed(wanted, output))
    return jars


def _run(command: list[str], output: Path, wanted: JarSet, stop: threading.Event | None) -> tuple[int, str]:
    """Exit status and output of a command that ends when this process does. Raises TimeoutError."""
    options = ["--limit-ms", str(STOP_LIMIT_MS), "--"]
    deadline = time.monotonic() + RESOLVE_TIMEOUT_MS / 1000
    with (
        output.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, *options, *command],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C is for us, and the keeper ends when we do
        ) as process,
    ):
        # Leaving this block closes the keeper's standard input, at which it ends its child, and waits for it.
        while (status := process.poll()) is None:
            _check_stop(wanted, stop)
            if time.monotonic() >= deadline:
                raise TimeoutError
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_MS / 1000)
    return status, output.read_bytes()[-OUTPUT_BYTES_MAX:].decode(errors="replace")


def _ivy_failed(wanted: JarSet, output: str) -> str:
    said = [line.strip() for line in output.splitlines() if line.strip()][-_IVY_MESSAGES:]
    return f"{wanted.title} could not be downloaded; Ivy said\n  " + "\n  ".join(said)


def _explain_os_error(e: OSError, root: Path, wanted: JarSet) -> str:
    place = e.filename or root
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space for the jars of {wanted.title}: {place}: {e.strerror}"
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        return f"the cache folder {root} cannot be written ({place}: {e.strerror}); set XDG_CACHE_HOME to one that can"
    return f"the jars of {wanted.title}: {place}: {e.strerror}"
