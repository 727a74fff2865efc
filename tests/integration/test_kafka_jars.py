"""Downloading Kafka's jars: without a network, and by two processes at once from a mirror."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.local.jars import JarsUnavailable, cache_root, kafka_jars
from services.local.java import find_java
from services.local.ports import pick

DOWNLOAD = """
import asyncio
from services.local.jars import kafka_jars
from services.local.java import find_java
print(asyncio.run(kafka_jars(find_java())))
"""


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
