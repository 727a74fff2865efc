"""What compose.yaml starts, started: each service's command with compose's environment, from the wheel in a new venv.

Only what belongs to the place is replaced: addresses by the embedded Kafka's, ports by free ones, volumes by temporary
folders. The virtual environment has what the image's has, deploy/requirements.lock and the wheel: what only the
developers' environment has is not there.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.utils import canonicalize_name

from services.local.kafka import EmbeddedKafka
from shared.clients.admin import Admin, event_time_topic
from shared.common.settings import KafkaSettings

ROOT = Path(__file__).resolve().parent.parent.parent
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/penstock.json").read_text(encoding="utf-8"))
LOCK = ROOT / "deploy" / "requirements.lock"
SECRET = "0123456789abcdef"
# Without the developers' commands, where their environment is an activated one.
SYSTEM_PATH = os.pathsep.join(p for p in os.environ["PATH"].split(":") if Path(p) != Path(sys.executable).parent)
START_TIMEOUT_SECONDS = 60
TOPICS = ("flights", "banks")


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def pinned(lock: Path) -> dict[str, str]:
    """Version by canonical name of what the lock has for this Python."""
    marked = re.findall(r"^([\w.-]+)==([^ ]+)(?: ; (.+?))? \\$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return {canonicalize_name(n): version for n, version, marker in marked if not marker or Marker(marker).evaluate()}


def link(name: str, version: str, python: Path) -> None:
    """Give another environment a distribution of this one, file by file; commands start the other one's Python."""
    found = distribution(name)
    assert found.version == version, f"{name}: the two locks differ, or scripts/install was not run"
    here, there = Path(sys.prefix), python.parent.parent
    for file in found.files or ():
        path = Path(os.path.normpath(str(file.locate())))
        if path.suffix == ".pyc" or not path.is_file():
            continue
        target = there / path.relative_to(here)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.name == "bin" and path.read_bytes().startswith(b"#!" + os.fsencode(here)):
            target.write_bytes(b"\n".join([b"#!" + os.fsencode(python), *path.read_bytes().split(b"\n")[1:]]))
            shutil.copymode(path, target)
            continue
        try:
            os.link(path, target)
        except OSError:  # on another disk
            shutil.copy2(path, target)


def fresh_environment(folder: Path, lock: Path, *, from_index: bool = False) -> Path:
    """The Python of a virtual environment in `folder` that has the lock's packages and Penstock's wheel alone.

    The packages are those that scripts/install put into this environment, or, with `from_index`, pip's own, as in the
    image. Without pip or setuptools in it: they would lend what the lock does not name.
    """
    pip("wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("penstock-*.whl")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    if from_index:
        pip("--python", python, "install", "--quiet", "--require-hashes", "--use-pep517", "-r", lock)
    else:
        for name, version in pinned(lock).items():
            link(name, version, python)
    # With its dependencies, but from nowhere: one that the lock left out ends it here.
    pip("--python", python, "install", "--quiet", "--no-index", wheel)
    return python


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin folder of a new virtual environment that is what the image has; one for the run, and about 1 GB."""
    folder = tmp_path_factory.mktemp("compose")
    yield fresh_environment(folder, LOCK).parent
    shutil.rmtree(folder / "venv")


def ask(python: Path, code: str, *arguments: str) -> str:
    """What a Python prints that sees neither the checkout nor the user's own packages."""
    command = [python, "-I", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=python.parent).stdout.strip()


def test_environment_is_the_lock(installed: Path) -> None:
    """The new environment has the distributions that the lock names for this Python, Penstock's wheel, and no other."""
    python = installed / "python"
    listed = ask(python, "from importlib.metadata import distributions as d; print(*(x.name for x in d()), sep='\\n')")
    named = set(pinned(LOCK))
    assert len(named) > 30
    assert {canonicalize_name(name) for name in listed.split()} == named | {"penstock"}
    site = ask(python, "import services; print(services.__file__)")
    assert Path(site).is_relative_to(installed.parent), "the checkout is seen instead of the wheel"


@pytest.mark.soak
def test_the_image_s_environment(tmp_path: Path) -> None:
    """What pip makes of the lock, with every hash checked, is the environment that the services are tried in."""
    python = fresh_environment(tmp_path, LOCK, from_index=True)
    listed = ask(python, "from importlib.metadata import distributions as d; print(*(x.name for x in d()), sep='\\n')")
    assert {canonicalize_name(name) for name in listed.split()} == set(pinned(LOCK)) | {"penstock"}


def missing(python: Path, names: set[str]) -> set[str]:
    """Those of the modules that this Python does not find."""
    find = "import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if not find_spec(n)))"
    return set(ask(python, find, *sorted(names)).split())


def imported_by(room: Path) -> set[str]:
    """The top-level modules that a room's code imports anywhere, inside of functions too."""
    nodes = [node for path in room.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}


def test_every_import_is_there(installed: Path) -> None:
    """What the wheel's code imports, late or early, is found in the new environment; what is the developers' is not."""
    python = installed / "python"
    names = set().union(*(imported_by(ROOT / room) for room in ("shared", "services", "api", "penstock")))
    assert {"aiokafka", "pyspark", "fastapi", "deltalake", "services"} <= names
    assert missing(python, names) == set()
    developers = {"pytest", "hypothesis", "yaml", "moto", "confluent_kafka", "pip", "setuptools", "hatchling"}
    assert missing(python, developers) == developers


def test_a_gap_in_the_lock_is_seen(installed: Path, tmp_path: Path) -> None:
    """Without one of its distributions the environment refuses the wheel, and a service's import of it fails."""
    (wheel,) = installed.parent.parent.glob("penstock-*.whl")
    (site,) = (installed.parent / "lib").glob("python*/site-packages")
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    (less,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for path in site.iterdir():
        if not re.match(r"(httpx|penstock)\b", path.name):
            (less / path.name).symlink_to(path)
    python = tmp_path / "venv" / "bin" / "python"
    with pytest.raises(AssertionError, match="No matching distribution found for httpx"):
        pip("--python", python, "install", "--quiet", "--no-index", wheel)
    pip("--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    assert missing(python, {"httpx", "aiokafka", "services"}) == {"httpx"}


@pytest.fixture(scope="module")
def bootstrap_servers(kafka: EmbeddedKafka) -> str:
    """The embedded Kafka, with the topics that are there before the services are."""

    async def create_topics() -> None:
        async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
            await admin.create_topics([event_time_topic(name, 4) for name in TOPICS], exist_ok=True)

    asyncio.run(create_topics())
    return kafka.bootstrap_servers


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def here(value: Any, replaced: dict[str, str]) -> str:
    """A value of compose.yaml with the secrets filled in and the places replaced."""
    text = re.sub(r"\$\{\w+:\?[^}]*\}", SECRET, str(value))
    for there, ours in replaced.items():
        text = text.replace(there, ours)
    return text


def places(service: str, bootstrap_servers: str, folder: Path, port: int) -> dict[str, str]:
    found = {
        "kafka-1:9092,kafka-2:9092,kafka-3:9092": bootstrap_servers,
        "8080": str(port),
        "spark://spark-master:7077": "local[1]",
    }
    for mount in SERVICES[service].get("volumes", ()):
        source, target = mount.split(":")[:2]
        (folder / source).mkdir(exist_ok=True)
        found[target] = str(folder / source)
    return found


@contextlib.contextmanager
def started(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a folder of its own, its output in `output` there; killed at the end if it still runs."""
    inherited = {name: os.environ[name] for name in ("HOME", "JAVA_HOME", "LANG") if name in os.environ}
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            command, env=inherited | environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_until_healthy(
    check: list[str], environment: dict[str, str], process: subprocess.Popen[bytes], folder: Path
) -> None:
    """Run compose's own health check until it says yes."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if subprocess.run(check, env=environment, capture_output=True, check=False, cwd=folder).returncode == 0:
            return
        time.sleep(0.3)
    said = (folder / "output").read_text(encoding="utf-8", errors="replace")[-4000:]
    pytest.fail(f"not healthy within {START_TIMEOUT_SECONDS} s; exit status {process.poll()}:\n{said}")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("service", ["producer", "consumer", "aggregator", "admin"])
def test_command_runs(service: str, installed: Path, bootstrap_servers: str, tmp_path: Path) -> None:
    """A service comes up healthy by compose's command and check, serves what the dashboard shows, and ends with 0."""
    port = free_port()
    replaced = places(service, bootstrap_servers, tmp_path, port)
    environment = {name: here(value, replaced) for name, value in SERVICES[service]["environment"].items()}
    environment["PATH"] = f"{installed}:{SYSTEM_PATH}"
    command = [here(part, replaced) for part in SERVICES[service]["command"]]
    kind, *check = SERVICES[service]["healthcheck"]["test"]
    assert kind == "CMD"
    with started([str(installed / command[0]), *command[1:]], environment, tmp_path) as process:
        wait_until_healthy([here(part, replaced) for part in check], environment, process, tmp_path)
        assert json.loads(get(f"http://127.0.0.1:{port}/health"))["service"] == service
        wait_for_metrics(f"http://127.0.0.1:{port}/metrics", shown_of(service))
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=60)
        assert status == 0, (tmp_path / "output").read_text(encoding="utf-8", errors="replace")[-4000:]


def wait_for_metrics(url: str, wanted: set[str]) -> None:
    """Until all are served: some come only once a partition is assigned."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while missing := wanted - served(get(url)):
        assert time.monotonic() < deadline, f"in the dashboard, but not served: {missing}"
        time.sleep(0.3)


def shown_of(service: str) -> set[str]:
    """The metrics of a service in the dashboard's queries."""
    queries = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    found = re.findall(rf'(penstock_\w+?)(?:_bucket)?\{{service="{service}"', queries)
    assert found or service == "admin", "the dashboard shows nothing of it"
    return set(found)


def served(metrics: str) -> set[str]:
    """The names of metrics in Prometheus' text format, of counters as they are queried."""
    return set(re.findall(r"^# TYPE (\w+) \w+$", metrics, re.MULTILINE))


def test_spark_cluster_runs(installed: Path, tmp_path: Path) -> None:
    """Master and worker come up by compose's commands and checks, and the worker reports to the master."""
    (tmp_path / "master").mkdir()
    (tmp_path / "worker").mkdir()
    master_port, master_ui, worker_ui = free_port(), free_port(), free_port()
    common = {"7077": str(master_port), "spark-master": "127.0.0.1", "/var/lib/penstock": str(tmp_path / "worker")}
    # Where the lock put Spark's own scripts, too.
    environment = {"PATH": f"{installed}:{SYSTEM_PATH}", "SPARK_LOCAL_IP": "127.0.0.1"}

    def command(service: str, port: int) -> list[str]:
        name, *arguments = (here(part, {**common, "8080": str(port)}) for part in SERVICES[service]["command"])
        return [str(installed / name), *arguments]

    def check(service: str, port: int) -> list[str]:
        return [here(part, {**common, "8080": str(port)}) for part in SERVICES[service]["healthcheck"]["test"][1:]]

    own = {name: here(value, common) for name, value in SERVICES["spark-worker"]["environment"].items()}
    with started(command("spark-master", master_ui), environment, tmp_path / "master") as master:
        wait_until_healthy(check("spark-master", master_ui), environment, master, tmp_path / "master")
        with started(command("spark-worker", worker_ui), environment | own, tmp_path / "worker") as worker:
            wait_until_healthy(check("spark-worker", worker_ui), environment, worker, tmp_path / "worker")
            deadline = time.monotonic() + START_TIMEOUT_SECONDS
            while not (workers := json.loads(get(f"http://127.0.0.1:{master_ui}/json/"))["workers"]):
                assert time.monotonic() < deadline, "no worker has come to the master"
                time.sleep(0.3)
            assert [w["state"] for w in workers] == ["ALIVE"]
