"""Each extra alone, installed into an empty environment, runs its smallest program.

The environments hold only what the metadata names, so that a package of another extra cannot hide a missing dependency.
"""

from __future__ import annotations

import ast
import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution, version
from pathlib import Path

import pytest

from penstock.services.local.broker_config import KAFKA_JARS, QUICK_START
from penstock.shared.common.java.class_archive import archive_options
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import fetch_jars
from tests.integration.environments import (
    ROOT,
    SYSTEM_PATH,
    Environments,
    distributions,
    inherited,
    link,
    required,
    run_python,
)
from tests.integration.maven_mirror import mirror
from tests.shared_broker import Broker

WITH_SPARK = ("server", "spark", "streams")
"""The extras that an aggregator with compactions needs."""
INSTALL_TIMEOUT_S = 600
BASE_BYTES_MAX = 120_000_000
HEAVY = {"pyarrow", "deltalake", "fastapi", "numba", "pyspark", "pandas", "uvicorn", "datasketches"}
FOLDER = Path(__file__).with_name("extra_programs")
VISIT = b'{"key":"ann","start":0,"end":1000,"clicks":2}'
PRINTED = {
    "streams": f"{VISIT!r}",
    "server": '200 1\nTrue\n{"id":1}',
    "spark": "[{'key': 'ann', 'clicks': 2}]",
    "postgres": "['insert.mode']\nConnectionRefusedError",
    "avro": "b'\\x00\\x00\\x00\\x00\\x07\\x02\\x06tea' True {'id': 1, 'item': 'tea'}",
    "files": '[0, 1]\n[b\'{"id":0}\\n{"id":1}\\n\']',
    "schemas": '200 None\n400 index 0: schema: the event: "id" is a required property',
    "rocksdb": "2",
    "otel": "send orders 0 True",
    "demo": "2 penstock demo: --time: clicks.csv has no column 'when'; it has user, at",
}
"""The output of each extra's program, extra_programs/EXTRA.py."""
PUBLIC = {"penstock", *(f"penstock.{name}" for name in ("clients", "connect", "errors", "otel", "streams", "testing")),
          "penstock.connect.connectors", "penstock.connect.converters"}  # fmt: skip
"""The public modules."""

LACKING = {
    "streams": "import penstock.streams",
    "server": "command('producer')",
    "spark": "command('compact', '--application', 'a', '--lake', 'lake')",
    "postgres": """
from penstock.connect.connectors import PostgresSinkConnector
asyncio.run(PostgresSinkConnector.task_class().start({"connection.url": "postgres://127.0.0.1:1/a", "topics": "a"}))
""",
    "avro": """
from penstock.connect.converters import AvroConverter
AvroConverter().configure({"schema.registry.url": "http://127.0.0.1:1"}, is_key=False)
""",
    "files": """
from penstock.connect import AllowedFiles, SinkTaskContext
from penstock.connect.connectors import FilesSinkConnector
class Context(SinkTaskContext):
    files = AllowedFiles(["memory://a"])
task = FilesSinkConnector.task_class()
task.initialize(Context())
asyncio.run(task.start({"url": "memory://a", "topics": "a"}))
""",
    "schemas": "command('producer', '--config', 'schema.toml')",
    "rocksdb": """
from penstock.streams import StateDirectory, StreamsBuilder
from penstock.testing import TopologyTestDriver
state = StateDirectory("state", "app", memory_bytes_max=2**24, cache_bytes_max=0)
state.acquire()
builder = StreamsBuilder()
builder.add_store("a")
TopologyTestDriver(builder.build(), state=state)
""",
    "otel": "import penstock.otel",
    "demo": "command('demo')",
}
"""Code that needs each extra and fails without it."""
FIRST_NEEDED = {"schemas": "server", "rocksdb": "streams"}
"""An extra that requires another one; the error names the other one if both are missing."""
FAILURES = """
import asyncio, contextlib, gc, io, json, sys
from penstock.services.cli import main

gc.disable()  # imports are faster without it

def command(*arguments):
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main()
        except SystemExit as e:
            status = e.code or 0
    raise RuntimeError(f"{status} {errors.getvalue().strip()}")

failures = {}
for name, code in json.loads(sys.argv[1]).items():
    try:
        exec(code)
        failures[name] = ""
    except Exception as e:
        failures[name] = str(e)
print(json.dumps(failures))
"""
"""Prints the error of each code, by name. A command's error is its exit status and what it prints to standard error."""

START_KAFKA = """
import asyncio, subprocess, sys
from pathlib import Path
from penstock import Admin, NewTopic, Producer

async def main(folder):
    command = [Path(sys.executable).with_name("penstock"), "kafka", "--data-dir", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as kafka:
        servers = kafka.stdout.readline().strip()
        async with Admin(servers) as admin:
            await admin.create_topics([NewTopic("clicks", 1)])
        async with Producer(servers) as producer:
            print((await producer.send_and_wait("clicks", b"a")).offset)
        kafka.terminate()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, environments: Environments) -> Iterator[Path]:
    """The Python of an environment with the base alone."""
    folder = tmp_path_factory.mktemp("base")
    yield environments.make(folder, required("penstock"))
    shutil.rmtree(folder / "venv")


def run(python: Path, folder: Path, *command: str | Path) -> str:
    """Run a Python in `folder` that imports neither the checkout nor the user's packages, and return its output."""
    variables = inherited() | {"PATH": f"{python.parent}:{SYSTEM_PATH}", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [python, "-I", *command], env=variables, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def failures(python: Path, folder: Path, codes: dict[str, str]) -> dict[str, str]:
    """The error of each code, by name."""
    found: dict[str, str] = json.loads(run(python, folder, "-c", FAILURES, json.dumps(codes)))
    return found


def named_extras(python: Path, folder: Path, extras: Iterable[str]) -> dict[str, str]:
    """The extra that is named when each of these is used without being installed. A command fails with one line and
    status 2.
    """
    (folder / "schema.toml").write_text('[ingest.topics.a]\njson_schema = "schema.json"\n', encoding="utf-8")
    (folder / "schema.json").write_text("{}", encoding="utf-8")
    codes = {extra: LACKING[extra] for extra in extras}
    errors = failures(python, folder, codes)
    for extra, code in codes.items():
        assert "command(" not in code or (errors[extra][:2], "\n" in errors[extra]) == ("2 ", False), errors[extra]
    return {extra: error.rpartition('pip install "penstock[')[2].removesuffix(']"') for extra, error in errors.items()}


def test_the_base_is_small_and_has_the_clients_and_the_command(tmp_path: Path, base: Path) -> None:
    """A base install takes less than 120 MB, imports the clients, runs commands, and names the extra that another
    command needs.
    """
    assert not distributions(base) & HEAVY
    site = Path(run_python(base, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    sizes = {
        path.stat().st_ino: path.stat().st_size
        for path in site.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert sum(sizes.values()) < BASE_BYTES_MAX
    run_python(base, "from penstock import Producer, Consumer, Admin; import penstock.connect, penstock.testing")
    usage = subprocess.run([base.with_name("penstock"), "--help"], capture_output=True, text=True, check=True).stdout
    assert "Usage: penstock" in usage
    names = ("doctor --help", "dlq --help", "jars --help", "aggregator", "up", "jars spark", "jars s3")
    ran = failures(base, tmp_path, {name: f"command(*{name.split()})" for name in names})
    for name, error in ran.items():
        expected = ("0", False) if name.endswith("--help") else ("2", True)
        assert (error[:1], "pip install" in error) == expected, (name, error)
        assert "\n" not in error
    errors = named_extras(base, tmp_path, LACKING)
    assert errors == {extra: FIRST_NEEDED.get(extra, extra) for extra in LACKING}


def test_the_programs_import_only_public_modules() -> None:
    """Each extra has a program, and the programs import only Penstock's public modules."""
    assert (
        set(PRINTED) == set(LACKING) == set(distribution("penstock").metadata.get_all("Provides-Extra") or ()) - {"all"}
    )
    for program in FOLDER.glob("*.py"):
        imports = [
            node for node in ast.walk(ast.parse(program.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        modules = {getattr(node, "module", None) or name.name for node in imports for name in node.names}
        assert {m for m in modules if m.startswith("penstock")} <= PUBLIC, program


@pytest.mark.parametrize("extra", PRINTED)
def test_an_extra_alone_runs_its_smallest_program(
    tmp_path: Path, environments: Environments, kafka: Broker, topic_name: str, extra: str
) -> None:
    """Each extra's dependencies suffice for its program. With an extra that another one requires, the error names the
    other one.
    """
    python = environments.make(tmp_path, required("penstock", [extra]))
    on_top = [other for other, first in FIRST_NEEDED.items() if first == extra]
    assert not on_top or named_extras(python, tmp_path, on_top) == {other: other for other in on_top}
    arguments = {
        "server": (kafka.bootstrap_servers, topic_name, tmp_path),
        "schemas": (kafka.bootstrap_servers, topic_name, tmp_path),
        "spark": (kafka.bootstrap_servers, topic_name, tmp_path),
        "files": (tmp_path / "files",),
        "demo": (tmp_path,),
    }
    if extra == "otel":
        assert run(python, tmp_path, FOLDER / "otel_api.py") == "0"
        present = distributions(python)
        sdk = required("opentelemetry-sdk") | {"opentelemetry-sdk": version("opentelemetry-sdk")}
        for name in sdk.keys() - present:
            link(name, sdk[name], python)
    assert run(python, tmp_path, FOLDER / f"{extra}.py", *arguments.get(extra, ())) == PRINTED[extra]
    shutil.rmtree(tmp_path / "venv")


async def test_the_base_starts_kafka_with_a_class_archive(tmp_path: Path, base: Path) -> None:
    """Without pyspark and with an empty cache, the jars come from the configured repository. The second call finds the
    class archive of the first one, no other file is left, and a JVM with the same class path maps it. A broker starts
    and acknowledges a record.
    """
    await fetch_jars(KAFKA_JARS)
    cache = tmp_path / "cache" / "penstock"
    variables = {
        "HOME": str(tmp_path),
        "JAVA_HOME": str(find_java().home),
        "XDG_CACHE_HOME": str(cache.parent),
        "NO_PROXY": "127.0.0.1",
    }

    async def output(*command: str | Path) -> list[str]:
        ran = await asyncio.create_subprocess_exec(*map(str, command), env=variables, cwd=tmp_path, stdout=-1)
        output, _ = await ran.communicate()
        assert ran.returncode == 0
        return output.decode().splitlines()

    make_archive = (base.with_name("penstock"), "jars", "kafka", "--class-archive")
    with mirror(KAFKA_JARS, tmp_path / "mirror") as variables["PENSTOCK_MAVEN_REPOSITORY"]:
        jars, archive = map(Path, await output(*make_archive))
    written = archive.stat().st_mtime_ns
    assert await output(*make_archive) == [str(jars), str(archive)]
    assert archive.stat().st_mtime_ns == written
    assert {path for path in cache.iterdir() if path.suffix != ".lock"} == {jars, archive}
    await output(find_java().executable, "-Xshare:on", *archive_options(archive), "-cp", f"{jars}/*", "-version")
    variables["JDK_JAVA_OPTIONS"] = " ".join(QUICK_START)
    assert (await output(base, "-I", "-c", START_KAFKA, tmp_path / "data"))[-1] == "0"


@pytest.mark.soak
def test_index_has_what_the_wheel_requires(tmp_path: Path, environments: Environments) -> None:
    """uv installs from the package index, at the lock's versions, the same packages as in the environments of these
    tests.
    """
    folder = tmp_path / "venv"
    for arguments in (
        ["venv", "--quiet", "--python", sys.executable, folder],
        [
            "pip",
            "install",
            "--quiet",
            "--python",
            folder,
            "--constraint",
            ROOT / "requirements.lock",
            f"penstock[{','.join(WITH_SPARK)}] @ {environments.wheel.as_uri()}",
        ],
    ):
        subprocess.run([sys.executable, "-m", "uv", *map(str, arguments)], check=True, timeout=INSTALL_TIMEOUT_S)
    assert distributions(folder / "bin" / "python") == {*required("penstock", WITH_SPARK), "penstock"}
