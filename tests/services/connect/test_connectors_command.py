"""The output of `penstock connectors`."""

from __future__ import annotations

import asyncio
import io
import socket
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from penstock.api.http.app import create_health_app
from penstock.services.connect.connectors_command import _decode_response_body, main, table_of
from tests.integration.certificates import serving_with_trust
from tests.shared.connect.connectors.http_server import serving


def test_foreign_text_is_printed_without_markup() -> None:
    """No name or trace is interpreted as markup or as a terminal command."""
    trace = "first\nValueError: [/b] \\[link=x]y \x1b[31m"
    status = {"connector": {"state": "FAILED", "trace": trace}, "tasks": [{"state": "RUNNING"}]}
    connectors = {"[bold]a": {"status": status}}
    console = Console(file=io.StringIO(), width=120)
    console.print(table_of(connectors))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("[bold]a", "FAILED", "1/1 running", r"ValueError: [/b] \[link=x]y \x1b[31m"):
        assert text in output
    assert "\x1b" not in output


async def test_no_name_is_cut_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names of connectors and workers continue on the next line. `restart` needs the whole name."""
    monkeypatch.setenv("COLUMNS", "80")
    name, worker = "orders-jdbc-sink" * 5, "connect-1.example.com:8083" * 2
    connectors = {name: {"status": {"connector": {"state": "RUNNING", "worker_id": worker}}}}
    async with serving(lambda _: (200, {}, msgspec.json.encode(connectors))) as server:
        assert await asyncio.to_thread(main, ["list", "--url", server.url]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = ["".join(parts).replace(" ", "") for parts in zip(*rows, strict=True)]
    assert (cells[1], cells[5]) == (name, worker)


@pytest.mark.parametrize("data", [b"{", b'"\xff"', b"[" * 100_000])
def test_offsets_that_are_not_json_are_an_error(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of offsets that is not JSON, or nested too deeply, is an error with its name, before any request."""
    (tmp_path / "offsets.json").write_bytes(data)
    assert main(["offsets", "set", "c", str(tmp_path / "offsets.json")]) == 2
    assert "offsets.json: " in capsys.readouterr().err


async def test_a_connector_is_created_in_the_initial_state_of_its_file(tmp_path: Path) -> None:
    """`create` sends the file's initial state. With `--update` it is an error, since that request has no such field."""
    file = tmp_path / "c.json"
    file.write_text('{"name": "c", "config": {"topics": "t"}, "initial_state": "STOPPED"}')
    async with serving(lambda _: (201, {}, b"{}")) as server:
        command = ["create", str(file), "--url", server.url]
        assert await asyncio.to_thread(main, command) == 0
        assert await asyncio.to_thread(main, [*command, "--update"]) == 2
    (request,) = server.requests
    assert msgspec.json.decode(request.body) == {
        "name": "c",
        "config": {"name": "c", "topics": "t"},
        "initial_state": "STOPPED",
    }


async def test_a_worker_behind_a_proxy_with_an_own_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request over TLS succeeds if the system trusts the authority of the certificate."""
    app = create_health_app("proxy", {}, CollectorRegistry())
    async with serving_with_trust(app, tmp_path, monkeypatch) as server:
        assert await asyncio.to_thread(main, ["status", "c", "--url", server.url]) == 1
        assert "404: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [["delete", "c"], ["list"]])
async def test_a_redirect_is_an_error(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A redirect, as of a proxy that requires https, is an error with its target: the request had no effect."""
    async with serving(lambda _: (308, {"Location": "https://connect.example/"}, b"")) as server:
        assert await asyncio.to_thread(main, [*command, "--url", server.url]) == 1
    assert "308: redirects to https://connect.example/" in capsys.readouterr().err


def test_an_error_does_not_show_the_password_of_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    """The error of a worker that does not respond has its address without the password."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main(["list", "--url", f"http://ann:s3cret@127.0.0.1:{port}"]) == 1
    assert f"http://ann:[hidden]@127.0.0.1:{port}: ConnectError" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--include-tasks", "--only-failed"])
def test_a_restart_of_one_task_rejects_the_options_of_a_connector(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--task` with an option that has no effect on one task is an error with their names, before any request."""
    assert main(["restart", "orders", "--task", "0", option]) == 2
    output = capsys.readouterr().err
    assert "--task" in output
    assert option in output


@pytest.mark.parametrize("content", [b"", b"<html>", b'"\xff"', b"[" * 100_000])
def test_a_response_that_is_not_json_has_no_body(content: bytes) -> None:
    """A response that is not JSON, or nested too deeply, is as one without a body."""
    assert _decode_response_body(httpx.Response(502, content=content)) is None
