"""`penstock up` before anything is started."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.local.up import main


@pytest.fixture(autouse=True)
def _own_folder_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = before


@pytest.mark.parametrize(("flag", "setting"), [("http.port", "http.port"), ("connect-port", "connect_port")])
def test_a_port_that_is_taken_is_said_before_kafka_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flag: str, setting: str
) -> None:
    """One line that names the setting, exit status 2, and no data folder."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = ["--http.port=0", "--connect-port=0"]
        assert main([*free, f"--{flag}={port}", "--data-dir=data", "--log.format=json"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{setting}: port {port} on 127.0.0.1 is taken" in line
    assert not (tmp_path / "data").exists()
