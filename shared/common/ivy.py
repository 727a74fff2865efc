"""Java libraries, fetched once per user by Ivy, which ships inside pyspark.

A set of jars lands in one folder, named after what it is for and its version, in `~/.cache/penstock` (`XDG_CACHE_HOME`
is honoured). The folder appears by a rename of a complete one: it is either whole or not there, and of two processes
that fill it at once both succeed.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from shared.common.errors import ConfigError
from shared.common.log import get_logger

log = get_logger(__name__)

MAVEN_CENTRAL = "https://repo1.maven.org/maven2/"
REPOSITORY_VARIABLE = "PENSTOCK_MAVEN_REPOSITORY"
RESOLVE_TIMEOUT_SECONDS = 900  # tens of megabytes: a slow line needs minutes, a dead one must end
_KEPT_TYPES = ("jar", "bundle")
_IVY_MESSAGES = 12


class JarsUnavailable(ConfigError):
    """Jars are not in the cache and could not be put there; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class JarSet:
    """What to fetch: `artifacts` are (organisation, name, revision), with what they depend on at run time.

    `excluded` are organisations, or (organisation, name) pairs, that are not followed since they are there already.
    `needed_bytes` is for the jars twice (Ivy's cache and ours) and room to work.
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
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".cache"
    return root / "penstock"


def fetch_jars(java: Path | str, wanted: JarSet, environ: Mapping[str, str] | None = None) -> Path:
    """The folder that holds the jars; downloads them with the Java launcher `java` when it is not there yet.

    Blocks for about a minute the first time. Raises JarsUnavailable.
    """
    environ = os.environ if environ is None else environ
    root = cache_root(environ)
    folder = root / wanted.folder
    if folder.is_dir():
        return folder
    repository = environ.get(REPOSITORY_VARIABLE) or MAVEN_CENTRAL
    log.info("downloading", what=wanted.title, repository=repository, folder=str(folder))
    try:
        _check_space(root, wanted)
        with tempfile.TemporaryDirectory(dir=root, prefix=f"{wanted.folder}-", ignore_cleanup_errors=True) as temporary:
            _publish(_resolve(java, wanted, Path(temporary), root / "ivy", repository), folder)
    except OSError as e:
        raise JarsUnavailable(_explain_os_error(e, root, wanted)) from None
    return folder


def ivy_jar() -> Path:
    """Ivy, found in pyspark's folder without importing pyspark."""
    spec = importlib.util.find_spec("pyspark")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for jar in sorted(Path(place, "jars").glob("ivy-*.jar")):
            return jar
    raise JarsUnavailable("pyspark, whose jars folder holds Ivy, is not installed: pip install pyspark")


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


def ivy_settings(repository: str, ivy_cache: Path) -> str:
    """Ivy's settings: one Maven repository, and Ivy's own cache inside ours, locked against a second process."""
    root = repository if repository.endswith("/") else f"{repository}/"
    return (
        "<ivysettings><settings defaultResolver='maven'/>"
        f"<caches defaultCacheDir={quoteattr(str(ivy_cache))} lockStrategy='artifact-lock-nio'/>"
        f"<resolvers><ibiblio name='maven' m2compatible='true' root={quoteattr(root)}/></resolvers></ivysettings>"
    )


def explain_ivy(output: str, wanted: JarSet, repository: str, ivy_cache: str) -> str | None:
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
        f"{wanted.title} must be downloaded once, and {named} could not be had from {repository}: {why}. "
        f"Connect this machine to the network, or name a mirror by {REPOSITORY_VARIABLE}"
    )


def _check_space(root: Path, wanted: JarSet) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < wanted.needed_bytes:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, {wanted.needed_bytes >> 20} MiB needed", str(root))


def _resolve(java: Path | str, wanted: JarSet, work: Path, ivy_cache: Path, repository: str) -> Path:
    """Run Ivy; the folder with the jars. Raises JarsUnavailable with what could not be had."""
    jars = work / "jars"
    (work / "ivy.xml").write_text(ivy_module(wanted), encoding="utf-8")
    (work / "ivysettings.xml").write_text(ivy_settings(repository, ivy_cache), encoding="utf-8")
    pattern = f"{jars}/[artifact]-[revision](-[classifier]).[ext]"
    command = [java, "-Xmx256m", f"-Divy.default.ivy.user.dir={ivy_cache}", "-jar", ivy_jar()]
    command += ["-settings", work / "ivysettings.xml", "-ivy", work / "ivy.xml"]
    command += ["-types", *_KEPT_TYPES, "-retrieve", pattern]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=RESOLVE_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise JarsUnavailable(
            f"{wanted.title} could not be downloaded from {repository} within {RESOLVE_TIMEOUT_SECONDS} s"
        ) from None
    missing = explain_ivy(answer.stdout, wanted, repository, str(ivy_cache))
    lacking = [name for _, name, _ in wanted.artifacts if not any(jars.glob(f"{name}-*.jar"))]
    if answer.returncode != 0 or missing or lacking:
        raise JarsUnavailable(missing or _ivy_failed(wanted, answer.stdout))
    return jars


def _publish(jars: Path, folder: Path) -> None:
    try:
        jars.rename(folder)
    except OSError as e:
        # Another process was quicker and its folder is as good; a rename onto a folder with files is refused.
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _ivy_failed(wanted: JarSet, output: str) -> str:
    said = [line.strip() for line in output.splitlines() if line.strip()][-_IVY_MESSAGES:]
    return f"{wanted.title} could not be downloaded; Ivy said\n  " + "\n  ".join(said)


def _explain_os_error(e: OSError, root: Path, wanted: JarSet) -> str:
    place = e.filename or root
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space for the jars of {wanted.title}: {place}: {e.strerror}"
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return f"the cache folder {root} cannot be written ({place}: {e.strerror}); set XDG_CACHE_HOME to one that can"
    return f"the jars of {wanted.title}: {place}: {e.strerror}"
