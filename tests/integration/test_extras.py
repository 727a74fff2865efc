"""Each extra alone: installed into an empty environment, where its smallest program runs.

The environments hold what the metadata names and nothing else, so that nothing that another extra brings along hides a
dependency that is missing.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.services.local.jars import KAFKA_JARS
from penstock.shared.common.jars import fetch_jars
from penstock.shared.common.java import find_java
from tests.integration.environments import ask, distributions, make_environment, required
from tests.integration.maven_mirror import mirror

BASE_BYTES_MAX = 120_000_000
HEAVY = {"pyarrow", "deltalake", "fastapi", "numba", "pyspark", "pandas", "uvicorn", "datasketches"}
CONNECTORS = (
    "from penstock.shared.connect.plugins import Plugins; p = Plugins.installed(); "
    "print(p.connector_class('%s').__name__)"
)
PROGRAMS = {
    "streams": """
from penstock import Count, StreamsBuilder
from penstock.testing import TopologyTestDriver
builder = StreamsBuilder()
windows = builder.stream("clicks").group_by_key().tumbling_window(size=1000)
windows.aggregate("visits", clicks=Count()).on_close().to("visits")
driver = TopologyTestDriver(builder.build())
for at in (0, 999, 1000):
    driver.pipe("clicks", key=b"ann", value=b"{}", timestamp=at)
(window,) = driver.read("visits")
assert window.value == b'{"key":"ann","start":0,"end":1000,"clicks":2}', window
print("visits")
""",
    "server": """
import penstock.services.producer.main, penstock.services.consumer.main, penstock.services.admin.main
import penstock.services.connect.main
from penstock.shared.connect.plugins import Plugins
print(Plugins.installed().connector_class("FileStreamSink").__name__)
""",
    "spark": "import penstock.services.compactor.spark, penstock.services.compactor.audit as a; print(a.__name__)",
    "postgres": """
from penstock.connect.connectors import PostgresSinkConnector
from penstock.shared.connect.connectors.postgres.settings import driver
settings = {"connection.url": "postgres://shop", "topics": "orders", "insert.mode": "nonsense"}
wrong = [value.name for value in PostgresSinkConnector().validate(settings) if value.errors]
assert wrong == ["insert.mode"], wrong
print(driver().__name__)
""",
    "avro": "from penstock.shared.connect.converters.avro import avro_library; print(avro_library().__name__)",
    "files": CONNECTORS % "FilesSink",
    "schemas": """
from penstock.api.json_schema import compile_schema
validate = compile_schema({"type": "object", "required": ["id"]}, "orders.json")
assert validate({"id": 1}) is None
print(validate({}))
""",
    "rocksdb": """
import tempfile
from penstock.streams import Processor, StateDirectory, StreamsBuilder
from penstock.testing import TopologyTestDriver
class Numbered(Processor):
    def process(self, record):
        rows = self.context.store("seen")
        rows.put(record.key, (rows.get(record.key) or 0) + 1)
builder = StreamsBuilder()
builder.stream("clicks").process_values(Numbered, builder.add_store("seen"))
with tempfile.TemporaryDirectory() as folder:
    state = StateDirectory(folder, "app", memory_bytes_max=2**24, cache_bytes_max=0)
    state.acquire()
    driver = TopologyTestDriver(builder.build(), state=state)
    driver.pipe("clicks", key=b"ann", value=b"{}")
    driver.pipe("clicks", key=b"ann", value=b"{}")
    driver.crash()
    driver.restore()
    assert driver.store("seen").get("ann") == 2
    driver.close()
print("seen")
""",
    "otel": """
from penstock import ProducerRecord
from penstock.otel import OpenTelemetryInterceptor
interceptor = OpenTelemetryInterceptor()
record = interceptor.on_send(ProducerRecord("orders", b"tea"))
interceptor.on_acknowledgement(None, None, record.headers)
print(interceptor)
""",
    "demo": """
import penstock.services.local.up, penstock.services.local.demo.main, penstock.services.compactor.spark
from penstock.services.local.demo.flights import data_file
print(data_file().is_file())
""",
}

START_KAFKA = """
import asyncio, sys
from pathlib import Path
from penstock import Admin, NewTopic, Producer
from penstock.services.local.kafka import EmbeddedKafka

async def main(folder):
    async with EmbeddedKafka(folder) as kafka:
        async with Admin(kafka.bootstrap_servers) as admin:
            await admin.create_topics([NewTopic("clicks", 1)])
        async with Producer(kafka.bootstrap_servers) as producer:
            print((await producer.send_and_wait("clicks", b"a")).offset)

asyncio.run(main(Path(sys.argv[1])))
"""


def environment(folder: Path, *extras: str) -> Path:
    return make_environment(folder, required("penstock", extras))


def test_the_base_is_small_and_has_the_clients_and_the_command(tmp_path: Path) -> None:
    """A base install takes less than 120 MB; clients import, commands start, and what needs an extra says which."""
    python = environment(tmp_path)
    assert not distributions(python) & HEAVY
    site = Path(ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    sizes = {path.stat().st_ino: path.stat().st_size for path in site.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < BASE_BYTES_MAX
    assert ask(python, "from penstock import Producer, Consumer, Admin; print(Producer.__name__)") == "Producer"
    ask(python, "import penstock.connect, penstock.testing, penstock.services.local.kafka")
    ask(python, "import penstock.services.local.doctor.main, penstock.services.consumer.dlq")
    assert (
        ask(python, "try:\n from penstock import StreamsBuilder\nexcept ImportError as e: print(e)")
        .strip()
        .endswith('pip install "penstock[streams]"')
    )
    lacking = f"try:\n {CONNECTORS % 'DeltaSink'}\nexcept Exception as e: print(e)"
    assert 'pip install "penstock[streams]"' in ask(python, lacking)
    for name, status in {"--help": 0, "doctor --help": 0, "dlq --help": 0, "aggregator": 2, "demo": 2, "up": 2}.items():
        done = subprocess.run(
            [python.parent / "penstock", *name.split()], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == status, (name, done.stderr)
        assert status == 0 or (done.stderr.count("\n"), "pip install" in done.stderr) == (1, True), done.stderr
    shutil.rmtree(tmp_path / "venv")


@pytest.mark.parametrize("extra", PROGRAMS)
def test_an_extra_alone_runs_its_smallest_program(tmp_path: Path, extra: str) -> None:
    """Nothing is missing from the extra's dependencies."""
    assert ask(environment(tmp_path, extra), PROGRAMS[extra])
    shutil.rmtree(tmp_path / "venv")


@pytest.mark.parametrize("extras", [(), ("server",)], ids=["base", "server"])
async def test_kafka_starts_without_spark(tmp_path: Path, extras: tuple[str, ...]) -> None:
    """Without pyspark, from an empty cache: the jars come from the user's repository, and a record is acknowledged."""
    await fetch_jars(KAFKA_JARS)
    python = await asyncio.to_thread(environment, tmp_path, *extras)
    assert "pyspark" not in distributions(python)
    with mirror(KAFKA_JARS, tmp_path / "mirror") as url:
        variables = {
            "HOME": str(tmp_path),
            "JAVA_HOME": str(find_java().home),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "PENSTOCK_MAVEN_REPOSITORY": url,
            "NO_PROXY": "127.0.0.1",
        }
        command = [python, "-I", "-c", START_KAFKA, tmp_path / "data"]
        started = await asyncio.create_subprocess_exec(*map(str, command), env=variables, cwd=tmp_path, stdout=-1)
        said, _ = await started.communicate()
    assert (started.returncode, said.split()[-1]) == (0, b"0")
    shutil.rmtree(tmp_path / "venv")
