"""Downloads of Kafka's jars: without a network, by two processes at once, and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.services.local.broker_config import KAFKA_JARS
from penstock.services.local.ports import pick
from penstock.shared.common.errors import JarsUnavailable
from penstock.shared.common.java.jars import fetch_jars
from tests.integration.maven_mirror import mirror

WAIT_SECONDS = 30.0


async def test_no_network_for_the_first_download(tmp_path: Path) -> None:
    """Without a network the error names the jar and the repository, and no folder is left in the cache."""
    (closed,) = pick("127.0.0.1", 1)
    repository = f"http://127.0.0.1:{closed}/maven/"
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PENSTOCK_MAVEN_REPOSITORY": repository}
    with pytest.raises(JarsUnavailable, match=rf"Kafka 4\.1\.1.*{repository}.*reached"):
        await fetch_jars(KAFKA_JARS, environ)
    assert not any(entry.name.startswith("kafka") for entry in (tmp_path / "penstock").iterdir())


async def test_two_processes_at_once_both_succeed(tmp_path: Path) -> None:
    """Two concurrent downloads into an empty cache leave one complete folder and no temporary files."""
    names = {jar.name for jar in (await fetch_jars(KAFKA_JARS)).iterdir()}
    with mirror(KAFKA_JARS, tmp_path / "mirror") as repository:
        variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PENSTOCK_MAVEN_REPOSITORY": repository}
        env = {**os.environ, **variables, "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-m", "penstock", "jars", "kafka"]
        both = [await asyncio.create_subprocess_exec(*command, env=env, stdout=-1, stderr=-1) for _ in range(2)]
        ended = [(await process.communicate(), process.returncode) for process in both]
    folder = tmp_path / "cache" / "penstock" / "kafka-4.1.1"
    assert [status for _, status in ended] == [0, 0], ended
    assert {output.decode().strip() for (output, _), _ in ended} == {str(folder)}
    assert {jar.name for jar in folder.iterdir()} == names
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["download.lock", "kafka-4.1.1"]


class Silent:
    """A repository that never answers. `requested` is set by the first request, `gone` when its client disconnects."""

    def __init__(self) -> None:
        self.requested, self.gone = asyncio.Event(), asyncio.Event()
        self.address = ""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            self.requested.set()
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
    """A cancelled download closes its connection."""
    async with silent_repository() as silent:
        environ = {"XDG_CACHE_HOME": str(tmp_path), "PENSTOCK_MAVEN_REPOSITORY": silent.address}
        starting = asyncio.create_task(fetch_jars(KAFKA_JARS, environ))
        await asyncio.wait_for(silent.requested.wait(), WAIT_SECONDS)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await asyncio.wait_for(silent.gone.wait(), WAIT_SECONDS)
