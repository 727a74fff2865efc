"""The image and compose.yaml: the Dockerfile's steps make an environment, and each service runs in it.

A service runs by compose's command with compose's environment. The test replaces addresses by the embedded Kafka's,
ports by free ones and volumes by temporary folders.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml

from penstock import Producer
from penstock.services.local.broker_config import QUICK_START
from penstock.services.local.ports import pick
from penstock.services.spark.spark_session import SPARK_JARS
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.common.settings import KafkaSettings
from tests.integration.connect import postgres
from tests.integration.environments import (
    LOCK,
    ROOT,
    SYSTEM_PATH,
    Environments,
    distributions,
    get,
    pinned,
    required,
    run_python,
    started,
)
from tests.integration.image import DOCKERFILE, SKIPPED, Build, instructions, tools
from tests.integration.promtool import assert_clean
from tests.shared_broker import Broker
from tests.source_imports import imported_modules

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/penstock.json").read_text(encoding="utf-8"))
CACHE = "home/penstock/.cache/penstock"
SECRET = "0123456789abcdef"
START_TIMEOUT_SECONDS = 240  # the first start compiles the kernels, which the image has compiled already
TOPICS = ("flights", "banks")


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """The result of the Dockerfile's steps; about 1 GB."""
    build = Build(tmp_path_factory.mktemp("image"), from_index=False).all_steps()
    yield build
    shutil.rmtree(build.root / "opt")


@pytest.fixture(scope="session")
def installed(image: Build) -> Path:
    """The image's folder of commands."""
    return image.python.parent


def test_every_step_is_known() -> None:
    """Every entry of SKIPPED matches a step, and most commands run."""
    steps = instructions(DOCKERFILE)
    commands = [c.strip() for name, argument in steps if name == "RUN" for c in argument.split(" && ")]
    whole = [f"{name} {argument}" for name, argument in steps if name != "RUN"]
    for skipped in SKIPPED:
        assert [step for step in (*commands, *whole) if step.startswith(skipped)], skipped
    assert len([c for c in commands if not c.startswith(tuple(SKIPPED))]) >= 7


def test_the_image_has_the_locks_packages(image: Build) -> None:
    """The image has the lock's packages, Penstock and Spark's jars, and its command runs."""
    assert_complete(image)
    assert len(pinned(LOCK)) > 30
    site = Path(run_python(image.python, "import penstock; print(penstock.__file__)"))
    assert site.is_relative_to(image.root), "the checkout is seen instead of the wheel"


@pytest.mark.soak
def test_the_steps_run_with_an_index(tmp_path: Path) -> None:
    """The steps also work with downloaded packages and jars, and make the class archive."""
    build = Build(tmp_path, from_index=True).all_steps()
    assert_complete(build)
    assert len(list((build.root / CACHE).glob("spark-*.jsa"))) == 1
    shutil.rmtree(tmp_path / "opt")


def assert_complete(image: Build) -> None:
    assert image.output.strip().startswith("Usage: penstock")
    named = {*pinned(LOCK), *tools(), "penstock"}
    assert distributions(image.python) - {"pip", "setuptools"} == named - {"setuptools"}
    assert list((image.root / CACHE / SPARK_JARS.folder).glob("*.jar"))


def missing(python: Path, names: set[str]) -> set[str]:
    """The modules that this Python does not find."""
    find = "import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if not find_spec(n)))"
    return set(run_python(python, find, *sorted(names)).split())


LATER_STANDARD_LIBRARY = {"compression"} - sys.stdlib_module_names
"""Modules of a newer Python's standard library, for which this one has a backport."""


def test_every_import_is_installed(installed: Path) -> None:
    """The image has every module that the wheel's code imports, and no module of the development tools."""
    python = installed / "python"
    names = imported_modules(*(ROOT / room for room in ("shared", "services", "api", "penstock")))
    assert {"aiokafka", "pyspark", "fastapi", "deltalake", "penstock"} <= names
    assert missing(python, names - LATER_STANDARD_LIBRARY) == set()
    developers = {"pytest", "hypothesis", "yaml", "moto", "confluent_kafka"}
    assert missing(python, developers) == developers


def test_a_missing_dependency_is_found(environments: Environments, tmp_path: Path) -> None:
    """Without one of its dependencies the wheel's installation is incomplete, and the module is missing."""
    less = {name: version for name, version in required("penstock").items() if name != "httpx"}
    with pytest.raises(AssertionError, match="httpx"):
        environments.make(tmp_path, less)
    assert missing(tmp_path / "venv" / "bin" / "python", {"httpx", "aiokafka", "penstock"}) == {"httpx"}


@pytest.fixture(scope="module")
def bootstrap_servers(kafka: Broker) -> str:
    """The embedded Kafka, with the topics that exist before the services start."""

    async def create_topics() -> None:
        async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
            await admin.create_topics([event_time_topic(name, 4) for name in TOPICS], exist_ok=True)

    asyncio.run(create_topics())
    return kafka.bootstrap_servers


def substituted(value: Any, replaced: dict[str, str]) -> str:
    """A value of compose.yaml with secrets filled in and texts replaced."""
    text = re.sub(r"\$\{\w+:\?[^}]*\}", SECRET, str(value))
    for there, ours in replaced.items():
        text = text.replace(there, ours)
    return text


def replacements(service: str, bootstrap_servers: str, folder: Path, port: int) -> dict[str, str]:
    """Replacements for a service's addresses, volumes and configuration files in compose.yaml."""
    found = {
        "kafka-1:9092,kafka-2:9092,kafka-3:9092": bootstrap_servers,
        f"http://{service}:8080": f"http://127.0.0.1:{port}",
        "8080": str(port),
        "spark://spark-master:7077": "local[1]",
    }
    for mount in SERVICES[service].get("volumes", ()):
        source, target = mount.split(":")[:2]
        (folder / source).mkdir(exist_ok=True)
        found[target] = str(folder / source)
    for config in SERVICES[service].get("configs", ()):
        file = folder / Path(config["target"]).name
        file.write_text(substituted(COMPOSE["configs"][config["source"]]["content"], found), encoding="utf-8")
        found[config["target"]] = str(file)
    return found


def wait_until_healthy(
    check: list[str], port: int, environment: dict[str, str], process: subprocess.Popen[bytes], folder: Path
) -> None:
    """Run compose's health check until it succeeds. Each check starts a Python, so the first one waits for the port."""

    def is_healthy() -> bool:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return False
        return subprocess.run(check, env=environment, capture_output=True, check=False, cwd=folder).returncode == 0

    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if is_healthy():
            return
        time.sleep(0.3)
    output = (folder / "output").read_text(encoding="utf-8", errors="replace")[-4000:]
    pytest.fail(f"not healthy within {START_TIMEOUT_SECONDS} s; exit status {process.poll()}:\n{output}")


@contextmanager
def service_running(
    service: str, installed: Path, bootstrap_servers: str, folder: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a service by compose's command until compose's check succeeds, and yield its process and HTTP port."""
    (port,) = pick("127.0.0.1", 1)
    replaced = replacements(service, bootstrap_servers, folder, port)
    environment = {name: substituted(value, replaced) for name, value in SERVICES[service]["environment"].items()}
    environment["PATH"] = f"{installed}:{SYSTEM_PATH}"
    command = [substituted(part, replaced) for part in SERVICES[service]["command"]]
    kind, *check = SERVICES[service]["healthcheck"]["test"]
    assert kind == "CMD"
    with started([str(installed / command[0]), *command[1:]], environment, folder) as process:
        wait_until_healthy([substituted(part, replaced) for part in check], port, environment, process, folder)
        yield process, port


def stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Stop a service as the container engine does; its exit status is 0."""
    process.send_signal(signal.SIGTERM)
    status = process.wait(timeout=60)
    assert status == 0, (folder / "output").read_text(encoding="utf-8", errors="replace")[-4000:]


@pytest.mark.parametrize("service", ["producer", "consumer", "aggregator", "admin"])
def test_command_runs(service: str, installed: Path, bootstrap_servers: str, tmp_path: Path) -> None:
    """Each service becomes healthy by compose's command and check, serves the dashboard's metrics, and exits with
    status 0.
    """
    with service_running(service, installed, bootstrap_servers, tmp_path) as (process, port):
        assert json.loads(get(f"http://127.0.0.1:{port}/health"))["service"] == service
        assert_clean(wait_for_metrics(f"http://127.0.0.1:{port}/metrics", dashboard_metrics(service)))
        stop(process, tmp_path)


@pytest.fixture(scope="module")
def connect_worker(
    installed: Path, bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, Path]]:
    """The HTTP port and the folder of a Connect worker that runs by compose's command and check."""
    folder = tmp_path_factory.mktemp("connect")
    with service_running("connect", installed, bootstrap_servers, folder) as (process, port):
        yield port, folder
        stop(process, folder)


def test_connect_worker_runs(connect_worker: tuple[int, Path]) -> None:
    """The Connect worker becomes healthy by compose's command and check, requires compose's token, and exits with
    status 0.
    """
    port, _ = connect_worker
    assert_clean(get(f"http://127.0.0.1:{port}/metrics"))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(f"http://127.0.0.1:{port}/connectors")


@pytest.mark.skipif(not postgres.is_installed(), reason="no Postgres: initdb, pg_ctl and postgres must be on the PATH")
def test_connect_worker_writes_to_postgres(
    installed: Path, bootstrap_servers: str, connect_worker: tuple[int, Path]
) -> None:
    """The connectors that compose's service creates write closed windows to Postgres; created a second time, they
    continue.
    """
    port, folder = connect_worker
    user, database = (SERVICES["postgres"]["environment"][f"POSTGRES_{name}"] for name in ("USER", "DB"))
    with postgres.server() as admin_url:
        address = admin_url.partition("@")[2].partition("/")[0]
        for statement in (f"CREATE ROLE {user} LOGIN", f"CREATE DATABASE {database} OWNER {user}"):
            asyncio.run(query_postgres(admin_url, statement))
        url = f"postgresql://{user}@{address}/{database}"
        create_connectors(installed, port, address, folder)
        asyncio.run(send_bank(bootstrap_servers, flights=41))
        wait_for_rows(url, [("UA-EWR", 41, 7.5)], folder)
        create_connectors(installed, port, address, folder)
        asyncio.run(send_bank(bootstrap_servers, flights=42))
        wait_for_rows(url, [("UA-EWR", 42, 7.5)], folder)
        assert_clean(wait_for_metrics(f"http://127.0.0.1:{port}/metrics", dashboard_metrics("connect")))


def create_connectors(installed: Path, port: int, database: str, folder: Path) -> None:
    """Run compose's one-shot service that creates the connectors, with the addresses of this worker and this
    Postgres.
    """
    service = SERVICES["connectors"]
    replaced = {"http://connect:8080": f"http://127.0.0.1:{port}"}
    for mount in service["volumes"]:
        source, target = mount.split(":")[:2]
        copy = shutil.copytree(ROOT / source, folder / "connectors", dirs_exist_ok=True)
        for file in copy.iterdir():
            file.write_text(file.read_text(encoding="utf-8").replace("//postgres:5432/", f"//{database}/"))
        replaced[target] = str(copy)
    environment = {name: substituted(value, replaced) for name, value in service["environment"].items()}
    name, *arguments = (substituted(part, replaced) for part in service["command"])
    done = subprocess.run(
        [installed / name, *arguments],
        env=environment | {"PATH": f"{installed}:{SYSTEM_PATH}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def send_bank(bootstrap_servers: str, flights: int) -> None:
    """Send a closed window as the aggregator writes it."""
    window = {"key": "UA-EWR", "start": 1_357_034_400_000, "end": 1_357_038_000_000}
    value = json.dumps({**window, "flights": flights, "mean_delay": 7.5}).encode()
    async with Producer(KafkaSettings(bootstrap_servers=bootstrap_servers)) as producer:
        await (await producer.send("banks", value, key=b"UA-EWR"))


async def query_postgres(url: str, statement: str) -> list[tuple[Any, ...]]:
    """The rows of one statement."""
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    finally:
        await connection.close()


def wait_for_rows(url: str, wanted: list[tuple[Any, ...]], folder: Path) -> None:
    """Wait until the table of windows has these rows."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    rows: list[tuple[Any, ...]] = []
    while rows != wanted:
        with suppress(asyncpg.UndefinedTableError):
            rows = asyncio.run(query_postgres(url, "SELECT key, flights, mean_delay FROM banks"))
        output = (folder / "output").read_text(encoding="utf-8", errors="replace")[-4000:]
        assert time.monotonic() < deadline, f"{rows}\n{output}"
        time.sleep(0.3)


def wait_for_metrics(url: str, wanted: set[str]) -> str:
    """Wait until the page has all wanted metrics, and return it; some appear once a partition is assigned."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while missing := wanted - served(page := get(url)):
        assert time.monotonic() < deadline, f"in the dashboard, but not served: {missing}"
        time.sleep(0.3)
    return page


def dashboard_metrics(service: str) -> set[str]:
    """The metrics of a service in the dashboard's queries."""
    queries = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    found = re.findall(rf'((?:penstock|kafka_connect)_\w+?)(?:_bucket)?\{{service="{service}"', queries)
    assert found or service == "admin", "the dashboard shows nothing of it"
    return set(found)


def served(metrics: str) -> set[str]:
    """The names of the metrics on a page in Prometheus' text format."""
    return set(re.findall(r"^# TYPE (\w+) \w+$", metrics, re.MULTILINE))


def test_spark_cluster_runs(installed: Path, tmp_path: Path) -> None:
    """Spark's master and worker become healthy by compose's commands and checks, and the worker registers with the
    master.
    """
    (tmp_path / "master").mkdir()
    (tmp_path / "worker").mkdir()
    master_port, master_ui, worker_ui = pick("127.0.0.1", 3)
    common = {"7077": str(master_port), "spark-master": "127.0.0.1", "/var/lib/penstock": str(tmp_path / "worker")}
    environment = {
        "PATH": f"{installed}:{SYSTEM_PATH}",  # Spark's own scripts are in the same folder
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JDK_JAVA_OPTIONS": " ".join(QUICK_START),
    }

    def command(service: str, port: int) -> list[str]:
        name, *arguments = (substituted(part, {**common, "8080": str(port)}) for part in SERVICES[service]["command"])
        return [str(installed / name), *arguments]

    def check(service: str, port: int) -> list[str]:
        return [
            substituted(part, {**common, "8080": str(port)}) for part in SERVICES[service]["healthcheck"]["test"][1:]
        ]

    own = {name: substituted(value, common) for name, value in SERVICES["spark-worker"]["environment"].items()}
    with started(command("spark-master", master_ui), environment, tmp_path / "master") as master:
        wait_until_healthy(check("spark-master", master_ui), master_ui, environment, master, tmp_path / "master")
        with started(command("spark-worker", worker_ui), environment | own, tmp_path / "worker") as worker:
            wait_until_healthy(check("spark-worker", worker_ui), worker_ui, environment, worker, tmp_path / "worker")
            deadline = time.monotonic() + START_TIMEOUT_SECONDS
            while not (workers := json.loads(get(f"http://127.0.0.1:{master_ui}/json/"))["workers"]):
                assert time.monotonic() < deadline, "no worker has come to the master"
                time.sleep(0.3)
            assert [w["state"] for w in workers] == ["ALIVE"]
