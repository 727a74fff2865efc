"""`penstock connectors …`: manages connectors from the command line, over the REST API of a Connect worker.

`--url` or `PENSTOCK_CONNECT_URL` is the address of any worker of the cluster, which may also be a worker of Apache
Kafka. The credentials are in `PENSTOCK_CONNECT_TOKEN` (a token) or `PENSTOCK_CONNECT_USER` (`user:password`). They are
not flags, since other users of the machine can see flags.
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
from rich.table import Table

from penstock.services.command_line import run_app
from penstock.services.connect.property_files import read_connector_file
from penstock.services.terminal_tables import console_for, plain
from penstock.shared.common.errors import ConfigError, PenstockError
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.connect.redaction import without_passwords

DEFAULT_URL = "http://127.0.0.1:8083"
URL_VARIABLE = "PENSTOCK_CONNECT_URL"
TOKEN_VARIABLE = "PENSTOCK_CONNECT_TOKEN"  # noqa: S105 - a variable's name
USER_VARIABLE = "PENSTOCK_CONNECT_USER"
TIMEOUT_MS = 100_000
"""Longer than a worker's timeout for one step (90 s), so that the worker's own error is shown. A request with several
slow steps, such as validation and write, may take longer."""
TRACE_LINES = 1
"""How many of the last lines of a failure's trace the table shows. `--json` shows all of it."""

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Manage the connectors of a Connect cluster.")
offsets_app = typer.Typer(no_args_is_help=True, help="Manage the offsets of a connector.")
app.add_typer(offsets_app, name="offsets")

Url = Annotated[str | None, typer.Option("--url", help=f"a worker's address; default: {URL_VARIABLE} or {DEFAULT_URL}")]
Name = Annotated[str, typer.Argument(help="the connector's name")]
Json = Annotated[bool, typer.Option("--json", help="print the worker's response as JSON")]


class ConnectRestError(PenstockError):
    """The worker rejected a request, or did not respond."""


@app.command("list")
def list_(url: Url = None, json: Json = False) -> None:
    """List connectors with their states and tasks."""
    connectors = _request_worker("GET", "/connectors?expand=info&expand=status", url)
    if json:
        _print_response(connectors)
        return
    table = table_of(connectors)
    console_for(table).print(table)


def table_of(connectors: dict[str, Any]) -> Table:
    """Return the table of `penstock connectors list`, sorted by name.

    The column `failure` has the last TRACE_LINES lines of the connector's stack trace, or else of the first one of a
    task. `connectors` is the response to `GET /connectors?expand=info&expand=status`. Markup in its texts is printed as
    it is.
    """
    table = Table("connector", "type", "state", "tasks", "worker", "failure")
    for name in sorted(connectors):
        status = connectors[name].get("status", {})
        tasks = status.get("tasks", [])
        running = sum(task["state"] == "RUNNING" for task in tasks)
        traces = [state["trace"] for state in (status.get("connector", {}), *tasks) if state.get("trace")]
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
    file: Annotated[Path, typer.Argument(help="properties file, or JSON file as in the body of POST /connectors")],
    url: Url = None,
    update: Annotated[bool, typer.Option(help="replace the config if the connector exists")] = False,
) -> None:
    """Create a connector from a file."""
    connector = read_connector_file(file)
    config = connector.config
    name = config.get("name")
    if not name:
        raise ConfigError(f"{file}: the connector has no name")
    body = {"name": name, "config": config}
    if connector.initial_state is not None:
        if update:
            raise ConfigError(f"{file}: 'initial_state' cannot be used with --update")
        body["initial_state"] = connector.initial_state
    if update:
        _print_response(_request_worker("PUT", f"/connectors/{_quote_connector_name(name)}/config", url, config))
    else:
        _print_response(_request_worker("POST", "/connectors", url, body))


@app.command()
def status(name: Name, url: Url = None) -> None:
    """Show the states of a connector and its tasks."""
    _print_response(_request_worker("GET", f"/connectors/{_quote_connector_name(name)}/status", url))


@app.command()
def config(name: Name, url: Url = None) -> None:
    """Show a connector's config."""
    _print_response(_request_worker("GET", f"/connectors/{_quote_connector_name(name)}/config", url))


@app.command()
def pause(name: Name, url: Url = None) -> None:
    """Pause a connector and its tasks."""
    _request_worker("PUT", f"/connectors/{_quote_connector_name(name)}/pause", url)


@app.command()
def resume(name: Name, url: Url = None) -> None:
    """Resume a connector that is paused or stopped."""
    _request_worker("PUT", f"/connectors/{_quote_connector_name(name)}/resume", url)


@app.command()
def stop(name: Name, url: Url = None) -> None:
    """Stop a connector: its tasks are shut down until it is resumed."""
    _request_worker("PUT", f"/connectors/{_quote_connector_name(name)}/stop", url)


@app.command()
def restart(
    name: Name,
    url: Url = None,
    task: Annotated[
        int | None, typer.Option(help="restart only this task; not with --include-tasks or --only-failed")
    ] = None,
    include_tasks: Annotated[bool, typer.Option(help="restart the tasks as well")] = False,
    only_failed: Annotated[bool, typer.Option(help="restart only the instances that have failed")] = False,
) -> None:
    """Restart a connector, or one of its tasks. With --include-tasks, also restart its tasks."""
    if task is not None:
        if include_tasks or only_failed:
            raise ConfigError("restart: --task cannot be used with --include-tasks or --only-failed")
        _request_worker("POST", f"/connectors/{_quote_connector_name(name)}/tasks/{task}/restart", url)
        return
    query = f"includeTasks={str(include_tasks).lower()}&onlyFailed={str(only_failed).lower()}"
    response = _request_worker("POST", f"/connectors/{_quote_connector_name(name)}/restart?{query}", url)
    if response is not None:
        _print_response(response)


@app.command()
def delete(name: Name, url: Url = None) -> None:
    """Delete a connector. Its offsets remain."""
    _request_worker("DELETE", f"/connectors/{_quote_connector_name(name)}", url)


@offsets_app.command("get")
def get_offsets(name: Name, url: Url = None) -> None:
    """Show the offsets of a connector."""
    _print_response(_request_worker("GET", f"/connectors/{_quote_connector_name(name)}/offsets", url))


@offsets_app.command("set")
def set_offsets(
    name: Name,
    file: Annotated[Path, typer.Argument(help='JSON file: {"offsets": [{"partition": …, "offset": …}]}')],
    url: Url = None,
) -> None:
    """Set the offsets of a stopped connector from a file."""
    try:
        body = decode_json(file.read_bytes())
    except (OSError, InvalidJson) as e:
        raise ConfigError(f"{file}: {e}") from None
    _print_response(_request_worker("PATCH", f"/connectors/{_quote_connector_name(name)}/offsets", url, body))


@offsets_app.command("reset")
def reset_offsets(name: Name, url: Url = None) -> None:
    """Delete the offsets of a stopped connector. When you resume it, it starts as a new connector does."""
    _print_response(_request_worker("DELETE", f"/connectors/{_quote_connector_name(name)}/offsets", url))


def _quote_connector_name(name: str) -> str:
    return quote(name, safe="")


def _request_worker(method: str, path: str, url: str | None, body: Any = None) -> Any:
    """Send a request of `penstock connectors` to a worker. Returns the decoded body; None if it is not JSON.

    Raises ConnectRestError if there is no response, or its status is an error or a redirect.
    """
    base = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
    token = os.environ.get(TOKEN_VARIABLE)
    user, _, password = os.environ.get(USER_VARIABLE, "").partition(":")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    auth = httpx.BasicAuth(user, password) if user and not token else None
    try:
        with httpx.Client(
            timeout=TIMEOUT_MS / 1000, verify=client_tls(), trust_env=False, headers=headers, auth=auth
        ) as client:
            response = client.request(method, f"{base}{path}", json=body)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise ConnectRestError(f"{without_passwords(base)}: {type(e).__name__}: {e}".rstrip(": ")) from None
    decoded = _decode_response_body(response)
    if not response.is_success:
        message = decoded.get("message") if isinstance(decoded, dict) else None
        if response.has_redirect_location:
            message = f"redirects to {response.headers['location']}"
        raise ConnectRestError(f"{response.status_code}: {message or response.text[:500] or response.reason_phrase}")
    return decoded


def _decode_response_body(response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return decode_json(response.content)
    except InvalidJson:
        return None


def _print_response(response: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(response), indent=2).decode() + "\n")


def main(arguments: list[str]) -> int:
    """Run `penstock connectors`. Returns the exit status: 1 for a ConnectRestError, 2 for invalid arguments."""
    return run_app(app, arguments, "penstock connectors")
