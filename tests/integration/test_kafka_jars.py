"""Downloading Kafka's jars: without a network, by two processes at once from a mirror, and given up half-way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.services.local.jars import kafka_jars
from penstock.services.local.ports import pick
from penstock.shared.common.errors import JarsUnavailable
from penstock.shared.common.ivy import cache_root
from penstock.shared.common.java import find_java

DOWNLOAD = """
import asyncio
from penstock.services.local.jars import kafka_jars
from penstock.shared.common.java import find_java
print(asyncio.run(kafka_jars(find_java())))
"""
WAIT_SECONDS = 30.0


def make_mirror(ivy_cache: Path, mirror: Path) -> None:
    """Lay out what Ivy has downloaded as a Maven repository."""
    for pom in ivy_cache.glob("*/*/ivy-*.xml.original"):
        module = pom.parent
        revision = pom.name.removeprefix("ivy-").removesuffix(".xml.original")
        folder = mirror / module.parent.name.replace(".", "/") / module.name / revision
        folder.mkdir(parents=True)
        shutil.copyfile(pom, folder / f"{module.name}-{revision}.pom")
        for jar in (*module.glob(f"jars/*-{revision}.jar"), *module.glob(f"bundles/*-{revision}.jar")):
            shutil.copyfile(jar, folder / jar.name)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a request a line would hide the test's own output."""


@pytest.fixture
async def mirror(tmp_path: Path) -> str:
    """The folder of a Maven repository that has Kafka."""
    await kafka_jars(find_java())
    ivy_cache = cache_root() / "ivy"
    if not any(ivy_cache.glob("org.apache.kafka/kafka_2.13/jars/*.jar")):
        pytest.skip("the jars in the cache came from elsewhere: there is nothing to make a mirror of")
    make_mirror(ivy_cache, tmp_path / "mirror")
    return str(tmp_path / "mirror")


@pytest.fixture
def repository(mirror: str) -> Iterator[str]:
    """The mirror's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=mirror)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


async def test_no_network_for_the_first_download(tmp_path: Path) -> None:
    """What could not be had and from where is said; a later try starts afresh."""
    (closed,) = pick("127.0.0.1", 1)
    environ = {
        "XDG_CACHE_HOME": str(tmp_path),
        "PENSTOCK_MAVEN_REPOSITORY": f"http://127.0.0.1:{closed}/maven",
    }
    with pytest.raises(JarsUnavailable, match=r"org\.apache\.kafka:kafka_2\.13:4\.1\.1.*cannot be reached"):
        await kafka_jars(find_java(), environ)
    assert not any(entry.name.startswith("kafka") for entry in (tmp_path / "penstock").iterdir())


@pytest.mark.soak
async def test_two_processes_at_once_both_succeed(tmp_path: Path, repository: str) -> None:
    """From an empty cache and a mirror, two downloads end with the same whole folder and no leftovers."""
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PENSTOCK_MAVEN_REPOSITORY": repository}
    env = {**os.environ, **environ}
    both = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", DOWNLOAD, env=env, stdout=-1, stderr=-1)
        for _ in range(2)
    ]
    ended = [(await process.communicate(), process.returncode) for process in both]
    folder = tmp_path / "cache" / "penstock" / "kafka-4.1.1"
    assert [status for _, status in ended] == [0, 0], ended
    assert {jar.name for jar in folder.iterdir()} == {jar.name for jar in (await kafka_jars(find_java())).iterdir()}
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["download.lock", "ivy", "kafka-4.1.1"]


class Silent:
    """A repository that takes a request and never answers; `asked` is set by the first, `gone` when it hangs up."""

    def __init__(self) -> None:
        self.asked, self.gone = asyncio.Event(), asyncio.Event()
        self.address = ""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            self.asked.set()
            with contextlib.suppress(ConnectionError):
                await reader.read()
            self.gone.set()
        writer.close()


@asynccontextmanager
async def silent_repository() -> AsyncIterator[Silent]:
    silent = Silent()
    async with await asyncio.start_server(silent.take, "127.0.0.1", 0) as server:
        silent.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        yield silent


async def test_a_cancelled_start_ends_its_download(tmp_path: Path) -> None:
    """Nobody waits for the jars any more: Ivy goes at once, and the next download starts afresh."""
    async with silent_repository() as silent:
        environ = {"XDG_CACHE_HOME": str(tmp_path), "PENSTOCK_MAVEN_REPOSITORY": silent.address}
        starting = asyncio.create_task(kafka_jars(find_java(), environ))
        await asyncio.wait_for(silent.asked.wait(), WAIT_SECONDS)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await asyncio.wait_for(silent.gone.wait(), WAIT_SECONDS)


async def test_a_download_ends_with_the_process_that_wanted_it(tmp_path: Path) -> None:
    """After SIGKILL to the process that downloads, its Ivy does not run on."""
    async with silent_repository() as silent:
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PENSTOCK_MAVEN_REPOSITORY": silent.address}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", DOWNLOAD, env=env, stderr=-1)
        try:
            await asyncio.wait_for(silent.asked.wait(), WAIT_SECONDS)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            await process.communicate()
        await asyncio.wait_for(silent.gone.wait(), WAIT_SECONDS)
