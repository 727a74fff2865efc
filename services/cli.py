"""The `penstock` command. The module of each subcommand is imported only when the subcommand runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import cast

import typer

from penstock.services.exit_status import ExitStatus, exit_status_of
from penstock.shared.common.errors import MissingExtra, PenstockError
from penstock.shared.common.extras import needs
from penstock.shared.common.gc_tuning import collector_off

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="penstock",
    help="Event-time stream processing on Kafka in Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SERVICES = "Services (SERVICE --help lists the settings)"
JOBS = "Spark jobs"
LOCAL = "On one machine"

COMMANDS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "up": (
        LOCAL,
        "penstock.services.local.up:main",
        "Start Kafka and every service at one HTTP address.",
        ("demo",),
    ),
    "demo": (
        LOCAL,
        "penstock.services.local.demo.main:main",
        "Replay real events through the whole pipeline and audit it.",
        ("demo",),
    ),
    "kafka": (LOCAL, "penstock.services.local.kafka_command:main", "Run the embedded Kafka alone.", ()),
    "producer": (
        SERVICES,
        "penstock.services.producer.main:main",
        "Serve HTTP ingest: store events in Kafka topics.",
        ("server",),
    ),
    "consumer": (
        SERVICES,
        "penstock.services.consumer.main:main",
        "Run a handler over topics, in parallel per key.",
        ("server",),
    ),
    "aggregator": (
        SERVICES,
        "penstock.services.aggregator.main:main",
        "Run a topology: windows, punctuation, exactly-once.",
        ("server", "streams"),
    ),
    "connect": (
        SERVICES,
        "penstock.services.connect.main:main",
        "Run a Connect worker: Kafka Connect's REST, connectors in Python.",
        ("server",),
    ),
    "connectors": (
        SERVICES,
        "penstock.services.connect.connectors_command:main",
        "List, create and manage connectors over REST.",
        (),
    ),
    "sessions": (
        SERVICES,
        "penstock.services.aggregator.sessions_command:main",
        "Print windows by key and time, from lake and changelog.",
        ("streams",),
    ),
    "admin": (
        SERVICES,
        "penstock.services.admin.main:main",
        "Serve REST for groups, offsets and topics, and the dashboard.",
        ("server",),
    ),
    "compact": (
        JOBS,
        "penstock.services.spark.main:compact_main",
        "Compact the changelog into Delta tables.",
        ("spark",),
    ),
    "batch": (
        JOBS,
        "penstock.services.spark.main:batch_main",
        "Run a topology over existing records in Spark.",
        ("spark",),
    ),
    "audit": (
        JOBS,
        "penstock.services.spark.main:audit_main",
        "Check the stream's windows against Spark's own.",
        ("spark",),
    ),
    "jars": (
        LOCAL,
        "penstock.services.local.jars_command:main",
        "Download Kafka's and Spark's jars ahead of their first use.",
        (),
    ),
    "doctor": (
        LOCAL,
        "penstock.services.local.doctor.main:main",
        "Check Kafka, its topics and this machine.",
        (),
    ),
    "streams": (
        SERVICES,
        "penstock.services.aggregator.streams_command:main",
        "Reset an application, or restore its offsets.",
        ("streams",),
    ),
    "dlq": (SERVICES, "penstock.services.consumer.dlq_command:main", "List and replay dead letters.", ()),
}
"""Each command's panel, function, help, and the extras that it needs."""


def _load(target: str) -> Callable[[list[str]], int]:
    """Return the function of a command, after importing its module."""
    module, _, function = target.partition(":")
    with collector_off():
        return cast("Callable[[list[str]], int]", getattr(importlib.import_module(module), function))


def _add_command(name: str, panel: str, target: str, text: str, extras: tuple[str, ...]) -> None:
    @app.command(name, help=text, rich_help_panel=panel, context_settings=PASS_ON)
    def run_command(context: typer.Context) -> None:
        try:
            with needs(f"penstock {name}", *extras):
                status = _load(target)(context.args)
        except MissingExtra as e:
            print(e, file=sys.stderr)
            raise typer.Exit(ExitStatus.WRONG_SETTING) from None
        except PenstockError as e:
            print(f"penstock {name}: {e}", file=sys.stderr)
            raise typer.Exit(exit_status_of(e)) from None
        raise typer.Exit(status)


for _name, _command in COMMANDS.items():
    _add_command(_name, *_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def _accept_version_option(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
