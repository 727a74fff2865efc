"""`penstock connectors …`: manages a Connect worker's connectors from the command line, over its REST API.

The worker may be any of the cluster. `--url` or `PENSTOCK_CONNECT_URL` names it. It may also be another implementation
of Kafka Connect. `PENSTOCK_CONNECT_TOKEN` holds its token, or `PENSTOCK_CONNECT_USER` its user:password. They are not
flags, since other users can see flags.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from penstock.services.connect.property_files import read_properties
from penstock.services.terminal_tables import plain
from penstock.shared.common.errors import ConfigError, PenstockError

DEFAULT_URL = "http://127.0.0.1:8083"
URL_VARIABLE = "PENSTOCK_CONNECT_URL"
TOKEN_VARIABLE, USER_VARIABLE = "PENSTOCK_CONNECT_TOKEN", "PENSTOCK_CONNECT_USER"
TIMEOUT_MS = 100_000
TRACE_LINES = 1
"""The number of last lines of a failure's trace in the table. `--json` has all of it."""

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Connectors of a Connect cluster, over its REST.")
offsets_app = typer.Typer(no_args_is_help=True, help="How far a connector has read.")
app.add_typer(offsets_app, name="offsets")

Url = Annotated[str | None, typer.Option("--url", help=f"a worker's REST; default {URL_VARIABLE} or {DEFAULT_URL}")]
Name = Annotated[str, typer.Argument(help="the connector's name")]
Json = Annotated[bool, typer.Option("--json", help="print the worker's answer as it is")]


class RestError(PenstockError):
    """The worker rejected a request, or did not answer."""


@app.command("list")
def list_(url: Url = None, json: Json = False) -> None:
    """List connectors with their states and tasks."""
    found = _ask("GET", "/connectors?expand=info&expand=status", url)
    if json:
        _print(found)
        return
    Console().print(table_of(found))


def table_of(found: dict[str, Any]) -> Table:
    """Returns a table of connectors by name, with the last lines of the first failure. Texts are not interpreted."""
    table = Table("connector", "type", "state", "tasks", "worker", "failure")
    for name in sorted(found):
        status = found[name].get("status", {})
        tasks = status.get("tasks", [])
        running = sum(task["state"] == "RUNNING" for task in tasks)
        traces = [part["trace"] for part in (status.get("connector", {}), *tasks) if part.get("trace")]
        row = (
            name,
            status.get("type", "unknown"),
            status.get("connector", {}).get("state", "UNASSIGNED"),
            f"{running}/{len(tasks)} running",
            status.get("connector", {}).get("worker_id", ""),
            "\n".join(traces[0].strip().splitlines()[-TRACE_LINES:]) if traces else "",
        )
        table.add_row(*(plain(text, lines=True) for text in row))
    return table


@app.command()
def create(
    file: Annotated[Path, typer.Argument(help="properties file, or JSON as REST takes it")],
    url: Url = None,
    update: Annotated[bool, typer.Option(help="also where there is a connector of that name")] = False,
) -> None:
    """Create a connector from a file."""
    config = read_properties(file)
    name = config.get("name")
    if not name:
        raise ConfigError(f"{file}: the connector has no name")
    if update:
        _print(_ask("PUT", f"/connectors/{_quoted(name)}/config", url, config))
    else:
        _print(_ask("POST", "/connectors", url, {"name": name, "config": config}))


@app.command()
def status(name: Name, url: Url = None) -> None:
    """Show what a connector and its tasks are doing."""
    _print(_ask("GET", f"/connectors/{_quoted(name)}/status", url))


@app.command()
def config(name: Name, url: Url = None) -> None:
    """Show a connector's config."""
    _print(_ask("GET", f"/connectors/{_quoted(name)}/config", url))


@app.command()
def pause(name: Name, url: Url = None) -> None:
    """Have a connector's tasks keep still."""
    _ask("PUT", f"/connectors/{_quoted(name)}/pause", url)


@app.command()
def resume(name: Name, url: Url = None) -> None:
    """Have a connector go on, after a pause or a stop."""
    _ask("PUT", f"/connectors/{_quoted(name)}/resume", url)


@app.command()
def stop(name: Name, url: Url = None) -> None:
    """Stop a connector: its tasks are gone until it is resumed."""
    _ask("PUT", f"/connectors/{_quoted(name)}/stop", url)


@app.command()
def restart(
    name: Name,
    url: Url = None,
    task: Annotated[int | None, typer.Option(help="this task alone")] = None,
    include_tasks: Annotated[bool, typer.Option(help="the tasks too")] = False,
    only_failed: Annotated[bool, typer.Option(help="only what has failed")] = False,
) -> None:
    """Restart a connector, its tasks, or what of them failed."""
    if task is not None:
        _ask("POST", f"/connectors/{_quoted(name)}/tasks/{task}/restart", url)
        return
    query = f"includeTasks={str(include_tasks).lower()}&onlyFailed={str(only_failed).lower()}"
    answer = _ask("POST", f"/connectors/{_quoted(name)}/restart?{query}", url)
    if answer is not None:
        _print(answer)


@app.command()
def delete(name: Name, url: Url = None) -> None:
    """Delete a connector; its offsets are kept."""
    _ask("DELETE", f"/connectors/{_quoted(name)}", url)


@offsets_app.command("get")
def get_offsets(name: Name, url: Url = None) -> None:
    """Show how far a connector has read."""
    _print(_ask("GET", f"/connectors/{_quoted(name)}/offsets", url))


@offsets_app.command("set")
def set_offsets(
    name: Name,
    file: Annotated[Path, typer.Argument(help='JSON as REST takes it: {"offsets": [{partition, offset}]}')],
    url: Url = None,
) -> None:
    """Set a stopped connector's offsets from a file."""
    try:
        body = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{file}: {e}") from None
    _print(_ask("PATCH", f"/connectors/{_quoted(name)}/offsets", url, body))


@offsets_app.command("reset")
def reset_offsets(name: Name, url: Url = None) -> None:
    """Forget a stopped connector's offsets: it starts anew."""
    _print(_ask("DELETE", f"/connectors/{_quoted(name)}/offsets", url))


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _ask(method: str, path: str, url: str | None, body: Any = None) -> Any:
    base = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
    token, (user, _, password) = os.environ.get(TOKEN_VARIABLE), os.environ.get(USER_VARIABLE, "").partition(":")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    auth = httpx.BasicAuth(user, password) if user and not token else None
    try:
        with httpx.Client(timeout=TIMEOUT_MS / 1000, trust_env=False, headers=headers, auth=auth) as client:
            answer = client.request(method, f"{base}{path}", json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise RestError(f"{base}: {type(e).__name__}: {e}".rstrip(": ")) from None
    found = _decoded(answer)
    if answer.is_error:
        message = found.get("message") if isinstance(found, dict) else None
        raise RestError(f"{answer.status_code}: {message or answer.text[:500] or answer.reason_phrase}")
    return found


def _decoded(answer: httpx.Response) -> Any:
    if not answer.content:
        return None
    try:
        return msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        return None


def _print(answer: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode() + "\n")


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the exit status (1 if the worker rejects, 2 for wrong arguments)."""
    try:
        app(args=arguments, prog_name="penstock connectors")
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0
    except ConfigError as e:
        print(f"penstock connectors: {e}", file=sys.stderr)
        return 2
    except PenstockError as e:
        print(f"penstock connectors: {e}", file=sys.stderr)
        return 1
    return 0
