"""The cost of an import: CPU time, memory and installed size, compared with aiokafka, FastStream and Quix Streams.

uv installs each package into its own virtual environment, with its requirements only. Penstock is the wheel of this
checkout without extras. Each import runs in its own process, in turns, after one run each that compiles the modules.
CPU time is that of the import alone, as the median. Memory is the resident set of the whole process after it, as the
median. Size is that of the environment's site-packages before any import. The target: a producer's import takes at most
1.2 times the CPU time of importing its dependencies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RATIO_MAX = 1.2
PENSTOCK, AIOKAFKA, FASTSTREAM, QUIX = "penstock", "aiokafka", "faststream[kafka]", "quixstreams"
PRODUCER = "from penstock import Producer"
ALONE, OWN_DEPENDENCIES = "Python alone", "the dependencies of Producer alone"
# The distributions of pyproject.toml that a producer loads.
DEPENDENCIES = (
    "import aiokafka, cramjam, msgspec, murmurhash2, numpy, prometheus_client, pydantic, pydantic_settings, structlog, "
    "typing_extensions"
)
MEASURED = """
import time
began = time.process_time()
{}
cpu = time.process_time() - began
with open("/proc/self/statm") as statm:
    pages = int(statm.read().split()[1])
import os
print(cpu, pages * os.sysconf("SC_PAGE_SIZE"))
"""


@dataclass(frozen=True)
class Contestant:
    """An import: the row's name, the package to install, and the statement."""

    name: str
    package: str
    statement: str


CONTESTANTS = (
    Contestant(ALONE, PENSTOCK, "pass"),
    Contestant("import penstock", PENSTOCK, "import penstock"),
    Contestant(PRODUCER, PENSTOCK, PRODUCER),
    Contestant(OWN_DEPENDENCIES, PENSTOCK, DEPENDENCIES),
    Contestant("from aiokafka import AIOKafkaProducer", AIOKAFKA, "from aiokafka import AIOKafkaProducer"),
    Contestant("from faststream.kafka import KafkaBroker", FASTSTREAM, "from faststream.kafka import KafkaBroker"),
    Contestant("from quixstreams import Application", QUIX, "from quixstreams import Application"),
)


def environment(folder: Path, package: str) -> Path:
    """The Python of a new environment with a package."""
    uv = [sys.executable, "-m", "uv", "--quiet"]
    python = folder / "bin" / "python"
    subprocess.run([*uv, "venv", "--python", sys.executable, folder], check=True)
    what = str(ROOT) if package == PENSTOCK else package
    subprocess.run([*uv, "pip", "install", "--python", python, what], check=True)
    return python


def installed_bytes(folder: Path) -> int:
    """The size of all files in a folder, each once."""
    return sum({path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}.values())


def version(python: Path, package: str) -> str:
    """The version of a package that is installed in an environment."""
    name = package.partition("[")[0]
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def imported(python: Path, statement: str) -> tuple[float, int]:
    """CPU seconds and resident bytes of one import."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [python, "-c", MEASURED.format(statement)],
        capture_output=True,
        text=True,
        check=True,
        cwd=python.parent,
        env=environ,
    )
    cpu, resident = done.stdout.split()[-2:]
    return float(cpu), int(resident)


def table(figures: dict[str, dict[str, float]]) -> str:
    """The figures as a table of Markdown."""
    lines = ["| | CPU of the import | memory after it | installed |", "|---|---|---|---|"]
    for name, of in figures.items():
        mib = [f"{of[key] / (1 << 20):.0f} MiB" if of[key] else "" for key in ("resident_bytes", "installed_bytes")]
        lines.append(f"| {name} | {of['cpu_seconds'] * 1000:.0f} ms | {mib[0]} | {mib[1]} |")
    return "\n".join(lines)


def ratio(figures: dict[str, dict[str, float]]) -> float:
    """CPU time of a producer's import over that of its dependencies."""
    return figures[PRODUCER]["cpu_seconds"] / figures[OWN_DEPENDENCIES]["cpu_seconds"]


def main(arguments: list[str]) -> int:
    """Install, measure, and print the table. The status is 1 if the ratio misses its target."""
    parser = argparse.ArgumentParser(prog="scripts/bench footprint", description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="penstock-footprint-") as work:
        pythons, sizes, versions = {}, {}, {}
        for package in dict.fromkeys(each.package for each in CONTESTANTS):
            pythons[package] = python = environment(Path(work) / package.partition("[")[0], package)
            sizes[package] = installed_bytes(python.parent.parent / "lib")
            versions[package] = version(python, package)
        runs: dict[str, list[tuple[float, int]]] = {each.name: [] for each in CONTESTANTS}
        for run in range(given.runs + 1):
            for each in CONTESTANTS:
                measured = imported(pythons[each.package], each.statement)
                if run:
                    runs[each.name].append(measured)
    figures = {
        each.name: {
            "cpu_seconds": statistics.median(cpu for cpu, _ in runs[each.name]),
            "resident_bytes": statistics.median(resident for _, resident in runs[each.name]),
            "installed_bytes": sizes[each.package] if each.name not in (ALONE, OWN_DEPENDENCIES) else 0,
        }
        for each in CONTESTANTS
    }
    seen = ratio(figures)
    print(f"{given.runs} runs of each in turns: {', '.join(f'{name} {text}' for name, text in versions.items())}")
    print(table(figures))
    print(f"{PRODUCER} / its dependencies: {seen:.2f} (target: {RATIO_MAX})")
    if given.json:
        print(json.dumps({"figures": figures, "ratio": seen, "versions": versions}))
    return 1 if seen > RATIO_MAX else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
