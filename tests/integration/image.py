"""Runs the Dockerfile's steps one by one in a scratch folder, since there is no container engine.

Every RUN is split at its `&&`, and a shell runs each command. Absolute paths of the image are replaced by paths in the
scratch folder. The Python is the one that made this checkout's environment, not the image's. Packages are hard links to
the locked ones of this environment, so pip checks them and downloads nothing; the soak test downloads them.

Steps that change the machine do not run: SKIPPED lists them with their reasons. A step that is neither run nor listed
raises AssertionError.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from typing import Self

from penstock.services.spark.spark_session import SPARK_JARS
from penstock.shared.common.java.jars import cache_root
from tests.integration.environments import (
    LOCK,
    ROOT,
    SYSTEM_PATH,
    inherited,
    link,
    link_kernels,
    pinned,
)

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
SKIPPED = {
    "FROM": "no base image: the Python and the Java of this machine are used",
    "USER": "the steps run as the user who runs the tests",
    "EXPOSE": "says something about the image and runs nothing",
    "STOPSIGNAL": "says something about the image and runs nothing",
    "ENTRYPOINT": "tini is a package of the image",
    "COPY --from=build": "both stages share the scratch folder",
    "apt-get update": "no packages of the distribution are installed",
    "apt-get install": "no packages of the distribution are installed",
    "rm -rf /var/lib/apt/lists": "the machine's package lists stay",
    "useradd": "no user is made",
}
MAKES_VENV = "-m venv"
"""The step that installs pip. Unless packages are downloaded, pip is linked as well: installing it takes 4 s of CPU."""
LEFT_OUT = " --class-archive"
"""An option that is removed from a step unless packages are downloaded: scripts/install runs the same, and it takes 40
s of CPU.
"""
COMPILES_KERNELS = "penstock.shared.streams.compile_kernels"
"""The step that compiles the kernels. It finds those that scripts/install has compiled, unless packages are downloaded:
compiling takes 20 s of CPU.
"""
IMAGE_PATHS = re.compile(r"(?<![\w./])/(?=(?:opt/penstock|build|var/lib/penstock|home/penstock)\b)")
BUILDS_WHEELS = {"setuptools", "hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers"}
STEP_TIMEOUT_S = 900


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Each instruction with its argument on one line, without comments."""
    lines = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def passes(path: str, ignore: str) -> bool:
    """Whether a path of the checkout is in the build context, by the rules and exceptions of a .dockerignore."""
    taken = True
    for rule in filter(None, ignore.splitlines()):
        pattern = rule.removeprefix("!")
        if pattern == "*" or path == pattern or path.startswith(f"{pattern}/"):
            taken = rule.startswith("!")
    return taken


@dataclass
class Build:
    """The image's file system below `root`, and the state that the instructions have set so far."""

    root: Path
    from_index: bool
    variables: dict[str, str] = field(default_factory=dict)
    folder: Path = field(init=False)
    skipped: list[str] = field(default_factory=list)
    output: str = ""

    def __post_init__(self) -> None:
        self.folder = self.root
        (self.root / "usr/bin").mkdir(parents=True)
        (self.root / "home/penstock").mkdir(parents=True)
        (self.root / "usr/bin/python").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
        self.variables = inherited() | {
            "PATH": f"{self.root}/usr/bin:{SYSTEM_PATH}",
            "HOME": f"{self.root}/home/penstock",
        }
        self.variables.pop("XDG_CACHE_HOME", None)
        if not self.from_index:
            self.variables["PIP_NO_INDEX"] = "1"
            cache = self.root / "home/penstock/.cache/penstock"
            cache.mkdir(parents=True)
            (cache / SPARK_JARS.folder).symlink_to(cache_root() / SPARK_JARS.folder)

    def all_steps(self) -> Self:
        """Run the whole Dockerfile."""
        for name, argument in instructions(DOCKERFILE):
            self.run(name, argument)
        return self

    @property
    def python(self) -> Path:
        return self.root / "opt/penstock/bin/python"

    def here(self, text: str) -> str:
        """A command or value in which the image's paths are replaced."""
        return IMAGE_PATHS.sub(f"{self.root}/", text)

    def run(self, name: str, argument: str) -> None:
        """Run one instruction."""
        match name:
            case "RUN":
                for command in argument.split(" && "):
                    self.shell(command.strip())
            case "WORKDIR":
                self.folder = Path(self.here(argument))
                self.folder.mkdir(parents=True, exist_ok=True)
            case "ENV":
                for entry in re.findall(r"(\w+)=(\S+)", argument):
                    value = self.here(entry[1]).replace("$PATH", self.variables["PATH"])
                    self.variables[entry[0]] = value
            case "COPY" if not argument.startswith("--from=build"):
                *sources, target = argument.split()
                for source in sources:
                    self.copy(source, self.folder / target / ("" if target != "./" else Path(source).name))
            case "CMD":
                self.output = self.shell(" ".join(re.findall(r'"([^"]*)"', argument)))
            case _:
                self.skip(f"{name} {argument}")

    def copy(self, source: str, target: Path) -> None:
        assert passes(source, (ROOT / ".dockerignore").read_text(encoding="utf-8")), f".dockerignore drops {source}"
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, target)

    def shell(self, command: str) -> str:
        """Run one command in the current folder and return its output."""
        if command.startswith(tuple(SKIPPED)):
            self.skip(command)
            return ""
        command = self.here(command).replace(" -o penstock -g penstock ", " ")
        if not self.from_index:
            command = command.removesuffix(LEFT_OUT).replace(MAKES_VENV, f"{MAKES_VENV} --without-pip")
            if command.endswith(COMPILES_KERNELS):
                link_kernels(self.python)
        done = subprocess.run(
            ["sh", "-c", command],
            env=self.variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=STEP_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if MAKES_VENV in command and not self.from_index:
            for name, version in (pinned(LOCK) | tools() | {"pip": distribution("pip").version}).items():
                link(name, version, self.python)
        return done.stdout

    def skip(self, step: str) -> None:
        assert step.startswith(tuple(SKIPPED)), f"a step that this test does not know: {step}"
        self.skipped.append(step)


def tools() -> dict[str, str]:
    """The versions of the packages that build wheels in the image, by name."""
    return {name: version for name, version in pinned(ROOT / "requirements.lock").items() if name in BUILDS_WHEELS}
