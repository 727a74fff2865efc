"""The embedded Kafka, run for real: started, stopped, killed, paused, and started under bad conditions."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.services.local.broker_config import BROKER_LOG, LOG_FOLDER, QUICK_START, EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka, KafkaDied, broker_answers
from penstock.services.local.folder_lock import LOCK_FILE, FolderInUse
from penstock.services.local.ports import PortTaken
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.errors import ConfigError, PenstockError
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker

QUICK = EmbeddedKafkaSettings(jvm_options=QUICK_START)
RESPONSE_MS = 1_000
RESUMED_MS = 15_000
"""How long a resumed broker may take until it answers: it first finds that its own sessions have expired."""
END_LIMIT_SECONDS = 15.0
STARTER = """
import asyncio, sys
from pathlib import Path
from penstock.services.local.broker_config import QUICK_START, EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka

async def main():
    async with EmbeddedKafka(Path(sys.argv[1]), EmbeddedKafkaSettings(jvm_options=QUICK_START)) as kafka:
        print("PID", kafka.child.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
TINY_DISK_BYTES = 64 * 1024
FILLING_DISK_BYTES = 80 * 1024 * 1024


async def is_answering(kafka: Broker, timeout_ms: int = RESPONSE_MS) -> bool:
    host, port = kafka.bootstrap_servers.split(":")
    return await broker_answers(host, int(port), timeout_ms)


async def create_topic(kafka: Broker, name: str, partitions: int) -> None:
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), timeout_ms=10_000) as admin:
        await admin.create_topics([NewTopic(name, partitions)])


async def partitions_of(kafka: Broker, name: str) -> int:
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), timeout_ms=10_000) as admin:
        return len((await admin.describe_topics([name]))[name].partitions)


def test_one_broker_serves_synchronous_tests(kafka: Broker) -> None:
    """A test without an event loop can reach the session's broker."""
    assert asyncio.run(is_answering(kafka))


async def test_one_broker_serves_asynchronous_tests(kafka: Broker) -> None:
    """A test on anyio's event loop can reach the session's broker, which runs on another loop."""
    assert await is_answering(kafka)


async def test_topics_survive_stop_and_crash_but_not_damage(own_kafka: EmbeddedKafka) -> None:
    """A restart and a SIGKILL keep the address and the topics. If the broker ends without a stop, `wait` raises
    KafkaDied. A stop ends by SIGTERM alone, and garbage in `meta.properties` after it is an error that names the fix.
    """
    address = own_kafka.bootstrap_servers
    await create_topic(own_kafka, "kept", 3)
    await own_kafka.restart()
    assert await is_answering(own_kafka)
    waiting = asyncio.ensure_future(own_kafka.wait())
    os.kill(own_kafka.child.pid, signal.SIGKILL)
    with pytest.raises(KafkaDied, match="the embedded Kafka ended"):
        await waiting
    assert not await is_answering(own_kafka)
    await own_kafka.start()
    assert own_kafka.bootstrap_servers == address
    assert await partitions_of(own_kafka, "kept") == 3
    await check_damage_after_a_stop(own_kafka, "meta.properties", "damaged")


async def check_damage_after_a_stop(kafka: EmbeddedKafka, damage: str, match: str) -> None:
    """Stop the broker, which ends by SIGTERM alone, before the time limit for SIGKILL. Then garbage in one of Kafka's
    own files is an error that names the fix.
    """
    await create_topic(kafka, "some", 12)
    child, begin = kafka.child, time.monotonic()
    await kafka.stop()
    assert child.returncode == 128 + signal.SIGTERM, child
    assert time.monotonic() - begin < kafka.settings.stop_timeout_ms / 1000
    (kafka.data_dir / LOG_FOLDER / damage).write_text("garbage\n")
    with pytest.raises(KafkaDied, match=f"{match}.*folder"):
        await kafka.start()


@pytest.mark.soak
async def test_a_damaged_metadata_log_is_an_error(own_kafka: EmbeddedKafka) -> None:
    """Garbage in the state of Kafka's metadata log is an error that names the fix."""
    await check_damage_after_a_stop(own_kafka, "__cluster_metadata-0/quorum-state", "is damaged")


@pytest.mark.soak
async def test_paused_broker_can_be_stopped(own_kafka: EmbeddedKafka) -> None:
    """A stop also ends a paused process."""
    own_kafka.pause()
    child = own_kafka.child
    await own_kafka.stop()
    assert child.returncode is not None
    assert not exists(child.pid)


def start_and_kill_starter(folder: Path) -> int:
    """Start a broker from another process, kill that process, and return the broker's process id."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert starter.stdout is not None
        java = next(int(line.split()[1]) for line in starter.stdout if line.startswith("PID"))
        assert exists(java)
    finally:
        starter.kill()
        starter.communicate()
    return java


@pytest.mark.soak
async def test_folder_locked_by_kafka(own_kafka: EmbeddedKafka) -> None:
    """Kafka's own lock on a folder raises FolderInUse, if our lock file is missing."""
    (own_kafka.data_dir / LOCK_FILE).unlink()
    with pytest.raises(FolderInUse, match=str(own_kafka.data_dir)):
        await EmbeddedKafka(own_kafka.data_dir, QUICK).start()
    assert await is_answering(own_kafka)


async def test_a_configured_port_in_use_is_named(tmp_path: Path) -> None:
    """A configured port that is in use raises PortTaken with its number."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port}"):
            await EmbeddedKafka(tmp_path, EmbeddedKafkaSettings(port=port, jvm_options=QUICK_START)).start()


class RacedKafka(EmbeddedKafka):
    """Chooses a port that is in use, once, as if another process had bound it after the choice."""

    def __init__(self, data_dir: Path, taken: int) -> None:
        super().__init__(data_dir)
        self.lost = [taken]

    def _choose_ports(self) -> dict[str, int]:
        return super()._choose_ports() | ({"PLAINTEXT": self.lost.pop()} if self.lost else {})


@pytest.mark.soak
async def test_lost_race_for_a_port_is_retried(tmp_path: Path) -> None:
    """If another process takes a chosen port first, the start is retried."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        async with RacedKafka(tmp_path, taken) as kafka:
            assert kafka.bootstrap_servers != f"127.0.0.1:{taken}"
            assert await is_answering(kafka)
        assert kafka.lost == []


@pytest.fixture(scope="module")
async def kafka_with_a_listener(
    tmp_path_factory: pytest.TempPathFactory, formatted: Path
) -> AsyncIterator[EmbeddedKafka]:
    """A broker with a listener INSIDE and properties of its own."""
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_a="pässword: #1";'
    settings = EmbeddedKafkaSettings(
        jvm_options=QUICK_START,
        listeners={"INSIDE": "SASL_PLAINTEXT"},
        properties={"sasl.enabled.mechanisms": "PLAIN", "listener.name.inside.plain.sasl.jaas.config": login},
    )
    folder = tmp_path_factory.mktemp("listener") / "kafka"
    shutil.copytree(formatted, folder)
    async with EmbeddedKafka(folder, settings) as broker:
        yield broker


async def test_listeners_and_properties_of_the_settings_reach_the_broker(kafka_with_a_listener: EmbeddedKafka) -> None:
    """An additional listener gets its own free port, and its properties reach the broker with any characters."""
    host, port = kafka_with_a_listener.address("INSIDE").split(":")
    assert await broker_answers(host, int(port), RESPONSE_MS)
    assert kafka_with_a_listener.address("INSIDE") != kafka_with_a_listener.bootstrap_servers


async def test_paused_broker_is_silent_and_comes_back(kafka_with_a_listener: EmbeddedKafka) -> None:
    """A paused broker answers nothing though its port is open; after a resume it answers again.

    A second broker on its folder raises FolderInUse, and the first one keeps running.
    """
    broker = kafka_with_a_listener
    with pytest.raises(FolderInUse, match=f"process {os.getpid()}"):
        await EmbeddedKafka(broker.data_dir, QUICK).start()
    assert await is_answering(broker)
    broker.pause()
    try:
        async with asyncio.timeout(END_LIMIT_SECONDS):
            while await is_answering(broker):  # the signal stops the threads of a busy process one after another
                pass
    finally:
        broker.resume()
    assert await is_answering(broker, RESUMED_MS)


@pytest.mark.soak
async def test_a_folder_with_topics_is_not_formatted(own_kafka: EmbeddedKafka) -> None:
    """A folder with topics but without meta.properties is an error, since formatting would hide the topics."""
    await own_kafka.stop()
    (own_kafka.data_dir / LOG_FOLDER / "meta.properties").unlink()
    with pytest.raises(ConfigError, match=r"log/meta\.properties"):
        await own_kafka.start()


async def test_an_invalid_property_is_shown(tmp_path: Path) -> None:
    """An invalid property is an error with Kafka's message."""
    settings = EmbeddedKafkaSettings(properties={"num.io.threads": "many"}, jvm_options=QUICK_START)
    with pytest.raises(KafkaDied, match=r"num\.io\.threads: Not a number"):
        await EmbeddedKafka(tmp_path, settings).start()


async def test_failed_and_orphaned_starts_leave_nothing_behind(tmp_path: Path) -> None:
    """After each of these the broker ends, and the folder can be used again: a failed start, a start that is cancelled
    while the JVM boots, and the kill of the process that started the broker.
    """
    with pytest.raises(KafkaDied, match=r"formatted|start_timeout_ms=1"):
        await EmbeddedKafka(tmp_path, EmbeddedKafkaSettings(start_timeout_ms=1)).start()
    start = asyncio.ensure_future(EmbeddedKafka(tmp_path, QUICK).start())
    async with asyncio.timeout(END_LIMIT_SECONDS):
        while not (tmp_path / BROKER_LOG).exists():  # noqa: ASYNC110 - the first output of the broker
            await asyncio.sleep(0.01)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    java = await asyncio.to_thread(start_and_kill_starter, tmp_path)
    # The next start waits for the lock that the dying broker still holds.
    async with EmbeddedKafka(tmp_path, QUICK) as kafka:
        assert not exists(java)
        assert await is_answering(kafka)


@contextmanager
def disk_of(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a small file system in memory; skip the test if that is not possible."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root on Linux")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_is_found_before_the_start(tmp_path: Path) -> None:
    """A disk without space for a topic is a ConfigError before the start."""
    with disk_of(tmp_path / "small", TINY_DISK_BYTES) as disk, pytest.raises(ConfigError, match="no space for Kafka"):
        await EmbeddedKafka(disk / "kafka", QUICK).start()


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


@pytest.mark.soak
async def test_a_disk_that_fills_up_is_reported(tmp_path: Path) -> None:
    """If the broker dies of a full disk, KafkaDied names the disk, although the broker could not log it."""
    with disk_of(tmp_path / "filling", FILLING_DISK_BYTES) as disk:
        async with EmbeddedKafka(disk / "kafka", QUICK) as kafka:
            fill(disk)
            with contextlib.suppress(PenstockError):
                await create_topic(kafka, "one-too-many", 9)
            async with asyncio.timeout(END_LIMIT_SECONDS):
                with pytest.raises(KafkaDied, match="no space left"):
                    await kafka.wait()


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
