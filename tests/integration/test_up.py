"""README's programs, and `penstock up` with its topology, event, lake and audit, in a user's own project.

Penstock's wheel is installed beside the project, and the project's root is the working directory. The project has
packages with the names of the checkout's folders. Its topology checks that it imports these. If Penstock looked for its
own modules there, it would not find them.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.services.local import ports
from penstock.services.local.broker_config import QUICK_START
from penstock.services.spark.audit.settings import AuditSettings
from tests.documents import DOCS, README, block
from tests.integration.environments import ROOT, SYSTEM_PATH, Environments, inherited, required, run_python
from tests.integration.promtool import assert_clean
from tests.integration.spark.conftest import INTERPRETED

START_TIMEOUT_S, RESULT_TIMEOUT_S, COMMAND_TIMEOUT_S, STOP_TIMEOUT_S = 360, 240, 360, 90
LAKE_TIMEOUT_S = 180
LAST_LINE = "Ctrl-C stops everything"
OWN_PACKAGES = ("api", "services", "shared", "tests")
PROGRAM = "from visits import topology"
"""README's complete program contains this; its last line is its output."""
EXAMPLES = ("orders.py", "producing.py", "committing.py", "punctuated_sessions.py")
"""Files of `examples/`; the last line of each is the last line of its output."""
END = "--- end of a program ---\n"
RUN_PROGRAMS = f"""
import runpy, sys

for name in sys.argv[1:]:
    sys.argv = [name]
    runpy.run_path(name, run_name="__main__")
    print({END!r}, end="", flush=True)
"""
CONNECTORS = ("load_average.py", "value_lines.py")
"""Files of `examples/`: a source and a sink, as modules of the project."""


def flags() -> list[str]:
    """README's flags of `up`."""
    (line,) = [line for line in block(README, "sh", "penstock up").splitlines() if " up " in line]
    return shlex.split(line)[2:]


@pytest.fixture(scope="module")
def bin(tmp_path_factory: pytest.TempPathFactory, environments: Environments) -> Iterator[Path]:
    """The folder of commands of an environment with the wheel and the dependencies of `up`."""
    folder = tmp_path_factory.mktemp("project-environment")
    yield environments.make(folder, required("penstock", ["demo"])).parent
    shutil.rmtree(folder / "venv")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project with README's topology, which also imports the project's own packages."""
    own = ""
    for name in OWN_PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f'OWNER = "the user\'s {name}"\n', encoding="utf-8")
        own += f'import {name}\nassert {name}.OWNER == "the user\'s {name}"\n'
    (tmp_path / "visits.py").write_text(own + block(README, "python", "# visits.py"), encoding="utf-8")
    for name in CONNECTORS:
        shutil.copy(ROOT / "examples" / name, tmp_path)
    return tmp_path


def variables(bin: Path) -> dict[str, str]:
    return inherited() | {"PATH": f"{bin}:{SYSTEM_PATH}"}


@pytest.fixture
def printed_rows(bin: Path, project: Path) -> Iterator[dict[str, str]]:
    """The output of a running `up`, by the name of the row."""
    port = ports.pick("127.0.0.1", 1)[0]
    quick = f"--broker.jvm-options={json.dumps(QUICK_START)}"
    command = [bin / "penstock", "up", "--http.port=0", f"--connect-port={port}", quick, *flags()]
    environment = variables(bin) | {"PENSTOCK_COMPACTION__SPARK__CONF": json.dumps(INTERPRETED)}
    with subprocess.Popen(command, cwd=project, env=environment, stdout=subprocess.PIPE, text=True) as up:
        watchdog = threading.Timer(START_TIMEOUT_S, up.kill)
        watchdog.start()
        try:
            assert up.stdout is not None
            lines = []
            for line in up.stdout:
                lines.append(line)
                if LAST_LINE in line:
                    break
            watchdog.cancel()
            assert LAST_LINE in lines[-1], lines
            rows = {line[:11].strip(): line[11:].strip() for line in lines}
            assert rows["Connect"].startswith(f"http://127.0.0.1:{port}: ")
            yield rows
            up.send_signal(signal.SIGINT)
            assert up.wait(STOP_TIMEOUT_S) == 0
        finally:
            watchdog.cancel()
            up.kill()


def shell_output(script: str, cwd: Path) -> str:
    run = subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True, timeout=180, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def printed(command: list[str | Path], bin: Path, cwd: Path) -> str:
    """Run a command of the environment, which exits with status 0, and return its output."""
    done = subprocess.run(
        command, cwd=cwd, env=variables(bin), capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def lines_of(command: list[str], bin: Path, cwd: Path) -> list[dict[str, Any]]:
    """Run a command of Penstock with `--json`, and return its decoded output."""
    lines = printed([bin / "penstock", *command, "--json"], bin, cwd).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def run_a_connector(connectors: str, tmp_path: Path) -> None:
    """Create a sink at the printed address, outside and inside the allowed folder, and wait for its output."""
    written = tmp_path / ".penstock" / "files" / "visits.txt"
    sink = {"connector.class": "FileStreamSink", "topics": "visits", "file": str(written)}
    outside = httpx.put(f"{connectors}/visits/config", json={**sink, "file": str(tmp_path / "visits.txt")}, timeout=60)
    assert (outside.status_code, "connect.files.allowed" in outside.text) == (400, True)
    made = httpx.put(f"{connectors}/visits/config", json=sink, timeout=60)
    assert (made.status_code, made.headers["location"]) == (201, f"{connectors}/visits")
    deadline = time.monotonic() + RESULT_TIMEOUT_S
    while not written.exists() or "clicks" not in written.read_text():
        assert time.monotonic() < deadline, httpx.get(f"{connectors}/visits/status").text
        time.sleep(0.2)
    health = httpx.get(connectors.replace("/connectors", "/health"), timeout=60).json()
    assert health["checks"]["connect"]["status"] == "ok"


def run_the_projects_connectors(connectors: str, tmp_path: Path) -> None:
    """Run the project's source and sink: the sink writes each record of the source once, ordered by offset."""
    lines = tmp_path / "lines"
    json_values = {"value.converter": "org.apache.kafka.connect.json.JsonConverter"}
    json_values |= {"value.converter.schemas.enable": "false"}
    source = {"connector.class": "load_average.LoadConnector", "topic": "load", "interval.ms": "20"}
    source |= {"topic.creation.default.partitions": "1", "topic.creation.default.replication.factor": "1"}
    sink = {"connector.class": "value_lines.ValueLines", "topics": "load", "file": str(lines)}
    sink |= {"consumer.override.metadata.max.age.ms": "500"}
    for name, config in (("load", source), ("lines", sink)):
        made = httpx.put(f"{connectors}/{name}/config", json=config | json_values, timeout=60)
        assert made.status_code == 201, made.text
    deadline = time.monotonic() + RESULT_TIMEOUT_S
    while not lines.exists() or lines.read_text(encoding="utf-8").count("\n") < 3:
        assert time.monotonic() < deadline, httpx.get(f"{connectors}/lines/status", timeout=60).text
        time.sleep(0.2)
    for name in ("load", "lines"):
        assert httpx.delete(f"{connectors}/{name}", timeout=60).status_code == 204
    written = lines.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    coordinates = [f"load-0@{offset} {{'count': {offset + 1}," for offset in range(len(written))]
    assert [line.partition(" 'load'")[0] for line in written] == coordinates != []


def check_the_workers_rest_api(worker: str) -> None:
    """Check that the worker's own address serves paths that the gateway reserves for its page: version and loggers."""
    assert httpx.get(f"{worker}/", timeout=60).json().keys() == {"version", "commit", "kafka_cluster_id"}
    level = httpx.put(f"{worker}/admin/loggers/penstock.shared.connect", json={"level": "DEBUG"}, timeout=60)
    assert level.status_code == 200
    assert httpx.get(f"{worker}/admin/loggers", timeout=60).json()["penstock.shared.connect"]["level"] == "DEBUG"
    assert httpx.get(f"{worker}/connectors", timeout=60).json() == ["visits"]


def read_the_lake(address: str, bin: Path, project: Path) -> None:
    """Start a compaction as the document shows, wait until it has written the visit, and run docs/lake.md's program,
    which prints what that document shows.
    """
    (start,) = re.findall(r"`(curl -X POST [^`]+)`", (DOCS / "deployment.md").read_text(encoding="utf-8"))
    assert json.loads(shell_output(start.replace("http://127.0.0.1:8080", address), project)) == {"started": True}
    program = block(DOCS / "lake.md", "py", "DeltaTable(")
    (project / "read_lake.py").write_text(
        program.replace('"lake/visits/', '".penstock/lake/penstock/'), encoding="utf-8"
    )
    (shown,) = [line.removeprefix("# ") for line in program.splitlines() if line.startswith("# ")]
    log = project / ".penstock" / "lake" / "penstock" / "closed" / "visits" / "_delta_log"
    deadline = time.monotonic() + LAKE_TIMEOUT_S
    while not any('"add":' in commit.read_text(encoding="utf-8") for commit in log.glob("*.json")):
        assert time.monotonic() < deadline, shell_output("cat .penstock/logs/aggregator.log", project)
        time.sleep(0.2)
    assert printed([bin / "python", "read_lake.py"], bin, project).strip() == shown


def test_the_project_imports_the_wheel_alone(bin: Path) -> None:
    """The environment imports the wheel and not the checkout, and the wheel has one top-level package."""
    where = Path(run_python(bin / "python", "import penstock; print(penstock.__file__)"))
    assert where.is_relative_to(bin.parent)
    assert not where.is_relative_to(ROOT)
    assert not {path.name for path in where.parent.parent.iterdir()} & set(OWN_PACKAGES)


def test_programs_print_what_they_show(bin: Path, project: Path) -> None:
    """README's program and each example run in the project with public modules alone, and print their last line.

    One Python runs them, since each would take a second of CPU for its imports.
    """
    programs = {name: (ROOT / "examples" / name).read_text(encoding="utf-8") for name in EXAMPLES}
    programs["try_visits.py"] = block(README, "python", PROGRAM)
    for name, program in programs.items():
        assert "penstock.shared" not in program
        (project / name).write_text(program, encoding="utf-8")
    output = printed([bin / "python", "-c", RUN_PROGRAMS, *programs], bin, project)
    last = {name: text.splitlines()[-1] for name, text in zip(programs, output.split(END), strict=False)}
    assert last == {name: text.strip().splitlines()[-1].removeprefix("# ") for name, text in programs.items()}


def test_up_and_its_document(printed_rows: dict[str, str], bin: Path, tmp_path: Path) -> None:
    """The event that `up` prints is stored, and the document's visit is found where it says and in the lake. The
    printed audit has valid arguments, which name the lake, the application and Kafka: with them `penstock sessions`
    reads closed and open windows.
    """
    shown = block(DOCS / "deployment.md", "console", "curl").replace("http://127.0.0.1:8080", printed_rows["dashboard"])
    post, look = (step.strip().rsplit("\n", 1) for step in shown.split("$ ")[1:])
    assert shell_output(post[0], tmp_path).strip() == post[1]
    assert json.loads(shell_output(printed_rows["ingest"], tmp_path))["stored"] == 1
    deadline = time.monotonic() + RESULT_TIMEOUT_S
    while '"topic": "visits"' not in (tmp_path / ".penstock" / "logs" / "consumer.log").read_text():
        assert time.monotonic() < deadline, shell_output("cat .penstock/logs/*.log", tmp_path)
        time.sleep(0.2)
    assert shell_output(look[0], tmp_path).strip() == look[1]
    run_a_connector(printed_rows["connectors"], tmp_path)
    run_the_projects_connectors(printed_rows["connectors"], tmp_path)
    assert_clean(httpx.get(f"{printed_rows['dashboard']}/metrics", timeout=60).text)
    check_the_workers_rest_api(printed_rows["Connect"].partition(": ")[0])
    assert printed_rows["topology"] == "visits:topology, as application penstock"
    logs = tmp_path / ".penstock" / "logs"
    handler = "penstock.services.local.log_handler:log_record"
    assert printed_rows["results"] == f"topic visits, handled by {handler}, which logs to {logs / 'consumer.log'}"
    assert printed_rows["files"].startswith(f"{tmp_path / '.penstock' / 'files'}, ")
    assert printed_rows["logs"] == str(logs)
    assert "compaction.interval_ms=300000" in printed_rows["lake"]
    read_the_lake(printed_rows["dashboard"], bin, tmp_path)
    program, *audit = shlex.split(printed_rows["audit"])
    assert (Path(program).name, audit[0]) == ("penstock", "audit")
    settings = AuditSettings.load(audit[1:], program="penstock audit")
    assert settings.kafka.bootstrap_servers == printed_rows["Kafka"]
    assert (settings.application, settings.lake) == ("penstock", str(tmp_path / ".penstock" / "lake"))
    windows = lines_of(["sessions", *audit[1:]], bin, tmp_path)
    assert {window["status"] for window in windows} == {"closed", "open"}
