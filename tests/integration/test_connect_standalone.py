"""A standalone worker, the `penstock connectors` command line, and exit statuses of workers that cannot start."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.services.cli import app
from penstock.services.connect import connectors_command
from penstock.services.connect.daemon import CONNECTOR_FAILED, KAFKA_UNREACHABLE, PORT_IN_USE
from penstock.services.exit_status import ExitStatus
from penstock.services.local.ports import pick
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.settings import KafkaSettings
from tests.integration.connect_processes import WorkerProcess
from tests.integration.connect_worker import JSON_CONVERTER
from tests.shared_broker import Broker

STRING = "org.apache.kafka.connect.storage.StringConverter"


def standalone(servers: str, folder: Path) -> dict[str, str]:
    return {
        "bootstrap.servers": servers,
        "key.converter": JSON_CONVERTER,
        "value.converter": STRING,
        "offset.storage.file.filename": str(folder / "offsets.json"),
        "offset.flush.interval.ms": "200",
    }


def connector(path: Path, **config: str) -> str:
    path.write_text("".join(f"{name.replace('_', '.')}={value}\n" for name, value in config.items()))
    return str(path)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def lines_of(path: Path, count: int) -> list[str]:
    async with asyncio.timeout(30):
        while len(lines(path)) < count:  # noqa: ASYNC110 - a file has no event to wait for
            await asyncio.sleep(0.05)
    return lines(path)


async def test_lines_go_through_kafka_and_offsets_survive(kafka: Broker, tmp_path: Path, topic_name: str) -> None:
    """Connectors named on the command line run, and a restarted worker continues where it stopped, with each line
    once.
    """
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    source = connector(tmp_path / "src.properties", name="src", connector_class="FileStreamSource",
                       file=str(tmp_path / "in.txt"), topic=topic_name)  # fmt: skip
    sink = connector(tmp_path / "snk.properties", name=f"{topic_name}-sink", connector_class="FileStreamSink",
                     file=str(tmp_path / "out.txt"), topics=topic_name)  # fmt: skip
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    props = standalone(kafka.bootstrap_servers, tmp_path)
    for wanted in (["one", "two"], ["one", "two", "three"]):
        worker = WorkerProcess(tmp_path, props, "standalone", source, sink)
        await worker.ready()
        try:
            assert await lines_of(tmp_path / "out.txt", len(wanted)) == wanted
        finally:
            assert await worker.stop() == 0, worker.log[-3_000:]
        with (tmp_path / "in.txt").open("a") as more:
            more.write("three\n")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["connect", *arguments, "--log.format=json"])


def error_line(done: Result) -> str:
    """The only error line on standard error, logged or plain."""
    lines = [line for line in done.stderr.splitlines() if '"level": "error"' in line or line.startswith("penstock")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_each_start_error_has_its_exit_status(kafka: Broker, tmp_path: Path) -> None:
    """An invalid setting, a port in use, an unreachable Kafka and an invalid connector each have their exit status and
    one line.
    """
    file = tmp_path / "worker.properties"
    rest, no_kafka = pick("127.0.0.1", 2)
    props = standalone(kafka.bootstrap_servers, tmp_path) | {"listeners": f"http://127.0.0.1:{rest}"}
    file.write_text("".join(f"{name}={value}\n" for name, value in props.items()))
    wrong = run("standalone", str(file), "--offset.flush.interval.ms=never")
    assert (wrong.exit_code, "offset.flush.interval.ms" in error_line(wrong)) == (ExitStatus.WRONG_SETTING, True)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        rejected = run("standalone", str(file), f"--listeners=http://127.0.0.1:{port}")
    assert (rejected.exit_code, str(port) in error_line(rejected)) == (PORT_IN_USE, True)
    nowhere = f"127.0.0.1:{no_kafka}"
    alone = run("standalone", str(file), f"--bootstrap.servers={nowhere}", "--request.timeout.ms=1000")
    assert (alone.exit_code, nowhere in error_line(alone)) == (KAFKA_UNREACHABLE, True)
    bad = connector(tmp_path / "bad.properties", name="bad", connector_class="no.such.Class")
    failed = run("standalone", str(file), bad)
    assert failed.exit_code == CONNECTOR_FAILED
    assert "bad.properties" in error_line(failed)
    bad = connector(tmp_path / "worse.properties", name="worse",
                    connector_class="tests.shared.connect.isolation.blocking.FailingSource")  # fmt: skip
    failed = run("standalone", str(file), bad)
    assert failed.exit_code == CONNECTOR_FAILED
    assert "worse.properties: KeyError: 'on purpose'" in failed.stderr


def run_connectors(worker: WorkerProcess, *arguments: str) -> int:
    return connectors_command.main([*arguments, "--url", worker.url])


async def test_connectors_from_the_command_line(
    kafka: Broker, tmp_path: Path, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`penstock connectors` creates, shows, controls and deletes connectors, and reports the worker's errors."""
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    (tmp_path / "in.txt").write_text("one\n")
    file = connector(tmp_path / "src.properties", name="src", connector_class="FileStreamSource",
                     file=str(tmp_path / "in.txt"), topic=topic_name)  # fmt: skip
    worker = WorkerProcess(tmp_path, standalone(kafka.bootstrap_servers, tmp_path), "standalone")
    await worker.ready()
    try:
        assert run_connectors(worker, "create", file) == 0
        assert json.loads(capsys.readouterr().out)["name"] == "src"
        assert run_connectors(worker, "create", file) == 1
        assert "already exists" in capsys.readouterr().err
        assert run_connectors(worker, "create", file, "--update") == 0
        for steps in (["pause"], ["resume"], ["restart"], ["config"], ["status"]):
            assert run_connectors(worker, *steps, "src") == 0
        capsys.readouterr()
        assert run_connectors(worker, "list") == 0
        assert "src" in capsys.readouterr().out
        assert run_connectors(worker, "offsets", "reset", "src") == 1
        for steps in (["stop"], ["offsets", "get"], ["offsets", "reset"], ["delete"]):
            assert run_connectors(worker, *steps, "src") == 0
        assert run_connectors(worker, "status", "src") == 1
        assert run_connectors(worker, "offsets", "set", "src", str(tmp_path / "none.json")) == 2
    finally:
        worker.kill()
