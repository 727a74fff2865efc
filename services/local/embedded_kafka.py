"""The embedded Kafka: a real single-node Apache Kafka as a child process, with its data in one folder.

    async with EmbeddedKafka(Path(".penstock/kafka")) as kafka:
        client = Producer(kafka.bootstrap_servers)

The folder is formatted at the first start and used again afterwards, so topics survive. The broker inherits a lock of
the folder and holds it until it ends, so two brokers never share a folder. When this process ends, even by SIGKILL, the
broker ends too (see child_process.py). Records that a broker has acknowledged are in the page cache or on disk. So
SIGKILL of the broker loses no records; only a crash of the whole machine can. `penstock kafka` runs an embedded Kafka
in the foreground (see kafka_command.py).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import signal
import struct
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.services.local import broker_config as config
from penstock.services.local import ports
from penstock.services.local.broker_config import DEFAULT_DATA_DIR, KAFKA_JARS, EmbeddedKafkaSettings
from penstock.services.local.broker_failure import Cause, explain, find_cause
from penstock.services.local.folder_lock import FolderLock, check_no_kafka_runs_in
from penstock.shared.common.child_process import ChildProcess, tail
from penstock.shared.common.errors import ConfigError, FatalError, IllegalState
from penstock.shared.common.java.class_archive import archive_options
from penstock.shared.common.java.installed_java import Java, find_java
from penstock.shared.common.java.jars import fetch_jars
from penstock.shared.common.java.properties_file import render_properties
from penstock.shared.common.log import get_logger

# This is the key of ApiVersions requests.
PROBE_API_KEY = 18
PROBE_CORRELATION_ID = 1
# A broker lists about a hundred APIs of six bytes each, so a larger response is not from Kafka.
PROBE_RESPONSE_BYTES_MAX = 65_536

log = get_logger(__name__)

DEFAULT_SETTINGS = EmbeddedKafkaSettings()
# Each attempt can lose a race against another process for a free port.
PORT_ATTEMPTS = 5
POLL_MS = 50
PROBE_TIMEOUT_MS = 2_000
LOG_LINES = 400
# With less, a broker starts but fails at its first topics: index files alone map 20 MiB a partition.
MIN_FREE_BYTES = 64 * 1024 * 1024
# Kafka's formatting writes this file last, so a folder without it is not formatted.
META_PROPERTIES = "meta.properties"


class KafkaDied(FatalError):
    """The embedded broker did not start, or ended unexpectedly. The message has the reason and lines of its output."""


class EmbeddedKafka:
    """One broker and its data folder. Use `async with`, or `start` and `stop`, from one event loop.

    By default, `java` is looked for on this machine, and the `jars` are downloaded once.
    """

    def __init__(
        self,
        data_dir: Path = DEFAULT_DATA_DIR,
        settings: EmbeddedKafkaSettings = DEFAULT_SETTINGS,
        *,
        java: Java | None = None,
        jars: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.settings = settings
        self._environ = environ
        self._java = java
        self._jars = jars
        self._ports: dict[str, int] = {}
        self._child: ChildProcess | None = None
        self._stopping: ChildProcess | None = None
        self._lock = FolderLock(self.data_dir)

    def __repr__(self) -> str:
        address = self.bootstrap_servers if self._ports else "not started"
        return f"<EmbeddedKafka {address} {self.data_dir} {self._child!r}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    def has_data(self) -> bool:
        """Whether the folder's storage is formatted, so there may be topics."""
        return (self.data_dir / config.LOG_FOLDER / META_PROPERTIES).exists()

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of the plaintext listener. Raises IllegalState before the first start."""
        return self.address(config.CLIENT_LISTENER)

    def address(self, listener: str) -> str:
        """Return `host:port` of the listener with this name.

        Raises IllegalState before the first start, and for an unknown name.
        """
        if listener not in self._ports:
            raise IllegalState(f"{listener}: the broker was not started, or has no such listener")
        return ports.address_text(self.settings.host, self._ports[listener])

    @property
    def child(self) -> ChildProcess:
        """The broker's process. Raises IllegalState before `start`, and after `stop` or `kill`."""
        if self._child is None:
            raise IllegalState("the embedded Kafka is not running")
        return self._child

    async def start(self) -> None:
        """Start the broker and return when it answers. A restarted broker keeps its ports.

        Raises IllegalState if it is running.

        Raises JavaNotFound, WrongJava, JarsUnavailable, FolderInUse, PortTaken or another ConfigError before the
        broker is launched. Raises KafkaDied if Kafka itself fails.
        """
        if self._child is not None:
            if self._child.returncode is None:
                raise IllegalState("the embedded Kafka is already running")
            # It has ended without a stop, so `wait` still raises KafkaDied.
            await self._child.wait()
            self._child = None
            self._lock.release()
        if self._java is None:
            self._java = await asyncio.to_thread(find_java, self._environ)
        if self._jars is None:
            self._jars = await fetch_jars(KAFKA_JARS, self._environ)
        await self._lock.acquire()
        try:
            check_no_kafka_runs_in(self.data_dir / config.LOG_FOLDER)
            self._require_space()
            await self._start_on_free_ports(self._java, self._jars)
        except BaseException:
            await self.stop()
            raise
        log.info("Kafka is up", bootstrap_servers=self.bootstrap_servers, data_dir=str(self.data_dir))

    async def stop(self) -> None:
        """Stop the broker with SIGTERM, or with SIGKILL if it runs for longer than `stop_timeout_ms` after that.

        Does nothing if the broker is not running.
        """
        # Before the end of the process, so that `wait` takes it for an expected one.
        self._stopping = self._child
        if self._child is not None:
            await self._child.terminate(self.settings.stop_timeout_ms)
            self._child = None
        self._lock.release()

    async def kill(self) -> None:
        """Send SIGKILL, as in a crash. `start` or `restart` continues with the same ports and data."""
        self.child.kill()
        await self.stop()

    async def restart(self) -> None:
        """Stop if running, and start with the same ports and data."""
        await self.stop()
        await self.start()

    def pause(self) -> None:
        """Send SIGSTOP: connections stay open and nothing answers."""
        self.child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT after `pause`."""
        self.child.send_signal(signal.SIGCONT)

    async def wait(self) -> None:
        """Wait until `stop` or `kill` ends the broker. Raises KafkaDied if it ends unexpectedly."""
        child = self.child
        await child.wait()
        if self._stopping is not child:
            raise KafkaDied(f"the embedded Kafka ended: {self._explain_broker_end(child)}")

    async def _start_on_free_ports(self, java: Java, jars: Path) -> None:
        first_start = not self._ports
        for attempts_left in reversed(range(PORT_ATTEMPTS)):
            taken = self._choose_ports() if first_start else dict(self._ports)
            # The user's port, and the ports of a restarted broker, must be free. The others were just picked as free.
            for listener, port in taken.items():
                if not first_start or (listener == config.CLIENT_LISTENER and self.settings.port):
                    ports.require_free(self.settings.host, port)
            self._write_files(taken)
            if not self._is_storage_formatted():
                await self._format_storage(java, jars)
            child = await self._launch_java(broker_command(java, jars, self.settings), config.CONSOLE_LOG)
            self._child = child
            if await self._wait_for_broker_response(child, taken[config.CLIENT_LISTENER]):
                self._ports = taken
                return
            # The broker has ended.
            self._child = None
            # Only a lost race for a free port is worth another attempt.
            if not (first_start and attempts_left and find_cause(self._broker_output(child)) is Cause.PORT_TAKEN):
                raise KafkaDied(f"the embedded Kafka did not start: {self._explain_broker_end(child)}")
            log.info("another process took a port meanwhile; other ports are tried")

    def _choose_ports(self) -> dict[str, int]:
        """Return a port for each listener. The client listener has the port of the settings, if they set one."""
        listeners = [config.CLIENT_LISTENER, config.CONTROLLER_LISTENER, *self.settings.listeners]
        chosen = dict(zip(listeners, ports.pick(self.settings.host, len(listeners)), strict=True))
        if self.settings.port:
            chosen[config.CLIENT_LISTENER] = self.settings.port
        return chosen

    def _write_files(self, taken: Mapping[str, int]) -> None:
        properties = render_properties(config.broker_properties(self.settings, taken))
        # Each run's log starts empty, so its lines are from this run.
        broker_log = self.data_dir / config.BROKER_LOG
        try:
            (self.data_dir / config.PROPERTIES_FILE).write_text(properties, encoding="ascii")
            (self.data_dir / config.LOG4J_FILE).write_text(config.log4j_config(), encoding="ascii")
            if broker_log.exists():
                broker_log.replace(self.data_dir / f"{config.BROKER_LOG}.before")
        except OSError as e:
            raise ConfigError(f"the data folder {self.data_dir} cannot be written: {e.strerror}") from None

    def _is_storage_formatted(self) -> bool:
        """Return whether the storage is formatted. Raises ConfigError if it is not formatted but contains folders."""
        folder = self.data_dir / config.LOG_FOLDER
        if self.has_data():
            return True
        # A folder with topics must not be formatted again: it would get another cluster id.
        if folder.is_dir() and any(entry.is_dir() for entry in folder.iterdir()):
            raise ConfigError(
                f"the data folder {self.data_dir} is damaged: {config.LOG_FOLDER}/{META_PROPERTIES} is missing. "
                "Move the folder away to start with an empty one"
            )
        return False

    async def _format_storage(self, java: Java, jars: Path) -> None:
        child = await self._launch_java(format_storage_command(java, jars, new_cluster_id()), config.FORMAT_LOG)
        try:
            async with asyncio.timeout(self.settings.start_timeout_ms / 1000):
                await child.wait()
        except TimeoutError:
            log.warning("formatting took longer than start_timeout_ms")
        finally:
            # Even a cancellation must not leave a JVM that writes into the folder.
            status = await child.terminate(0)
        if status != 0:
            raise KafkaDied(
                f"the storage of the embedded Kafka could not be formatted: {self._explain_broker_end(child)}"
            )

    async def _launch_java(self, command: list[str], log_name: str) -> ChildProcess:
        return await ChildProcess.start(
            command,
            name="the embedded Kafka",
            log_file=self.data_dir / log_name,
            env=self._environ,
            cwd=self.data_dir,
            orphan_limit_ms=self.settings.stop_timeout_ms,
            pass_fds=(self._lock.fd,),
        )

    async def _wait_for_broker_response(self, child: ChildProcess, port: int) -> bool:
        """Return True once the broker answers, False if it ended.

        Raises KafkaDied if the broker logs nothing for `start_timeout_ms`.
        """
        limit_s = self.settings.start_timeout_ms / 1000
        logged = self._logged_bytes()
        deadline = time.monotonic() + limit_s
        while child.returncode is None:
            # A broker that logs makes progress, for example with the recovery of its logs after a crash.
            if (now_logged := self._logged_bytes()) != logged:
                logged = now_logged
                deadline = time.monotonic() + limit_s
            if await broker_answers(self.settings.host, port, PROBE_TIMEOUT_MS):
                # A response on the port is this broker's only while its process lives.
                return child.returncode is None
            if time.monotonic() >= deadline:
                raise KafkaDied(
                    "the embedded Kafka does not answer and has logged nothing for "
                    f"start_timeout_ms={self.settings.start_timeout_ms}: " + self._explain_broker_end(child)
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_MS / 1000):
                    await child.wait()
        return False

    def _logged_bytes(self) -> int:
        """Return the size of the broker's log files. While the size grows the broker makes progress."""
        logs = (self.data_dir / config.BROKER_LOG, self.data_dir / config.CONSOLE_LOG)
        return sum(file.stat().st_size for file in logs if file.exists())

    def _broker_output(self, child: ChildProcess) -> list[str]:
        return tail(self.data_dir / config.BROKER_LOG, LOG_LINES) + child.log_tail(LOG_LINES)

    def _explain_broker_end(self, child: ChildProcess) -> str:
        return explain(self._broker_output(child), str(self.data_dir), shutil.disk_usage(self.data_dir).free)

    def _require_space(self) -> None:
        free = shutil.disk_usage(self.data_dir).free
        if free < MIN_FREE_BYTES:
            raise ConfigError(
                f"no space for Kafka: {free >> 20} MiB free on the disk of {self.data_dir}, "
                f"{MIN_FREE_BYTES >> 20} MiB needed; free some, or name another data folder"
            )


def broker_command(java: Java, jars: Path, settings: EmbeddedKafkaSettings) -> list[str]:
    """Return the command line that runs the embedded broker in its data folder."""
    return [
        str(java.executable),
        f"-Xmx{settings.heap_mb}m",
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        *settings.jvm_options,
        *_common_java_arguments(java, jars),
        "kafka.Kafka",
        config.PROPERTIES_FILE,
    ]


def format_storage_command(java: Java, jars: Path, cluster_id: str) -> list[str]:
    """Return the command line that formats the embedded broker's storage in its data folder."""
    # A short-lived JVM starts sooner with the first compiler alone.
    quick = ["-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    arguments = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", config.PROPERTIES_FILE]
    return [str(java.executable), *quick, *_common_java_arguments(java, jars), *arguments]


def _common_java_arguments(java: Java, jars: Path) -> list[str]:
    if ":" in str(jars):
        raise ConfigError(f"{jars}: a path with a colon cannot be on Java's class path; set XDG_CACHE_HOME to another")
    archive = archive_options(config.broker_archive_path(java, jars))
    return [*archive, "-cp", f"{jars}/*", f"-Dlog4j2.configurationFile={config.LOG4J_FILE}"]


def new_cluster_id() -> str:
    """Return a new cluster id, with which an embedded Kafka formats its storage.

    It is a random UUID in Kafka's form: URL-safe base64 without padding, never starting with a dash.
    """
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def probe_request() -> bytes:
    """Return an ApiVersions request, with its size. It is the smallest request that only a working broker answers.

    Version 0 has size, api key, version, correlation id, null client id.

    >>> len(probe_request())
    14
    """
    body = struct.pack(">hhih", PROBE_API_KEY, 0, PROBE_CORRELATION_ID, -1)
    return struct.pack(">i", len(body)) + body


def is_probe_response(body: bytes) -> bool:
    """Return whether the embedded broker's response (without its size) answers the probe without an error.

    The response has correlation id, error code, the versions.
    """
    return len(body) >= 6 and struct.unpack(">ih", body[:6]) == (PROBE_CORRELATION_ID, 0)


async def broker_answers(host: str, port: int, timeout_ms: int) -> bool:
    """Return whether a Kafka broker at this address answers a probe within `timeout_ms`.

    A KRaft broker answers the probe only once the controller has unfenced it.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(probe_request())
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                return 0 < size <= PROBE_RESPONSE_BYTES_MAX and is_probe_response(await reader.readexactly(size))
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
