"""`penstock streams reset|restore-offsets`: see `reset` and `restore_offsets`.

By default a command lists what it would change; `--execute` changes it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection
from typing import Annotated

import msgspec
import typer

from penstock.services.aggregator.reset import ResetPlan, apply_reset, plan_reset
from penstock.services.aggregator.restore_offsets import RestorePlan, apply_restore, plan_restore
from penstock.services.aggregator.settings import ResetSettings
from penstock.services.command_line import run_app
from penstock.shared.clients.admin import Admin
from penstock.shared.common import log

PROGRAM = "penstock streams"

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Manage a streams application as a whole.")


def _load_settings(
    command: str, config: str | None, bootstrap_servers: str | None, application_id: str | None
) -> ResetSettings:
    """Load the settings of a command of `penstock streams`, and configure the log."""
    given = {"--config": config, "--kafka.bootstrap-servers": bootstrap_servers}
    given["--streams.application-id"] = application_id
    arguments = [part for flag, value in given.items() if value is not None for part in (flag, value)]
    settings = ResetSettings.load(arguments, program=f"{PROGRAM} {command}")
    log.configure(settings.log, "streams")
    return settings


ApplicationId = Annotated[str | None, typer.Option(help="the application; default: streams.application_id")]
BootstrapServers = Annotated[str | None, typer.Option(help="host:port, comma-separated")]
ConfigFile = Annotated[str | None, typer.Option("--config", help="TOML file")]
Execute = Annotated[bool, typer.Option("--execute", help="apply the change (default: dry run)")]
DRY_RUN = "nothing was changed: add --execute to apply the change"
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object")]


@app.command("reset")
def reset_command(
    application_id: ApplicationId = None,
    bootstrap_servers: BootstrapServers = None,
    config: ConfigFile = None,
    execute: Execute = False,
    json: AsJson = False,
) -> None:
    """List an application's state. With --execute, delete it, so that the application starts from the beginning.

    The state is the changelog and the other internal topics, the lake's tables, this machine's stores and the group's
    offsets.
    """
    settings = _load_settings("reset", config, bootstrap_servers, application_id)
    plan = asyncio.run(_plan_and_reset(settings, execute))
    if json:
        sizes = {name: table._asdict() for name, table in plan.tables.items()}
        typer.echo(msgspec.json.encode({**plan._asdict(), "tables": sizes, "executed": execute}))
        return
    for line in plan.lines():
        typer.echo(line)
    if settings.streams.lake is None:
        typer.echo("streams.lake is not set: the lake's tables, if there are any, stay")
    if not plan.is_empty:
        typer.echo("done" if execute else DRY_RUN)


@app.command("restore-offsets")
def restore_offsets_command(
    application_id: ApplicationId = None,
    start_over: Annotated[
        list[str] | None,
        typer.Option(help="a source topic to read from the beginning where the changelog has no position; repeatable"),
    ] = None,
    bootstrap_servers: BootstrapServers = None,
    config: ConfigFile = None,
    execute: Execute = False,
    json: AsJson = False,
) -> None:
    """List the group's offsets that are ahead of the changelog. With --execute, set them back to the changelog's
    positions.

    If the changelog has no position for a partition, its offset stays unless --start-over names the topic. The command
    is safe at any time, also with --execute while instances run.
    """
    settings = _load_settings("restore-offsets", config, bootstrap_servers, application_id)
    plan = asyncio.run(_restore_offsets(settings, start_over or [], execute))
    if json:
        typer.echo(msgspec.json.encode({**plan.values(), "executed": execute}))
        return
    for line in plan.lines():
        typer.echo(line)
    if plan.back:
        typer.echo("done" if execute else DRY_RUN)


async def _restore_offsets(settings: ResetSettings, start_over: Collection[str], execute: bool) -> RestorePlan:
    async with Admin(settings.kafka) as admin:
        plan = await plan_restore(admin, settings.kafka, settings.streams, start_over)
        if execute and plan.back:
            await apply_restore(admin, settings.kafka, plan)
    return plan


async def _plan_and_reset(settings: ResetSettings, execute: bool) -> ResetPlan:
    async with Admin(settings.kafka) as admin:
        plan = await plan_reset(admin, settings.streams)
        if execute:
            await apply_reset(admin, plan, settings.streams)
    return plan


def main(arguments: list[str]) -> int:
    """Run `penstock streams`. Returns the exit status: 1 if it failed, 2 for invalid arguments or settings."""
    return run_app(app, arguments, PROGRAM)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
