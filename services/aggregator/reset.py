"""`penstock streams`. `reset` deletes an application's progress and state, so that it starts from the beginning.
`restore-offsets` is in `restore_offsets`.

By default reset lists what it would delete; `--execute` deletes it. No instance may run meanwhile. An interrupted reset
is harmless because of its order: the group's offsets are deleted last, and a worker that finds offsets without their
state does not start. The application's output for others (results, late records, dead letters) stays, and is written
again from the beginning.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from penstock.services.aggregator.restore_offsets import RestorePlan, plan_restore
from penstock.services.aggregator.restore_offsets import carry_out as carry_out_restore
from penstock.services.aggregator.restore_offsets import lines_of as offset_lines
from penstock.services.aggregator.restore_offsets import values_of as offset_values
from penstock.services.aggregator.settings import ResetSettings
from penstock.services.command_line import run_app
from penstock.shared.clients.admin import Admin
from penstock.shared.common import log
from penstock.shared.common.errors import GroupNotEmpty, GroupNotFound
from penstock.shared.common.lake.application_files import TableFiles, find_files, remove_files, remove_folder
from penstock.shared.common.topic_names import CHANGELOG_SUFFIX, changelog_topic, instances_topic, is_repartition_topic
from penstock.shared.streams.settings import StreamsSettings

PROGRAM = "penstock streams"


class ResetPlan(NamedTuple):
    """The data to delete: committed offsets by topic and partition, topics, the `snapshot` (folder or URI) with its
    `tables`, and the `state` folders.

    `unsure` maps topics that stay to the other application that may own them by their names. `state` has folders of
    this machine only. On other machines an instance discards state of a deleted changelog itself.
    """

    application: str
    offsets: dict[str, int]
    topics: list[str]
    snapshot: str | None
    tables: dict[str, TableFiles]
    unsure: dict[str, str]
    state: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to delete."""
        return not (self.offsets or self.topics or self.snapshot or self.state)


async def plan_reset(admin: Admin, settings: StreamsSettings) -> ResetPlan:
    """Return what a reset would delete now.

    Raises GroupNotEmpty, which names the members that still run, and LakeNotRemoved if the lake cannot be read.
    """
    application = settings.application_id
    try:
        members = (await admin.describe_group(application)).members
        offsets = await admin.group_offsets(application)
    except GroupNotFound:
        members = ()
        offsets = {}
    if members:
        raise GroupNotEmpty(f"application {application} is running: stop {'; '.join(map(str, members))}")
    known = await admin.list_topics()
    always = (changelog_topic(application), instances_topic(application))
    repartition, unsure = repartition_topics(known, application, {at.topic for at in offsets})
    own = [name for name in known if name in always or name in repartition]
    found = None
    if settings.lake is not None:
        found = await asyncio.to_thread(find_files, settings.lake, application, settings.lake_options)
    snapshot, tables = (found.root, found.tables) if found else (None, {})
    committed = {str(at): to.offset for at, to in sorted(offsets.items())}
    return ResetPlan(application, committed, own, snapshot, tables, unsure, _local_state_folders(settings))


def repartition_topics(
    known: Iterable[str], application: str, committed: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the application's own repartition topics, and those that may belong to the named other application.

    An application's name may begin with another's, and a topic's name does not show where the application's name ends.
    A topic with committed offsets of the group (`committed`) is the application's own. Any other topic is its own
    unless another application, known by its changelog, could have the same topic name.

    >>> topics = ["shop-changelog", "shop-by-user-repartition", "shop-eu-changelog", "shop-eu-by-user-repartition"]
    >>> repartition_topics(topics, "shop", ())
    (['shop-by-user-repartition'], {'shop-eu-by-user-repartition': 'shop-eu'})
    """
    topics = list(known)
    others = [name.removesuffix(CHANGELOG_SUFFIX) for name in topics if name.endswith(CHANGELOG_SUFFIX)]
    own = []
    unsure = {}
    for topic in topics:
        if not is_repartition_topic(topic, application):
            continue
        claims = [other for other in others if other != application and is_repartition_topic(topic, other)]
        if topic in committed or not claims:
            own.append(topic)
        else:
            unsure[topic] = max(claims, key=len)
    return own, unsure


def _local_state_folders(settings: StreamsSettings) -> tuple[str, ...]:
    """Return the folders of the application's stores on disk: an instance's own, and those of its workers."""
    root = Path(settings.state_dir)
    folders = (root / settings.application_id, *root.glob(f"worker-*/{settings.application_id}"))
    return tuple(sorted(str(folder) for folder in folders if folder.is_dir()))


async def carry_out(admin: Admin, plan: ResetPlan, settings: StreamsSettings) -> None:
    """Delete what the plan names, the group's offsets last. Raises LakeNotRemoved if files could not be removed."""
    if plan.topics:
        await admin.delete_topics(plan.topics)
    if plan.snapshot is not None and settings.lake is not None:
        await asyncio.to_thread(remove_files, settings.lake, plan.application, settings.lake_options)
    for folder in plan.state:
        await asyncio.to_thread(remove_folder, Path(folder))
    if plan.offsets:
        await admin.delete_group(plan.application)


def lines_of(plan: ResetPlan) -> list[str]:
    """The plan in words."""
    unsure = [f"topic {topic} stays: it may be application {other}'s" for topic, other in plan.unsure.items()]
    if plan.is_empty:
        return [f"application {plan.application}: there is nothing to delete", *unsure]
    lines = [f"topic {topic}: its records" for topic in plan.topics]
    if plan.snapshot is not None:
        tables = [
            f"{name} ({n} file{'s'[: n != 1]}, {size_bytes} bytes)" for name, (n, size_bytes) in plan.tables.items()
        ]
        lines.append(f"snapshot {plan.snapshot}: {', '.join(tables) or 'an empty folder'}")
    lines += [f"state {folder}: stores on disk" for folder in plan.state]
    lines += [f"offset of {at}: {offset}" for at, offset in plan.offsets.items()]
    return lines + unsure


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Manage a streams application as a whole.")


@app.callback()
def _declare_subcommands() -> None:
    pass


def _load_reset_settings(
    command: str, config: str | None, bootstrap_servers: str | None, application_id: str | None
) -> ResetSettings:
    """Load the settings from the command line over environment and file, and configure the log."""
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


@app.command()
def reset(
    application_id: ApplicationId = None,
    bootstrap_servers: BootstrapServers = None,
    config: ConfigFile = None,
    execute: Execute = False,
    json: AsJson = False,
) -> None:
    """Delete offsets, changelog, own topics and snapshot, so that the application starts from the beginning."""
    settings = _load_reset_settings("reset", config, bootstrap_servers, application_id)
    plan = asyncio.run(_plan_and_reset(settings, execute))
    if json:
        sizes = {name: table._asdict() for name, table in plan.tables.items()}
        typer.echo(msgspec.json.encode({**plan._asdict(), "tables": sizes, "executed": execute}))
        return
    for line in lines_of(plan):
        typer.echo(line)
    if not plan.is_empty:
        typer.echo("done" if execute else DRY_RUN)


@app.command("restore-offsets")
def restore_offsets(
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
    """Set the group's offsets back where they are ahead of the changelog. Safe while the aggregator restarts."""
    settings = _load_reset_settings("restore-offsets", config, bootstrap_servers, application_id)
    plan = asyncio.run(_restore_offsets(settings, start_over or [], execute))
    if json:
        typer.echo(msgspec.json.encode({**offset_values(plan), "executed": execute}))
        return
    for line in offset_lines(plan):
        typer.echo(line)
    if plan.back:
        typer.echo("done" if execute else DRY_RUN)


async def _restore_offsets(settings: ResetSettings, start_over: Collection[str], execute: bool) -> RestorePlan:
    async with Admin(settings.kafka) as admin:
        plan = await plan_restore(admin, settings.kafka, settings.streams, start_over)
        if execute and plan.back:
            await carry_out_restore(admin, settings.kafka, plan)
    return plan


async def _plan_and_reset(settings: ResetSettings, execute: bool) -> ResetPlan:
    async with Admin(settings.kafka) as admin:
        plan = await plan_reset(admin, settings.streams)
        if execute:
            await carry_out(admin, plan, settings.streams)
    return plan


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit status: 1 if it failed, 2 for invalid arguments or settings."""
    return run_app(app, arguments, PROGRAM)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
